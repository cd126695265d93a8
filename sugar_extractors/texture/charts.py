# SPDX-License-Identifier: Apache-2.0
"""Unfold a surface into flat charts.

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

from gaussian_splatting.core.moved import unit_vectors
from gaussian_splatting.core.subsets import is_among
from sugar_extractors.texture.plane_geometry import cells_inside, doubled_areas
from sugar_scene.triangle_mesh import doubled_area_normals

_DIRECTIONS = np.concatenate([np.eye(3), -np.eye(3)])
_SMOOTHINGS = 8, 2, 0  # rounds in which normals are averaged with those of neighbours, per attempt
_LABEL_ROUNDS = 12
_LABEL_SHARE = 0.6  # of the faces that may change their direction in a round
_NEIGHBOR_COST = 0.35  # what an edge between two directions costs, in units of 1 - cosine
_SMALL_CHART = 10  # faces; smaller charts join the neighbour that they share most edges with
_UNTANGLING_ROUNDS = 6  # each of a larger neighbourhood
_UNTANGLING_STEPS = 30  # of a round
_FOLDED = 0.05  # share of its area below which the image of a face is untangled
_USABLE = 0.02  # share of its area that the image of a face has at least
_LARGEST_GAIN = 3.0  # how much a chart is enlarged at most to have the area of its faces
_SHEET_SAMPLES = 4_000_000  # points at which sheets above each other are looked for
_SAMPLES_PER_FACE = 16
_ROUGH = 20.0  # median angle between neighbours in radians, times the root of the number of faces
_FAIRING_ROUNDS = 10
_FAIRING_STEPS = 0.5, -0.53
_TINY = 1e-300


class Charts(NamedTuple):
    """A surface in flat parts, which do not overlap where they are laid out apart."""

    numbers: np.ndarray  # chart of each face, from 0 on, (F,) int64
    corners: np.ndarray  # corners of the faces in the plane of their chart, world units, (F, 3, 2)


class _Surface(NamedTuple):
    """Faces with the quantities that charts are made from."""

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
        projection = _untangled(_projected(surface, labels), surface.areas)
        is_usable = _signed_areas(projection) > _USABLE * surface.areas
        is_usable &= ~_below_others(projection, labels, is_usable)
        rows = remaining[is_usable]
        numbers[rows] = count + labels[is_usable]
        enlarged = _enlarged(projection, labels, surface.areas)
        corners[rows] = enlarged[is_usable]
        count += labels.max(initial=-1) + 1
        remaining = remaining[~is_usable]
        if not len(remaining):
            break
    flat_faces, has_area = _single_faces(points[faces[remaining]])
    corners[remaining] = flat_faces
    # Faces without area are one chart together.
    single_numbers = np.arange(len(remaining)) + 1
    numbers[remaining] = count + np.where(has_area, single_numbers, 0)
    return Charts(_renumbered(numbers), corners)


def without_noise(vertices: np.ndarray, faces: np.ndarray) -> np.ndarray:
    """Smooth a surface that is rougher than its size explains. (V, 3), (F, 3) -> (V, 3) float64

    Of smooth surfaces the angle between neighbouring faces falls with the square root of their
    number; where it does not, it is noise that would end charts. Smoothing is that of Taubin, "A
    signal processing approach to fair surface design", 1995, which does not shrink.
    """
    points = np.asarray(vertices, dtype=np.float64)
    surface = _surface(points, faces)
    if not len(surface.neighbors):
        return points
    first_normals, second_normals = surface.normals[surface.neighbors.T]
    cosines = (first_normals * second_normals).sum(axis=1)
    median = float(np.median(cosines))
    angle = math.acos(min(1.0, max(-1.0, median)))
    if angle * math.sqrt(len(faces)) < _ROUGH:
        return points
    adjacency = _adjacency(_edges(faces), len(points))
    adjacency.data[:] = 1.0
    n_neighbors = np.asarray(adjacency.sum(axis=1)).reshape(-1, 1)
    degrees = np.maximum(n_neighbors, 1)
    is_used = n_neighbors > 0
    for _ in range(_FAIRING_ROUNDS):
        for step in _FAIRING_STEPS:
            means = adjacency @ points / degrees
            points = points + step * is_used * (means - points)
    return points


def _renumbered(labels: np.ndarray) -> np.ndarray:
    """Return labels as numbers from 0 on, without gaps. (F,) int64"""
    _, numbers = np.unique(labels, return_inverse=True)
    return numbers.reshape(-1)


def _edges(faces: np.ndarray) -> np.ndarray:
    """Return the three edges of each face. (F, 3) -> (3 F, 2)"""
    return faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2)


def _surface(points: np.ndarray, faces: np.ndarray) -> _Surface:
    doubled = doubled_area_normals(points, faces)
    edges = np.sort(_edges(faces), axis=1)
    owners = np.repeat(np.arange(len(faces)), 3)
    keys = edges[:, 0] * np.int64(len(points)) + edges[:, 1]
    order = np.argsort(keys, kind="stable")
    _, first, count = np.unique(keys[order], return_index=True, return_counts=True)
    first = first[count == 2]
    neighbors = np.stack([owners[order[first]], owners[order[first + 1]]], axis=1)
    return _Surface(
        vertices=points,
        faces=faces,
        normals=unit_vectors(doubled),
        areas=np.linalg.norm(doubled, axis=1) / 2,
        neighbors=neighbors,
    )


def _adjacency(pairs: np.ndarray, size: int) -> sparse.csr_matrix:
    """Return the symmetric matrix that counts how often each pair of rows occurs.

    (P, 2) -> (size, size)
    """
    rows, columns = np.concatenate([pairs, pairs[:, ::-1]]).T
    ones = np.ones(len(rows))
    return sparse.csr_matrix((ones, (rows, columns)), shape=(size, size))


def _charts_of(surface: _Surface, smoothing: int) -> np.ndarray:
    """Return connected faces that look in about the same direction. (F,) int64, from 0 on

    Args:
        smoothing: Rounds in which normals are averaged; 0 also leaves labels and small charts.
    """
    n_faces = len(surface.faces)
    adjacency = _adjacency(surface.neighbors, n_faces)
    smooth = surface.normals * surface.areas[:, None]
    for _ in range(smoothing):
        smooth = unit_vectors(smooth + adjacency @ smooth)
    smooth = unit_vectors(smooth)
    costs = 1 - smooth @ _DIRECTIONS.T
    labels = costs.argmin(axis=1)
    if not smoothing:
        return _connected(surface, labels)
    rng = np.random.default_rng(0)
    for _ in range(_LABEL_ROUNDS):
        one_hot = np.eye(len(_DIRECTIONS))[labels]
        n_agreeing = adjacency @ one_hot
        better = (costs - _NEIGHBOR_COST * n_agreeing).argmin(axis=1)
        # Not all at once, or two neighbours would exchange their labels for ever.
        may_change = rng.random(n_faces) < _LABEL_SHARE
        labels = np.where(may_change, better, labels)
    return _joined(surface, _connected(surface, labels))


def _connected(surface: _Surface, labels: np.ndarray) -> np.ndarray:
    """Return connected components of faces with the same label. (F,) int64, from 0 on"""
    first_labels, second_labels = labels[surface.neighbors.T]
    pairs = surface.neighbors[first_labels == second_labels]
    graph = _adjacency(pairs, len(labels))
    _, components = csgraph.connected_components(graph, directed=False)
    return components.astype(np.int64)


def _joined(surface: _Surface, charts: np.ndarray) -> np.ndarray:
    """Join small charts to those that they share most edges with."""
    sizes = np.bincount(charts)
    ends = charts[surface.neighbors]
    ends = ends[ends[:, 0] != ends[:, 1]]
    ends = np.concatenate([ends, ends[:, ::-1]])
    # Only to larger ones, so that chains end.
    source_sizes, target_sizes = sizes[ends.T]
    may_join = (source_sizes < _SMALL_CHART) & (target_sizes > source_sizes)
    pairs, counts = np.unique(ends[may_join], axis=0, return_counts=True)
    order = np.argsort(counts, kind="stable")
    target = np.arange(len(sizes))
    # The pair of most edges is assigned last and overwrites the others.
    target[pairs[order, 0]] = pairs[order, 1]
    while not np.array_equal(target, target[target]):
        target = target[target]
    return _renumbered(target[charts])


def _projected(surface: _Surface, charts: np.ndarray) -> _Projection:
    """Project each chart along its mean normal."""
    n_charts = charts.max(initial=-1) + 1
    weighted = surface.normals * surface.areas[:, None]
    sums = [np.bincount(charts, weighted[:, k], n_charts) for k in range(3)]
    z = unit_vectors(np.stack(sums, axis=1))
    least_axis = np.abs(z).argmin(axis=1)
    x = unit_vectors(np.cross(np.eye(3)[least_axis], z))
    y = np.cross(z, x)
    # A point for each pair of a vertex and a chart.
    stride = max(n_charts, 1)
    keys = surface.faces * np.int64(stride) + charts[:, None]
    distinct, rows = np.unique(keys.ravel(), return_inverse=True)
    vertices, owners = np.divmod(distinct, stride)
    places = surface.vertices[vertices]
    along_x = (places * x[owners]).sum(axis=1)
    along_y = (places * y[owners]).sum(axis=1)
    along_z = (places * z[owners]).sum(axis=1)
    return _Projection(
        points=np.stack([along_x, along_y], axis=1),
        heights=along_z,
        charts=owners,
        faces=rows.reshape(-1, 3),
    )


def _signed_areas(projection: _Projection) -> np.ndarray:
    """Return areas of the projected faces, negative where they are folded over. (F,)"""
    return doubled_areas(projection.points[projection.faces]) / 2


def _untangled(projection: _Projection, areas: np.ndarray) -> _Projection:
    """Move inner points of folded faces to the mean of their neighbours.

    Args:
        areas: Of the faces on the surface. (F,)
    """
    size = len(projection.points)
    edges = _edges(projection.faces)
    adjacency = _adjacency(edges, size)
    adjacency.data[:] = 1.0
    degrees = np.asarray(adjacency.sum(axis=1)).ravel()
    keys = np.sort(edges, axis=1) @ np.array([size, 1])
    _, first, count = np.unique(keys, return_index=True, return_counts=True)
    border_edges = edges[first[count == 1]]
    is_inner = ~is_among(size, border_edges)
    points = projection.points.copy()
    for number in range(_UNTANGLING_ROUNDS):
        current_areas = _signed_areas(projection._replace(points=points))
        is_folded = current_areas < _FOLDED * areas
        is_active = is_among(size, projection.faces[is_folded])
        for _ in range(number + 1):
            is_active |= adjacency @ is_active.astype(np.float64) > 0
        rows = np.flatnonzero(is_active & is_inner)
        if not len(rows):
            break
        row_adjacency = adjacency[rows]
        row_degrees = degrees[rows, None]
        for _ in range(_UNTANGLING_STEPS):
            points[rows] = row_adjacency @ points / row_degrees
    return projection._replace(points=points)


def _below_others(projection: _Projection, charts: np.ndarray, is_usable: np.ndarray) -> np.ndarray:
    """Return usable faces that lie below another usable one of their chart somewhere. (F,) bool

    The faces are sampled; what is smaller than the distance of samples may be missed.
    """
    is_below = np.zeros(len(is_usable), dtype=bool)
    total = np.where(is_usable, _signed_areas(projection), 0.0).sum()
    if not total > 0:
        return is_below
    n_samples = min(_SHEET_SAMPLES, _SAMPLES_PER_FACE * len(is_usable))
    # Each chart has a grid of cells for itself; all cells are numbered one grid after the other.
    grid = projection.points * np.sqrt(n_samples / total)
    n_charts = charts.max() + 1
    lowest = np.full((n_charts, 2), np.inf)
    np.minimum.at(lowest, projection.charts, grid)
    grid = grid - np.floor(lowest)[projection.charts]
    highest = np.zeros((n_charts, 2))
    np.maximum.at(highest, projection.charts, grid)
    sizes = np.floor(highest).astype(np.int64) + 2
    starts = np.concatenate([[0], np.cumsum(sizes.prod(axis=1))])
    usable_rows = np.flatnonzero(is_usable)
    inside = cells_inside(grid[projection.faces[usable_rows]])
    owners = usable_rows[inside.faces]
    owner_charts = charts[owners]
    cells = starts[owner_charts] + inside.y * sizes[owner_charts, 0] + inside.x
    face_heights = projection.heights[projection.faces].mean(axis=1)
    heights = face_heights[owners]
    # Of the faces at a cell the highest comes first.
    order = np.lexsort((-heights, cells))
    cells = cells[order]
    is_covered = np.concatenate([[False], cells[1:] == cells[:-1]])
    is_below[owners[order[is_covered]]] = True
    return is_below


def _enlarged(projection: _Projection, charts: np.ndarray, areas: np.ndarray) -> np.ndarray:
    """Return corners of the faces, where each chart has the area of its faces. (F, 3, 2)"""
    corners = projection.points[projection.faces]
    gains = _gains(charts, _signed_areas(projection), areas)
    return corners * gains[charts][:, None, None]


def _gains(charts: np.ndarray, flat_areas: np.ndarray, areas: np.ndarray) -> np.ndarray:
    """Return the factors that give charts the area of their faces, within limits. (C,)"""
    size = charts.max(initial=-1) + 1
    projected = np.bincount(charts, np.maximum(flat_areas, 0.0), size)
    wanted_areas = np.bincount(charts, areas, size)
    gains = np.sqrt(wanted_areas / np.maximum(projected, _TINY))
    return np.clip(gains, 1.0, _LARGEST_GAIN)


def with_areas_of(charts: Charts, vertices: np.ndarray, faces: np.ndarray) -> Charts:
    """Scale charts that were unfolded in other units to the areas of a surface. (V, 3), (F, 3)"""
    areas = np.linalg.norm(doubled_area_normals(vertices, faces), axis=1) / 2
    flat_areas = np.abs(doubled_areas(charts.corners)) / 2
    unit = math.sqrt(areas.sum() / max(flat_areas.sum(), _TINY))
    gains = _gains(charts.numbers, flat_areas * unit**2, areas)
    face_gains = gains[charts.numbers][:, None, None]
    return charts._replace(corners=charts.corners * unit * face_gains)


def _single_faces(triangles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return triangles in their own planes, (F, 3, 2), and whether they have an area, (F,)."""
    along = triangles[:, 1] - triangles[:, 0]
    other = triangles[:, 2] - triangles[:, 0]
    length = np.linalg.norm(along, axis=1)
    divisor = np.maximum(length, _TINY)
    height = np.linalg.norm(np.cross(along, other), axis=1) / divisor
    flat = np.zeros((len(triangles), 3, 2))
    flat[:, 1, 0] = length
    flat[:, 2, 0] = (along * other).sum(axis=1) / divisor
    flat[:, 2, 1] = height
    has_area = length * height > 0
    flat[~has_area] = 0.0
    return flat, has_area
