# SPDX-License-Identifier: Apache-2.0
"""Marching cubes on a field that is stored in blocks, welded by edge numbers.

Case tables are those of Warp (Lorensen and Cline, SIGGRAPH 1987). Memory beyond the field itself
is that of the cells the surface passes through.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

try:
    from warp.geometry import IsoSurfaceMarchingCubes as Tables
except ImportError:
    # Warp 1.17, the newest that drivers of CUDA 12 can use.
    from warp import MarchingCubes as Tables

from sugar_scene.mesh.triangle_mesh import TriangleMesh

_CHUNK_BLOCKS = 2048
_CORNERS = np.array(Tables.CUBE_CORNER_OFFSETS, dtype=np.int64)
_EDGES = np.array(Tables.EDGE_TO_CORNERS, dtype=np.int64)
_RANGES = np.array(Tables.CASE_TO_TRI_RANGE, dtype=np.int64)
_TRIANGLES = np.array(Tables.TRI_LOCAL_INDICES, dtype=np.int64)
_EDGE_AXES = np.argmax(_CORNERS[_EDGES[:, 1]] - _CORNERS[_EDGES[:, 0]], axis=1)


@dataclass(frozen=True)
class SparseField:
    """Signed distances at voxel corners, in B stored blocks of side S.

    Corner (x, y, z) of the whole grid lies at ``origin + voxel * (x, y, z)``; within a block the
    last axis runs fastest.

    Attributes:
        origin: World units.
        voxel: Side of a voxel, world units.
        table: Block number by place; -1 where none is stored. (X, Y, Z) int32
        distances: Positive outside. (B S^3,)
        weights: 0 where the distance is unknown. (B S^3,)
        colors: 0 to 1. (B S^3, 3)
    """

    origin: tuple[float, float, float]
    voxel: float
    table: Tensor
    distances: Tensor
    weights: Tensor
    colors: Tensor

    @property
    def side(self) -> int:
        """Corners along the side of a block."""
        n_blocks = max(1, int(self.table.max()) + 1)
        return round((self.distances.shape[0] / n_blocks) ** (1 / 3))


def extract_surface(field: SparseField, min_weight: float = 1.0) -> TriangleMesh:
    """Zero level set; cells with a corner of less than the weight asked for are left open.

    Returns:
        Welded mesh, counter-clockwise seen from where the distance is positive.
    """
    table = field.table.cpu().numpy()
    values = (field.distances.cpu().numpy(), field.weights.cpu().numpy() >= min_weight)
    colors = field.colors.cpu().numpy()
    parts = []
    if field.distances.shape[0]:
        places = np.argwhere(table >= 0)
        for first in range(0, len(places), _CHUNK_BLOCKS):
            parts.append(
                _chunk_cells(table, places[first : first + _CHUNK_BLOCKS], *values, field.side)
            )
    cells = np.concatenate([cells for cells, _ in parts] or [np.zeros((0, 3), np.int64)])
    rows = np.concatenate([rows for _, rows in parts] or [np.zeros((0, 8), np.int64)])
    if len(cells) == 0:
        return TriangleMesh(
            np.zeros((0, 3)), np.zeros((0, 3), np.int64), np.zeros((0, 3), np.uint8)
        )
    cell_of, edges = _triangle_edges(values[0][rows])
    low, axis = _EDGES[edges, 0], _EDGE_AXES[edges]
    corner = cells[cell_of][:, None] + _CORNERS[low]
    extent = np.array(table.shape) * field.side + 1
    keys = ((corner[..., 0] * extent[1] + corner[..., 1]) * extent[2] + corner[..., 2]) * 3 + axis
    _, where, faces = np.unique(keys.ravel(), return_index=True, return_inverse=True)

    row_a = rows[cell_of[:, None], low].ravel()[where]
    row_b = rows[cell_of[:, None], _EDGES[edges, 1]].ravel()[where]
    a, b = values[0][row_a].astype(np.float64), values[0][row_b].astype(np.float64)
    share = a / (a - b)
    vertices = corner.reshape(-1, 3)[where].astype(np.float64)
    vertices[np.arange(len(where)), axis.ravel()[where]] += share
    color = colors[row_a] + share[:, None] * (colors[row_b] - colors[row_a])
    return TriangleMesh(
        vertices * field.voxel + np.array(field.origin),
        # The tables wind towards smaller values.
        faces.reshape(-1, 3)[:, ::-1].copy(),
        np.clip(np.rint(color * 255), 0, 255).astype(np.uint8),
    )


def _chunk_cells(
    table: np.ndarray, places: np.ndarray, distances: np.ndarray, is_known: np.ndarray, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cells of some blocks that the surface passes through.

    Returns:
        Grid coordinates of their low corners (C, 3), and the rows of their corners (C, 8).
    """
    # Corners 0 to side: the last layer belongs to the next blocks.
    local = np.stack(np.meshgrid(*[np.arange(side + 1)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    step, inner = local // side, local % side
    offset = (inner[:, 0] * side + inner[:, 1]) * side + inner[:, 2]
    at = places[:, None] + step
    exists = (at < table.shape).all(axis=-1)
    at = np.minimum(at, np.array(table.shape) - 1)
    block = np.where(exists, table[at[..., 0], at[..., 1], at[..., 2]], -1).astype(np.int64)
    row = np.where(block >= 0, block * side**3 + offset, -1)
    known = (row >= 0) & is_known[row]
    inside = known & (distances[row] < 0)

    shape = (len(places), *[side + 1] * 3)
    row, known, inside = (array.reshape(shape) for array in (row, known, inside))

    def corner_view(array: np.ndarray, corner: np.ndarray) -> np.ndarray:
        x, y, z = corner
        return array[:, x : x + side, y : y + side, z : z + side]

    n_known = sum(corner_view(known, corner).astype(np.int8) for corner in _CORNERS)
    n_inside = sum(corner_view(inside, corner).astype(np.int8) for corner in _CORNERS)
    active = np.argwhere((n_known == 8) & (n_inside > 0) & (n_inside < 8))
    rows = np.stack([corner_view(row, corner)[tuple(active.T)] for corner in _CORNERS], axis=1)
    return places[active[:, 0]] * side + active[:, 1:], rows


def _triangle_edges(corner_values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cell of each triangle (T,), and the cell edges its corners lie on (T, 3)."""
    case = ((corner_values < 0) << np.arange(8)).sum(axis=1)
    first, n = _RANGES[case] // 3, (_RANGES[case + 1] - _RANGES[case]) // 3
    cell_of = np.repeat(np.arange(len(case)), n)
    number = np.arange(len(cell_of)) - np.repeat(np.cumsum(n) - n, n) + first[cell_of]
    return cell_of, _TRIANGLES.reshape(-1, 3)[number]
