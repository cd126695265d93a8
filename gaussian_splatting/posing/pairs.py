# SPDX-License-Identifier: Apache-2.0
"""Which photographs to compare with each other: all pairs, neighbours in order, those alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_RATIO = 0.8
"""A feature counts as found where the second best is so much further away (Lowe 2004)."""

_BLOCK = 32


def all_pairs(n: int) -> set[tuple[int, int]]:
    """Every pair (i, j) of n photographs with i < j."""
    return {(i, j) for i in range(n) for j in range(i + 1, n)}


def neighbour_pairs(n: int, reach: int = 10) -> set[tuple[int, int]]:
    """Pairs near each other in order: the next ``reach``, then ever larger steps.

    The large steps (16, 32, 64, ...) tie distant parts of a video together where one still shows
    what the other shows.
    """
    steps = {*range(1, reach + 1), *(1 << k for k in range(n.bit_length()))}
    return {(i, i + step) for step in steps for i in range(n - step)}


def similar_pairs(descriptors: Sequence[np.ndarray], n_each: int = 30) -> set[tuple[int, int]]:
    """Pairs of photographs that show the same, found by a few features of each.

    The features that cover most of a photograph survive a change of viewpoint best, so comparing
    some hundred of them tells which photographs are worth comparing whole (Wu 2013, "Towards
    linear-time incremental structure from motion", section 3).

    Args:
        descriptors: Of each photograph, its largest features. (K, 128) uint8, K may differ
        n_each: Partners of each photograph, the most similar first.
    """
    n = len(descriptors)
    scores = _common_features(descriptors)
    pairs = set()
    for i in range(n):
        # A stable order, so that equal scores give the same pairs everywhere.
        best = np.argsort(-scores[i], kind="stable")[:n_each]
        pairs |= {(min(i, int(j)), max(i, int(j))) for j in best if scores[i, j] > 0}
    return pairs


def _common_features(descriptors: Sequence[np.ndarray]) -> np.ndarray:
    """How many features each photograph has in common with each other one. (n, n) int64"""
    n = len(descriptors)
    width = max((len(d) for d in descriptors), default=0)
    table = np.zeros((n, width, 128), np.float32)
    for row, own in zip(table, descriptors, strict=True):
        values = own.astype(np.float32)
        row[: len(own)] = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-6)
    scores = np.zeros((n, n), np.int64)
    for i in range(n):
        for first in range(i + 1, n, _BLOCK):
            block = table[first : first + _BLOCK]
            scores[i, first : first + len(block)] = _found(table[i], block)
    return scores + scores.T


def _found(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Features of one photograph that are found clearly in each of some others.

    Args:
        own: Descriptors of length 1, zeros behind the last. (K, 128)
        others: Of other photographs. (B, K, 128)

    Returns:
        (B,) int64
    """
    n_others, width = others.shape[:2]
    if width < 2:
        return np.zeros(n_others, np.int64)
    likeness = (own @ others.reshape(-1, 128).T).reshape(-1, n_others, width)
    best = np.partition(likeness, width - 2, axis=2)[..., -2:]
    # Of vectors of length 1, squared distance is 2 - 2 cos.
    second, first = 2 - 2 * best[..., 0], 2 - 2 * best[..., 1]
    clear = (first < MAX_RATIO**2 * second) & own.any(axis=1)[:, None]
    return clear.sum(axis=0)
