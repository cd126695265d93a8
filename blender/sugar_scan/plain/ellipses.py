# SPDX-License-Identifier: Apache-2.0
"""Gaussians as flat ellipses, each a rectangle across its two longest axes."""

from dataclasses import dataclass

import numpy as np

from .gaussian_ply import Gaussians

REACH = 2.5
"""Half the side of a rectangle in standard deviations; texture coordinates are in these, too."""

_CORNERS = np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]], dtype=np.float32)


@dataclass(frozen=True)
class Ellipses:
    """Rectangles of Gaussians, four vertices each, in the order of the Gaussians."""

    vertices: np.ndarray  # (4 N, 3) float32
    faces: np.ndarray  # (N, 4) int32
    uvs: np.ndarray  # of the corners, in standard deviations, (4 N, 2) float32


def ellipses_of(gaussians: Gaussians) -> Ellipses:
    """Return a rectangle for each Gaussian."""
    axes = rotation_matrices(gaussians.quats) * gaussians.scales[:, None, :]
    # The shortest axis is the normal.
    order = np.argsort(gaussians.scales, axis=1)[:, 1:]
    sides = np.take_along_axis(axes, order[:, None, :], axis=2)
    offsets = REACH * np.einsum("nik,ck->nci", sides, _CORNERS)
    vertices = gaussians.means[:, None] + offsets
    n_gaussians = len(gaussians)
    return Ellipses(
        vertices=vertices.reshape(-1, 3).astype(np.float32),
        faces=np.arange(4 * n_gaussians, dtype=np.int32).reshape(-1, 4),
        uvs=np.tile(REACH * _CORNERS, (n_gaussians, 1)),
    )


def rotation_matrices(quats: np.ndarray) -> np.ndarray:
    """Return the rotations of unit quaternions, w first. (N, 4) -> (N, 3, 3)"""
    w, x, y, z = quats.T
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.array(rows).transpose(2, 0, 1)
