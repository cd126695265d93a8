# SPDX-License-Identifier: Apache-2.0
"""Triangulate the rim of a hole with the least area, without edges that are there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sugar_scene.triangle_mesh import TriangleMesh, sides_of

_MAX_PART = 128  # edges of a loop that is triangulated at once; larger ones are divided
_COMPACTNESS = 0.02  # weight of squared sides beside the area, for triangles that are no slivers
_LEAST_AREA = 1e-6  # of a triangle, in squares of its sides; smaller ones are degenerate


@dataclass(frozen=True)
class RimEdges:
    """Edges between vertices on rims of holes, of the mesh and of fillings; none is made twice."""

    neighbors: dict[int, set[int]]  # by row of a vertex

    @classmethod
    def of(cls, mesh: TriangleMesh, loops: Sequence[np.ndarray]) -> RimEdges:
        """Return the edges of a mesh with both ends on loops."""
        is_rim = np.zeros(mesh.n_vertices, dtype=bool)
        for loop in loops:
            is_rim[loop] = True
        edges = cls({})
        starts, ends = sides_of(mesh.faces)
        is_between = is_rim[starts] & is_rim[ends]
        pairs = zip(starts[is_between].tolist(), ends[is_between].tolist(), strict=True)
        for start, end in pairs:
            edges.add(start, end)
        return edges

    def add(self, start: int, end: int) -> None:
        """Add an edge."""
        self.neighbors.setdefault(start, set()).add(end)
        self.neighbors.setdefault(end, set()).add(start)

    def between(self, loop: np.ndarray) -> np.ndarray:
        """Return which pairs of vertices of a loop are ends of an edge. (N,) -> (N, N) bool"""
        places = {row: place for place, row in enumerate(loop.tolist())}
        joined = np.zeros((len(loop), len(loop)), dtype=bool)
        for row, place in places.items():
            for neighbor in self.neighbors.get(row, ()):
                if neighbor in places:
                    joined[place, places[neighbor]] = True
        return joined


def triangulated(vertices: np.ndarray, loop: np.ndarray, edges: RimEdges) -> np.ndarray | None:
    """Return triangles between the vertices of a loop, (N - 2, 3), and add their edges.

    None where there are none without degenerate triangles or edges of more than two faces.
    """
    is_joined = edges.between(loop)
    faces: list[tuple[int, int, int]] = []
    chords: list[tuple[int, int]] = []
    parts = [np.arange(len(loop))]
    while parts:
        part = parts.pop()
        points = vertices[loop[part]]
        is_forbidden = is_joined[np.ix_(part, part)]
        if len(part) > _MAX_PART:
            chord = _dividing_chord(points, is_forbidden)
            if chord is None:
                return None
            first, last = chord
            parts.append(part[first : last + 1])
            parts.append(np.concatenate([part[last:], part[: first + 1]]))
            chords.append((int(part[first]), int(part[last])))
            continue
        triangles = _least_triangles(points, is_forbidden)
        if triangles is None:
            return None
        # Against the sense of the faces around, as faces on two sides of an edge are.
        faces += [(int(part[c]), int(part[b]), int(part[a])) for a, b, c in triangles]
    rows = loop[np.array(faces, dtype=np.int64)]
    for triangle in rows.tolist():
        for corner in range(3):
            edges.add(triangle[corner], triangle[corner - 1])
    return rows


def _dividing_chord(points: np.ndarray, is_forbidden: np.ndarray) -> tuple[int, int] | None:
    """Return the ends of the shortest chord that leaves a quarter of a loop on either side.

    (N, 3), (N, N) bool -> None where there is none
    """
    n = len(points)
    places = np.arange(n)
    steps = places[None, :] - places[:, None]
    is_balanced = (steps >= n // 4) & (steps <= n - n // 4)
    squares = (points**2).sum(axis=1)
    lengths = squares[:, None] + squares[None, :] - 2 * points @ points.T
    lengths[~is_balanced | is_forbidden] = np.inf
    first, last = np.unravel_index(lengths.argmin(), lengths.shape)
    if not np.isfinite(lengths[first, last]):
        return None
    return int(first), int(last)


def _least_triangles(
    points: np.ndarray, is_forbidden: np.ndarray
) -> list[tuple[int, int, int]] | None:
    """Return the triangulation of least cost of a closed polygon, by dynamic programming.

    Args:
        points: Corners of the polygon. (N, 3)
        is_forbidden: Pairs of corners between which there is an edge already. (N, N) bool

    Returns:
        Corners of N - 2 triangles in ascending order; None where there is no triangulation.
    """
    n = len(points)
    costs = np.full((n, n), np.inf)
    middles = np.zeros((n, n), dtype=np.int64)
    first = np.arange(n - 1)
    costs[first, first + 1] = 0.0
    for gap in range(2, n):
        start = np.arange(n - gap)
        end = start + gap
        middle = start[:, None] + np.arange(1, gap)
        total = costs[start[:, None], middle] + costs[middle, end[:, None]]
        total += triangle_costs(points[start][:, None], points[middle], points[end][:, None])
        best = total.argmin(axis=1)
        least = total[start, best]
        if gap < n - 1:
            least[is_forbidden[start, end]] = np.inf
        costs[start, end] = least
        middles[start, end] = middle[start, best]
    if not np.isfinite(costs[0, n - 1]):
        return None
    triangles = []
    spans = [(0, n - 1)]
    while spans:
        a, c = spans.pop()
        if c - a < 2:
            continue
        b = int(middles[a, c])
        triangles.append((a, b, c))
        spans.append((a, b))
        spans.append((b, c))
    return triangles


def triangle_costs(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the costs of triangles; infinite for degenerate ones. (..., 3) -> (...)"""
    ab = b - a
    ac = c - a
    bc = c - b
    areas = np.linalg.norm(np.cross(ab, ac), axis=-1) / 2
    squares = (ab**2).sum(axis=-1) + (ac**2).sum(axis=-1) + (bc**2).sum(axis=-1)
    costs = areas + _COMPACTNESS * squares
    return np.where(areas > _LEAST_AREA * squares, costs, np.inf)
