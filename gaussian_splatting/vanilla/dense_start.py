# SPDX-License-Identifier: Apache-2.0
"""Dense points to start from: what neighbouring photographs agree on, beside the sparse points.

A reconstruction of few photographs has few points. Between them Gaussians explain each photograph
by itself, which other views show as floaters. Depth from plane sweeps puts the surface there from
the start. It is found on small copies of the photographs, without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.data.visual_hull import VisualHull
from gaussian_splatting.engine.masking import is_counted
from gaussian_splatting.rasterization.spherical_harmonics import sh_to_rgb
from gaussian_splatting.vanilla.plane_sweep import (
    NOWHERE,
    GreyView,
    consistent,
    parallax,
    sweep,
    world_points,
)
from gaussian_splatting.vanilla.vanilla_stage import initial_cloud

LONG_SIDE = 240
"""Of the small copies, in pixels."""

MAX_VIEWS = 64
"""Photographs whose depth is found; of more, evenly spaced ones."""

SHARE, FEWEST, MOST = 1, 5_000, 50_000
"""Dense points for each point that is there already, and the least and largest number of them. They
show where the surface is; how fine it has to be is for densification to find out."""

MIN_SEEN = 10
"""Sparse points in a view from which its range of depths is taken."""

AGREEMENT, TOLERANCE, STRIDE = 0.6, 0.02, 2
"""Least agreement, largest difference of depths as a share, and pixels between points."""

N_NEIGHBORS, IDEAL_PARALLAX, LARGEST_PARALLAX = 4, 12.0, 55.0
"""Neighbours of a view, and the angles in degrees at which they should and may look."""


@dataclass(frozen=True)
class _Swept:
    view: GreyView
    colors: Tensor
    neighbors: list[int]
    depth: Tensor
    believed: Tensor


def with_dense_points(
    cloud: GaussianCloud,
    scene: Scene,
    load_image: Callable[[Camera], Tensor],
    hull: VisualHull | None,
    limit: int | None,
    notify: Callable[[str], None],
) -> GaussianCloud:
    """The initial Gaussians, as opaque as they are, and those of dense points.

    Sizes are of the gaps between all.

    Args:
        cloud: Gaussians to start from, as of :func:`initial_cloud`.
        scene: Training views, and the sparse points that say how deep to search.
        load_image: Photograph of a camera. (H, W, 3), or (H, W, 4) uint8 with a mask
        hull: What masks say of the object; nothing is added outside of it.
        limit: Most Gaussians that are allowed; None for any number.
        notify: Is told what was found.
    """
    points, colors = dense_points(scene, load_image, cloud.means.device)
    if hull is not None:
        inside = hull.contains(points.to(cloud.means)).cpu()
        points, colors = points[inside], colors[inside]
    n_found, room = len(points), min(max(SHARE * len(cloud), FEWEST), MOST)
    if limit is not None:
        room = min(room, max(0, limit - len(cloud)))
    if n_found > room:
        rows = torch.linspace(0, n_found - 1, room, dtype=torch.float64, device="cpu").long()
        points, colors = points[rows], colors[rows]
    notify(f"dense start: {len(points):,} of {n_found:,} points that photographs agree on")
    if len(points) == 0:
        return cloud
    own = (sh_to_rgb(cloud.sh_dc[:, 0]).clamp(0, 1) * 255).round().to(torch.uint8)
    start = initial_cloud(
        torch.cat([cloud.means, points.to(cloud.means)]),
        torch.cat([own, colors.to(own.device)]),
    )
    added = start.opacity_logits[len(cloud) :]
    return replace(start, opacity_logits=torch.cat([cloud.opacity_logits, added]))


def dense_points(
    scene: Scene, load_image: Callable[[Camera], Tensor], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Points that at least two photographs agree on.

    Args:
        scene: Training views and sparse points.
        load_image: Photograph of a camera. (H, W, 3), or (H, W, 4) uint8 with a mask
        device: Where to compute.

    Returns:
        Points, (P, 3) float32 world units, and their colours, (P, 3) uint8, on the CPU, in the
        order of the views.
    """
    cameras, ranges = _with_ranges(evenly_chosen(scene.train_cameras), scene.points)
    smaller = [small_copy(camera, load_image(camera), device) for camera in cameras]
    swept = []
    for index, (view, colors, counted) in enumerate(smaller):
        chosen = _neighbors(cameras, index, float(np.sqrt(ranges[index][0] * ranges[index][1])))
        if not chosen:
            nothing = torch.full_like(view.grey, NOWHERE)
            swept.append(_Swept(view, colors, chosen, nothing, nothing > 0))
            continue
        depth, agreement = sweep(view, [smaller[i][0] for i in chosen], *ranges[index])
        swept.append(_Swept(view, colors, chosen, depth, counted & (agreement > AGREEMENT)))
    found = [_points_of(one, swept) for one in swept]
    if not found:
        return torch.zeros(0, 3, device="cpu"), torch.zeros(0, 3, dtype=torch.uint8, device="cpu")
    points, colors = zip(*found, strict=True)
    return torch.cat(points), torch.cat(colors)


def _with_ranges(
    cameras: Sequence[Camera], points: np.ndarray
) -> tuple[list[Camera], list[tuple[float, float]]]:
    """Views with enough sparse points in them, and where to search: a little beyond those."""
    kept, ranges = [], []
    for camera in cameras:
        view = points.astype(np.float64) @ camera.rotation.T + camera.translation
        depth = view[view[:, 2] > 0]
        pixels = depth[:, :2] / depth[:, 2:] * (camera.fx, camera.fy) + (camera.cx, camera.cy)
        inside = ((pixels >= 0) & (pixels < (camera.width, camera.height))).all(axis=1)
        if inside.sum() >= MIN_SEEN:
            near, far = np.percentile(depth[inside, 2], (1, 99))
            kept.append(camera)
            ranges.append((0.8 * float(near), 1.3 * float(far)))
    return kept, ranges


def evenly_chosen(cameras: Sequence[Camera]) -> list[Camera]:
    """The cameras, or MAX_VIEWS evenly spaced ones of more."""
    if len(cameras) <= MAX_VIEWS:
        return list(cameras)
    return [cameras[i] for i in np.linspace(0, len(cameras) - 1, MAX_VIEWS).astype(int)]


def small_copy(
    camera: Camera, photograph: Tensor, device: torch.device | str
) -> tuple[GreyView, Tensor, Tensor]:
    """A small grey copy, its colours, (h, w, 3) uint8, and what counts in it, (h, w) bool."""
    scale = min(1.0, LONG_SIDE / max(camera.width, camera.height))
    size = round(camera.height * scale), round(camera.width * scale)
    counted = is_counted(photograph)
    if counted is None:
        counted = torch.ones_like(photograph[..., 0], dtype=torch.bool)
    planes = torch.cat([photograph[..., :3].float() / 255, counted[..., None].float()], dim=-1)
    planes = F.interpolate(planes.to(device).permute(2, 0, 1)[None], size, mode="area")[0]
    colors = (planes[:3] * 255).round().to(torch.uint8).permute(1, 2, 0).cpu()
    small = camera.resized(size[1], size[0])
    return GreyView(small, planes[:3].mean(dim=0)), colors, planes[3] > 0.99


def _neighbors(cameras: Sequence[Camera], index: int, depth: float) -> list[int]:
    """Views that look at the same from a good angle, the best ones first."""
    ranked = []
    for other, camera in enumerate(cameras):
        angle = parallax(cameras[index], camera, depth) if other != index else 0.0
        facing = float(camera.rotation[2] @ cameras[index].rotation[2]) > 0.5
        if facing and 0 < angle < LARGEST_PARALLAX:
            ranked.append((max(angle / IDEAL_PARALLAX, IDEAL_PARALLAX / angle), other))
    return [other for _, other in sorted(ranked)[:N_NEIGHBORS]]


def _points_of(one: _Swept, swept: Sequence[_Swept]) -> tuple[Tensor, Tensor]:
    """Points of a view that one of its neighbours has found as well, and their colours."""
    others = [
        (swept[i].view, torch.where(swept[i].believed, swept[i].depth, torch.inf))
        for i in one.neighbors
    ]
    kept = one.believed & consistent(one.view, one.depth, others, TOLERANCE)
    every = torch.zeros_like(kept)
    every[::STRIDE, ::STRIDE] = True
    kept = (kept & every).cpu()
    return world_points(one.view.camera, one.depth)[kept], one.colors[kept]
