# SPDX-License-Identifier: Apache-2.0
"""Depth of a scan's points in a view: the nearest in each pixel, without those behind a surface."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import minimum_filter
from scipy.spatial import KDTree

from gaussian_splatting.core.subsets import about
from gaussian_splatting.data.cameras import Camera

_SAMPLES = 2_000  # points for measuring the density of the scan
_NEIGHBOR = 4  # the neighbour whose distance counts; the nearest may be a double
_GAP = 1.5  # times the spacing, within which points in front are a surface without holes
_MAX_WINDOW = 8  # pixels
_BEHIND = 0.04  # relative depth from which a point is behind the surface in front of it
_SPLAT = 3  # pixels a side that a point covers


def point_spacing(positions: np.ndarray) -> float:
    """Return the usual distance between neighbours of a surface, world units. (N, 3)"""
    if len(positions) <= _NEIGHBOR:
        return 0.0
    distances, _ = KDTree(positions).query(about(positions, _SAMPLES), k=_NEIGHBOR + 1)
    return float(np.median(distances[:, -1]))


def depth_of_points(positions: np.ndarray, camera: Camera, spacing: float) -> np.ndarray:
    """Return the depth of points in a view, along its axis, 0 where there is none. (H, W) float64

    Between the points of a near surface those of far ones show through, as the surface has no
    extent. A pixel whose depth is larger than that of another one within the distance between
    points is such a hole, and stays unknown.

    Args:
        positions: World units, (N, 3).
        spacing: See :func:`point_spacing`.
    """
    width = camera.width
    height = camera.height
    projection = camera.project(positions)
    is_shown = projection.is_inside & (projection.depths > camera.near)
    depth = projection.depths[is_shown]
    if not len(depth):
        return np.zeros((height, width))
    columns, rows = projection.pixels[is_shown].astype(np.int64).T
    pixels = rows * width + columns
    nearest = np.full(width * height, np.inf)
    np.minimum.at(nearest, pixels, depth)
    nearest = nearest.reshape(height, width)
    reach = int(np.ceil(_GAP * spacing * camera.fx / float(np.median(depth))))
    window = 2 * min(max(reach, 1), _MAX_WINDOW) + 1
    in_front = minimum_filter(nearest, size=window, mode="constant", cval=np.inf)
    visible = np.where(nearest <= (1 + _BEHIND) * in_front, nearest, np.inf)
    covered = minimum_filter(visible, size=_SPLAT, mode="constant", cval=np.inf)
    # The splats of far points end where something nearer is known.
    filled = np.where(np.isfinite(visible), visible, covered)
    return np.where(np.isfinite(filled), filled, 0.0)
