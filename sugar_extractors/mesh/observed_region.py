# SPDX-License-Identifier: Apache-2.0
"""The region in which a reconstruction has points.

Sky and other things without texture lie wherever they please, and all images are explained; but no
point of a reconstruction is ever found there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaussian_splatting.data.observations import Observations
from sugar_extractors.mesh.level_sets import Box

MIN_OBSERVING_VIEWS = 3  # images that observe a reliable point: two agree by chance now and then
MIN_OBSERVED = 50  # fewer points in a box do not tell where the scene ends


@dataclass(frozen=True)
class ObservedRegion:
    """A convex region, as half-spaces."""

    normals: np.ndarray  # outward normals of its sides, (S, 3)
    offsets: np.ndarray  # a point x lies inside where normals . x <= offsets. (S,) world units

    def contains(self, points: np.ndarray) -> np.ndarray:
        """Return which points lie inside. (N, 3) -> (N,) bool"""
        inside = np.ones(len(points), dtype=bool)
        for normal, offset in zip(self.normals, self.offsets, strict=True):
            inside &= points @ normal <= offset
        return inside


def observed_region(
    observations: Observations | None, box: Box, margin: float
) -> ObservedRegion | None:
    """Return the region around the points of a reconstruction.

    None for too few points, or if all lie in one plane.

    Args:
        margin: By which the surface may lie outside of their convex hull, in world units.
    """
    # Here and not above: most commands start without it.
    from scipy.spatial import ConvexHull, QhullError

    if observations is None:
        return None
    is_reliable = observations.lengths >= MIN_OBSERVING_VIEWS
    points = observations.points[is_reliable].astype(np.float64)
    points = points[box.contains(points)]
    if len(points) < MIN_OBSERVED:
        return None
    try:
        sides = np.unique(ConvexHull(points).equations, axis=0)
    except QhullError:
        return None
    return ObservedRegion(sides[:, :3], margin - sides[:, 3])
