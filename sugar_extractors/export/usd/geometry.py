# SPDX-License-Identifier: Apache-2.0
"""Triangles of USD meshes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


def set_triangles(usd: ModuleType, shape: Any, vertices: np.ndarray, faces: np.ndarray) -> None:
    """Set the points, triangles and extent of a mesh. (V, 3), (F, 3)"""
    points = vertices.astype(np.float32)
    corner_counts = np.full(len(faces), 3, np.int32)
    extent = np.stack([points.min(axis=0), points.max(axis=0)])
    arrays = usd.Vt
    shape.CreatePointsAttr(arrays.Vec3fArray.FromNumpy(points))
    shape.CreateFaceVertexCountsAttr(arrays.IntArray.FromNumpy(corner_counts))
    shape.CreateFaceVertexIndicesAttr(arrays.IntArray.FromNumpy(faces.astype(np.int32).ravel()))
    shape.CreateExtentAttr(arrays.Vec3fArray.FromNumpy(extent))
    shape.CreateSubdivisionSchemeAttr(usd.UsdGeom.Tokens.none)
