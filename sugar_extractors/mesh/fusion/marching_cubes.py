# SPDX-License-Identifier: Apache-2.0
"""Triangles of the zero level set of a sparse field, by marching cubes.

Case tables are those of Warp (Lorensen and Cline, SIGGRAPH 1987).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.color_bytes import rounded_bytes
from sugar_scene.triangle_mesh import TriangleMesh

try:
    from warp.geometry import IsoSurfaceMarchingCubes as Tables
except ImportError:
    # Warp 1.17, the newest that drivers of CUDA 12 can use.
    from warp import MarchingCubes as Tables

EMPTY_MESH = TriangleMesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64), np.zeros((0, 3), np.uint8))
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
    """

    origin: tuple[float, float, float]
    voxel: float  # side of a voxel, world units
    table: Tensor  # block number by place; -1 where none is stored, (X, Y, Z) int32
    distances: Tensor  # positive outside, (B S^3,)
    weights: Tensor  # 0 where the distance is unknown, (B S^3,)
    colors: Tensor  # 0 to 1, (B S^3, 3)

    @property
    def side(self) -> int:
        """Voxels along the side of a block."""
        n_blocks = max(1, int(self.table.max()) + 1)
        return round((self.distances.shape[0] / n_blocks) ** (1 / 3))

    def nearest_corners(self, points: Tensor) -> Tensor:
        """Return the corners of the whole grid next to points. (P, 3) -> (P, 3) int64"""
        corners = (points - points.new_tensor(self.origin)) / self.voxel
        return corners.round().long()

    def rows_of(self, corners: Tensor) -> Tensor:
        """Return the stored row of corners of the grid, -1 where none is. (..., 3) -> (...)"""
        side = self.side
        blocks = corners.div(side, rounding_mode="floor")
        nearest = blocks.clamp(min=0).minimum(blocks.new_tensor(self.table.shape) - 1)
        is_inside = (blocks == nearest).all(dim=-1)
        x, y, z = nearest.unbind(dim=-1)
        numbers = torch.where(is_inside, self.table[x, y, z].long(), -1)
        x, y, z = corners.remainder(side).unbind(dim=-1)
        offsets = (x * side + y) * side + z
        return torch.where(numbers >= 0, numbers * side**3 + offsets, -1)

    def positions(self, rows: Tensor) -> Tensor:
        """Return where corners in some stored rows lie. (R,) -> (R, 3) float64 world units"""
        side = self.side
        # Blocks are numbered in the order of their places.
        blocks = (self.table >= 0).nonzero()[rows.div(side**3, rounding_mode="floor")]
        shape = (side, side, side)
        offsets = torch.stack(torch.unravel_index(rows.remainder(side**3), shape), dim=1)
        corners = (blocks * side + offsets).double()
        return corners * self.voxel + corners.new_tensor(self.origin)


class _Cells(NamedTuple):
    """Cells of the grid that the surface crosses."""

    places: np.ndarray  # of the lowest corner in the whole grid, (N, 3)
    rows: np.ndarray  # of the corners among the stored ones, in the order of the tables, (N, 8)


def extract_surface(field: SparseField) -> TriangleMesh:
    """Return the zero level set; cells with a corner that no view sees are left open."""
    cells = _crossed_cells(field)
    if not len(cells.rows):
        return EMPTY_MESH
    distances = field.distances.cpu().numpy()
    colors = field.colors.cpu().numpy()
    # The corners inside decide which triangles a cell has; their corners are edges of the cell.
    cases = ((distances[cells.rows] < 0) << np.arange(8)).sum(axis=1)
    first = _RANGES[cases] // 3
    counts = (_RANGES[cases + 1] - _RANGES[cases]) // 3
    owners = np.repeat(np.arange(len(cases)), counts)
    first_of_cell = np.cumsum(counts) - counts
    numbers = np.arange(len(owners)) - first_of_cell[owners] + first[owners]
    edges = _TRIANGLES.reshape(-1, 3)[numbers]
    low, high = np.moveaxis(_EDGES[edges], -1, 0)
    axes = _EDGE_AXES[edges]
    # An edge is named by its lower corner in the grid and its axis.
    corners = cells.places[owners][:, None] + _CORNERS[low]
    extent = np.array(field.table.shape) * field.side + 1
    x, y, z = np.moveaxis(corners, -1, 0)
    keys = ((x * extent[1] + y) * extent[2] + z) * 3 + axes
    _, distinct, faces = np.unique(keys.ravel(), return_index=True, return_inverse=True)

    row_a = cells.rows[owners[:, None], low].ravel()[distinct]
    row_b = cells.rows[owners[:, None], high].ravel()[distinct]
    a = distances[row_a].astype(np.float64)
    b = distances[row_b].astype(np.float64)
    share = a / (a - b)
    vertices = corners.reshape(-1, 3)[distinct].astype(np.float64)
    vertices[np.arange(len(distinct)), axes.ravel()[distinct]] += share
    color = colors[row_a] + share[:, None] * (colors[row_b] - colors[row_a])
    return TriangleMesh(
        vertices=vertices * field.voxel + np.array(field.origin),
        # The tables wind towards smaller values.
        faces=faces.reshape(-1, 3)[:, ::-1].copy(),
        colors=rounded_bytes(color * 255),
    )


def _crossed_cells(field: SparseField) -> _Cells:
    """Return the cells with corners on both sides of the surface, all of them known."""
    distances = field.distances.cpu().numpy()
    is_known = field.weights.cpu().numpy() > 0
    side = field.side
    blocks = (field.table >= 0).nonzero().cpu().numpy()
    chunks = [_Cells(np.zeros((0, 3), np.int64), np.zeros((0, 8), np.int64))]
    for first in range(0, len(blocks), _CHUNK_BLOCKS):
        chunk = blocks[first : first + _CHUNK_BLOCKS]
        corners = torch.from_numpy(_corners_of(chunk, side)).to(field.table.device)
        rows = field.rows_of(corners).cpu().numpy()
        is_corner_known = (rows >= 0) & is_known[rows]
        is_inside = is_corner_known & (distances[rows] < 0)
        n_known = sum(
            _corner_view(is_corner_known, corner, side).astype(np.int8) for corner in _CORNERS
        )
        n_inside = sum(_corner_view(is_inside, corner, side).astype(np.int8) for corner in _CORNERS)
        active = np.argwhere((n_known == 8) & (n_inside > 0) & (n_inside < 8))
        at = tuple(active.T)
        corner_rows = [_corner_view(rows, corner, side)[at] for corner in _CORNERS]
        places = chunk[active[:, 0]] * side + active[:, 1:]
        chunks.append(_Cells(places, np.stack(corner_rows, axis=1)))
    return _Cells(*map(np.concatenate, zip(*chunks, strict=True)))


def _corners_of(blocks: np.ndarray, side: int) -> np.ndarray:
    """Return the corners of the cells of some blocks, in the grid.

    They go from 0 to ``side``: the last layer belongs to the next blocks.

    Args:
        blocks: Places of the blocks. (B, 3)

    Returns:
        (B, side + 1, side + 1, side + 1, 3)
    """
    corners = np.moveaxis(np.indices((side + 1, side + 1, side + 1)), 0, -1)
    return blocks[:, None, None, None] * side + corners


def _corner_view(corners: np.ndarray, corner: np.ndarray, side: int) -> np.ndarray:
    """Return one corner of each cell. (B, side + 1, ...), (3,) -> (B, side, side, side)"""
    x, y, z = corner
    return corners[:, x : x + side, y : y + side, z : z + side]
