# SPDX-License-Identifier: Apache-2.0
"""Similarities between two sets of points: least squares (Umeyama 1991), and RANSAC."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gaussian_splatting.core.random import generator
from gaussian_splatting.core.subsets import longest_side

MIN_POINTS = 3
_MIN_ROBUST = 6  # points of which some may be taken for outliers
_TRIALS = 500
_REFINEMENTS = 10
# Multiple of the median distance within which points agree: of normal errors, 4.6 deviations.
_OUTLIER_RATIO = 3.0
_SMALL_SAMPLE = 5.0  # a sample of three fits itself: what is added for few other points
_ROUNDING = 1e-9  # of the extent; distances below it are rounding
_LEAST_SPREAD = 1e-3  # of the second direction, in units of the first; below it is a line


@dataclass(frozen=True)
class Similarity:
    """A map of points: ``scale * rotation @ point + translation``."""

    scale: float
    rotation: np.ndarray  # (3, 3) float64
    translation: np.ndarray  # (3,) float64

    def moved(self, points: np.ndarray) -> np.ndarray:
        """Return points after the map. (N, 3) -> (N, 3)"""
        return self.scale * points @ self.rotation.T + self.translation

    @property
    def inverse(self) -> Similarity:
        """The map back."""
        scale = 1 / self.scale
        return Similarity(scale, self.rotation.T, -scale * self.translation @ self.rotation)

    @property
    def matrix(self) -> np.ndarray:
        """The map as a matrix. (4, 4)"""
        matrix = np.eye(4)
        matrix[:3, :3] = self.scale * self.rotation
        matrix[:3, 3] = self.translation
        return matrix


@dataclass(frozen=True)
class Fit:
    """A similarity between two sets of points, and which of them it was fitted to."""

    similarity: Similarity
    residuals: np.ndarray  # target minus the source after the map, (N, 3)
    is_used: np.ndarray  # (N,) bool

    @property
    def distances(self) -> np.ndarray:
        """Lengths of the residuals. (N,)"""
        return np.linalg.norm(self.residuals, axis=1)

    @property
    def rms(self) -> float:
        """Root of the mean square of the distances of the points that were used."""
        return root_mean_square(self.distances[self.is_used])


def root_mean_square(values: np.ndarray) -> float:
    """Return the root of the mean of the squares; 0 of none."""
    return float(np.sqrt(np.mean(np.square(values)))) if len(values) else 0.0


def is_line(points: np.ndarray) -> bool:
    """Whether points, (N, 3), are collinear or equal, so they determine no orientation."""
    spreads = axis_spreads(points)
    return bool(spreads[1] <= _LEAST_SPREAD * spreads[0])


def axis_spreads(points: np.ndarray) -> np.ndarray:
    """Return standard deviations of points along their principal axes, the largest first. (3,)"""
    values = np.linalg.svd(points - points.mean(axis=0), compute_uv=False)
    spreads = np.zeros(3)
    spreads[: len(values)] = values / np.sqrt(len(points))
    return spreads


def least_squares(source: np.ndarray, target: np.ndarray, scale: float | None = None) -> Similarity:
    """Return the similarity with the least sum of squared distances. (N, 3), (N, 3)

    Args:
        scale: Of the similarity, where it is known; None: it is fitted, too.
    """
    source_mean = source.mean(axis=0)
    target_mean = target.mean(axis=0)
    centered_source = source - source_mean
    centered_target = target - target_mean
    left_vectors, values, right_vectors = np.linalg.svd(centered_target.T @ centered_source)
    signs = np.array([1.0, 1.0, np.sign(np.linalg.det(left_vectors @ right_vectors))])
    rotation = left_vectors @ np.diag(signs) @ right_vectors
    if scale is None:
        scale = float(values @ signs) / float(np.square(centered_source).sum())
    return Similarity(scale, rotation, target_mean - scale * rotation @ source_mean)


def fitted(source: np.ndarray, target: np.ndarray, scale: float | None = None) -> Fit:
    """Fit a similarity to all points; its scale may be known. (N, 3), (N, 3)"""
    similarity = least_squares(source, target, scale)
    residuals = target - similarity.moved(source)
    return Fit(similarity, residuals, np.ones(len(source), bool))


def robust_fit(source: np.ndarray, target: np.ndarray, scale: float | None = None) -> Fit:
    """Fit a similarity to the points that agree, by RANSAC; with fewer than 6, to all of them.

    The distance within which points agree follows from the median distance, since errors of a
    survey or a receiver are not known beforehand. (N, 3), (N, 3)

    Args:
        scale: Of the similarity, where it is known.
    """
    n_points = len(source)
    if n_points < _MIN_ROBUST:
        return fitted(source, target, scale)
    random = generator(0, "georeference")
    best_median = np.inf
    best = least_squares(source, target, scale)
    for _ in range(_TRIALS):
        rows = torch.randperm(n_points, generator=random, device="cpu")[:MIN_POINTS].numpy()
        if is_line(source[rows]):
            continue
        candidate = least_squares(source[rows], target[rows], scale)
        distances = np.linalg.norm(target - candidate.moved(source), axis=1)
        median = float(np.median(distances))
        if median < best_median:
            best_median = median
            best = candidate
    return _refined(source, target, best, scale)


def _refined(
    source: np.ndarray, target: np.ndarray, similarity: Similarity, scale: float | None
) -> Fit:
    """Fit a similarity again to the points that agree with it, until they stay the same."""
    n_points = len(source)
    extent = longest_side(target)
    ratio = _OUTLIER_RATIO * (1 + _SMALL_SAMPLE / (n_points - MIN_POINTS))
    is_used = np.zeros(n_points, bool)
    for _ in range(_REFINEMENTS):
        distances = np.linalg.norm(target - similarity.moved(source), axis=1)
        limit = max(ratio * float(np.median(distances)), _ROUNDING * extent)
        agrees = distances <= limit
        if np.array_equal(agrees, is_used) or is_line(source[agrees]):
            break
        is_used = agrees
        similarity = least_squares(source[is_used], target[is_used], scale)
        # The first limit allows for a sample that fits itself; later ones are of many points.
        ratio = max(_OUTLIER_RATIO, ratio / 2)
    return Fit(similarity, target - similarity.moved(source), is_used)
