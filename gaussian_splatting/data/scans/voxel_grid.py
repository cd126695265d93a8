# SPDX-License-Identifier: Apache-2.0
"""Thin points piece by piece: one point is left in each cell of a grid, the mean of its points."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_GROWTH = 1.25  # of the side of cells, until few enough points are left
_FIRST_SIDE = 0.25  # of the side that a square of the extent would need
_MAX_CELLS = 1 << 20  # along an axis; three such numbers fit into one of 64 bits
_LEAST_SIDE = 1e-30  # world units
_QUANTILES = 0.02, 0.98  # the extent of most points; outliers do not coarsen the others


@dataclass
class VoxelGrid:
    """Points that arrive in chunks; about ``limit`` at most are kept.

    Until the limit is passed nothing is thinned. Memory is that of twice the limit and a piece.
    """

    limit: int
    side: float = 0.0  # of the cells, 0: nothing was thinned
    _positions: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))
    _values: np.ndarray | None = None  # (N, C)
    _weights: np.ndarray = field(default_factory=lambda: np.zeros(0))  # points of each mean

    def add(self, positions: np.ndarray, values: np.ndarray) -> None:
        """Add a piece. (N, 3) float64, (N, C) any numbers, such as colours"""
        if not len(positions):
            return
        previous = self._values
        if previous is None:
            previous = np.zeros((0, values.shape[1]), np.float32)
        self._positions = np.concatenate([self._positions, positions])
        self._values = np.concatenate([previous, values.astype(np.float32)])
        self._weights = np.concatenate([self._weights, np.ones(len(positions))])
        if len(self._positions) > 2 * self.limit:
            self._thin()

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions, (N, 3) float64, and the values, (N, C) float32; N <= limit."""
        if len(self._positions) > self.limit:
            self._thin()
        values = self._values
        if values is None:
            values = np.zeros((0, 3), np.float32)
        return self._positions, values

    def _thin(self) -> None:
        """Merge the points of each cell, and enlarge the cells until few enough are left."""
        positions = self._positions
        low = positions.min(axis=0)
        extent = float((positions.max(axis=0) - low).max())
        if self.side == 0:
            # Scans are surfaces, so points rise with the square of the extent.
            low_corner, high_corner = np.quantile(positions, _QUANTILES, axis=0)
            diagonal = float(np.linalg.norm(high_corner - low_corner))
            self.side = _FIRST_SIDE * diagonal / self.limit**0.5
        self.side = max(self.side, extent / _MAX_CELLS, _LEAST_SIDE)
        self._merge(low)
        while len(self._positions) > self.limit:
            self.side *= _GROWTH
            self._merge(low)

    def _merge(self, origin: np.ndarray) -> None:
        cells = ((self._positions - origin) / self.side).astype(np.int64)
        keys = (cells[:, 0] * _MAX_CELLS * 2 + cells[:, 1]) * _MAX_CELLS * 2 + cells[:, 2]
        _, inverse = np.unique(keys, return_inverse=True)
        weights = np.bincount(inverse, self._weights)
        values = self._values
        if values is not None:
            self._values = _means(values, self._weights, inverse, weights).astype(np.float32)
        self._positions = _means(self._positions, self._weights, inverse, weights)
        self._weights = weights


def _means(
    values: np.ndarray, weights: np.ndarray, inverse: np.ndarray, sums: np.ndarray
) -> np.ndarray:
    """Return the means of the rows of each cell. (N, C) -> (M, C)"""
    columns = [np.bincount(inverse, column * weights) / sums for column in values.T]
    return np.stack(columns, axis=1)
