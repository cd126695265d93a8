# SPDX-License-Identifier: Apache-2.0
"""Triangles of a surface between the corners of tetrahedra, and where on their edges it lies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

EDGES = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])  # corners of a tetrahedron
_CORNERS = np.array([(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])  # of one that counts as positive


class PointSamples(NamedTuple):
    """Values of a field at N points."""

    distances: np.ndarray  # to the surface, negative inside, (N,)
    is_known: np.ndarray  # whether some view has a distance; others count as inside, (N,) bool
    colors: np.ndarray  # 0 to 1, (N, 3)

    @property
    def is_inside(self) -> np.ndarray:
        """Which points do not lie outside. (N,) bool"""
        return (self.distances < 0) | ~self.is_known


Field = Callable[[np.ndarray], PointSamples]  # (N, 3) -> N samples


class CrossedEdges(NamedTuple):
    """Edges of tetrahedra from inside to outside, and the triangles between them."""

    inner: np.ndarray  # rows of the points inside, (E,)
    outer: np.ndarray  # rows of the points outside, (E,)
    faces: np.ndarray  # rows of edges, counter-clockwise seen from outside, (F, 3)


class Crossings(NamedTuple):
    """Where the surface crosses edges."""

    points: np.ndarray  # (E, 3)
    is_known: np.ndarray  # whether the field is known on both sides, (E,) bool
    steps: np.ndarray  # differences of the field between both sides, (E,)


def _edge_of(a: int, b: int) -> int:
    """Return the row of the edge between two corners."""
    low = min(a, b)
    high = max(a, b)
    is_edge = np.equal(EDGES, (low, high)).all(axis=1)
    return int(is_edge.argmax())


@functools.cache
def _case_triangles(case: int) -> list[tuple[int, int, int]]:
    """Return edges of triangles; the bits of ``case`` are the corners inside, 1 to 14."""
    inside = [corner for corner in range(4) if case >> corner & 1]
    outside = [corner for corner in range(4) if not case >> corner & 1]
    if len(inside) == 2:
        a, b = inside
        c, d = outside
        ring = [
            _edge_of(a, c),
            _edge_of(a, d),
            _edge_of(b, d),
            _edge_of(b, c),
        ]
    else:
        apex = inside[0] if len(inside) == 1 else outside[0]
        ring = [_edge_of(apex, corner) for corner in range(4) if corner != apex]
    middles = _CORNERS[EDGES[ring]].mean(axis=1)
    first_side = middles[1] - middles[0]
    second_side = middles[2] - middles[0]
    normal = np.cross(first_side, second_side)
    outward = _CORNERS[outside].mean(axis=0) - _CORNERS[inside].mean(axis=0)
    if normal @ outward < 0:
        ring = ring[::-1]
    first = ring[0]
    pairs = itertools.pairwise(ring[1:])
    return [(first, second, third) for second, third in pairs]


def crossed_edges(
    points: np.ndarray, tetrahedra: np.ndarray, is_inside: np.ndarray
) -> CrossedEdges:
    """Return the edges and triangles where a surface separates corners of tetrahedra.

    Args:
        points: (N, 3)
        tetrahedra: Rows of their corners, in either orientation. (T, 4)
        is_inside: Which points lie inside. (N,) bool
    """
    bits = is_inside[tetrahedra] << np.arange(4)
    cases = bits.sum(axis=1)
    is_crossed = (cases > 0) & (cases < 15)
    corners = tetrahedra[is_crossed]
    cases = cases[is_crossed]
    ways = points[corners[:, 1:]] - points[corners[:, :1]]
    is_negative = np.linalg.det(ways) < 0
    parts = [np.zeros((0, 3, 2), dtype=np.int64)]
    for case in range(1, 15):
        is_case = cases == case
        for triangle in _case_triangles(case):
            edges = EDGES[list(triangle)]
            positive = corners[is_case & ~is_negative]
            parts.append(positive[:, edges])
            negative = corners[is_case & is_negative]
            parts.append(negative[:, edges[::-1]])
    ends = np.concatenate(parts).reshape(-1, 2)
    starts_inside = is_inside[ends[:, 0]]
    inner, outer = np.where(starts_inside, ends.T, ends.T[::-1])
    n_points = len(points)
    keys, faces = np.unique(inner * n_points + outer, return_inverse=True)
    return CrossedEdges(
        inner=keys // n_points,
        outer=keys % n_points,
        faces=faces.reshape(-1, 3),
    )


def crossings(
    field: Field, points: np.ndarray, samples: PointSamples, edges: CrossedEdges, n_rounds: int
) -> Crossings:
    """Halve edges around the surface, and interpolate between the last two ends.

    Args:
        field: Tells values at points.
        points: Corners of tetrahedra. (N, 3)
        samples: Of the field at them.
        edges: Edges between them.
        n_rounds: Number of halvings.
    """
    inner = points[edges.inner]
    outer = points[edges.outer]
    inner_values = samples.distances[edges.inner]
    outer_values = samples.distances[edges.outer]
    is_known = samples.is_known[edges.inner]
    for _ in range(n_rounds):
        middles = (inner + outer) / 2
        values = field(middles)
        is_inside = values.is_inside
        inner = np.where(is_inside[:, None], middles, inner)
        outer = np.where(is_inside[:, None], outer, middles)
        inner_values = np.where(is_inside, values.distances, inner_values)
        outer_values = np.where(is_inside, outer_values, values.distances)
        is_known = np.where(is_inside, values.is_known, is_known)
    steps = outer_values - inner_values
    shares = np.where(is_known, -inner_values / np.maximum(steps, 1e-12), 1.0)
    shares = np.clip(shares, 0.0, 1.0)
    places = inner + shares[:, None] * (outer - inner)
    return Crossings(places, is_known, steps)
