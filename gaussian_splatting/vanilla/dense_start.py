# SPDX-License-Identifier: Apache-2.0
"""Dense points that photographs agree on, added to the Gaussians to start from.

A reconstruction of few photographs has few points, and between them Gaussians explain each
photograph by itself. Plane sweeps put the surface there from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.color_bytes import color_bytes
from gaussian_splatting.core.spherical_harmonics import sh_to_rgb
from gaussian_splatting.data.cameras import Camera, LoadImage
from gaussian_splatting.data.masks import VisualHull
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.vanilla.initial_gaussians import initial_cloud
from gaussian_splatting.vanilla.plane_sweep import (
    NOWHERE,
    GreyView,
    SmallCopy,
    consistent,
    parallax,
    small_copy,
    sweep,
    world_points,
)
from sugar_utils.errors import Notify

MAX_VIEWS = 64  # photographs whose depth is found; of more, evenly spaced ones
SHARE = 1
FEWEST = 5_000
MOST = 50_000
"""Dense points for each point that is there already, and the least and largest number of them. They
show where the surface is; how fine it has to be is for densification to find out."""

MIN_SPARSE_POINTS = 10  # in a view, from which its range of depths is taken
AGREEMENT = 0.6  # least agreement of the neighbours
TOLERANCE = 0.02  # largest difference of depths, as a share of the depth
STRIDE = 2  # pixels between points
N_NEIGHBORS = 4
IDEAL_PARALLAX = 12.0  # degrees
LARGEST_PARALLAX = 55.0  # degrees


class DepthRange(NamedTuple):
    """Where to search the depth of a view, in world units."""

    near: float
    far: float


class ColoredPoints(NamedTuple):
    """Points on the CPU."""

    points: Tensor  # (P, 3) float32 world units
    colors: Tensor  # (P, 3) uint8


@dataclass(frozen=True)
class _SweptView:
    """A view with its depth."""

    view: GreyView
    colors: Tensor  # (H, W, 3) uint8
    neighbors: list[int]  # indices of the views that it was compared with
    depth: Tensor  # (H, W) world units
    is_believed: Tensor  # pixels whose depth neighbours agree on, or a depth map says. (H, W) bool
    is_measured: Tensor  # pixels whose depth a depth map says. (H, W) bool


def with_dense_points(
    cloud: GaussianCloud,
    scene: Scene,
    load_image: LoadImage,
    hull: VisualHull | None,
    limit: int | None,
    notify: Notify,
) -> GaussianCloud:
    """Add Gaussians of dense points to the initial ones, which stay as opaque as they are.

    All are sized by the gaps between them.

    Args:
        load_image: (H, W, 3), or (H, W, 4) uint8 with a mask
        hull: What masks say of the object; nothing is added outside of it.
        limit: Most Gaussians that are allowed; None for any number.
    """
    points, colors = dense_points(scene, load_image, cloud.means.device)
    if hull is not None:
        inside = hull.contains(points.to(cloud.means)).cpu()
        points = points[inside]
        colors = colors[inside]
    n_points = len(points)
    most = min(max(SHARE * len(cloud), FEWEST), MOST)
    if limit is not None:
        most = min(most, max(0, limit - len(cloud)))
    if n_points > most:
        rows = torch.linspace(0, n_points - 1, most, dtype=torch.float64, device="cpu").long()
        points = points[rows]
        colors = colors[rows]
    notify(f"dense start: {len(points):,} of {n_points:,} points that photographs agree on")
    if len(points) == 0:
        return cloud
    cloud_colors = color_bytes(sh_to_rgb(cloud.sh_dc[:, 0]).clamp(0, 1))
    all_points = torch.cat([cloud.means, points.to(cloud.means)])
    all_colors = torch.cat([cloud_colors, colors.to(cloud_colors.device)])
    start = initial_cloud(all_points, all_colors)
    added = start.opacity_logits[len(cloud) :]
    return replace(start, opacity_logits=torch.cat([cloud.opacity_logits, added]))


def dense_points(
    scene: Scene, load_image: LoadImage, device: torch.device | str = "cpu"
) -> ColoredPoints:
    """Find points that at least two photographs agree on, or that depth maps say.

    In the order of the views.
    """
    cameras, ranges = _with_ranges(evenly_chosen(scene.train_cameras), scene.points)
    copies = [small_copy(camera, load_image(camera), device) for camera in cameras]
    swept_views = []
    for index, copy in enumerate(copies):
        middle_depth = float(np.sqrt(ranges[index].near * ranges[index].far))
        neighbors = _neighbors(cameras, index, middle_depth)
        neighbor_views = [copies[i].view for i in neighbors]
        swept = _swept_view(copy, neighbor_views, ranges[index], scene)
        swept_views.append(replace(swept, neighbors=neighbors))
    by_view = [_points_of(swept, swept_views) for swept in swept_views]
    if not by_view:
        no_points = torch.zeros(0, 3, device="cpu")
        return ColoredPoints(no_points, torch.zeros(0, 3, dtype=torch.uint8, device="cpu"))
    points = torch.cat([found.points for found in by_view])
    return ColoredPoints(points, torch.cat([found.colors for found in by_view]))


def evenly_chosen(cameras: Sequence[Camera]) -> list[Camera]:
    """Return the cameras, or MAX_VIEWS evenly spaced ones of more."""
    if len(cameras) <= MAX_VIEWS:
        return list(cameras)
    rows = np.linspace(0, len(cameras) - 1, MAX_VIEWS).astype(int)
    return [cameras[row] for row in rows]


def _swept_view(
    copy: SmallCopy, neighbors: Sequence[GreyView], search: DepthRange, scene: Scene
) -> _SweptView:
    """Find the depth of a view; where photographs do not agree, a depth map may say it."""
    view = copy.view
    depth = torch.full_like(view.grey, NOWHERE)
    agreement = depth
    if neighbors:
        depth, agreement = sweep(view, neighbors, search.near, search.far)
    is_believed = copy.counted & (agreement > AGREEMENT)
    is_measured = torch.zeros_like(copy.counted)
    measured = scene.depths.of(view.camera, depth.device)
    if measured is not None:
        is_measured = copy.counted & (measured > 0) & ~is_believed
        depth = torch.where(is_measured, measured, depth)
        is_believed = is_believed | is_measured
    return _SweptView(view, copy.colors, [], depth, is_believed, is_measured)


def _with_ranges(
    cameras: Sequence[Camera], points: np.ndarray
) -> tuple[list[Camera], list[DepthRange]]:
    """Views with enough sparse points in them, and where to search: a little beyond those."""
    usable = []
    ranges = []
    for camera in cameras:
        projection = camera.project(points.astype(np.float64))
        depths = projection.depths[projection.is_inside]
        if len(depths) >= MIN_SPARSE_POINTS:
            nearest, farthest = np.percentile(depths, (1, 99))
            usable.append(camera)
            ranges.append(DepthRange(0.8 * float(nearest), 1.3 * float(farthest)))
    return usable, ranges


def _neighbors(cameras: Sequence[Camera], index: int, depth: float) -> list[int]:
    """Views that look at the same from a good angle, the best ones first."""
    ranked = []
    for other, camera in enumerate(cameras):
        if other == index:
            continue
        angle = parallax(cameras[index], camera, depth)
        looks_the_same_way = float(camera.rotation[2] @ cameras[index].rotation[2]) > 0.5
        if looks_the_same_way and 0 < angle < LARGEST_PARALLAX:
            ranked.append((max(angle / IDEAL_PARALLAX, IDEAL_PARALLAX / angle), other))
    return [other for _, other in sorted(ranked)[:N_NEIGHBORS]]


def _points_of(swept: _SweptView, swept_views: Sequence[_SweptView]) -> ColoredPoints:
    """Points of a view that a depth map or one of its neighbours confirms."""
    neighbors = []
    for index in swept.neighbors:
        neighbor = swept_views[index]
        believed_depth = torch.where(neighbor.is_believed, neighbor.depth, torch.inf)
        neighbors.append((neighbor.view, believed_depth))
    is_confirmed = consistent(swept.view, swept.depth, neighbors, TOLERANCE)
    is_point = swept.is_believed & (swept.is_measured | is_confirmed)
    on_grid = torch.zeros_like(is_point)
    on_grid[::STRIDE, ::STRIDE] = True
    is_point = (is_point & on_grid).cpu()
    points = world_points(swept.view.camera, swept.depth)[is_point]
    return ColoredPoints(points, swept.colors[is_point])
