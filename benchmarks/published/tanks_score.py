# SPDX-License-Identifier: Apache-2.0
"""How Tanks and Temples scores a surface (Knapitsch et al., SIGGRAPH 2017).

The surface's points come into the scanner's world by the cameras, and are then fitted to its points
three times by ICP with a scale. What lies in the volume that counts is resampled in voxels of half
the threshold. Precision is the share of the surface's points nearer to the truth than the
threshold, recall the share of the true points nearer to the surface, F1 their harmonic mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.spatial import cKDTree

from benchmarks.published.mesh_points import points_near
from benchmarks.published.similarity import IDENTITY, Similarity, best_similarity
from benchmarks.published.tanks_data import CropVolume
from sugar_scene.mesh.triangle_mesh import TriangleMesh
from sugar_utils.errors import UserError

MAX_SAMPLES = 10_000_000
"""Samples of a mesh at most; meshes are scored by even samples, not by their vertices."""

SAMPLES_PER_VOXEL = 4.0
MAX_UNIFORM = 4_000_000
"""Points of either side in the last fit at most."""

ITERATIONS = 20
_CONVERGED = 1e-6


@dataclass(frozen=True)
class TanksScore:
    """Figures of one scene.

    Attributes:
        precision: Share of the surface that is true.
        recall: Share of the truth that is there.
    """

    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """Harmonic mean of both."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both > 0 else 0.0


def score_mesh(
    mesh: TriangleMesh,
    truth: np.ndarray,
    volume: CropVolume,
    threshold: float,
    seed: int = 0,
) -> TanksScore:
    """Score a mesh.

    Args:
        mesh: In the scanner's world as far as the cameras tell. Metres
        truth: Points of the scanner. (P, 3)
        volume: What counts.
        threshold: Distance at which points agree. Metres
        seed: Of the samples.

    Raises:
        UserError: Nothing of the mesh or of the truth lies in the volume.
    """
    reach = 100 * threshold
    low, high = volume.polygon.min(axis=0) - reach, volume.polygon.max(axis=0) + reach
    along = "XYZ".index(volume.axis)
    low[along], high[along] = volume.low - reach, volume.high + reach
    density = SAMPLES_PER_VOXEL / (threshold / 2) ** 2
    points = points_near(mesh, low, high, density, seed, MAX_SAMPLES)
    return score_points(points, truth, volume, threshold)


def score_points(
    points: np.ndarray, truth: np.ndarray, volume: CropVolume, threshold: float
) -> TanksScore:
    """Fit points of a surface to the truth and score them; see the top of this file.

    Args:
        points: (N, 3) metres, nearly where they belong
        truth: (P, 3)
        volume: What counts.
        threshold: Metres.

    Raises:
        UserError: Nothing of either lies in the volume.
    """
    true = truth[volume.contains(truth)]
    fit = IDENTITY
    for voxel, reach in ((threshold, 80 * threshold), (threshold / 2, 20 * threshold)):
        fit = _fitted(points, true, volume, fit, lambda p, v=voxel: resampled(p, v), reach)
    fit = _fitted(points, true, volume, fit, _every_so_many, 2 * threshold)
    ours = _cropped(points, volume, fit, true)
    ours, true = resampled(ours, threshold / 2), resampled(true, threshold / 2)
    return TanksScore(_share_near(ours, true, threshold), _share_near(true, ours, threshold))


def resampled(points: np.ndarray, voxel: float) -> np.ndarray:
    """The mean of the points in each voxel. (N, 3) -> (n, 3)"""
    cells = np.floor((points - points.min(axis=0)) / voxel + 0.5).astype(np.int64)
    sides = cells.max(axis=0) + 1
    keys = (cells[:, 0] * sides[1] + cells[:, 1]) * sides[2] + cells[:, 2]
    _, rows, counts = np.unique(keys, return_inverse=True, return_counts=True)
    sums = np.stack([np.bincount(rows, weights=points[:, k]) for k in range(3)], axis=1)
    return sums / counts[:, None]


def _every_so_many(points: np.ndarray) -> np.ndarray:
    return points[:: -(-len(points) // MAX_UNIFORM)]


def _cropped(
    points: np.ndarray, volume: CropVolume, fit: Similarity, true: np.ndarray
) -> np.ndarray:
    """Points of the surface where they belong, inside of the volume."""
    moved = fit.apply(points)
    ours = moved[volume.contains(moved)]
    if len(ours) < 3 or len(true) < 3:
        raise UserError(
            "nothing of the surface, or of the true points, lies in the volume that counts; check "
            "that cameras, log and truth belong to one scene"
        )
    return ours


def _fitted(
    points: np.ndarray,
    true: np.ndarray,
    volume: CropVolume,
    start: Similarity,
    thin: Callable[[np.ndarray], np.ndarray],
    reach: float,
) -> Similarity:
    """One fit, begun where the last one ended."""
    ours = thin(_cropped(points, volume, start, true))
    return icp(ours, thin(true), reach).after(start)


def icp(points: np.ndarray, truth: np.ndarray, reach: float) -> Similarity:
    """The similarity that brings points to their nearest true ones (Besl and McKay, 1992).

    Args:
        points: (N, 3)
        truth: (P, 3)
        reach: Pairs that are farther apart do not count.

    Returns:
        The transform; no motion where fewer than three points have a partner.
    """
    tree = cKDTree(truth)
    found, before = IDENTITY, (0.0, 0.0)
    for _ in range(ITERATIONS):
        moved = found.apply(points)
        distances, rows = tree.query(moved, distance_upper_bound=reach, workers=-1)
        paired = np.isfinite(distances)
        if paired.sum() < 3:
            break
        now = float(paired.mean()), float(np.sqrt((distances[paired] ** 2).mean()))
        if max(abs(now[0] - before[0]), abs(now[1] - before[1])) < _CONVERGED:
            break
        found = best_similarity(moved[paired], truth[rows[paired]]).after(found)
        before = now
    return found


def _share_near(points: np.ndarray, others: np.ndarray, threshold: float) -> float:
    distances, _ = cKDTree(others).query(points, distance_upper_bound=threshold, workers=-1)
    return float(np.isfinite(distances).mean())
