# SPDX-License-Identifier: Apache-2.0
"""Gaussians in another world: turned, scaled and moved as a whole, with the colours they show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.engine.poses import rotation_generators
from sugar_utils.quaternions import quaternions_of, rotation_matrices


def moved_cloud(cloud: GaussianCloud, matrix: np.ndarray) -> GaussianCloud:
    """The cloud after a similarity: a camera that moves along sees the same picture.

    Computed in float64; results have the types of the cloud.

    Args:
        matrix: Scale times rotation, and a shift, for columns (x, y, z, 1). (4, 4)
    """
    scale = float(np.cbrt(np.linalg.det(matrix[:3, :3])))
    rotation = matrix[:3, :3] / scale
    linear, shift = _like(matrix[:3, :3], cloud.means), _like(matrix[:3, 3], cloud.means)
    turn, bands = _like(rotation, cloud.means), sh_rotation(rotation).to(cloud.means.device)
    n_bands = cloud.sh_rest.shape[1]
    own = rotation_matrices(torch.nn.functional.normalize(cloud.quats.double(), dim=-1))
    moved = {
        "means": cloud.means.double() @ linear.T + shift,
        "log_scales": cloud.log_scales.double() + np.log(scale),
        "quats": quaternions_of(turn @ own),
        "sh_rest": bands[:n_bands, :n_bands] @ cloud.sh_rest.double(),
    }
    return replace(cloud, **{name: t.to(getattr(cloud, name).dtype) for name, t in moved.items()})


def _like(array: np.ndarray, tensor: Tensor) -> Tensor:
    return torch.as_tensor(array, dtype=torch.float64, device=tensor.device)


def sh_rotation(rotation: np.ndarray) -> Tensor:
    """How coefficients of the bands 1 to 3 of spherical harmonics change when colours turn.

    The bands do not mix: each turns in a space of its own, of 3, 5 and 7 dimensions.

    Args:
        rotation: One or several. (..., 3, 3)

    Returns:
        To be multiplied with columns of coefficients. (..., 15, 15) float64 on the CPU
    """
    # A tenth of a program's start, and few programs move Gaussians.
    from scipy.spatial.transform import Rotation

    flat = Rotation.from_matrix(rotation.reshape(-1, 3, 3)).as_rotvec()
    generators = rotation_generators().reshape(3, -1)
    total = torch.as_tensor(flat, device="cpu") @ generators
    return torch.linalg.matrix_exp(total.reshape(*rotation.shape[:-2], 15, 15))
