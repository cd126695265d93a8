# SPDX-License-Identifier: Apache-2.0
"""Shapes and files that data sets with published tables are imitated with."""

from __future__ import annotations

import numpy as np
from plyfile import PlyData, PlyElement
from scipy.spatial.transform import Rotation

from benchmarks.published.similarity import Similarity
from sugar_scene.mesh.triangle_mesh import TriangleMesh
from tests.support.mesh_scenes import mesh_of


def plate(x0, x1, y0, y1, z) -> TriangleMesh:
    corners = [[x0, y0, z], [x1, y0, z], [x1, y1, z], [x0, y1, z]]
    return mesh_of(corners, [[0, 1, 2], [0, 2, 3]])


def grid(x0, x1, y0, y1, z, step) -> np.ndarray:
    x, y = np.meshgrid(np.arange(x0, x1, step), np.arange(y0, y1, step))
    return np.stack([x.ravel(), y.ravel(), np.full(x.size, float(z))], axis=1)


def write_points(path, points):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = np.ascontiguousarray(points.astype("<f8")).view([(a, "<f8") for a in "xyz"])
    PlyData([PlyElement.describe(table.reshape(-1), "vertex")]).write(str(path))


def some_similarity(seed=0) -> Similarity:
    rng = np.random.default_rng(seed)
    return Similarity(2.5, Rotation.random(random_state=seed).as_matrix(), rng.normal(size=3) * 3)
