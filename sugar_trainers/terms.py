# SPDX-License-Identifier: Apache-2.0
"""Tables of loss terms: of the coarse stage, and of its multi-view mode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.engine.loss_terms import COLOR, LossTerm
from gaussian_splatting.engine.training_views import ImageStrip
from sugar_scene.geometry import sdf_from_density
from sugar_scene.plane_kernels import NormalErrors, PlanesAt, lens_of
from sugar_trainers import losses
from sugar_trainers.losses import MIN_VIEW_Z
from sugar_trainers.sampling import SampleChunk, depth_gap
from sugar_trainers.stage_config import CoarseConfig, MultiviewConfig
from sugar_trainers.view_comparison import view_errors
from sugar_utils.device import constants

PLANE = "plane"  # map of a view that holds blended planes


@dataclass(frozen=True)
class VisibleGaussians:
    """Inputs of the terms of the model: all Gaussians, and which of them a view shows."""

    gaussians: Gaussians
    visible: Tensor  # (N,) bool


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


def _entropy(inputs: VisibleGaussians) -> Tensor:
    # Counted on the device: the host need not know.
    n_visible = inputs.visible.sum().clamp_min(1)
    return losses.opacity_entropy(inputs.gaussians.opacities, n_visible, counted=inputs.visible)


def _depth_normals(strip: ImageStrip) -> Tensor:
    device = strip.depth.device
    intrinsics = lens_of(strip.view.camera, device)
    if strip.rows.start > 0:
        intrinsics = intrinsics - constants((0.0, 0.0, 0.0, float(strip.rows.start)), device)
    return losses.fused_depth_normal_consistency(
        strip.depth,
        strip.normal_xy,
        intrinsics,
        rows=strip.counted_rows,
        total=strip.view.n_counted,
        counted=strip.counted_pixels(),
    )


def _density(chunk: SampleChunk) -> Tensor:
    fields = chunk.fields
    return losses.density_estimation_loss(
        fields.density, fields.plane_distance, fields.beta, chunk.total, chunk.has_spare
    )


def _sdf(chunk: SampleChunk) -> Tensor:
    sdf = sdf_from_density(chunk.fields.density, chunk.fields.beta)
    view_points = chunk.axes.to_view(chunk.fields.points)
    in_front = view_points[:, 2].detach() > MIN_VIEW_Z
    if chunk.used is not None:
        in_front = in_front & chunk.used
    total = chunk.total_in_front
    if total is None:
        total = in_front.sum().clamp_min(1)
    if chunk.depth is None:
        raise ValueError("the sdf term names the depth map among those that it reads")
    gap = depth_gap(chunk.depth, view_points, chunk.axes)
    return losses.sdf_estimation_loss(sdf, gap, chunk.extent, total, in_front, chunk.has_spare)


def _normal(chunk: SampleChunk) -> Tensor:
    return losses.better_normal_loss(
        chunk.fields.normal_error, chunk.total, has_spare=chunk.has_spare
    )


def multiview_terms(config: MultiviewConfig, extent: float) -> tuple[LossTerm, ...]:
    """Every term of the mode that has a weight.

    ``"model"`` terms are given :class:`VisibleGaussians`; those of images find a
    :class:`SurfaceView` in ``strip.view.surface``.
    """

    def flatten(inputs: VisibleGaussians) -> Tensor:
        return losses.flatness_loss(inputs.gaussians.scales, extent, inputs.visible)

    factors = config.view_factors
    normals_weight = config.plane_normal_factor
    views = partial(_view_errors, factors=factors)
    terms = (
        COLOR,
        LossTerm("plane_normal", normals_weight, "image", _normals, maps=(PLANE,), halo=1),
        LossTerm("views", float(any(factors)), "image", views, maps=(PLANE,)),
        LossTerm("flatten", config.flatten_factor, "model", flatten),
    )
    return tuple(term for term in terms if term.weight > 0)


def _normals(strip: ImageStrip) -> Tensor:
    view = strip.view
    return NormalErrors.apply(
        strip.plane,
        view.camera,
        strip.rows.start,
        view.surface.edges,
        strip.counted_rows,
        view.n_counted,
    )


def _view_errors(strip: ImageStrip, factors: tuple[float, float]) -> Tensor:
    """The strip's share of a mean over all compared pixels."""
    comparison = strip.view.surface.comparison
    if comparison is None or not comparison.pixels.shape[0]:
        return strip.plane.sum() * 0
    pixels = comparison.pixels
    places = comparison.places
    if strip.share < 1:
        top = strip.rows.start + strip.counted_rows.start
        bottom = strip.rows.start + strip.counted_rows.stop
        is_counted = (pixels[:, 1] >= top) & (pixels[:, 1] < bottom)
        pixels = pixels[is_counted]
        places = places[is_counted] - strip.rows.start * strip.view.camera.width
    planes = PlanesAt.apply(strip.plane, places)
    errors = view_errors(comparison, planes, pixels, *factors)
    return errors.sum() / comparison.pixels.shape[0]
