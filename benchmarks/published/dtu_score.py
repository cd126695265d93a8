# SPDX-License-Identifier: Apache-2.0
"""How DTU scores a surface (Jensen et al., CVPR 2014), in millimetres.

The surface becomes points, thinned until no two are nearer than 0.2 mm. Accuracy is the mean
distance of those that lie where the scanner looked (its mask of voxels) to the true points.
Completeness is the mean distance of the true points above the table to the surface's points near
the scanned volume. Distances from 20 mm on are left out of both. The overall figure is their mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.spatial import cKDTree

from benchmarks.published.dtu_data import Truth
from benchmarks.published.mesh_points import points_near
from sugar_scene.mesh.triangle_mesh import TriangleMesh
from sugar_utils.errors import UserError

SPACING = 0.2
"""Thinned points are at least so far apart. Millimetres"""

CAP = 20.0
"""Distances from here on do not count. Millimetres"""

PATCH = 60.0
"""Points so far below the scanned box, and twice as far above it, count for completeness. mm"""

SAMPLES_PER_SPACING = 2.0
"""Samples of the surface per square of the spacing, before it is thinned."""

_FIRST_PART = 100_000


@dataclass(frozen=True)
class DtuScore:
    """Figures of one scan in millimetres.

    Attributes:
        accuracy: Mean distance from the surface to the truth.
        completeness: Mean distance from the truth to the surface.
    """

    accuracy: float
    completeness: float

    @property
    def overall(self) -> float:
        """Mean of both, which papers call Chamfer distance."""
        return (self.accuracy + self.completeness) / 2


def score_mesh(mesh: TriangleMesh, truth: Truth, seed: int = 0) -> DtuScore:
    """Score a mesh.

    Args:
        mesh: In millimetres of DTU's world.
        truth: Of its scan.
        seed: Of the samples and of their order.

    Raises:
        UserError: Nothing of the mesh lies where the scanner looked.
    """
    low, high = truth.box[0] - PATCH, truth.box[1] + 2 * PATCH
    density = SAMPLES_PER_SPACING / SPACING**2
    return score_points(points_near(mesh, low, high, density, seed), truth)


def score_points(points: np.ndarray, truth: Truth) -> DtuScore:
    """Score points of a surface; see the top of this file.

    Args:
        points: In the order in which they are preferred where they crowd. (N, 3) millimetres
        truth: Of their scan.

    Raises:
        UserError: None of them lies where the scanner looked.
    """
    low, high = truth.box[0] - PATCH, truth.box[1] + 2 * PATCH
    points = thinned(points[((points >= low) & (points < high)).all(axis=1)], SPACING)
    seen = points[was_observed(points, truth)]
    homogeneous = np.concatenate([truth.points, np.ones((len(truth.points), 1))], axis=1)
    above = truth.points[homogeneous @ truth.plane > 0]
    if len(seen) == 0 or len(above) == 0:
        raise UserError(
            "no surface where the scanner looked, or no true point above the table; check that "
            "mesh, cameras and truth belong to one scan"
        )
    return DtuScore(_mean_distance(seen, truth.points), _mean_distance(above, points))


def was_observed(points: np.ndarray, truth: Truth) -> np.ndarray:
    """Points in voxels that the scanner saw. (N, 3) -> (N,) bool"""
    cells = np.around((points - truth.box[0]) / truth.resolution).astype(np.int64)
    inside = ((cells >= 0) & (cells < truth.observed.shape)).all(axis=1)
    x, y, z = np.where(inside[:, None], cells, 0).T
    return inside & truth.observed[x, y, z]


def _mean_distance(points: np.ndarray, others: np.ndarray) -> float:
    """Mean of the distances to the nearest of others that are below the cap; the cap if none is."""
    distances, _ = cKDTree(others).query(points, distance_upper_bound=CAP, workers=-1)
    near = distances[np.isfinite(distances)]
    return float(near.mean()) if len(near) else CAP


def thinned(points: np.ndarray, spacing: float) -> np.ndarray:
    """Points of which no two are nearer than the spacing; earlier ones stay where they crowd.

    What a loop over all points gives, which keeps a point if none that was kept is nearer. It is
    done in parts that grow, because pairs of near points are few once the space is filled.

    Args:
        points: (N, 3)
        spacing: Same units.

    Returns:
        (n, 3)
    """
    kept = points[:0]
    first, length = 0, _FIRST_PART
    while first < len(points):
        part = points[first : first + length]
        first, length = first + length, 2 * length
        if len(kept):
            bound = np.nextafter(spacing, np.inf)
            distances, _ = cKDTree(kept).query(part, distance_upper_bound=bound, workers=-1)
            part = part[distances > spacing]
        if len(part):
            pairs = cKDTree(part).query_pairs(spacing, output_type="ndarray")
            kept = np.concatenate([kept, part[_independent(len(part), pairs)]])
    return kept


def _independent(n: int, pairs: np.ndarray) -> np.ndarray:
    """Rows that stay when each one that stays removes the later rows it is paired with.

    Args:
        n: Rows.
        pairs: Rows that cannot both stay, the smaller one first. (P, 2)

    Returns:
        (n,) bool
    """
    stays = np.ones(n, dtype=bool)
    while len(pairs):
        blocked = np.zeros(n, dtype=bool)
        blocked[pairs[:, 1]] = True
        # Nobody before these can remove them any more.
        certain = stays & ~blocked
        stays[pairs[certain[pairs[:, 0]], 1]] = False
        pairs = pairs[stays[pairs].all(axis=1) & ~certain[pairs[:, 0]]]
    return stays
