# SPDX-License-Identifier: Apache-2.0
"""The sampling block: points drawn in Gaussians, and what the terms see at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.stage import LossTerm
from gaussian_splatting.engine.strips import backpropagate_weighted
from sugar_scene.field_kernels import evaluate_fields
from sugar_scene.geometry import FieldSamples, sample_points, std_along_view
from sugar_trainers.losses import MIN_VIEW_Z, lookup_depth, near_surface_mask
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
    """What a term sees of a chunk of the samples."""

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
    """Gaussians to sample: the visible ones, in sdf mode those near the depth map. (N,) bool

    Args:
        visible: (N,) bool
        depth: In sdf mode, else None. (H, W) world units
    """
    if depth is None:
        return visible
    with torch.no_grad():
        axes = CameraAxes(camera, depth.device)
        std = std_along_view(gaussians.means, gaussians.quats, gaussians.scales, axes.center)
        gap = depth_gap(depth, axes.to_view(gaussians.means), camera)
        return near_surface_mask(gap, std, visible)


class SurfaceSampler:
    def __init__(self, config: CoarseConfig, extent: float) -> None:
        self._config = config
        self._extent = extent

    def backward(
        self, terms: Sequence[LossTerm], leaves: Gaussians, neighbors: Tensor, indices: Tensor,
        noise: Tensor, camera: Camera, depth: Tensor | None, n_candidates: int | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Evaluate terms chunk by chunk, adding weighted gradients to the leaves.

        Every chunk's loss is divided by the number of all samples, so the sum over chunks is the
        mean over all. The terms share the fields, so they are backpropagated together.

        Args:
            neighbors: (N, K) int32
            indices: Gaussian of each sample, sorted. (S,)
            noise: (S, 3)
            depth: Leaf with the rendered depth, if a term reads it. (H, W) world units

        Returns:
            Unweighted values by name; none without samples.
        """
        config, total = self._config, indices.numel()
        if total == 0:
            return {}
        axes = CameraAxes(camera, leaves.means.device)
        in_front = None
        if depth is not None and total > config.sample_chunk:
            in_front = self._count_in_front(leaves, indices, noise, axes)
        sums = {term.name: leaves.means.new_zeros(()) for term in terms}
        for start in range(0, total, config.sample_chunk):
            part = slice(start, start + config.sample_chunk)
            fields = evaluate_fields(
                leaves.means, leaves.quats, leaves.scales, leaves.opacities, neighbors,
                indices[part], noise[part], config.density_factor, n_owners=n_candidates,
            )  # fmt: skip
            chunk = SampleChunk(fields, total, in_front, axes, depth, self._extent)
            values = {term.name: term.value(chunk) for term in terms}
            backpropagate_weighted(list(values.values()), [term.weight for term in terms])
            for name, value in values.items():
                sums[name] += value.detach()
        return sums

    def _count_in_front(
        self, gaussians: Gaussians, indices: Tensor, noise: Tensor, axes: CameraAxes
    ) -> Tensor:
        """Samples that have a pixel: the divisor of the sdf term, needed before the chunks. ()"""
        count = torch.zeros((), dtype=torch.int64, device=indices.device)
        with torch.no_grad():
            for start in range(0, indices.numel(), self._config.sample_chunk):
                chunk = slice(start, start + self._config.sample_chunk)
                points = sample_points(
                    gaussians.means, gaussians.quats, gaussians.scales,
                    indices[chunk], noise[chunk],
                )  # fmt: skip
                count += (axes.to_view(points)[:, 2] > MIN_VIEW_Z).sum()
        return count.clamp_min(1)


def depth_gap(depth: Tensor, view_points: Tensor, camera: Camera) -> Tensor:
    """Rendered depth where points project, minus their own depth. (S,) world units"""
    seen = lookup_depth(depth, view_points, camera.fx, camera.fy, camera.cx, camera.cy)
    return seen - view_points[:, 2]
