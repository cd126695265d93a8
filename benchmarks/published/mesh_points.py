# SPDX-License-Identifier: Apache-2.0
"""Points of a mesh near the volume in which it is scored."""

from __future__ import annotations

import numpy as np

from sugar_extractors.quality.mesh_quality import sample_surface
from sugar_scene.mesh.triangle_mesh import TriangleMesh


def points_near(
    mesh: TriangleMesh,
    low: np.ndarray,
    high: np.ndarray,
    density: float,
    seed: int,
    most: int | None = None,
) -> np.ndarray:
    """Even samples of the faces that reach into a box, in random order.

    Args:
        mesh: What is scored.
        low: Corner of the box. (3,)
        high: The corner across. (3,)
        density: Samples per unit of area.
        seed: Of the samples and of their order.
        most: Samples at most.

    Returns:
        (N, 3)
    """
    corners = mesh.vertices[mesh.faces]
    near = ((corners.min(axis=1) <= high) & (corners.max(axis=1) >= low)).all(axis=1)
    faces = mesh.faces[near]
    edges = mesh.vertices[faces[:, 1:]] - mesh.vertices[faces[:, :1]]
    area = 0.5 * np.linalg.norm(np.cross(edges[:, 0], edges[:, 1]), axis=1).sum()
    count = int(np.ceil(density * area))
    points = sample_surface(
        mesh.vertices, faces, count if most is None else min(count, most), seed
    ).points
    np.random.default_rng(seed).shuffle(points, axis=0)
    return points
