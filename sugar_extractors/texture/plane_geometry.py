# SPDX-License-Identifier: Apache-2.0
"""Triangles in the plane: areas, and the cells of a grid inside them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_CELLS_AT_ONCE = 30_000


class CellsInside(NamedTuple):
    """Cells of a grid whose centres lie in triangles."""

    faces: np.ndarray  # row of the triangle, (N,)
    x: np.ndarray  # column of the cell, (N,) int64
    y: np.ndarray  # row of the cell, (N,) int64


def cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cross products of vectors of the plane. (..., 2), (..., 2) -> (...)"""
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def doubled_areas(triangles: np.ndarray) -> np.ndarray:
    """Return twice the areas of triangles, negative where they turn right. (F, 3, 2) -> (F,)"""
    a, b, c = np.moveaxis(triangles, 1, 0)
    return cross(b - a, c - a)


def cells_inside(triangles: np.ndarray) -> CellsInside:
    """Return the cells whose centres lie in triangles.

    Args:
        triangles: Corners in units of cells. (F, 3, 2)
    """
    turns_right = doubled_areas(triangles) < 0
    triangles = np.where(turns_right[:, None, None], triangles[:, ::-1], triangles)
    low = np.floor(triangles.min(axis=1)).astype(np.int64)
    high = np.floor(triangles.max(axis=1)).astype(np.int64)
    widths, heights = (high - low + 1).T
    counts = widths * heights
    ends = np.cumsum(counts)
    nothing = np.zeros(0, dtype=np.int64)
    chunks = [CellsInside(nothing, nothing, nothing)]
    first = 0
    while first < len(triangles):
        start = ends[first - 1] if first else 0
        last = int(np.searchsorted(ends, start + _CELLS_AT_ONCE))
        last = max(first + 1, last)
        # All cells of the boxes around the triangles, row by row.
        faces = np.repeat(np.arange(first, last), counts[first:last])
        box_starts = np.repeat(ends[first:last] - counts[first:last] - start, counts[first:last])
        numbers = np.arange(len(faces)) - box_starts
        y, x = np.divmod(numbers, widths[faces])
        x += low[faces, 0]
        y += low[faces, 1]
        is_inside = _lies_inside(x + 0.5, y + 0.5, triangles[first:last], counts[first:last])
        chunks.append(CellsInside(faces[is_inside], x[is_inside], y[is_inside]))
        first = last
    return CellsInside(*map(np.concatenate, zip(*chunks, strict=True)))


def _lies_inside(
    x: np.ndarray, y: np.ndarray, triangles: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Return whether points lie in triangles that turn left. (N,), (N,) -> (N,) bool

    Args:
        triangles: (F, 3, 2)
        counts: Points of each triangle, one after the other; their sum is N. (F,)
    """
    is_inside = np.ones(len(x), dtype=bool)
    for k in range(3):
        start = triangles[:, k]
        along = triangles[:, (k + 1) % 3] - start
        start_x, start_y = np.repeat(start, counts, axis=0).T
        along_x, along_y = np.repeat(along, counts, axis=0).T
        is_inside &= along_x * (y - start_y) - along_y * (x - start_x) > 0
    return is_inside
