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
    """See :func:`.fused_depth_normal_consistency`; ``normal`` are unit normals. (H, W, 3)"""
    error = 1 - (normal * normals_from_depth(depth, fx, fy, cx, cy)).sum(dim=-1)
    if counted is not None:
        error = torch.where(counted, error, 0.0)
    error = error if rows is None else error[rows]
    return error.sum() / (error.numel() if total is None else total)
