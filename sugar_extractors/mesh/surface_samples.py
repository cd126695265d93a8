# SPDX-License-Identifier: Apache-2.0
"""Surface points gathered over all training views, and their split into regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.visual_hull import VisualHull
from gaussian_splatting.rasterization import rasterize
from sugar_extractors.mesh.level_sets import LevelSetModel, diamond_hits, march_rays, pixel_centers
from sugar_utils.random import generator

CANDIDATES_PER_POINT = 2


@dataclass(frozen=True)
class SurfaceSamples:
    """Coloured points with normals; P of them, on the CPU.

    Attributes:
        points: (P, 3) float32 world units.
        normals: Unit, outward. (P, 3) float32
        colors: (P, 3) uint8.
    """

    points: np.ndarray
    normals: np.ndarray
    colors: np.ndarray

    def __len__(self) -> int:
        return len(self.points)

    def select(self, rows: np.ndarray) -> SurfaceSamples:
        """Rows by mask or index, copied."""
        return SurfaceSamples(self.points[rows], self.normals[rows], self.colors[rows])


@dataclass(frozen=True)
class Box:
    """An axis-aligned box, corners in world units; its faces do not belong to it."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]

    @classmethod
    def cube(cls, center: np.ndarray, half: float) -> Box:
        """The cube of the given centre and half side."""
        return cls(tuple(map(float, center - half)), tuple(map(float, center + half)))

    def shifted(self, offset: np.ndarray) -> Box:
        """The box moved by ``offset``. (3,)"""
        return Box(
            tuple(map(float, np.add(self.low, offset))),
            tuple(map(float, np.add(self.high, offset))),
        )

    def contains(self, points: np.ndarray) -> np.ndarray:
        """Which points lie strictly inside. (P, 3) -> (P,) bool"""
        low, high = np.float32(self.low), np.float32(self.high)
        return ((points > low) & (points < high)).all(axis=1)

    def __str__(self) -> str:
        corners = (",".join(f"{v:.4g}" for v in corner) for corner in (self.low, self.high))
        return "({}) to ({})".format(*corners)


class _Store:
    """Arrays of a fixed capacity that fill up view by view."""

    def __init__(self, capacity: int) -> None:
        self._arrays = (
            np.empty((capacity, 3), np.float32),
            np.empty((capacity, 3), np.float32),
            np.empty((capacity, 3), np.uint8),
        )
        self._n = 0

    def append(self, *parts: Tensor) -> None:
        n = parts[0].shape[0]
        for array, part in zip(self._arrays, parts, strict=True):
            array[self._n : self._n + n] = part.cpu().numpy()
        self._n += n

    def samples(self) -> SurfaceSamples:
        return SurfaceSamples(*(array[: self._n] for array in self._arrays))


def collect_surface_samples(
    model: LevelSetModel,
    cameras: Sequence[Camera],
    levels: Sequence[float],
    *,
    target: int,
    n_samples: int,
    reach: float,
    seed: int,
    candidates_per_point: int = CANDIDATES_PER_POINT,
    hull: VisualHull | None = None,
    on_view: Callable[[int, int], None] = lambda done, found: None,
) -> list[SurfaceSamples]:
    """Sample the level sets from all views.

    Every view gives at most ``target // views + 1`` points per level, taken at random from
    ``candidates_per_point`` times as many random pixels. The arrays are allocated once for the
    target; nothing else grows with the number of views.

    Args:
        candidates_per_point: Pixels tried per point wanted.
        hull: Points outside of it are dropped; None keeps all.
        on_view: Called after each view with its number from 1 and the points found so far.

    Returns:
        Samples for each level, in the order of ``levels``.
    """
    per_view = target // len(cameras) + 1
    stores = [_Store(per_view * len(cameras)) for _ in levels]
    n_found = 0
    for view, camera in enumerate(cameras):
        hits = diamond_hits(model, camera)
        pixels = hits.covered.flatten().nonzero()[:, 0]
        pixels = _random_rows(pixels, candidates_per_point * per_view, seed, "pixels", view)
        found = march_rays(
            model,
            camera,
            pixel_centers(pixels, camera.width),
            hits.depth.flatten()[pixels],
            hits.face.flatten()[pixels] // 2,
            levels,
            n_samples=n_samples,
            reach=reach,
        )
        image = rasterize(model.gaussians, camera, sh_degree=0).image.reshape(-1, 3)
        colors = (image[pixels].clamp(0, 1) * 255).round().to(torch.uint8)
        for index, (level, store) in enumerate(zip(levels, stores, strict=True)):
            # A gradient of zero has no direction; it is as rare as it is useless to Poisson.
            good = found.valid[index] & (found.normals[index] != 0).any(dim=-1)
            good &= found.points[index].isfinite().all(dim=-1)
            if hull is not None:
                good &= hull.contains(found.points[index])
            # By the level itself: a mesh must not depend on which others are made beside it.
            labels = ("points", view, repr(float(level)))
            rows = _random_rows(good.nonzero()[:, 0], per_view, seed, *labels)
            store.append(found.points[index, rows], found.normals[index, rows], colors[rows])
            n_found += rows.shape[0]
        on_view(view + 1, n_found)
    return [store.samples() for store in stores]


def _random_rows(rows: Tensor, n: int, seed: int, *labels: str | int) -> Tensor:
    """At most ``n`` of the rows, without replacement and in ascending order."""
    if rows.shape[0] <= n:
        return rows
    chosen = torch.randperm(rows.shape[0], generator=generator(seed, *labels), device="cpu")[:n]
    return rows[chosen.sort().values.to(rows.device)]
