# SPDX-License-Identifier: Apache-2.0
"""Images that show the same, found by a few features of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COMPARED_FEATURES = 256  # features of an image by which similar ones are found
MAX_RATIO = 0.8  # most: distance of the best match over that of the second best (Lowe 2004)
_BLOCK = 32  # images that are compared at once
_DESCRIPTOR_SIZE = 128


def similar_pairs(descriptors: Sequence[np.ndarray], n_each: int = 30) -> set[tuple[int, int]]:
    """Return pairs of images that show the same, found by a few features of each.

    The features that cover most of an image survive a change of viewpoint best (Wu 2013,
    "Towards linear-time incremental structure from motion", section 3).

    Args:
        descriptors: Of the largest features of each image. (K, 128) uint8, K may differ
        n_each: Most similar images of each image.
    """
    scores = _common_features(descriptors)
    pairs = set()
    for i, row in enumerate(scores):
        # A stable order, so that equal scores give the same pairs everywhere.
        best = np.argsort(-row, kind="stable")[:n_each]
        for j in best[row[best] > 0].tolist():
            pairs.add((min(i, j), max(i, j)))
    return pairs


def _common_features(descriptors: Sequence[np.ndarray]) -> np.ndarray:
    """Count the features that each image has in common with each other one. (n, n) int64"""
    n = len(descriptors)
    width = max((len(rows) for rows in descriptors), default=0)
    table = np.zeros((n, width, _DESCRIPTOR_SIZE), np.float32)
    for normalized, rows in zip(table, descriptors, strict=True):
        values = rows.astype(np.float32)
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        normalized[: len(rows)] = values / np.maximum(lengths, 1e-6)
    scores = np.zeros((n, n), np.int64)
    for i in range(n):
        for first in range(i + 1, n, _BLOCK):
            block = table[first : first + _BLOCK]
            scores[i, first : first + len(block)] = _count_clear_matches(table[i], block)
    return scores + scores.T


def _count_clear_matches(features: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Count the features of one image that match clearly in each of some others.

    Args:
        features: Of length 1, or 0 for none. (K, 128)
        others: (n, K, 128)

    Returns:
        (n,) int64
    """
    n_others, width = others.shape[:2]
    if width < 2:
        return np.zeros(n_others, np.int64)
    cosines = (features @ others.reshape(-1, _DESCRIPTOR_SIZE).T).reshape(-1, n_others, width)
    two_best = np.partition(cosines, width - 2, axis=2)[..., -2:]
    # Of vectors of length 1, squared distance is 2 - 2 cos.
    second_distance = 2 - 2 * two_best[..., 0]
    first_distance = 2 - 2 * two_best[..., 1]
    is_clear = first_distance < MAX_RATIO**2 * second_distance
    is_feature = np.any(features, axis=1)[:, None]
    return (is_clear & is_feature).sum(axis=0)
