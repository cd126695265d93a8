# SPDX-License-Identifier: Apache-2.0
"""Depth of the planes that Gaussians blend to.

Every Gaussian is a plane: n . X = d in camera axes, n its normal towards the camera. Blending
gives N = sum w n and D = sum w d, and the point of a pixel's ray r = K^-1 p~ on the blended plane
is at z = D / (N . r) along the view axis. The weights' sum cancels, so the half transparent edge of
an object is not drawn towards the camera, as it is in a blended depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.pixels import pixel_rays

MIN_FACING = 0.05
"""Least -N . r of a pixel with a depth: less is nearly transparent, or seen at a grazing angle."""

REACH = 10.0
"""Gaussians farther from a camera, in camera extents, are sky and background that no two views see
differently: they have no planes."""

MIN_DEPTH = 1e-4
"""Points nearer to the camera than this have no pixel. World units."""


def plane_depth(plane: Tensor, rays: Tensor) -> tuple[Tensor, Tensor]:
    """Depth at which rays meet blended planes.

    Args:
        plane: Blended N and D. (..., 4)
        rays: Points of the rays at depth 1. (..., 3)

    Returns:
        Depth along the view axis, 1 where it is undefined, in world units; and where it is known.
        (...,) each. The gradient reaches the planes, where there is a depth.
    """
    facing = (plane[..., :3] * rays).sum(dim=-1)
    distance = plane[..., 3]
    known = (facing < -MIN_FACING) & (distance < MIN_DEPTH * facing)
    return torch.where(known, distance, -1.0) / torch.where(known, facing, -1.0), known


def plane_depth_map(plane: Tensor, camera: Camera) -> Tensor:
    """The same of a whole image, 0 where it is undefined. (H, W, 4) -> (H, W) world units"""
    rays = pixel_rays(camera, dtype=plane.dtype, device=plane.device)
    depth, known = plane_depth(plane, rays)
    return torch.where(known, depth, 0.0)
