# SPDX-License-Identifier: Apache-2.0
"""Depth where half of the light is left: of the first Gaussian that leaves less, no mean of many.

A mean of the depths that a pixel blends lies between surfaces at their edges; the median lies on
one of them. It is for looking at: there is no gradient.
"""

from __future__ import annotations

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization.projection import project
from gaussian_splatting.rasterization.projection_kernels import SPLAT_HEADER
from gaussian_splatting.rasterization.tile_lists import build_tile_lists
from gaussian_splatting.rasterization.view import ALPHA_MAX, ALPHA_MIN, TILE
from sugar_utils.warp_launch import launch

wp.set_module_options({"enable_backward": False})

_DEPTH = wp.constant(SPLAT_HEADER)
_SIDE = wp.constant(TILE)
_MOST = wp.constant(ALPHA_MAX)
_LEAST = wp.constant(ALPHA_MIN)
_MIN_PIXELS = 2_048


@wp.kernel
def find_medians(
    first: int,
    width: int,
    across: int,
    offsets: wp.array(dtype=int),
    ids: wp.array(dtype=int),
    splats: wp.array2d(dtype=float),
    depths: wp.array(dtype=float),
):
    """One pixel; its depth comes in as infinite."""
    pixel = first + wp.tid()
    row = pixel / width
    column = pixel % width
    tile = (row / _SIDE) * across + column / _SIDE
    light = float(1.0)
    for k in range(offsets[tile], offsets[tile + 1]):
        i = ids[k]
        dx = float(column) - splats[i, 0]
        dy = float(row) - splats[i, 1]
        sigma = 0.5 * (splats[i, 2] * dx * dx + splats[i, 4] * dy * dy) + splats[i, 3] * dx * dy
        if sigma >= 0.0 and sigma <= splats[i, 6]:
            alpha = wp.min(splats[i, 5] * wp.exp(-sigma), _MOST)
            if alpha >= _LEAST:
                light *= 1.0 - alpha
                if light < 0.5:
                    depths[pixel] = splats[i, _DEPTH]
                    break


@torch.no_grad()
def median_depth(gaussians: Gaussians, camera: Camera) -> Tensor:
    """Depth along the view axis of the Gaussian that takes a pixel's light below one half.

    Args:
        gaussians: N activated Gaussians with unit quaternions.
        camera: From where.

    Returns:
        Infinite where more light than that goes through. (H, W) world units
    """
    found = project(gaussians, camera, rgb=False, depth=True)
    tiles = build_tile_lists(found)
    depths = torch.full((camera.height, camera.width), torch.inf, device=found.splats.device)
    launch(
        find_medians,
        depths.numel(),
        [camera.width, tiles.across, tiles.offsets, tiles.ids, found.splats, depths.view(-1)],
        device=depths.device,
        min_items=_MIN_PIXELS,
    )
    return depths
