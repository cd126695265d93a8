# SPDX-License-Identifier: Apache-2.0
"""Boxes of space, and the region that one mesh covers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Corner = tuple[float, float, float]
_ON_PLANE = 1e-3  # voxels, by which a vertex of the border may lie beside its plane


def corner_of(values: Iterable[float]) -> Corner:
    """Return three numbers as the corner of a box."""
    x, y, z = values
    return float(x), float(y), float(z)


@dataclass(frozen=True)
class Box:
    """An axis-aligned box, corners in world units; its faces do not belong to it."""

    low: Corner
    high: Corner

    @classmethod
    def cube(cls, center: np.ndarray, half: float) -> Box:
        """Return a cube around a point, (3,), by half the length of its sides."""
        low = center - half
        high = center + half
        return cls.of_corners(low, high)

    @classmethod
    def of_corners(cls, low: np.ndarray, high: np.ndarray) -> Box:
        """Return the box between two corners. (3,) each"""
        return cls(corner_of(low), corner_of(high))

    @property
    def longest_side(self) -> float:
        """Length of the longest side, world units."""
        return float(max(np.subtract(self.high, self.low)))

    def contains(self, points: np.ndarray) -> np.ndarray:
        """Return which points lie strictly inside. (P, 3) -> (P,) bool"""
        low = np.array(self.low, dtype=np.float32)
        high = np.array(self.high, dtype=np.float32)
        return np.all((points > low) & (points < high), axis=1)

    def __str__(self) -> str:
        low = ",".join(f"{value:.4g}" for value in self.low)
        high = ",".join(f"{value:.4g}" for value in self.high)
        return f"({low}) to ({high})"


EVERYWHERE = Box((-math.inf, -math.inf, -math.inf), (math.inf, math.inf, math.inf))


class SharedPlane(NamedTuple):
    """A plane square to an axis, at which the meshes of two regions meet."""

    axis: int
    position: float  # along the axis, world units


@dataclass(frozen=True)
class Region:
    """The part of space that one mesh covers; the steps of the mesh stage take it.

    The whole capture has no planes. A block ends at the planes between it and its neighbours,
    where its mesh has to fit theirs: vertices there are shared, and the surface continues.
    """

    box: Box = EVERYWHERE  # the foreground
    planes: tuple[SharedPlane, ...] = ()
    voxel: float = 0.0  # side of a voxel of the grid that all regions share, world units

    def shared(self, vertices: np.ndarray) -> np.ndarray:
        """Return which vertices lie on one of the planes. (V, 3) -> (V,) bool"""
        is_shared = np.zeros(len(vertices), dtype=bool)
        for axis, position in self.planes:
            is_shared |= np.abs(vertices[:, axis] - position) < _ON_PLANE * self.voxel
        return is_shared


WHOLE = Region()
