# SPDX-License-Identifier: Apache-2.0
"""Differentiable tile rasterizer for 3D Gaussians."""

from gaussian_splatting.rasterization.projection import ChannelLayout, Projection, project
from gaussian_splatting.rasterization.rasterizers import (
    WARP,
    BlendedRows,
    Rasterizer,
    Rows,
    SplatGradients,
    backpropagate_rows,
    blend,
    blend_rows,
)
from gaussian_splatting.rasterization.render import (
    RenderOutput,
    channel_background,
    complete_normals,
    plain_background,
    rasterize,
    render_view,
)
from gaussian_splatting.rasterization.tile_lists import TileLists, build_tile_lists

__all__ = [
    "BlendedRows",
    "ChannelLayout",
    "Projection",
    "Rasterizer",
    "RenderOutput",
    "Rows",
    "SplatGradients",
    "TileLists",
    "WARP",
    "backpropagate_rows",
    "blend",
    "blend_rows",
    "build_tile_lists",
    "channel_background",
    "complete_normals",
    "plain_background",
    "project",
    "rasterize",
    "render_view",
]
