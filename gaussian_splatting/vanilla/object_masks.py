# SPDX-License-Identifier: Apache-2.0
"""Masks of an object from a model of the whole scene, where the given ones are imprecise or
missing.

The share of a Gaussian that lies inside the given masks, weighted by the blending weights of all
views,

    s_g = sum_views sum_pixels w_gp m_p / sum_views sum_pixels w_gp,

averages errors of outlines that differ between views. A pixel belongs to the object where the
blended share is at least ``OBJECT_SHARE``.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import WARP, Rasterizer, rasterize

OBJECT_SHARE = 0.4
"""Blended share of the object from which a pixel belongs to it. Less than a half, because pixels
that a mask lacks cost more than those that it has too many."""

_MIN_WEIGHT = 1e-6


def object_shares(
    gaussians: Gaussians, views: Iterable[tuple[Camera, Tensor]], rasterizer: Rasterizer = WARP
) -> Tensor:
    """Share of each Gaussian that lies inside of the masks; 0 where no view shows it. (N,)

    Args:
        views: Cameras, and masks of their size. (H, W) in [0, 1] each
    """
    sums = torch.zeros(len(gaussians.means), 2, device=gaussians.means.device)
    for camera, mask in views:
        # The gradient of a blended feature is the sum of the blending weights over the pixels,
        # weighted by what is propagated back.
        features = torch.zeros_like(sums, requires_grad=True)
        blended = rasterize(
            gaussians, camera, rgb=False, features=features, rasterizer=rasterizer
        ).features
        inside = mask.to(sums)
        weights = torch.stack([inside, torch.ones_like(inside)], dim=-1)
        sums += torch.autograd.grad(blended, features, weights)[0]
    return sums[:, 0] / sums[:, 1].clamp_min(_MIN_WEIGHT)


@torch.no_grad()
def render_mask(
    gaussians: Gaussians,
    shares: Tensor,
    camera: Camera,
    size: tuple[int, int] | None = None,
    rasterizer: Rasterizer = WARP,
) -> np.ndarray:
    """The mask of the object in a view, 255 where it is. (height, width) uint8

    Args:
        shares: As of :func:`object_shares`. (N,)
        size: Width and height in pixels; those of the camera if None.
    """
    blended = rasterize(
        gaussians, camera, rgb=False, features=shares[:, None], rasterizer=rasterizer
    ).features[..., 0]
    width, height = size or (camera.width, camera.height)
    image = functional.interpolate(
        blended[None, None], (height, width), mode="bilinear", align_corners=False
    )
    return ((image[0, 0] >= OBJECT_SHARE).to(torch.uint8) * 255).cpu().numpy()
