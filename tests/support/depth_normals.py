# SPDX-License-Identifier: Apache-2.0
"""Depth-normal consistency in a few lines of torch, the twin of the fused term."""

from __future__ import annotations

import torch
from torch import Tensor

from sugar_trainers.losses import normals_from_depth


def depth_normal_consistency(
    depth: Tensor,
    normal: Tensor,
    fx: float,
    fy: float,
    cx: float,
    cy: float,
    *,
    rows: slice | None = None,
    total: int | Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Mean of 1 - N . n_D over all pixels, n_D the normals of the depth map.

    The border and empty pixels count with the constant 1.

    Args:
        depth: (H, W) world units
        normal: Unit normals in camera axes, towards the camera. (H, W, 3)
        fx, fy, cx, cy: In pixels, from the top left edge of this map.
        rows: Rows that count; strips continue one row beyond them as a halo.
        total: Divisor; the number of pixels in those rows when None.
        counted: Pixels that count; None for all. (H, W) bool
    """
    error = 1 - (normal * normals_from_depth(depth, fx, fy, cx, cy)).sum(dim=-1)
    if counted is not None:
        error = torch.where(counted, error, 0.0)
    error = error if rows is None else error[rows]
    return error.sum() / (error.numel() if total is None else total)
