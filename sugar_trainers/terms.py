# SPDX-License-Identifier: Apache-2.0
"""The loss terms of the coarse stage and of its multi-view mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.engine.stage import COLOR, ImageStrip, LossTerm
from sugar_scene.geometry import sdf_from_density
from sugar_scene.plane_kernels import NormalErrors, PlanesAt
from sugar_trainers.losses import (
    MIN_VIEW_Z,
    better_normal_loss,
    density_estimation_loss,
    flatness_loss,
    fused_depth_normal_consistency,
    opacity_entropy,
    sdf_estimation_loss,
)
from sugar_trainers.sampling_block import SampleChunk, depth_gap
from sugar_trainers.stage_config import CoarseConfig, MultiviewConfig
from sugar_trainers.view_comparison import Comparison, geometric_errors, photometric_errors


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
    maps, camera, shown, counted = strip.maps, strip.camera, strip.maps.shown, strip.counted
    return fused_depth_normal_consistency(
        maps.depth, maps.normal_xy, camera.fx, camera.fy, camera.cx, camera.cy - shown.start,
        rows=maps.counted, total=_n_counted(strip),
        counted=None if counted is None else counted[shown.start : shown.stop],
    )  # fmt: skip


def _n_counted(strip: ImageStrip) -> int | Tensor:
    """How many pixels of the whole image count."""
    if strip.counted is None:
        return strip.maps.height * strip.camera.width
    return strip.counted.sum().clamp_min(1)


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


def multiview_terms(config: MultiviewConfig, extent: float) -> tuple[LossTerm, ...]:
    """Every term of the mode that has a weight.

    ``"model"`` terms are given :class:`VisibleGaussians`, those of images find a
    :class:`SurfaceView` beside the strip.
    """

    def flatten(seen: VisibleGaussians) -> Tensor:
        return flatness_loss(seen.gaussians.scales, extent, seen.visible)

    normals = LossTerm(
        "plane_normal", config.plane_normal_factor, "image", _normals, maps=(PLANE,), halo=1
    )
    flat = LossTerm("flatten", config.flatten_factor, "model", flatten)
    photo, cycle = config.photometric_factor, config.geometric_factor
    photometric = partial(_mean_over_pixels, value=photometric_errors)
    geometric = partial(_mean_over_pixels, value=geometric_errors)
    terms = (
        COLOR,
        normals,
        LossTerm("photometric", photo, "image", photometric, maps=(PLANE,)),
        LossTerm("geometric", cycle, "image", geometric, maps=(PLANE,)),
        flat,
    )
    return tuple(term for term in terms if term.weight > 0)


def _normals(strip: ImageStrip) -> Tensor:
    first, plane, rows = strip.maps.shown.start, strip.maps.plane, strip.maps.counted
    return NormalErrors.apply(
        plane, strip.camera, first, strip.beside.edges, rows, _n_counted(strip)
    )


def _mean_over_pixels(
    strip: ImageStrip, value: Callable[[Comparison, Tensor, Tensor], Tensor]
) -> Tensor:
    """The strip's share of a mean over all compared pixels."""
    maps, comparison = strip.maps, strip.beside.comparison
    if comparison is None or not comparison.pixels.shape[0]:
        return maps.plane.sum() * 0
    pixels, places = comparison.pixels, comparison.places
    if maps.share < 1:
        top = maps.shown.start + maps.counted.start
        here = (pixels[:, 1] >= top) & (pixels[:, 1] < maps.shown.start + maps.counted.stop)
        pixels, places = pixels[here], places[here] - maps.shown.start * strip.camera.width
    planes = PlanesAt.apply(maps.plane, places)
    return value(comparison, planes, pixels).sum() / comparison.pixels.shape[0]
