# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401  these are the names that other packages use
"""Differentiable tile rasterizer for 3D Gaussians."""

from gaussian_splatting.rasterization.projection import Projection, project
from gaussian_splatting.rasterization.rasterizers import (
    WARP,
    Rasterizer,
    Rows,
    SplatGradients,
    TileLists,
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
