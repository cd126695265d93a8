# SPDX-License-Identifier: Apache-2.0
"""Images that show the same, found by a few features of each, in time that grows with their number.

Two images are as similar as they have features in common. To compare each feature with all others
would take hours for thousands of images, so it is compared with those of the same region of the
space of descriptors (an inverted file, Sivic and Zisserman 2003, "Video Google").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

COMPARED_FEATURES = 256  # features of an image by which similar ones are found
# Most distance of a feature that two images have in common, over the distance of the second best
# match (Lowe 2004).
MAX_RATIO = 0.65
_TYPICAL_IMAGES = 16  # by which the distance of a feature's second best match is estimated
_REGION_FEATURES = 1000  # features of a region of the space of descriptors, on average
_REGIONS = 5  # nearest to a feature, in which its matches are looked for
_BLOCK_PRODUCTS = 4_000_000  # products of descriptors that are held at once
_DESCRIPTOR_SIZE = 128
_SEED = 0


@dataclass(frozen=True)
class _Features:
    """A few features of each image."""

    descriptors: np.ndarray  # of length 1, (F, 128) float32
    images: np.ndarray  # whose feature each one is, (F,)


def similar_pairs(descriptors: Sequence[np.ndarray], n_each: int = 30) -> set[tuple[int, int]]:
    """Return pairs of images that show the same, found by a few features of each.

    The features that cover most of an image survive a change of viewpoint best (Wu 2013,
    "Towards linear-time incremental structure from motion", section 3).

    Args:
        descriptors: Of the largest features of each image. (K, 128) uint8, K may differ
        n_each: Most similar images of each image.
    """
    pairs = set()
    for i, row in enumerate(common_features(descriptors)):
        # A stable order, so that equal scores give the same pairs everywhere.
        best = np.argsort(-row, kind="stable")[:n_each]
        for j in best[row[best] > 0].tolist():
            pairs.add((min(i, j), max(i, j)))
    return pairs


def common_features(descriptors: Sequence[np.ndarray]) -> np.ndarray:
    """Count the features that each image has in common with each other one. (n, n) int32

    Args:
        descriptors: As for :func:`similar_pairs`.
    """
    n = len(descriptors)
    counts = np.zeros((n, n), np.int32)
    features = _features_of(descriptors)
    if len(features.images) == 0:
        return counts
    rng = np.random.default_rng(_SEED)
    least_cosines = _least_cosines(features, rng)
    for queries, members in _regions(features, rng):
        matches = _common_in_region(features, least_cosines, queries, members)
        np.add.at(counts, (features.images[matches[:, 0]], matches[:, 1]), 1)
    np.fill_diagonal(counts, 0)
    return counts + counts.T


def _features_of(descriptors: Sequence[np.ndarray]) -> _Features:
    """Join the features of all images."""
    lengths = [len(rows) for rows in descriptors]
    joined = np.zeros((sum(lengths), _DESCRIPTOR_SIZE), np.float32)
    if descriptors:
        np.concatenate([rows.reshape(-1, _DESCRIPTOR_SIZE) for rows in descriptors], out=joined)
    joined /= np.maximum(np.linalg.norm(joined, axis=1, keepdims=True), 1e-6)
    return _Features(joined, np.repeat(np.arange(len(descriptors)), lengths))


def _least_cosines(features: _Features, rng: np.random.Generator) -> np.ndarray:
    """Return the smallest cosine of an unambiguous match for each feature. (F,)

    The second best match in an image is none, whether or not the image shows the feature. So its
    distance is about the same in all images, and the median of some stands for each of them.
    """
    n_features_of = np.bincount(features.images)
    usable = np.flatnonzero(n_features_of >= 2)
    chosen = rng.permutation(usable)[:_TYPICAL_IMAGES]
    if len(chosen) == 0:
        return np.full(len(features.images), np.inf)
    second_cosines = np.empty((len(chosen), len(features.images)), np.float32)
    for row, image in enumerate(chosen):
        others = features.descriptors[features.images == image]
        for rows in _blocks(len(features.images), len(others)):
            cosines = features.descriptors[rows] @ others.T
            second_cosines[row, rows] = np.partition(cosines, -2, axis=1)[:, -2]
    # Of vectors of length 1, squared distance is 2 - 2 cos.
    return 1 - MAX_RATIO**2 * (1 - np.median(second_cosines, axis=0))


def _regions(
    features: _Features, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the querying features and the stored features of each region.

    A region is what lies nearest to one of some features that are drawn.
    """
    n = len(features.images)
    n_regions = max(1, n // _REGION_FEATURES)
    n_visited = min(_REGIONS, n_regions)
    centers = features.descriptors[rng.choice(n, n_regions, replace=False)]
    nearest = np.empty(n, np.int64)
    visited = np.empty((n, n_visited), np.int64)
    for rows in _blocks(n, n_regions):
        cosines = features.descriptors[rows] @ centers.T
        nearest[rows] = cosines.argmax(axis=1)
        visited[rows] = np.argpartition(-cosines, n_visited - 1, axis=1)[:, :n_visited]
    members = _places_by_value(nearest, n_regions)
    visits = _places_by_value(visited.ravel(), n_regions)
    for places, of_region in zip(visits, members, strict=True):
        yield places // n_visited, of_region


def _places_by_value(values: np.ndarray, n_values: int) -> list[np.ndarray]:
    """Return where each of the values from 0 on stands among some. Ascending"""
    order = np.argsort(values, kind="stable")
    starts = np.searchsorted(values[order], np.arange(1, n_values))
    return np.split(order, starts)


def _common_in_region(
    features: _Features, least_cosines: np.ndarray, queries: np.ndarray, members: np.ndarray
) -> np.ndarray:
    """Return features, and images of other features of a region that clearly match them. (P, 2)"""
    pieces = []
    images = features.images[members]
    others = features.descriptors[members]
    for rows in _blocks(len(queries), len(members)):
        asking = queries[rows]
        cosines = features.descriptors[asking] @ others.T
        row, column = np.nonzero(cosines > least_cosines[asking, None])
        pieces.append(np.stack([asking[row], images[column]], axis=1))
    return np.unique(np.concatenate(pieces), axis=0) if pieces else np.empty((0, 2), int)


def _blocks(n_rows: int, n_columns: int) -> Iterator[slice]:
    """Yield ranges of rows with few enough products to hold in memory."""
    step = max(1, _BLOCK_PRODUCTS // max(1, n_columns))
    for start in range(0, n_rows, step):
        yield slice(start, start + step)
