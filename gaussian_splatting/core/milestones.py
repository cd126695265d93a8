# SPDX-License-Identifier: Apache-2.0
"""Milestones of a schedule, in iterations, as functions of its scale."""

from __future__ import annotations

from collections.abc import Iterable


def scaled(iterations: int, scale: float) -> int:
    """Scale a milestone or interval of the paper's schedule; at least 1."""
    return max(1, round(iterations * scale))


def scaled_all(iterations: Iterable[int], scale: float) -> tuple[int, ...]:
    """Scale milestones; in order, without duplicates."""
    return tuple(sorted({scaled(i, scale) for i in iterations}))


def spaced(iterations: Iterable[int], last: int, least: int) -> tuple[int, ...]:
    """Return the last iteration and earlier ones at least ``least`` iterations apart."""
    descending = [last]
    for iteration in sorted(iterations, reverse=True):
        if descending[-1] - iteration >= least:
            descending.append(iteration)
    return tuple(reversed(descending))
