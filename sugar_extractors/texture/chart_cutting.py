# SPDX-License-Identifier: Apache-2.0
"""Cut charts that leave much of the box around them empty, which nothing packs well."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from gaussian_splatting.core.subsets import is_among
from sugar_extractors.texture.charts import Charts
from sugar_extractors.texture.plane_geometry import doubled_areas

_DIRECTIONS = np.radians(np.arange(0, 180, 15))  # across which cuts are tried
_LEAST_SAVED = 0.12  # of the box of a chart, by the boxes of its two parts
_LEAST_SHARE = 1 / 400  # of the surface, in a chart that may be cut
_LEAST_FACES = 16
_SMALL_PART = 8  # faces; smaller parts go back to what they were cut from


class _Cut(NamedTuple):
    """The straight cut of a chart that saves most."""

    box_area: float  # of the smallest box around the chart
    saved_area: float  # box_area less the boxes of both parts
    is_ahead: np.ndarray  # which part each face belongs to, (F,) bool


def compact(charts: Charts) -> Charts:
    """Cut charts in two, again and again, where that saves much of the boxes around them."""
    numbers = charts.numbers.copy()
    corners = charts.corners
    areas = np.abs(doubled_areas(corners)) / 2
    least_area = _LEAST_SHARE * areas.sum()
    neighbors = _neighbors(charts)
    n_charts = int(numbers.max(initial=-1)) + 1
    order = np.argsort(numbers, kind="stable")
    bounds = np.searchsorted(numbers[order], np.arange(n_charts + 1))
    # Faces of each chart.
    rows_of = {number: order[bounds[number] : bounds[number + 1]] for number in range(n_charts)}
    waiting = list(range(n_charts))
    while waiting:
        number = waiting.pop()
        rows = rows_of[number]
        if len(rows) < _LEAST_FACES or areas[rows].sum() < least_area:
            continue
        cut = _best_cut(corners[rows])
        if cut.saved_area < _LEAST_SAVED * cut.box_area:
            continue
        # The first part keeps the number of the chart.
        for part in _parts(rows, cut.is_ahead, neighbors)[1:]:
            numbers[part] = n_charts
            n_charts += 1
        changed = np.unique(numbers[rows])
        if len(changed) < 2:
            continue
        for part_number in changed.tolist():
            rows_of[part_number] = rows[numbers[rows] == part_number]
            waiting.append(part_number)
    return Charts(numbers, corners)


def _neighbors(charts: Charts) -> sparse.csr_matrix:
    """Return the matrix of faces of the same chart that share an edge in the plane. (F, F)"""
    n_faces = len(charts.numbers)
    owners = np.repeat(charts.numbers, 3).astype(np.float64)
    keys = np.column_stack([owners, charts.corners.reshape(-1, 2)])
    order = np.lexsort(keys.T)
    steps = np.diff(keys[order], axis=0)
    is_new = np.any(steps != 0, axis=1)
    # Number of the distinct corner at each corner of each face.
    places = np.empty(len(keys), dtype=np.int64)
    places[order] = np.concatenate([[0], np.cumsum(is_new)])
    rows = places.reshape(-1, 3)
    edges = rows[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2)
    edge_keys = np.sort(edges, axis=1) @ np.array([len(keys), 1])
    order = np.argsort(edge_keys, kind="stable")
    sorted_keys = edge_keys[order]
    is_shared = sorted_keys[1:] == sorted_keys[:-1]
    first = order[:-1][is_shared] // 3
    second = order[1:][is_shared] // 3
    ones = np.ones(len(first))
    return sparse.csr_matrix((ones, (first, second)), shape=(n_faces, n_faces))


def _best_cut(triangles: np.ndarray) -> _Cut:
    """Return the cut through triangles, (F, 3, 2), that saves most."""
    smallest_box = math.inf
    smallest_parts = math.inf
    is_ahead = np.zeros(len(triangles), dtype=bool)
    for angle in _DIRECTIONS:
        cosine = math.cos(angle)
        sine = math.sin(angle)
        along = triangles @ np.array([cosine, sine])
        across = triangles @ np.array([-sine, cosine])
        order = np.argsort(along.mean(axis=1), kind="stable")
        before = _boxes(along[order], across[order])
        backwards = order[::-1]
        after = _boxes(along[backwards], across[backwards])[::-1]
        smallest_box = min(smallest_box, float(before[-1]))
        part_areas = before[:-1] + after[1:]
        place = int(part_areas.argmin())
        if part_areas[place] < smallest_parts:
            smallest_parts = float(part_areas[place])
            is_ahead = is_among(len(triangles), order[place + 1 :])
    return _Cut(smallest_box, smallest_box - smallest_parts, is_ahead)


def _boxes(along: np.ndarray, across: np.ndarray) -> np.ndarray:
    """Return areas of the boxes around the first 1, 2, ... triangles. (F, 3), (F, 3) -> (F,)"""
    return _extents(along) * _extents(across)


def _extents(values: np.ndarray) -> np.ndarray:
    """Return the extents of the first 1, 2, ... triangles along an axis. (F, 3) -> (F,)"""
    highest = np.maximum.accumulate(values.max(axis=1))
    lowest = np.minimum.accumulate(values.min(axis=1))
    return highest - lowest


def _parts(
    rows: np.ndarray, is_ahead: np.ndarray, neighbors: sparse.csr_matrix
) -> list[np.ndarray]:
    """Return connected parts of faces on either side of a cut; small ones change sides.

    Args:
        rows: The faces that are cut. (N,)
        is_ahead: On which side of the cut each lies. (N,) bool
        neighbors: Pairs of all faces that share an edge. (F, F)
    """
    graph = neighbors[rows][:, rows].tocoo()
    for attempt in range(2):
        is_uncut = is_ahead[graph.row] == is_ahead[graph.col]
        pairs = (graph.row[is_uncut], graph.col[is_uncut])
        ones = np.ones(is_uncut.sum())
        uncut_graph = sparse.coo_matrix((ones, pairs), shape=graph.shape)
        _, labels = csgraph.connected_components(uncut_graph, directed=False)
        sizes = np.bincount(labels)[labels]
        is_small = sizes < _SMALL_PART
        if attempt or not is_small.any():
            break
        is_ahead = is_ahead ^ is_small
    return [rows[labels == label] for label in range(labels.max() + 1)]
