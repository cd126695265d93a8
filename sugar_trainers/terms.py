# SPDX-License-Identifier: Apache-2.0
"""The loss terms of the coarse stage and of its multi-view mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.engine.stage import COLOR, ImageStrip, LossTerm
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.rasterization import Rasterizer, channel_background, project
from sugar_scene.geometry import sdf_from_density
from sugar_scene.reprojection import ViewPair, plane_depth
from sugar_trainers.depth_normals import fused_depth_normal_consistency
from sugar_trainers.losses import (
    MIN_VIEW_Z,
    better_normal_loss,
    cycle_of,
    density_estimation_loss,
    edge_weights,
    flatness_loss,
    gray_values,
    opacity_entropy,
    patch_mismatch,
    plane_normal_loss,
    sdf_estimation_loss,
)
from sugar_trainers.sampling_block import SampleChunk, depth_gap
from sugar_trainers.stage_config import CoarseConfig, MultiviewConfig


@dataclass(frozen=True)
class VisibleGaussians:
    """What a term sees of the model."""

    gaussians: Gaussians
    visible: Tensor  # (N,) bool
    n_visible: int | None = None  # None where the host does not know


def coarse_terms(config: CoarseConfig) -> tuple[LossTerm, ...]:
    """Every term of the stage, in the order of the paper.

    ``"model"`` terms are given :class:`VisibleGaussians`, those at samples a :class:`SampleChunk`.
    """
    schedule = config.schedule
    geometry = schedule.regularization_active
    place = "image" if config.full_res_normals else "half-size image"
    maps = ("depth", "normal")
    dn = LossTerm("dn", config.dn_factor, place, _depth_normals, geometry, maps, halo=1)
    sdf = LossTerm("sdf", config.estimation_factor, "samples", _sdf, geometry, maps=("depth",))
    density = LossTerm("density", config.estimation_factor, "samples", _density, geometry)
    return (
        COLOR,
        LossTerm("entropy", config.entropy_factor, "model", _entropy, schedule.entropy_active),
        *([dn] if config.uses_depth_normals else []),
        sdf if config.uses_sdf else density,
        LossTerm("normal", config.normal_factor, "samples", _normal, geometry),
    )


def _entropy(seen: VisibleGaussians) -> Tensor | None:
    if not seen.n_visible:
        return None
    return opacity_entropy(seen.gaussians.opacities, seen.n_visible, counted=seen.visible)


def _depth_normals(strip: ImageStrip) -> Tensor:
    maps, camera = strip.maps, strip.camera
    return fused_depth_normal_consistency(
        maps.depth, maps.normal_xy, camera.fx, camera.fy, camera.cx, camera.cy - maps.shown.start,
        rows=maps.counted, **_divisor(strip),
    )  # fmt: skip


def _divisor(strip: ImageStrip) -> dict[str, Any]:
    """How many pixels of the image count, and those of the strip if not all do."""
    counted, shown = strip.counted, strip.maps.shown
    if counted is None:
        return {"total": strip.maps.height * strip.camera.width}
    return {"counted": counted[shown.start : shown.stop], "total": counted.sum().clamp_min(1)}


def _density(chunk: SampleChunk) -> Tensor:
    fields = chunk.fields
    return density_estimation_loss(fields.density, fields.plane_distance, fields.beta, chunk.total)


def _sdf(chunk: SampleChunk) -> Tensor:
    sdf = sdf_from_density(chunk.fields.density, chunk.fields.beta)
    view_points = chunk.axes.to_view(chunk.fields.points)
    in_front = view_points[:, 2].detach() > MIN_VIEW_Z
    total = chunk.total_in_front
    if total is None:
        total = in_front.sum().clamp_min(1)
    gap = depth_gap(chunk.depth, view_points, chunk.axes.camera)
    return sdf_estimation_loss(sdf, gap, chunk.extent, total, in_front)


def _normal(chunk: SampleChunk) -> Tensor:
    return better_normal_loss(chunk.fields.normal_error, chunk.total)


PLANE = "plane"


@dataclass(frozen=True)
class Comparison:
    """What a view is compared with."""

    pair: ViewPair
    gray: Tensor  # see gray_values; (H, W)
    neighbor_gray: Tensor  # (H', W')
    neighbor_depth: Tensor  # 0 where unknown. (H', W') world units
    pixels: Tensor  # columns and rows, in the order of rows. (n, 2) int32

    def cycle(self, planes: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Errors and weights; see :func:`cycle_of`."""
        return cycle_of(planes, pixels, self.neighbor_depth, self.pair)

    def mismatch(self, planes: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """1 - NCC, and where there is one; see :func:`patch_mismatch`."""
        return patch_mismatch(planes, pixels, self.gray, self.neighbor_gray, self.pair)


@dataclass(frozen=True)
class SurfaceView:
    """What the terms know of a view besides its render."""

    edges: Tensor  # see edge_weights; (H, W)
    comparison: Comparison | None  # None where the view has no neighbour


def multiview_terms(config: MultiviewConfig, extent: float) -> tuple[LossTerm, ...]:
    """Every term of the mode that has a weight.

    ``"model"`` terms are given :class:`VisibleGaussians`, those of images find a
    :class:`SurfaceView` beside the strip.
    """

    def flatten(seen: VisibleGaussians) -> Tensor:
        return flatness_loss(seen.gaussians.scales[seen.visible], extent)

    normals = LossTerm(
        "plane_normal", config.plane_normal_factor, "image", _normals, maps=(PLANE,), halo=1
    )
    flat = LossTerm("flatten", config.flatten_factor, "model", flatten)
    photo, cycle = config.photometric_factor, config.geometric_factor
    terms = (
        COLOR,
        normals,
        LossTerm("photometric", photo, "image", _photometric, maps=(PLANE,)),
        LossTerm("geometric", cycle, "image", _geometric, maps=(PLANE,)),
        flat,
    )
    return tuple(term for term in terms if term.weight > 0)


def surface_view(gray: Tensor, comparison: Comparison | None) -> SurfaceView:
    """What the terms need of a view with these grey values. (H, W)"""
    return SurfaceView(edge_weights(gray), comparison)


def gray_of(photograph: Tensor) -> Tensor:
    """Grey values of a photograph as the image store gives it; what a mask leaves out is marked."""
    return gray_values(photograph[..., :3], is_counted(photograph))


def all_pixels(camera: Camera, device: torch.device) -> Tensor:
    """Columns and rows of every pixel, row by row. (H W, 2) int32"""
    x = torch.arange(camera.width, dtype=torch.int32, device=device)
    y = torch.arange(camera.height, dtype=torch.int32, device=device)
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2)


def spread_pixels(candidates: Tensor, width: int, n: int, rng: torch.Generator) -> Tensor:
    """Columns and rows of at most ``n`` of the candidates, ascending by row. (n, 2) int32

    One is drawn from each of n equally long runs of the candidates, (H, W) bool, so no two are
    equal.
    """
    places = candidates.reshape(-1).nonzero()[:, 0]
    total = places.shape[0]
    n = min(n, total)
    if n == 0:
        return torch.zeros(0, 2, dtype=torch.int32, device=candidates.device)
    runs = torch.arange(n + 1, dtype=torch.int64, device="cpu") * total // n
    offsets = torch.rand(n, generator=rng, dtype=torch.float64, device="cpu")
    lengths = runs[1:] - runs[:-1]
    rows = runs[:-1] + torch.minimum((offsets * lengths).long(), lengths - 1)
    chosen = places[rows.to(places.device)]
    return torch.stack([chosen % width, chosen // width], dim=1).int()


@torch.no_grad()
def planes_depth_map(
    gaussians: Gaussians, camera: Camera, reach: float, split: ImageSplit, rasterizer: Rasterizer
) -> Tensor:
    """Depth of a view's planes, 0 where unknown, rendered strip by strip. (H, W) world units"""
    projection = project(gaussians, camera, rgb=False, plane_reach=reach)
    tiles = rasterizer.build_tile_lists(projection)
    behind = channel_background(projection)
    depth = projection.depths.new_empty(camera.height, camera.width)
    for rows in split.rows(camera.height):
        planes = rasterizer.blend_rows(projection.splats, tiles, behind, rows).pixels
        rays = pixel_rays(camera, rows, dtype=planes.dtype, device=planes.device)
        found, known = plane_depth(planes, rays)
        depth[rows.start : rows.stop] = torch.where(known, found, 0.0)
    return depth


def _normals(strip: ImageStrip) -> Tensor:
    shown, counted = strip.maps.shown, strip.counted
    edges = strip.beside.edges[shown.start : shown.stop]
    n_pixels = strip.maps.height * strip.camera.width
    total = n_pixels if counted is None else counted.sum().clamp_min(1)
    plane, rows = strip.maps.plane, strip.maps.counted
    return plane_normal_loss(plane, strip.camera, shown.start, edges, rows=rows, total=total)


def photometric_errors(comparison: Comparison, planes: Tensor, pixels: Tensor) -> Tensor:
    """1 - NCC of the patches at pixels, by how well the views agree there. (n,)"""
    with torch.no_grad():
        _, weights = comparison.cycle(planes, pixels)
    return weights * comparison.mismatch(planes, pixels)[0]


def geometric_errors(comparison: Comparison, planes: Tensor, pixels: Tensor) -> Tensor:
    """Pixels by which the way to the neighbour and back misses, where both see the same. (n,)"""
    error, weights = comparison.cycle(planes, pixels)
    return weights * torch.where(weights > 0, error, 0.0)


def _photometric(strip: ImageStrip) -> Tensor:
    return _mean_over_pixels(strip, photometric_errors)


def _geometric(strip: ImageStrip) -> Tensor:
    return _mean_over_pixels(strip, geometric_errors)


def _mean_over_pixels(
    strip: ImageStrip, value: Callable[[Comparison, Tensor, Tensor], Tensor]
) -> Tensor:
    """The strip's share of a mean over all compared pixels."""
    maps, comparison = strip.maps, strip.beside.comparison
    if comparison is None or not comparison.pixels.shape[0]:
        return maps.plane.sum() * 0
    pixels = comparison.pixels
    top = maps.shown.start + maps.counted.start
    here = (pixels[:, 1] >= top) & (pixels[:, 1] < maps.shown.start + maps.counted.stop)
    pixels = pixels[here]
    planes = maps.plane[pixels[:, 1].long() - maps.shown.start, pixels[:, 0].long()]
    return value(comparison, planes, pixels).sum() / comparison.pixels.shape[0]
