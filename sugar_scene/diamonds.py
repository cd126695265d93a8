# SPDX-License-Identifier: Apache-2.0
"""Diamonds: one flat rhombus per Gaussian, a triangle soup that rays can be cast against.

A diamond lies in the plane of the two larger axes of its Gaussian and has its corners on them.
Mesh extraction looks up the depth of the soup to know where to search the level set
(SuGaR, Guédon & Lepetit, CVPR 2024, section 4.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sugar_scene.geometry import smallest_axis
from sugar_utils.quaternions import rotation_matrices


def diamond_vertices(means: Tensor, quats: Tensor, scales: Tensor, extent: float = 2.0) -> Tensor:
    """Corners of the diamonds.

    With the axes renumbered cyclically so that the shortest comes first, the corners lie on
    axis 1 (minus), axis 2 (plus), axis 1 (plus), axis 2 (minus), in this order.

    Args:
        means: (N, 3) world units.
        quats: Unit quaternions, wxyz. (N, 4)
        scales: (N, 3) world units.
        extent: Half diagonals in standard deviations; extraction uses 2.

    Returns:
        (N, 4, 3) world units.
    """
    axes = (smallest_axis(scales)[:, None] + torch.arange(1, 3, device=scales.device)) % 3
    half = rotation_matrices(quats) * (extent * scales)[:, None, :]
    first, second = half.gather(-1, axes[:, None, :].expand(-1, 3, -1)).unbind(-1)
    return means[:, None] + torch.stack((-first, second, first, -second), dim=1)


def diamond_faces(n_gaussians: int, device: torch.device | str = "cpu") -> Tensor:
    """Triangles of the soup: two per diamond, face ``f`` belongs to Gaussian ``f // 2``.

    Returns:
        Rows of the flattened vertices, (2 N, 3) int64.
    """
    quad = torch.tensor([[0, 2, 1], [0, 3, 2]], device=device)
    corners = 4 * torch.arange(n_gaussians, device=device)
    return (corners[:, None, None] + quad).reshape(-1, 3)
