# SPDX-License-Identifier: Apache-2.0
"""Gaussians of files that place them in a world by a matrix, such as nodes of glTF and USD do."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import is_identity, moved_cloud, moved_points
from gaussian_splatting.data.world_offset import world_offset
from sugar_utils.errors import Notify, UserError
from sugar_utils.schemas import FAR

_SHEAR = 1e-4  # of the square of the scale; float32 leaves so much in a similarity


def placed_cloud(
    cloud: GaussianCloud, matrix: np.ndarray, path: Path, notify: Notify
) -> GaussianCloud:
    """Return the cloud of a file at the place that the file gives it, see :func:`moved_cloud`.

    Args:
        cloud: In the axes of the file's own Gaussians.
        matrix: From these to the world of the file. (4, 4)
        path: The file.
        notify: Called with a line where that place is too far from the origin for float32, as
            with coordinates of a map; the translation is left out then.

    Raises:
        UserError: The matrix is no similarity, which Gaussians could follow, or has no numbers that
            can be computed with.
    """
    if is_identity(matrix):
        return cloud
    if not np.abs(matrix).max() <= FAR:
        raise UserError(f"{path}: a transform has numbers beyond {FAR:g}; export it again")
    if not is_similarity(matrix):
        raise UserError(
            f"{path}: its Gaussians are stretched, sheared or flattened by a transform; apply the "
            "transform to them in the program that made the file"
        )
    centers = moved_points(cloud.means.double().cpu().numpy(), matrix)
    if world_offset(centers).any():
        translation = ", ".join(f"{value:.6f}" for value in matrix[:3, 3])
        notify(f"{path}: translation ({translation}) left out, float32 has too few digits for it")
        matrix = matrix.copy()
        matrix[:3, 3] = 0
    return moved_cloud(cloud, matrix)


def is_similarity(matrix: np.ndarray) -> bool:
    """Whether a matrix rotates, mirrors, moves and scales evenly, and nothing else. (4, 4)"""
    products = matrix[:3, :3].T @ matrix[:3, :3]
    square = float(np.trace(products)) / 3
    if square <= 0:
        return False
    is_affine = np.array_equal(matrix[3], (0, 0, 0, 1))
    is_even = np.allclose(products, square * np.eye(3), rtol=0, atol=_SHEAR * square)
    return bool(is_affine and is_even)
