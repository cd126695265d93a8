# SPDX-License-Identifier: Apache-2.0
"""Points on a surface that somebody clicked on, how far they are apart, and boxes around them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gaussian_splatting.data.cameras import Camera
from sugar_pipeline.filming.camera_paths import looking
from sugar_pipeline.filming.shown_models import ShownModel

_PROBE_PIXELS = 3
_PROBE_ANGLE = math.radians(0.2)
"""Field of view of the camera that looks along a click."""

_BOX_DIGITS = 4
_COVERED_SHARE = 0.02
"""Of the points on each side that a first box leaves out: strays far outside."""


def hit(model: ShownModel, origin: np.ndarray, direction: np.ndarray) -> np.ndarray | None:
    """Where a line of sight first meets a model.

    Args:
        model: Gaussians count where they hide at least half of what is behind.
        origin: Of the line, in world units. (3,)
        direction: Of any length. (3,)

    Returns:
        The point, None where there is nothing. (3,)
    """
    origin, ahead = np.asarray(origin, float), np.asarray(direction, float)
    ahead = ahead / np.linalg.norm(ahead)
    rotation = looking(origin, origin + ahead, np.array([0.0, 0.0, 1.0]))
    focal = _PROBE_PIXELS / (2 * math.tan(_PROBE_ANGLE / 2))
    middle = _PROBE_PIXELS / 2
    probe = Camera("probe", _PROBE_PIXELS, _PROBE_PIXELS, focal, focal, middle, middle,
                   rotation, -rotation @ origin)  # fmt: skip
    depth = float(model.geometry(probe)[0][_PROBE_PIXELS // 2, _PROBE_PIXELS // 2])
    return origin + depth * ahead if math.isfinite(depth) else None


def distance_text(points: Sequence[np.ndarray], metres_per_unit: float | None) -> str:
    """What the page says of the points that were clicked on, two of which make a distance."""
    if len(points) < 2:
        return "Click on a second point." if points else "Click on a point of the surface."
    units = float(np.linalg.norm(points[1] - points[0]))
    if metres_per_unit is None:
        return f"{units:.5g} units of the capture"
    return f"{length_text(units * metres_per_unit)} ({units:.5g} units of the capture)"


def length_text(metres: float) -> str:
    """A length in what people use for its size: mm, cm or m."""
    for unit, size in (("m", 1.0), ("cm", 0.01)):
        if metres >= size:
            return f"{metres / size:.4g} {unit}"
    return f"{metres * 1000:.4g} mm"


def box_around(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A box around nearly all points, to begin with. (P, 3) -> two corners (3,)"""
    finite = points[np.isfinite(points).all(axis=1)]
    if not len(finite):
        return -np.ones(3), np.ones(3)
    low, high = np.quantile(finite, (_COVERED_SHARE, 1 - _COVERED_SHARE), axis=0)
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def box_flags(one: np.ndarray, other: np.ndarray) -> str:
    """The flags of a mesh extraction that is cut to a box between two corners."""
    corners = {"bboxmin": np.minimum(one, other), "bboxmax": np.maximum(one, other)}
    texts = {name: ",".join(f"{value:.{_BOX_DIGITS}g}" for value in corner)
             for name, corner in corners.items()}  # fmt: skip
    return " ".join(f'--{name} "({text})"' for name, text in texts.items())


def box_edges(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The edges of the box between two corners. (12, 2, 3)"""
    corners = np.stack([one, other])
    edges = []
    for axis in range(3):
        across = [a for a in range(3) if a != axis]
        for first in (0, 1):
            for second in (0, 1):
                start, end = corners[0].copy(), corners[0].copy()
                start[across[0]] = end[across[0]] = corners[first][across[0]]
                start[across[1]] = end[across[1]] = corners[second][across[1]]
                start[axis], end[axis] = corners[0][axis], corners[1][axis]
                edges.append((start, end))
    return np.array(edges)


def inside(points: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Which points lie in the box between two corners. (P, 3) -> (P,) bool"""
    low, high = np.minimum(one, other), np.maximum(one, other)
    return ((points >= low) & (points <= high)).all(axis=1)
