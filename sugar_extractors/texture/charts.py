# SPDX-License-Identifier: Apache-2.0
"""Unfolds a surface into flat charts.

Faces whose smoothed normals are nearest to the same of the six directions of the axes, and that are
connected, are one chart: they are projected along their mean normal. Where noise folds the
projection over, inner vertices move to the mean of their neighbours (Tutte, "How to draw a graph",
1963), which flattens bumps. What still is folded, or lies below another sheet of the same chart, is
unfolded again by itself, and single faces last.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

_DIRECTIONS = np.concatenate([np.eye(3), -np.eye(3)])
_SMOOTHINGS = 8, 2, 0  # rounds in which normals are averaged with those of neighbours, per attempt
_LABEL_ROUNDS = 12
_LABEL_SHARE = 0.6  # of the faces that may change their direction in a round
_NEIGHBOR_COST = 0.35  # what an edge between two directions costs, in units of 1 - cosine
_SMALL_CHART = 10  # faces; smaller charts join the neighbour that they share most edges with
_UNTANGLING = 6, 30  # rounds, each of a larger neighbourhood, and steps of a round
_FOLDED = 0.05  # share of its area below which the image of a face is untangled
_USABLE = 0.02  # share of its area that the image of a face has at least
_LARGEST_GAIN = 3.0  # how much a chart is enlarged at most to have the area of its faces
_SHEET_SAMPLES = 4_000_000  # points at which sheets above each other are looked for
_SAMPLES_PER_FACE = 16
_ROUGH = 20.0  # median angle between neighbours in radians, times the root of the number of faces
_FAIRING_ROUNDS = 10
_FAIRING_STEPS = 0.5, -0.53
_CELLS_AT_ONCE = 4_000_000
_TINY = 1e-300


class Charts(NamedTuple):
    """A surface in flat parts, which do not overlap where they are laid out apart."""

    numbers: np.ndarray  # chart of each face, from 0 on, (F,) int64
    corners: np.ndarray  # corners of the faces in the plane of their chart, world units, (F, 3, 2)


class _Surface(NamedTuple):
    """Faces with what charts are made of."""

    vertices: np.ndarray  # (V, 3) float64
    faces: np.ndarray  # (F, 3)
    normals: np.ndarray  # of length 1, zero for faces without area, (F, 3)
    areas: np.ndarray  # (F,)
    neighbors: np.ndarray  # pairs of faces that share an edge, (P, 2)


class _Projection(NamedTuple):
    """Charts in the plane."""

    points: np.ndarray  # vertices of the charts, each in the axes of its own, (N, 2)
    heights: np.ndarray  # along the mean normal of the chart, (N,)
    charts: np.ndarray  # chart of each point, (N,)
    faces: np.ndarray  # rows of the points, (F, 3)


def unfold(vertices: np.ndarray, faces: np.ndarray) -> Charts:
    """Return charts of all faces. (V, 3) world units, (F, 3)"""
    points = np.asarray(vertices, dtype=np.float64)
    numbers = np.full(len(faces), -1, dtype=np.int64)
    corners = np.zeros((len(faces), 3, 2))
    remaining = np.arange(len(faces))
    count = 0
    for smoothing in _SMOOTHINGS:
        surface = _surface(points, faces[remaining])
        labels = _charts_of(surface, smoothing)
        flat = _untangled(_projected(surface, labels), surface.areas)
        usable = _signed_areas(flat) > _USABLE * surface.areas
        usable &= ~_below_others(flat, labels, usable)
        rows = remaining[usable]
        numbers[rows] = count + labels[usable]
        corners[rows] = _enlarged(flat, labels, surface.areas)[usable]
        count += labels.max(initial=-1) + 1
        remaining = remaining[~usable]
        if not len(remaining):
            break
    flat_faces, has_area = _single_faces(points[faces[remaining]])
    corners[remaining] = flat_faces
    numbers[remaining] = count + np.where(has_area, np.arange(len(remaining)) + 1, 0)
    return Charts(np.unique(numbers, return_inverse=True)[1].reshape(-1), corners)


def without_noise(vertices: np.ndarray, faces: np.ndarray) -> np.ndarray:
    """Smooth a surface that is rougher than its size explains. (V, 3), (F, 3) -> (V, 3) float64

    Of smooth surfaces the angle between neighbouring faces falls with the square root of their
    number; where it does not, it is noise that would end charts. Smoothing is that of Taubin, "A
    signal processing approach to fair surface design", 1995, which does not shrink.
    """
    points = np.asarray(vertices, dtype=np.float64)
    surface = _surface(points, faces)
    ends = surface.normals[surface.neighbors]
    if not len(ends):
        return points
    cosine = float(np.median((ends[:, 0] * ends[:, 1]).sum(axis=1)))
    angle = math.acos(min(1.0, max(-1.0, cosine)))
    if angle * math.sqrt(len(faces)) < _ROUGH:
        return points
    edges = faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2)
    around = _adjacency(edges, len(points))
    around.data[:] = 1.0
    degrees = np.maximum(np.asarray(around.sum(axis=1)).ravel(), 1)[:, None]
    is_used = (np.asarray(around.sum(axis=1)) > 0).reshape(-1, 1)
    for _ in range(_FAIRING_ROUNDS):
        for step in _FAIRING_STEPS:
            points = points + step * is_used * (around @ points / degrees - points)
    return points


def _surface(points: np.ndarray, faces: np.ndarray) -> _Surface:
    a, b, c = (points[faces[:, k]] for k in range(3))
    doubled = np.cross(b - a, c - a)
    lengths = np.linalg.norm(doubled, axis=1)
    normals = doubled / np.maximum(lengths, _TINY)[:, None]
    edges = np.sort(faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2), axis=1)
    owners = np.repeat(np.arange(len(faces)), 3)
    keys = edges[:, 0] * np.int64(len(points)) + edges[:, 1]
    order = np.argsort(keys, kind="stable")
    _, first, count = np.unique(keys[order], return_index=True, return_counts=True)
    first = first[count == 2]
    neighbors = np.stack([owners[order[first]], owners[order[first + 1]]], axis=1)
    return _Surface(points, faces, normals, lengths / 2, neighbors)


def _adjacency(pairs: np.ndarray, size: int) -> sparse.csr_matrix:
    """The symmetric matrix of pairs of rows, which counts those that are there several times."""
    rows = np.concatenate([pairs[:, 0], pairs[:, 1]])
    columns = np.concatenate([pairs[:, 1], pairs[:, 0]])
    return sparse.coo_matrix((np.ones(len(rows)), (rows, columns)), shape=(size, size)).tocsr()


def _charts_of(surface: _Surface, smoothing: int) -> np.ndarray:
    """Connected faces that look in about the same direction. (F,) int64, from 0 on"""
    n_faces = len(surface.faces)
    adjacency = _adjacency(surface.neighbors, n_faces)
    smooth = surface.normals * surface.areas[:, None]
    for _ in range(smoothing):
        smooth = smooth + adjacency @ smooth
        smooth /= np.maximum(np.linalg.norm(smooth, axis=1), _TINY)[:, None]
    smooth /= np.maximum(np.linalg.norm(smooth, axis=1), _TINY)[:, None]
    costs = 1 - smooth @ _DIRECTIONS.T
    labels = costs.argmin(axis=1)
    draws = np.random.default_rng(0)
    for _ in range(_LABEL_ROUNDS if smoothing else 0):
        around = adjacency @ np.eye(len(_DIRECTIONS))[labels]
        better = (costs - _NEIGHBOR_COST * around).argmin(axis=1)
        # Not all at once, or two neighbours would exchange their labels for ever.
        labels = np.where(draws.random(n_faces) < _LABEL_SHARE, better, labels)
    charts = _connected(surface, labels)
    return _joined(surface, charts) if smoothing else charts


def _connected(surface: _Surface, labels: np.ndarray) -> np.ndarray:
    """Connected faces of the same label. (F,) int64, from 0 on"""
    pairs = surface.neighbors[labels[surface.neighbors[:, 0]] == labels[surface.neighbors[:, 1]]]
    graph = _adjacency(pairs, len(labels))
    return csgraph.connected_components(graph, directed=False)[1].astype(np.int64)


def _joined(surface: _Surface, charts: np.ndarray) -> np.ndarray:
    """Join small charts to those that they share most edges with."""
    sizes = np.bincount(charts)
    ends = charts[surface.neighbors]
    ends = ends[ends[:, 0] != ends[:, 1]]
    ends = np.concatenate([ends, ends[:, ::-1]])
    # Only to larger ones, so that chains end.
    larger = (sizes[ends[:, 0]] < _SMALL_CHART) & (sizes[ends[:, 1]] > sizes[ends[:, 0]])
    pairs, counts = np.unique(ends[larger], axis=0, return_counts=True)
    order = np.argsort(counts, kind="stable")
    target = np.arange(len(sizes))
    # The pair of most edges comes last, and stays.
    target[pairs[order, 0]] = pairs[order, 1]
    while not np.array_equal(target, target[target]):
        target = target[target]
    return np.unique(target[charts], return_inverse=True)[1].reshape(-1)


def _projected(surface: _Surface, charts: np.ndarray) -> _Projection:
    """Project each chart along its mean normal."""
    n_charts = charts.max(initial=-1) + 1
    weighted = surface.normals * surface.areas[:, None]
    sums = [np.bincount(charts, weighted[:, k], n_charts) for k in range(3)]
    z = np.stack(sums, axis=1)
    z /= np.maximum(np.linalg.norm(z, axis=1), _TINY)[:, None]
    x = np.cross(np.eye(3)[np.abs(z).argmin(axis=1)], z)
    x /= np.maximum(np.linalg.norm(x, axis=1), _TINY)[:, None]
    y = np.cross(z, x)
    keys = surface.faces * np.int64(max(n_charts, 1)) + charts[:, None]
    distinct, rows = np.unique(keys.ravel(), return_inverse=True)
    vertices, owners = np.divmod(distinct, max(n_charts, 1))
    places = surface.vertices[vertices]
    points = np.stack([(places * axis[owners]).sum(axis=1) for axis in (x, y)], axis=1)
    heights = (places * z[owners]).sum(axis=1)
    return _Projection(points, heights, owners, rows.reshape(-1, 3))


def _signed_areas(flat: _Projection) -> np.ndarray:
    a, b, c = (flat.points[flat.faces[:, k]] for k in range(3))
    return _cross(b - a, c - a) / 2


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def _untangled(flat: _Projection, areas: np.ndarray) -> _Projection:
    """Move inner points of folded faces to the mean of their neighbours."""
    size = len(flat.points)
    edges = flat.faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2)
    adjacency = _adjacency(edges, size)
    adjacency.data[:] = 1.0
    degrees = np.asarray(adjacency.sum(axis=1)).ravel()
    keys = np.sort(edges, axis=1) @ np.array([size, 1])
    _, first, count = np.unique(keys, return_index=True, return_counts=True)
    movable = np.ones(size, dtype=bool)
    movable[edges[first[count == 1]].ravel()] = False
    rounds, steps = _UNTANGLING
    points = flat.points.copy()
    for number in range(rounds):
        folded = _signed_areas(flat._replace(points=points)) < _FOLDED * areas
        active = np.zeros(size, dtype=bool)
        active[flat.faces[folded].ravel()] = True
        for _ in range(number + 1):
            active |= adjacency @ active.astype(np.float64) > 0
        rows = np.flatnonzero(active & movable)
        if not len(rows):
            break
        around = adjacency[rows]
        for _ in range(steps):
            points[rows] = around @ points / degrees[rows, None]
    return flat._replace(points=points)


def _below_others(flat: _Projection, charts: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Usable faces that lie below another usable one of their chart somewhere. (F,) bool

    The faces are sampled; what is smaller than the distance of samples may be missed.
    """
    areas = np.where(usable, _signed_areas(flat), 0.0)
    total = areas.sum()
    below = np.zeros(len(usable), dtype=bool)
    if not total > 0:
        return below
    samples = min(_SHEET_SAMPLES, _SAMPLES_PER_FACE * len(usable))
    grid = flat.points * np.sqrt(samples / total)
    n_charts = charts.max() + 1
    lowest = np.full((n_charts, 2), np.inf)
    np.minimum.at(lowest, flat.charts, grid)
    grid = grid - np.floor(lowest)[flat.charts]
    sizes = np.zeros((n_charts, 2))
    np.maximum.at(sizes, flat.charts, grid)
    sizes = np.floor(sizes).astype(np.int64) + 2
    starts = np.concatenate([[0], np.cumsum(sizes.prod(axis=1))])
    rows = np.flatnonzero(usable)
    inside = cells_inside(grid[flat.faces[rows]])
    owners = rows[inside.faces]
    numbers = charts[owners]
    places = starts[numbers] + inside.y * sizes[numbers, 0] + inside.x
    depths = flat.heights[flat.faces].mean(axis=1)[owners]
    order = np.lexsort((-depths, places))
    places = places[order]
    # Of the faces at a place the highest comes first.
    again = np.concatenate([[False], places[1:] == places[:-1]])
    below[owners[order[again]]] = True
    return below


class CellsInside(NamedTuple):
    """Cells of a grid whose middles lie in triangles."""

    faces: np.ndarray  # row of the triangle, (N,)
    x: np.ndarray  # column of the cell, (N,) int64
    y: np.ndarray  # row of the cell, (N,) int64


def cells_inside(triangles: np.ndarray) -> CellsInside:
    """Return the cells whose middles lie in triangles. (F, 3, 2), in cells"""
    a, b, c = (triangles[:, k] for k in range(3))
    turns_right = _cross(b - a, c - a) < 0
    triangles = np.where(turns_right[:, None, None], triangles[:, ::-1], triangles)
    low = np.floor(triangles.min(axis=1)).astype(np.int64)
    high = np.floor(triangles.max(axis=1)).astype(np.int64)
    widths = high[:, 0] - low[:, 0] + 1
    counts = widths * (high[:, 1] - low[:, 1] + 1)
    ends = np.cumsum(counts)
    parts = []
    first = 0
    while first < len(triangles):
        reached = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, reached + _CELLS_AT_ONCE)))
        rows = np.repeat(np.arange(first, last), counts[first:last])
        number = np.arange(len(rows)) - (ends[rows] - counts[rows] - reached)
        x = low[rows, 0] + number % widths[rows]
        y = low[rows, 1] + number // widths[rows]
        middles = np.stack([x, y], axis=1) + 0.5
        a, b, c = (triangles[rows, k] for k in range(3))
        inside = _cross(b - a, middles - a) > 0
        inside &= _cross(c - b, middles - b) > 0
        inside &= _cross(a - c, middles - c) > 0
        parts.append((rows[inside], x[inside], y[inside]))
        first = last
    if not parts:
        nothing = np.zeros(0, dtype=np.int64)
        return CellsInside(nothing, nothing, nothing)
    return CellsInside(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _enlarged(flat: _Projection, charts: np.ndarray, areas: np.ndarray) -> np.ndarray:
    """Corners of the faces, where each chart has the area of its faces. (F, 3, 2)"""
    corners = flat.points[flat.faces]
    return corners * _gains(charts, _signed_areas(flat), areas)[charts][:, None, None]


def _gains(charts: np.ndarray, flat_areas: np.ndarray, areas: np.ndarray) -> np.ndarray:
    """How much charts are enlarged to have the area of their faces. (C,)"""
    size = charts.max(initial=-1) + 1
    projected = np.bincount(charts, np.maximum(flat_areas, 0.0), size)
    gains = np.sqrt(np.bincount(charts, areas, size) / np.maximum(projected, _TINY))
    return np.clip(gains, 1.0, _LARGEST_GAIN)


def with_areas_of(charts: Charts, vertices: np.ndarray, faces: np.ndarray) -> Charts:
    """Scale charts that were unfolded in other units to the areas of a surface. (V, 3), (F, 3)"""
    a, b, c = (np.asarray(vertices, dtype=np.float64)[faces[:, k]] for k in range(3))
    areas = np.linalg.norm(np.cross(b - a, c - a), axis=1) / 2
    a, b, c = (charts.corners[:, k] for k in range(3))
    flat_areas = np.abs(_cross(b - a, c - a)) / 2
    unit = math.sqrt(areas.sum() / max(flat_areas.sum(), _TINY))
    gains = _gains(charts.numbers, flat_areas * unit**2, areas)
    return charts._replace(corners=charts.corners * unit * gains[charts.numbers][:, None, None])


def _single_faces(triangles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Triangles in their own planes, (F, 3, 2), and whether they have an area, (F,) bool."""
    along = triangles[:, 1] - triangles[:, 0]
    other = triangles[:, 2] - triangles[:, 0]
    length = np.linalg.norm(along, axis=1)
    height = np.linalg.norm(np.cross(along, other), axis=1) / np.maximum(length, _TINY)
    flat = np.zeros((len(triangles), 3, 2))
    flat[:, 1, 0] = length
    flat[:, 2, 0] = (along * other).sum(axis=1) / np.maximum(length, _TINY)
    flat[:, 2, 1] = height
    has_area = length * height > 0
    flat[~has_area] = 0.0
    return flat, has_area
