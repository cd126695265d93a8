# SPDX-License-Identifier: Apache-2.0
"""Similarity transforms: from one world to another that shows the same at another scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_ROUNDS = 5
_OUTLYING = 3.0


@dataclass(frozen=True)
class Similarity:
    """x -> scale rotation x + translation.

    Attributes:
        scale: Positive.
        rotation: (3, 3)
        translation: (3,)
    """

    scale: float
    rotation: np.ndarray
    translation: np.ndarray

    @classmethod
    def of_matrix(cls, matrix: np.ndarray) -> Similarity:
        """From a matrix of homogeneous coordinates. (4, 4)"""
        scale = float(np.cbrt(np.linalg.det(matrix[:3, :3])))
        return cls(scale, matrix[:3, :3] / scale, matrix[:3, 3].copy())

    def apply(self, points: np.ndarray) -> np.ndarray:
        """Points moved. (N, 3)"""
        return self.scale * points @ self.rotation.T + self.translation

    def after(self, first: Similarity) -> Similarity:
        """The transform that does ``first``, then this one."""
        return Similarity(
            self.scale * first.scale,
            self.rotation @ first.rotation,
            self.apply(first.translation[None])[0],
        )


IDENTITY = Similarity(1.0, np.eye(3), np.zeros(3))


def best_similarity(source: np.ndarray, target: np.ndarray) -> Similarity:
    """The similarity that brings points closest to their counterparts (Umeyama, PAMI 1991).

    Args:
        source: At least three points that do not coincide. (N, 3)
        target: Their counterparts. (N, 3)
    """
    a0, b0 = source.mean(axis=0), target.mean(axis=0)
    u, s, vt = np.linalg.svd((target - b0).T @ (source - a0))
    sign = np.array([1.0, 1.0, np.sign(np.linalg.det(u @ vt))])
    rotation = u * sign @ vt
    scale = float((s * sign).sum() / ((source - a0) ** 2).sum())
    return Similarity(scale, rotation, b0 - scale * rotation @ a0)


def robust_similarity(source: np.ndarray, target: np.ndarray) -> tuple[Similarity, np.ndarray]:
    """The same without the pairs that fit much worse than most, such as cameras placed wrongly.

    Returns:
        The transform, and the distances of all pairs after it. (N,)
    """
    kept = np.ones(len(source), dtype=bool)
    for _ in range(_ROUNDS):
        found = best_similarity(source[kept], target[kept])
        missed = np.linalg.norm(found.apply(source) - target, axis=1)
        fits = missed <= max(_OUTLYING * float(np.median(missed)), 1e-12)
        if fits.sum() < 3 or (fits == kept).all():
            break
        kept = fits
    return found, missed
