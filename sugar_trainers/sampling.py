# SPDX-License-Identifier: Apache-2.0
"""Points drawn in Gaussians, and what loss terms are given at them, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.gradients import backpropagate_weighted
from gaussian_splatting.engine.loss_terms import LossTerm
from sugar_scene.field_kernels import evaluate_fields
from sugar_scene.geometry import FieldSamples, sample_points, std_along_view
from sugar_trainers import losses
from sugar_trainers.losses import MIN_VIEW_Z
from sugar_trainers.stage_config import CoarseConfig
from sugar_utils.device import upload


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
    """One chunk of the samples of a view, as a term gets it."""

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


class Samples(NamedTuple):
    """Points drawn in Gaussians."""

    indices: Tensor  # Gaussian of each sample, sorted. (S,)
    noise: Tensor  # standard normal draws. (S, 3)


class SampledView(NamedTuple):
    """A view whose Gaussians are sampled."""

    camera: Camera
    depth: Tensor | None  # leaf with the rendered depth, if a term reads it. (H, W) world units
    n_candidates: int | None  # number of Gaussians that may be sampled, if the host knows it


class SurfaceSampler:
    """Evaluates terms at samples, chunk by chunk."""

    def __init__(self, config: CoarseConfig, extent: float) -> None:
        self._config = config
        self._extent = extent

    def backward(
        self,
        terms: Sequence[LossTerm],
        leaves: Gaussians,
        neighbors: Tensor,
        samples: Samples,
        view: SampledView,
        chunk_size: int,
    ) -> dict[str, Tensor]:
        """Evaluate terms chunk by chunk, adding weighted gradients to the leaves.

        Every chunk's loss is divided by the number of all samples, so the sum over chunks is the
        mean over all. The terms share the fields, so they are backpropagated together.

        Args:
            neighbors: (N, K) int32

        Returns:
            Unweighted values by name; none without samples.
        """
        total = samples.indices.numel()
        if total == 0:
            return {}
        axes = CameraAxes(view.camera, leaves.means.device)
        in_front = None
        if view.depth is not None and total > chunk_size:
            in_front = _count_in_front(leaves, samples, axes, chunk_size)
        values = {term.name: leaves.means.new_zeros(()) for term in terms}
        for indices, noise in _chunks(samples, chunk_size):
            fields = evaluate_fields(
                leaves.means,
                leaves.quats,
                leaves.scales,
                leaves.opacities,
                neighbors,
                indices,
                noise,
                self._config.density_factor,
                n_owners=view.n_candidates,
            )
            chunk = SampleChunk(fields, total, in_front, axes, view.depth, self._extent)
            shares = [_share(term, chunk) for term in terms]
            backpropagate_weighted(shares, [term.weight for term in terms])
            for term, share in zip(terms, shares, strict=True):
                values[term.name] += share.detach()
        return values


def _share(term: LossTerm, chunk: SampleChunk) -> Tensor:
    share = term.value(chunk)
    if share is None:
        raise ValueError(f"loss term {term.name}: a term at samples has a value in every chunk")
    return share


def _chunks(samples: Samples, chunk_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices and noise of the samples, chunk by chunk."""
    indices = samples.indices.split(chunk_size)
    noise = samples.noise.split(chunk_size)
    return zip(indices, noise, strict=True)


@torch.no_grad()
def _count_in_front(
    gaussians: Gaussians, samples: Samples, axes: CameraAxes, chunk_size: int
) -> Tensor:
    """Samples that have a pixel: the divisor of the sdf term, needed before the chunks. ()"""
    count = torch.zeros((), dtype=torch.int64, device=samples.indices.device)
    for indices, noise in _chunks(samples, chunk_size):
        points = sample_points(gaussians.means, gaussians.quats, gaussians.scales, indices, noise)
        count += (axes.to_view(points)[:, 2] > MIN_VIEW_Z).sum()
    return count.clamp_min(1)


def depth_gap(depth: Tensor, view_points: Tensor, camera: Camera) -> Tensor:
    """Rendered depth where points project, minus their own depth. (S,) world units"""
    rendered = losses.lookup_depth(depth, view_points, camera.fx, camera.fy, camera.cx, camera.cy)
    return rendered - view_points[:, 2]
