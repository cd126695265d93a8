# SPDX-License-Identifier: Apache-2.0
"""Differentiable tile rasterizer for 3D Gaussians."""

from gaussian_splatting.rasterization.projection import ChannelLayout, Projection, project
from gaussian_splatting.rasterization.rasterizers import (
    WARP,
    BlendedRows,
    Rasterizer,
    Rows,
    SplatGradients,
    TileLists,
    WarpRasterizer,
    backpropagate_rows,
    blend,
    blend_rows,
    build_tile_lists,
)
from gaussian_splatting.rasterization.render import (
    RenderOutput,
    channel_background,
    complete_normals,
    plain_background,
    rasterize,
    render_view,
)

__all__ = [
    "WARP",
    "BlendedRows",
    "ChannelLayout",
    "Projection",
    "Rasterizer",
    "RenderOutput",
    "Rows",
    "SplatGradients",
    "TileLists",
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
    "WarpRasterizer",
]
