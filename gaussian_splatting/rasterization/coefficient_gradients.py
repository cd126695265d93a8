# SPDX-License-Identifier: Apache-2.0
"""Gradients of spherical harmonics' coefficients, formed from the factors that a view left."""

from __future__ import annotations

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.core.color_gradients import ColorGradient
from gaussian_splatting.rasterization.projection_adjoint import SPREAD_COLORS
from gaussian_splatting.rasterization.projection_kernels import vec3bf
from sugar_utils.warp_launch import as_array, launch

MIN_ITEMS = 2048  # Gaussians of a range on the CPU


def coefficient_gradients(gradient: ColorGradient, rows: slice, values: Tensor) -> Tensor:
    """Form the gradients of bands 1 and up of some Gaussians.

    Args:
        rows: Those Gaussians.
        values: Their coefficients, (n, K, 3) float32 or bfloat16.

    Returns:
        What the backward pass of the projection would have written, as ``values``.
    """
    formed = torch.empty_like(values)
    vector = vec3bf if values.dtype == torch.bfloat16 else wp.vec3
    inputs = [
        gradient.camera_record,
        gradient.sh_degree,
        as_array(gradient.means[rows], wp.vec3),
        as_array(gradient.colors[rows], wp.vec3),
        as_array(formed, vector),
    ]
    launch(SPREAD_COLORS[vector], len(values), inputs, min_items=MIN_ITEMS)
    return formed
