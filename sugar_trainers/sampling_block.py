# SPDX-License-Identifier: Apache-2.0
"""The sampling block: points drawn in Gaussians, and the terms that compare fields at them."""

from __future__ import annotations

import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from sugar_scene.fields.field_kernels import evaluate_fields
from sugar_scene.fields.reference_fields import FieldSamples, sample_points, sdf_from_density
from sugar_scene.geometry import std_along_view
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.losses import (
    MIN_VIEW_Z,
    better_normal_loss,
    density_estimation_loss,
    lookup_depth,
    near_surface_mask,
    sdf_estimation_loss,
)

SAMPLED_TERMS = ("density", "sdf", "normal")
"""Names of all terms that are evaluated at samples."""


def sampling_mask(
    gaussians: Gaussians, camera: Camera, visible: Tensor, depth: Tensor | None
) -> Tensor:
    """Gaussians to sample: the visible ones, in sdf mode those near the depth map.

    Args:
        gaussians: N activated Gaussians.
        camera: The view.
        visible: Gaussians that the view shows. (N,) bool
        depth: Rendered depth in sdf mode, else None. (H, W) world units

    Returns:
        (N,) bool
    """
    if depth is None:
        return visible
    with torch.no_grad():
        view_means = to_view(gaussians.means, camera)
        center = gaussians.means.new_tensor(camera.center)
        std = std_along_view(gaussians.means, gaussians.quats, gaussians.scales, center)
        return near_surface_mask(depth_gap(depth, view_means, camera), std, visible)


class SurfaceSampler:
    """Backpropagates what is found at samples.

    Args:
        config: Settings of the coarse stage.
        extent: Camera extent in world units.
    """

    def __init__(self, config: CoarseConfig, extent: float) -> None:
        self._config = config
        self._extent = extent

    def backward(
        self,
        leaves: Gaussians,
        neighbors: Tensor,
        indices: Tensor,
        noise: Tensor,
        camera: Camera,
        depth: Tensor | None,
    ) -> dict[str, Tensor]:
        """Evaluate the sampling terms chunk by chunk, adding weighted gradients to the leaves.

        Every chunk's loss is divided by the number of all samples, so the sum over chunks is the
        mean over all.

        Args:
            leaves: Activated Gaussians that collect gradients.
            neighbors: Neighbours of each Gaussian. (N, K) int32
            indices: Gaussian of each sample, sorted. (S,)
            noise: Standard normal draws. (S, 3)
            camera: The view.
            depth: Leaf with the rendered depth in sdf mode, else None. (H, W)

        Returns:
            Unweighted terms: ``"density"`` or ``"sdf"``, and ``"normal"``.
        """
        config, total = self._config, indices.numel()
        name = "sdf" if config.uses_sdf else "density"
        n_in_front = self._count_in_front(leaves, indices, noise, camera) if config.uses_sdf else 0
        sums = {name: leaves.means.new_zeros(()), "normal": leaves.means.new_zeros(())}
        for start in range(0, total, config.sample_chunk):
            chunk = slice(start, start + config.sample_chunk)
            fields = evaluate_fields(
                leaves.means,
                leaves.quats,
                leaves.scales,
                leaves.opacities,
                neighbors,
                indices[chunk],
                noise[chunk],
                config.density_factor,
            )
            if depth is None:
                estimation = density_estimation_loss(
                    fields.density, fields.plane_distance, fields.beta, total
                )
            else:
                estimation = self._sdf_term(fields, camera, depth, n_in_front)
            normal = better_normal_loss(fields.normal_error, total)
            (config.estimation_factor * estimation + config.normal_factor * normal).backward()
            sums[name] += estimation.detach()
            sums["normal"] += normal.detach()
        return sums

    def _sdf_term(
        self, fields: FieldSamples, camera: Camera, depth: Tensor, n_in_front: int
    ) -> Tensor:
        sdf = sdf_from_density(fields.density, fields.beta)
        view_points = to_view(fields.points, camera)
        in_front = view_points[:, 2].detach() > MIN_VIEW_Z
        gap = depth_gap(depth, view_points, camera)
        return sdf_estimation_loss(sdf[in_front], gap[in_front], self._extent, n_in_front)

    def _count_in_front(
        self, gaussians: Gaussians, indices: Tensor, noise: Tensor, camera: Camera
    ) -> int:
        """Samples that have a pixel: the divisor of the sdf term, needed before the chunks."""
        count = 0
        with torch.no_grad():
            for start in range(0, indices.numel(), self._config.sample_chunk):
                chunk = slice(start, start + self._config.sample_chunk)
                points = sample_points(
                    gaussians.means, gaussians.quats, gaussians.scales,
                    indices[chunk], noise[chunk],
                )  # fmt: skip
                count += int((to_view(points, camera)[:, 2] > MIN_VIEW_Z).sum())
        return count


def to_view(points: Tensor, camera: Camera) -> Tensor:
    """World to camera axes. (S, 3) -> (S, 3) world units"""
    rotation = points.new_tensor(camera.rotation)
    return points @ rotation.T + points.new_tensor(camera.translation)


def depth_gap(depth: Tensor, view_points: Tensor, camera: Camera) -> Tensor:
    """Rendered depth where points project, minus their own depth. (S,) world units"""
    seen = lookup_depth(depth, view_points, camera.fx, camera.fy, camera.cx, camera.cy)
    return seen - view_points[:, 2]
