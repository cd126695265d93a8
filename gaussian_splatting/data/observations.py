# SPDX-License-Identifier: Apache-2.0
"""Which points of a reconstruction a photograph shows: known depth at some hundred pixels each.

A photograph with a handful of points is often posed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.consistency.reconstruction import error_limit
from sugar_utils.flags import integer, name_list
from sugar_utils.settings import flag

MAX_POINTS = 50_000
"""Of larger models an even sample of the points is kept: reading tracks takes microseconds each."""

DENSE = 4
"""A reconstruction whose median photograph observes fewer than this many times the least number is
sparse as a whole, or made by hand, and says nothing about single photographs."""

ALL_VIEWS = "all"


@dataclass(frozen=True)
class ViewOptions:
    min_observations: int = flag(
        20, "leave out photographs that observe fewer points of the reconstruction than this, or "
        "that fit it much worse than the others do (3 times the median reprojection error and 2 "
        "pixels); 0 keeps all", group="input", parse=integer, metavar="N",
        no_effect_when="where the reconstruction has no tracks, or few in all photographs",
    )  # fmt: skip

    keep_views: tuple[str, ...] = flag(
        (), "names of views to keep although they contradict the rest of the capture (wrong pose, "
        "image or mask), separated by commas; all switches the checks off", group="input",
        parse=name_list, metavar="NAME,...",
    )  # fmt: skip

    @property
    def keeps_all(self) -> bool:
        return ALL_VIEWS in self.keep_views


KEEP_ALL = ViewOptions(0, (ALL_VIEWS,))


@dataclass(frozen=True)
class ViewFit:
    n_points: int
    error: float


@dataclass(frozen=True)
class Observations:
    """Points that photographs observe."""

    points: np.ndarray  # positions, (P, 3) float32 world units
    # Mean reprojection errors, (P,) float32 pixels of the photographs as calibrated.
    errors: np.ndarray
    lengths: np.ndarray  # photographs that observe each point, (P,) int32
    # Rows of the above that a photograph observes, by its name, (n,) int32 each.
    rows: dict[str, np.ndarray]
    fits: dict[str, ViewFit] = field(default_factory=dict)
    # Colours of the points; None where they are not known, (P, 3) uint8.
    rgb: np.ndarray | None = None

    def only(self, names: Iterable[str]) -> Observations:
        names = list(names)
        rows = {n: self.rows[n] for n in names if n in self.rows}
        return replace(self, rows=rows, fits={n: self.fits[n] for n in names if n in self.fits})

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
        rgb = None if self.rgb is None else self.rgb[kept]
        return SeenPoints(pixels[inside], depth[inside], self.errors[kept], self.lengths[kept], rgb)


@dataclass(frozen=True)
class SeenPoints:
    pixels: np.ndarray  # where they are, (n, 2) pixels
    depths: np.ndarray  # along the view axis, (n,) world units
    errors: np.ndarray  # mean reprojection errors, (n,) pixels of the photographs as calibrated
    lengths: np.ndarray  # photographs that observe each point, (n,)
    # Colours of the points; None where they are not known, (n, 3) uint8.
    rgb: np.ndarray | None = None

    @property
    def nearest(self) -> float:
        return float(self.depths.min())


def hardly_known(observations: Observations | None, options: ViewOptions) -> dict[str, str]:
    """Views that the reconstruction knows too little about, by name, with the reason."""
    fits = {} if observations is None else observations.fits
    least = options.min_observations
    if least <= 0 or not fits:
        return {}
    if np.median([fit.n_points for fit in fits.values()]) < DENSE * least:
        return {}
    limit = error_limit([fit.error for fit in fits.values()])
    few = {n: f"{f.n_points} points" for n, f in fits.items() if f.n_points < least}
    far = {n: f"{f.error:.1f} pixels off" for n, f in fits.items() if f.error > limit}
    return {**far, **few}
