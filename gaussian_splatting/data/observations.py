# SPDX-License-Identifier: Apache-2.0
"""Which points of a reconstruction a photograph shows: known depth at some hundred pixels each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from gaussian_splatting.data.cameras import Camera

MAX_POINTS = 50_000
"""Of larger models an even sample of the points is kept: reading tracks takes microseconds each."""


@dataclass(frozen=True)
class Observations:
    """Points that photographs observe.

    Attributes:
        points: Positions. (P, 3) float32 world units
        errors: Mean reprojection errors. (P,) float32 pixels of the photographs as calibrated
        lengths: Photographs that observe each point. (P,) int32
        rows: Rows of the above that a photograph observes, by its name. (n,) int32 each
    """

    points: np.ndarray
    errors: np.ndarray
    lengths: np.ndarray
    rows: dict[str, np.ndarray]

    def only(self, names: Iterable[str]) -> Observations:
        """Those of some photographs."""
        return replace(self, rows={n: self.rows[n] for n in names if n in self.rows})

    def seen(self, camera: Camera) -> SeenPoints | None:
        """What a camera sees of the points that its photograph observes; None for nothing."""
        rows = self.rows.get(camera.name)
        if rows is None:
            return None
        view = self.points[rows].astype(np.float64) @ camera.rotation.T + camera.translation
        depth = view[:, 2]
        pixels = view[:, :2] / np.where(depth > 0, depth, 1.0)[:, None]
        pixels = pixels * (camera.fx, camera.fy) + (camera.cx, camera.cy)
        inside = (depth > 0) & (pixels >= 0).all(axis=1)
        inside &= (pixels < (camera.width, camera.height)).all(axis=1)
        if not inside.any():
            return None
        kept = rows[inside]
        return SeenPoints(pixels[inside], depth[inside], self.errors[kept], self.lengths[kept])


@dataclass(frozen=True)
class SeenPoints:
    """Observed points in a view.

    Attributes:
        pixels: Where they are. (n, 2) pixels
        depths: Along the view axis. (n,) world units
        errors: Mean reprojection errors. (n,) pixels of the photographs as calibrated
        lengths: Photographs that observe each point. (n,)
    """

    pixels: np.ndarray
    depths: np.ndarray
    errors: np.ndarray
    lengths: np.ndarray

    @property
    def nearest(self) -> float:
        """Depth of the nearest one in world units."""
        return float(self.depths.min())
