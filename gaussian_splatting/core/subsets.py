# SPDX-License-Identifier: Apache-2.0
"""Parts of what there is much of: evenly spaced items, finite points, the box of most points."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

Items = TypeVar("Items", bound=Any)  # a sequence or an array


def about(items: Items, n: int) -> Items:
    """Return ``n`` evenly spaced items or more, but fewer than twice as many; all of fewer."""
    return items[:: max(1, len(items) // n)]


def at_most(items: Items, n: int) -> Items:
    """Return at most ``n`` evenly spaced items."""
    return items[:: max(1, -(-len(items) // n))]


def finite_points(points: np.ndarray) -> np.ndarray:
    """Return the points without NaN and infinity. (P, 3)"""
    return points[np.isfinite(points).all(axis=1)]


def box_of_most(points: np.ndarray, share: float) -> np.ndarray:
    """Return low and high corner of the box that leaves out a share at each end of each axis.

    (P, 3) -> (2, 3)
    """
    return np.quantile(points, (share, 1 - share), axis=0)
