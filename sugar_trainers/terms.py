# SPDX-License-Identifier: Apache-2.0
"""The loss terms of the coarse stage and of its multi-view mode, and the sampling block: points
drawn in Gaussians, and what terms see at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.stage import COLOR, ImageStrip, LossTerm
from gaussian_splatting.engine.strips import backpropagate_weighted
from sugar_scene.field_kernels import evaluate_fields
from sugar_scene.geometry import FieldSamples, sample_points, sdf_from_density, std_along_view
from sugar_scene.plane_kernels import NormalErrors, PlanesAt
from sugar_trainers import losses
from sugar_trainers.losses import MIN_VIEW_Z
from sugar_trainers.stage_config import CoarseConfig, MultiviewConfig
from sugar_trainers.view_comparison import view_errors
from sugar_utils.device import upload

PLANE = "plane"


class CameraAxes:
    """World to camera axes on a device, sent there once without waiting."""

    def __init__(self, camera: Camera, device: torch.device) -> None:
        self.camera = camera
        rows = np.vstack([camera.rotation, camera.translation, camera.center])
        self._rows = upload(torch.from_numpy(rows.astype(np.float32)), device)

    @property
    def center(self) -> Tensor:
        """Where the camera is. (3,) world units"""
        return self._rows[4]

    def to_view(self, points: Tensor) -> Tensor:
        """World to camera axes. (S, 3) -> (S, 3) world units"""
        return points @ self._rows[:3].T + self._rows[3]


@dataclass(frozen=True)
class SampleChunk:
    fields: FieldSamples  # gradients reach the Gaussians through them
    total: int  # samples of all chunks
    # Those before the camera, at least 1; None without a depth map, or for all. () on the device
    total_in_front: Tensor | None
    axes: CameraAxes
    depth: Tensor | None  # leaf, if a term at samples reads it. (H, W) world units
    extent: float


def sampling_mask(
    gaussians: Gaussians, camera: Camera, visible: Tensor, depth: Tensor | None
) -> Tensor:
    """Gaussians to sample: the visible ones, of those near the depth map if there is one. (N,)"""
    if depth is None:
        return visible
    with torch.no_grad():
        axes = CameraAxes(camera, depth.device)
        std = std_along_view(gaussians.means, gaussians.quats, gaussians.scales, axes.center)
        gap = depth_gap(depth, axes.to_view(gaussians.means), camera)
        return losses.near_surface_mask(gap, std, visible)


class SurfaceSampler:
    def __init__(self, config: CoarseConfig, extent: float) -> None:
        self._config = config
        self._extent = extent

    def backward(
        self,
        terms: Sequence[LossTerm],
        leaves: Gaussians,
        neighbors: Tensor,
        indices: Tensor,
        noise: Tensor,
        camera: Camera,
        depth: Tensor | None,
        n_candidates: int | None = None,
    ) -> dict[str, Tensor]:
        """Evaluate terms chunk by chunk, adding weighted gradients to the leaves.

        Every chunk's loss is divided by the number of all samples, so the sum over chunks is the
        mean over all. The terms share the fields, so they are backpropagated together.

        Args:
            neighbors: (N, K) int32
            indices: Gaussian of each sample, sorted. (S,)
            depth: Leaf with the rendered depth, if a term reads it. (H, W) world units

        Returns:
            Unweighted values by name; none without samples.
        """
        config = self._config
        total = indices.numel()
        if total == 0:
            return {}
        axes = CameraAxes(camera, leaves.means.device)
        in_front = None
        if depth is not None and total > config.sample_chunk:
            in_front = self._count_in_front(leaves, indices, noise, axes)
        sums = {term.name: leaves.means.new_zeros(()) for term in terms}
        shape = leaves.means, leaves.quats, leaves.scales, leaves.opacities
        chunks = (values.split(config.sample_chunk) for values in (indices, noise))
        for drawn in zip(*chunks, strict=True):
            factor = config.density_factor
            fields = evaluate_fields(*shape, neighbors, *drawn, factor, n_owners=n_candidates)
            chunk = SampleChunk(fields, total, in_front, axes, depth, self._extent)
            values = {term.name: term.value(chunk) for term in terms}
            backpropagate_weighted(list(values.values()), [term.weight for term in terms])
            for name, value in values.items():
                sums[name] += value.detach()
        return sums

    @torch.no_grad()
    def _count_in_front(
        self, gaussians: Gaussians, indices: Tensor, noise: Tensor, axes: CameraAxes
    ) -> Tensor:
        """Samples that have a pixel: the divisor of the sdf term, needed before the chunks. ()"""
        count = torch.zeros((), dtype=torch.int64, device=indices.device)
        shape = gaussians.means, gaussians.quats, gaussians.scales
        chunks = (values.split(self._config.sample_chunk) for values in (indices, noise))
        for rows, draws in zip(*chunks, strict=True):
            count += (axes.to_view(sample_points(*shape, rows, draws))[:, 2] > MIN_VIEW_Z).sum()
        return count.clamp_min(1)


def depth_gap(depth: Tensor, view_points: Tensor, camera: Camera) -> Tensor:
    """Rendered depth where points project, minus their own depth. (S,) world units"""
    seen = losses.lookup_depth(depth, view_points, camera.fx, camera.fy, camera.cx, camera.cy)
    return seen - view_points[:, 2]


@dataclass(frozen=True)
class VisibleGaussians:
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
    return losses.opacity_entropy(seen.gaussians.opacities, seen.n_visible, counted=seen.visible)


def _depth_normals(strip: ImageStrip) -> Tensor:
    maps = strip.maps
    camera = strip.camera
    shown = strip.maps.shown
    counted = strip.counted
    return losses.fused_depth_normal_consistency(
        maps.depth,
        maps.normal_xy,
        camera.fx,
        camera.fy,
        camera.cx,
        camera.cy - shown.start,
        rows=maps.counted,
        total=_n_counted(strip),
        counted=None if counted is None else counted[shown.start : shown.stop],
    )


def _n_counted(strip: ImageStrip) -> int | Tensor:
    if strip.counted is None:
        return strip.maps.height * strip.camera.width
    return strip.counted.sum().clamp_min(1)


def _density(chunk: SampleChunk) -> Tensor:
    found = chunk.fields.density, chunk.fields.plane_distance, chunk.fields.beta
    return losses.density_estimation_loss(*found, chunk.total)


def _sdf(chunk: SampleChunk) -> Tensor:
    sdf = sdf_from_density(chunk.fields.density, chunk.fields.beta)
    view_points = chunk.axes.to_view(chunk.fields.points)
    in_front = view_points[:, 2].detach() > MIN_VIEW_Z
    total = chunk.total_in_front
    total = in_front.sum().clamp_min(1) if total is None else total
    gap = depth_gap(chunk.depth, view_points, chunk.axes.camera)
    return losses.sdf_estimation_loss(sdf, gap, chunk.extent, total, in_front)


def _normal(chunk: SampleChunk) -> Tensor:
    return losses.better_normal_loss(chunk.fields.normal_error, chunk.total)


def multiview_terms(config: MultiviewConfig, extent: float) -> tuple[LossTerm, ...]:
    """Every term of the mode that has a weight.

    ``"model"`` terms are given :class:`VisibleGaussians`, those of images find a
    :class:`SurfaceView` beside the strip.
    """

    def flatten(seen: VisibleGaussians) -> Tensor:
        return losses.flatness_loss(seen.gaussians.scales, extent, seen.visible)

    weight = config.plane_normal_factor
    factors = config.view_factors
    views = partial(_view_errors, factors=factors)
    terms = (
        COLOR,
        LossTerm("plane_normal", weight, "image", _normals, maps=(PLANE,), halo=1),
        LossTerm("views", float(any(factors)), "image", views, maps=(PLANE,)),
        LossTerm("flatten", config.flatten_factor, "model", flatten),
    )
    return tuple(term for term in terms if term.weight > 0)


def _normals(strip: ImageStrip) -> Tensor:
    maps = strip.maps
    edges = strip.beside.edges
    n = _n_counted(strip)
    return NormalErrors.apply(maps.plane, strip.camera, maps.shown.start, edges, maps.counted, n)


def _view_errors(strip: ImageStrip, factors: tuple[float, float]) -> Tensor:
    """The strip's share of a mean over all compared pixels."""
    maps = strip.maps
    comparison = strip.beside.comparison
    if comparison is None or not comparison.pixels.shape[0]:
        return maps.plane.sum() * 0
    pixels = comparison.pixels
    places = comparison.places
    if maps.share < 1:
        top = maps.shown.start + maps.counted.start
        here = (pixels[:, 1] >= top) & (pixels[:, 1] < maps.shown.start + maps.counted.stop)
        pixels = pixels[here]
        places = places[here] - maps.shown.start * strip.camera.width
    planes = PlanesAt.apply(maps.plane, places)
    errors = view_errors(comparison, planes, pixels, *factors)
    return errors.sum() / comparison.pixels.shape[0]
