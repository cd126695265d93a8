# SPDX-License-Identifier: Apache-2.0
"""Where a reconstruction has points: their convex hull, and a margin around it.

Sky and other things without texture lie wherever they please, and all photographs are explained;
but no point of a reconstruction is ever found there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaussian_splatting.data.observations import Observations
from sugar_extractors.mesh.level_sets import Box

MIN_VIEWS = 3  # photographs that observe a point that counts: two agree by chance now and then
MIN_POINTS = 50  # fewer points in a box do not tell where the scene ends


@dataclass(frozen=True)
class ObservedRegion:
    normals: np.ndarray  # outward normals of its sides, (S, 3)
    offsets: np.ndarray  # a point x lies inside where normals . x <= offsets. (S,) world units

    def contains(self, points: np.ndarray) -> np.ndarray:
        """Points inside. (N, 3) -> (N,) bool"""
        inside = np.ones(len(points), dtype=bool)
        for normal, offset in zip(self.normals, self.offsets, strict=True):
            inside &= points @ normal <= offset
        return inside


def observed_region(
    observations: Observations | None, box: Box, margin: float
) -> ObservedRegion | None:
    """The region around the points of a reconstruction; None for too few, or all in one plane."""
    # Here and not above: most commands start without it.
    from scipy.spatial import ConvexHull, QhullError

    if observations is None:
        return None
    points = observations.points[observations.lengths >= MIN_VIEWS].astype(np.float64)
    points = points[box.contains(points)]
    if len(points) < MIN_POINTS:
        return None
    try:
        sides = np.unique(ConvexHull(points).equations, axis=0)
    except QhullError:
        return None
    return ObservedRegion(sides[:, :3], margin - sides[:, 3])
