# SPDX-License-Identifier: Apache-2.0
"""Parts of what there is much of: evenly spaced items, chosen rows, groups, and boxes of points."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

Items = TypeVar("Items", bound=Any)  # a sequence or an array
Key = TypeVar("Key")
Value = TypeVar("Value")


def about(items: Items, n: int) -> Items:
    """Return ``n`` evenly spaced items or more, but fewer than twice as many; all of fewer."""
    return items[:: max(1, len(items) // n)]


def at_most(items: Items, n: int) -> Items:
    """Return at most ``n`` evenly spaced items."""
    return items[:: max(1, -(-len(items) // n))]


def values_by_key(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values that come with each key, both in the order of the pairs."""
    values: dict[Key, list[Value]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return values


def is_among(n: int, rows: np.ndarray) -> np.ndarray:
    """Return which of so many rows are among some. Rows of any shape -> (n,) bool"""
    result = np.zeros(n, dtype=bool)
    result[rows] = True
    return result


def longest_side(points: np.ndarray) -> float:
    """Return the longest side of the box around points. (P, 3)"""
    return float(np.ptp(points, axis=0).max())


def finite_points(points: np.ndarray) -> np.ndarray:
    """Return the points without NaN and infinity. (P, 3)"""
    return points[np.isfinite(points).all(axis=1)]


def box_of_most(points: np.ndarray, share: float) -> np.ndarray:
    """Return low and high corner of the box that leaves out a share at each end of each axis.

    (P, 3) -> (2, 3)
    """
    return np.quantile(points, (share, 1 - share), axis=0)
