# SPDX-License-Identifier: Apache-2.0
"""Cuts charts that leave much of the box around them empty, which nothing packs well."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from sugar_extractors.texture.charts import Charts

_DIRECTIONS = np.radians(np.arange(0, 180, 15))  # across which cuts are tried
_LEAST_SAVED = 0.12  # of the box of a chart, by the boxes of its two parts
_LEAST_SHARE = 1 / 400  # of the surface, in a chart that may be cut
_LEAST_FACES = 16
_SMALL_PART = 8  # faces; smaller parts go back to what they were cut from


class _Cut(NamedTuple):
    """A straight cut of a chart."""

    saved: float  # area of the box before less those of both parts
    is_ahead: np.ndarray  # which part each face belongs to, (F,) bool


def compact(charts: Charts) -> Charts:
    """Cut charts in two, again and again, where that saves much of the boxes around them."""
    numbers = charts.numbers.copy()
    corners = charts.corners
    areas = np.abs(_doubled_areas(corners)) / 2
    least = _LEAST_SHARE * areas.sum()
    neighbors = _neighbors(charts)
    waiting = list(range(int(numbers.max(initial=-1)) + 1))
    order = np.argsort(numbers, kind="stable")
    bounds = np.searchsorted(numbers[order], np.arange(len(waiting) + 1))
    rows_of = {number: order[bounds[number] : bounds[number + 1]] for number in waiting}
    count = len(waiting)
    while waiting:
        number = waiting.pop()
        rows = rows_of[number]
        if len(rows) < _LEAST_FACES or areas[rows].sum() < least:
            continue
        box, cut = _best_cut(corners[rows])
        if cut.saved < _LEAST_SAVED * box:
            continue
        for part in _parts(rows, cut.is_ahead, neighbors)[1:]:
            numbers[part] = count
            count += 1
        changed = np.unique(numbers[rows])
        if len(changed) < 2:
            continue
        for one in changed.tolist():
            rows_of[one] = rows[numbers[rows] == one]
            waiting.append(one)
    return Charts(numbers, corners)


def _doubled_areas(corners: np.ndarray) -> np.ndarray:
    a, b, c = (corners[:, k] for k in range(3))
    return (b - a)[:, 0] * (c - a)[:, 1] - (b - a)[:, 1] * (c - a)[:, 0]


def _neighbors(charts: Charts) -> sparse.csr_matrix:
    """Which faces of the same chart share an edge in the plane."""
    n_faces = len(charts.numbers)
    owners = np.repeat(charts.numbers, 3).astype(np.float64)
    keys = np.column_stack([owners, charts.corners.reshape(-1, 2)])
    order = np.lexsort(keys.T)
    is_new = np.any(np.diff(keys[order], axis=0) != 0, axis=1)
    places = np.empty(len(keys), dtype=np.int64)
    places[order] = np.concatenate([[0], np.cumsum(is_new)])
    rows = places.reshape(-1, 3)
    edges = np.sort(rows[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2), axis=1)
    edges = edges @ np.array([len(keys), 1])
    order = np.argsort(edges, kind="stable")
    same = edges[order][1:] == edges[order][:-1]
    first = order[:-1][same] // 3
    second = order[1:][same] // 3
    ones = np.ones(len(first))
    return sparse.coo_matrix((ones, (first, second)), shape=(n_faces, n_faces)).tocsr()


def _best_cut(triangles: np.ndarray) -> tuple[float, _Cut]:
    """The area of the smallest box around triangles, (F, 3, 2), and the cut that saves most."""
    smallest = math.inf
    least = math.inf
    best = np.zeros(len(triangles), dtype=bool)
    for angle in _DIRECTIONS:
        along = triangles @ np.array([math.cos(angle), math.sin(angle)])
        across = triangles @ np.array([-math.sin(angle), math.cos(angle)])
        order = np.argsort(along.mean(axis=1), kind="stable")
        before = _boxes(along[order], across[order])
        after = _boxes(along[order[::-1]], across[order[::-1]])[::-1]
        smallest = min(smallest, float(before[-1]))
        both = before[:-1] + after[1:]
        place = int(both.argmin())
        if both[place] < least:
            least = float(both[place])
            best = np.zeros(len(triangles), dtype=bool)
            best[order[place + 1 :]] = True
    return smallest, _Cut(smallest - least, best)


def _boxes(along: np.ndarray, across: np.ndarray) -> np.ndarray:
    """Areas of the boxes around the first 1, 2, ... triangles. (F, 3), (F, 3) -> (F,)"""
    sides = [
        np.maximum.accumulate(values.max(axis=1)) - np.minimum.accumulate(values.min(axis=1))
        for values in (along, across)
    ]
    return sides[0] * sides[1]


def _parts(
    rows: np.ndarray, is_ahead: np.ndarray, neighbors: sparse.csr_matrix
) -> list[np.ndarray]:
    """Connected parts of faces on either side of a cut; small ones go to the other side."""
    graph = neighbors[rows][:, rows].tocoo()
    for attempt in range(2):
        same = is_ahead[graph.row] == is_ahead[graph.col]
        pairs = graph.row[same], graph.col[same]
        joined = sparse.coo_matrix((np.ones(same.sum()), pairs), shape=graph.shape)
        labels = csgraph.connected_components(joined, directed=False)[1]
        small = (np.bincount(labels) < _SMALL_PART)[labels]
        if attempt or not small.any():
            break
        is_ahead = is_ahead ^ small
    return [rows[labels == label] for label in range(labels.max() + 1)]
