# SPDX-License-Identifier: Apache-2.0
"""The loss terms of the coarse stage. A new term is a new entry of :func:`coarse_terms`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.engine.terms import COLOR, ImageStrip, LossTerm
from sugar_scene.fields.reference_fields import sdf_from_density
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.depth_normals import fused_depth_normal_consistency
from sugar_trainers.losses import (
    MIN_VIEW_Z,
    better_normal_loss,
    density_estimation_loss,
    opacity_entropy,
    sdf_estimation_loss,
)
from sugar_trainers.sampling_block import SampleChunk, depth_gap


@dataclass(frozen=True)
class VisibleGaussians:
    """What a term sees of the model.

    Attributes:
        gaussians: N activated Gaussians; gradients reach them.
        visible: Those that the view shows. (N,) bool
        n_visible: How many; None where the host does not know.
    """

    gaussians: Gaussians
    visible: Tensor
    n_visible: int | None = None


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
        maps.depth,
        maps.normal_xy,
        camera.fx,
        camera.fy,
        camera.cx,
        camera.cy - maps.shown.start,
        rows=maps.counted,
        **_divisor(strip),
    )


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
