# SPDX-License-Identifier: Apache-2.0
"""Rendering as all stages do it for evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import WARP, Rasterizer, RenderOutput, rasterize
from sugar_utils.device import constants


def plain_background(white: bool, device: torch.device) -> Tensor:
    """White or black, not to be changed. (3,)"""
    return constants((1.0 if white else 0.0,) * 3, device)


@torch.no_grad()
def render_view(
    gaussians: Gaussians,
    camera: Camera,
    *,
    white: bool,
    geometry: bool,
    sh_degree: int = 3,
    rasterizer: Rasterizer = WARP,
) -> RenderOutput:
    """Colour on a plain background, with depth and normals where ``geometry`` asks for them."""
    return rasterize(
        gaussians,
        camera,
        plain_background(white, gaussians.means.device),
        depth=geometry,
        normal=geometry,
        sh_degree=sh_degree,
        rasterizer=rasterizer,
    )
