# SPDX-License-Identifier: Apache-2.0
"""How much each Gaussian adds to images: sums of its blending weights over pixels.

They are the gradient of a blended feature with respect to the Gaussian's value of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization.rasterizers import WARP, Rasterizer
from gaussian_splatting.rasterization.render import rasterize

_MIN_WEIGHT = 1e-6


def weight_sums(
    gaussians: Gaussians, camera: Camera, pixels: Tensor, rasterizer: Rasterizer = WARP
) -> Tensor:
    """Sums over a view of blending weight times value. pixels: (H, W, F). (N, F)"""
    features = pixels.new_zeros(len(gaussians), pixels.shape[2], requires_grad=True)
    blended = rasterize(gaussians, camera, rgb=False, features=features, rasterizer=rasterizer)
    return torch.autograd.grad(blended.features, features, pixels)[0]


def masked_shares(
    gaussians: Gaussians, views: Iterable[tuple[Camera, Tensor]], rasterizer: Rasterizer = WARP
) -> Tensor:
    """Share of each Gaussian's blending weights inside masks; 0 where no view shows it. (N,)

    Args:
        views: Cameras, and masks of their size. (H, W) in [0, 1] each
    """
    sums = torch.zeros(len(gaussians), 2, device=gaussians.means.device)
    for camera, mask in views:
        inside = mask.to(sums)
        pixels = torch.stack([inside, torch.ones_like(inside)], dim=-1)
        sums += weight_sums(gaussians, camera, pixels, rasterizer)
    return sums[:, 0] / sums[:, 1].clamp_min(_MIN_WEIGHT)
