# SPDX-License-Identifier: Apache-2.0
"""Rotation of spherical harmonics: matrices of the bands 1 to 3, and their derivatives."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.spherical_harmonics import sh_basis_of

_DECIMALS = 12  # of the derivatives of a rotation
_DIRECTIONS = 400


def sh_rotation(rotation: np.ndarray) -> Tensor:
    """Return the matrix that rotates coefficients of the bands 1 to 3 of spherical harmonics.

    It is multiplied with columns of them. (..., 3, 3) -> (..., 15, 15) float64 on the CPU
    """
    # A tenth of a program's start, and few programs move Gaussians.
    from scipy.spatial.transform import Rotation

    vectors = Rotation.from_matrix(rotation.reshape(-1, 3, 3)).as_rotvec()
    generators = rotation_generators().reshape(3, -1)
    total = torch.as_tensor(vectors, device="cpu") @ generators
    return torch.linalg.matrix_exp(total.reshape(*rotation.shape[:-2], 15, 15))


@functools.cache
def rotation_generators() -> Tensor:
    """Derivatives of the coefficients of the bands 1 to 3 as the function turns about x, y or z.

    (3, 15, 15) float64
    """
    rng = torch.Generator("cpu").manual_seed(0)
    directions = torch.randn(_DIRECTIONS, 3, generator=rng, dtype=torch.float64, device="cpu")
    directions = torch.nn.functional.normalize(directions, dim=1)
    basis = sh_basis_of(directions)[:, 1:]
    generators = []
    for axis in torch.eye(3, dtype=torch.float64, device="cpu"):
        # The turned function has at d the value that the function has at d turned back.
        back = -torch.linalg.cross(axis.expand_as(directions), directions)
        derivatives = torch.autograd.functional.jvp(sh_basis_of, directions, back)
        slope: Tensor = derivatives[1]  # pyright: ignore[reportAssignmentType]  of one tensor
        generators.append(torch.linalg.lstsq(basis, slope[:, 1:]).solution)
    # The solver leaves other last bits in every process, also where degrees do not mix, which is 0.
    return torch.stack(generators).round(decimals=_DECIMALS)
