# SPDX-License-Identifier: Apache-2.0
"""Differentiable tile rasterizer for 3D Gaussians."""

from gaussian_splatting.rasterization.render import RenderOutput, complete_normals, rasterize

__all__ = ["RenderOutput", "complete_normals", "rasterize"]
