# SPDX-License-Identifier: Apache-2.0
"""Cutting space into blocks that take about the same work.

A block is a box between planes that are square to the axes of the world; boxes at the outside have
no end there. Space is halved again and again, across its longest side, at the position of the least
work among those that divide it well: a cut through the middle of a house costs more than one along
a street.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sugar_scene.regions import Corner, corner_of

SLACK = 0.1  # of the work, by which a cut may lie off the position that divides it as asked
MARGIN = 0.15  # of the shortest finite side, by which a block reaches into its neighbours
_N_BINS = 48  # positions that are compared for a cut
_SMOOTHING = 2  # bins on either side that count for the work at a position
_SPREAD = 0.01  # of the work at either end that does not count for the length of a side


@dataclass(frozen=True)
class BlockBox:
    """The space that belongs to one block; infinite where no other block follows."""

    low: Corner
    high: Corner

    def contains(self, points: np.ndarray, margin: float = 0.0) -> np.ndarray:
        """Whether points lie in the box, grown by a margin on all sides. (P, 3) -> (P,) bool"""
        low = np.array(self.low) - margin
        high = np.array(self.high) + margin
        inside = (points >= low) & (points < high)
        return np.asarray(inside.all(axis=-1))

    def depth_inside(self, points: np.ndarray) -> np.ndarray:
        """Distance of points to the nearest side, negative outside. (P, 3) -> (P,)"""
        to_low = points - np.array(self.low)
        to_high = np.array(self.high) - points
        return np.minimum(to_low, to_high).min(axis=-1)

    def halves(self, axis: int, position: float) -> tuple[BlockBox, BlockBox]:
        """The parts below and above a plane."""
        high = list(self.high)
        high[axis] = position
        low = list(self.low)
        low[axis] = position
        return BlockBox(self.low, corner_of(high)), BlockBox(corner_of(low), self.high)


@dataclass(frozen=True)
class Partition:
    """Space, divided into blocks."""

    boxes: tuple[BlockBox, ...]
    margin: float  # by which blocks reach into each other, world units
    bounds: BlockBox  # what is meshed; finite


EVERYWHERE = BlockBox((-math.inf, -math.inf, -math.inf), (math.inf, math.inf, math.inf))


def cut_space(points: np.ndarray, work: np.ndarray, n: int) -> list[BlockBox]:
    """Cut space into boxes of about equal work.

    Args:
        points: Places of the work, (P, 3) world units.
        work: At each position. (P,)
        n: Number of boxes.

    Raises:
        ValueError: There are fewer positions than boxes.
    """
    if len(points) < n:
        raise ValueError(f"{len(points)} positions cannot be divided among {n} boxes")
    return _cut(EVERYWHERE, points, work, n)


def margin_of(boxes: Sequence[BlockBox], bounds: BlockBox) -> float:
    """Overlap of boxes in world units: a share of the shortest side.

    Args:
        bounds: Where boxes end that have no end.
    """
    if len(boxes) == 1:
        return 0.0
    shortest = math.inf
    for box in boxes:
        for axis in range(3):
            ends = (box.low[axis], box.high[axis])
            if all(math.isinf(end) for end in ends):
                # Nothing is cut across this axis.
                continue
            side = min(ends[1], bounds.high[axis]) - max(ends[0], bounds.low[axis])
            shortest = min(shortest, side)
    return MARGIN * max(shortest, 0.0)


def _cut(box: BlockBox, points: np.ndarray, work: np.ndarray, n: int) -> list[BlockBox]:
    if n == 1:
        return [box]
    axis = _longest_axis(points, work)
    n_below = n // 2
    position = _position(points[:, axis], work, n_below / n)
    below, above = box.halves(axis, position)
    is_below = points[:, axis] < position
    parts = []
    for half, mask, count in ((below, is_below, n_below), (above, ~is_below, n - n_below)):
        if mask.sum() < count:
            raise ValueError(f"{len(points)} positions lie too close together for {n} boxes")
        parts += _cut(half, points[mask], work[mask], count)
    return parts


def _longest_axis(points: np.ndarray, work: np.ndarray) -> int:
    lengths = []
    for axis in range(3):
        low, high = _quantiles(points[:, axis], work, (_SPREAD, 1 - _SPREAD))
        lengths.append(high - low)
    return int(np.argmax(lengths))


def _position(values: np.ndarray, work: np.ndarray, share: float) -> float:
    """Coordinate of a plane below which about a share of the work lies, where little is done."""
    slack = SLACK * min(share, 1 - share) * 2
    low, middle, high = _quantiles(values, work, (share - slack, share, share + slack))
    if not low < high:
        return _between(values, middle)
    edges = np.linspace(low, high, _N_BINS + 1)
    in_bins = np.histogram(values, edges, weights=work)[0]
    window = np.ones(2 * _SMOOTHING + 1)
    around = np.convolve(in_bins, window, mode="same") / np.convolve(
        np.ones(_N_BINS), window, mode="same"
    )
    least = int(np.argmin(around))
    return _between(values, (edges[least] + edges[least + 1]) / 2)


def _between(values: np.ndarray, position: float) -> float:
    """The position, moved so that values lie on both sides of it where they differ at all."""
    smallest = float(values.min())
    largest = float(values.max())
    if smallest < position <= largest:
        return position
    return (smallest + largest) / 2


def _quantiles(values: np.ndarray, work: np.ndarray, shares: Sequence[float]) -> list[float]:
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(work[order])
    rows = np.searchsorted(sums, np.array(shares) * sums[-1])
    return values[order[np.clip(rows, 0, len(order) - 1)]].tolist()
