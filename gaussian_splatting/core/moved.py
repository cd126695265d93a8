# SPDX-License-Identifier: Apache-2.0
"""Points and directions in other axes, and Gaussians, whose shapes and colours move with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud, quaternions_of, rotation_matrices
from gaussian_splatting.core.sh_rotation import sh_rotation

GLB_AXES = np.diag([1.0, -1.0, -1.0, 1.0])  # from those of a capture to glTF's: half a turn about x
# From y up to z up: a quarter of a turn about x.
Z_UP_AXES = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
_TINY = 1e-300  # length of a vector that has no direction
_REFLECTED_BANDS = np.repeat([-1.0, 1.0, -1.0], (3, 5, 7))  # of degree 1 to 3, at the origin


def moved_points(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return points after an affine map. (N, 3) and (4, 4) -> (N, 3) float64"""
    return points @ matrix[:3, :3].T + matrix[:3, 3]


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return vectors with length 1; zero stays zero. (..., D) -> (..., D)"""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, _TINY)


def is_identity(matrix: np.ndarray) -> bool:
    """Whether an affine map leaves all where it is. (4, 4)"""
    return np.array_equal(matrix, np.eye(4))


def scale_of_matrix(matrix: np.ndarray) -> float:
    """Return by how much a similarity, (4, 4), enlarges; negative where it mirrors."""
    return float(np.cbrt(np.linalg.det(matrix[:3, :3])))


def moved_cloud(cloud: GaussianCloud, matrix: np.ndarray) -> GaussianCloud:
    """Return a cloud after a similarity, (4, 4), which may mirror it.

    A camera that moves with it sees the same picture. A cloud that stays keeps all its bits.
    """
    if is_identity(matrix):
        return cloud
    linear = matrix[:3, :3]
    factor = scale_of_matrix(matrix)
    # A mirror is a rotation after a reflection at the origin, which has a negative factor.
    rotation = linear / factor
    n_bands = cloud.sh_rest.shape[1]
    bands = sh_rotation(rotation)
    if factor < 0:
        bands = torch.from_numpy(_REFLECTED_BANDS)[:, None] * bands
    device = cloud.means.device

    def tensor(array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, dtype=torch.float64, device=device)

    frames = rotation_matrices(torch.nn.functional.normalize(cloud.quats.double(), dim=-1))
    means = cloud.means.double() @ tensor(linear).T + tensor(matrix[:3, 3])
    log_scales = cloud.log_scales.double() + np.log(abs(factor))
    quats = quaternions_of(tensor(rotation) @ frames)
    sh_rest = bands.to(device)[:n_bands, :n_bands] @ cloud.sh_rest.double()
    return replace(
        cloud,
        means=means.to(cloud.means.dtype),
        log_scales=log_scales.to(cloud.log_scales.dtype),
        quats=quats.to(cloud.quats.dtype),
        sh_rest=sh_rest.to(cloud.sh_rest.dtype),
    )
