# SPDX-License-Identifier: Apache-2.0
"""Shapes of Gaussians (SuGaR, Guédon & Lepetit, CVPR 2024, sections 4.1 and 4.2).

A Gaussian close to a surface is flat, so its shortest axis stands for the surface normal. A diamond
in the plane of the two larger axes, with its corners on them, is what rays are cast against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sugar_utils.quaternions import rotation_matrices

MIN_SCALE = 1e-8  # scales are clamped to this before they are inverted. World units.


def smallest_axis(scales: Tensor) -> Tensor:
    """Index of the smallest scale, the first on ties. (N, 3) -> (N,) int64"""
    return scales.argmin(dim=-1)


def smallest_scales(scales: Tensor) -> Tensor:
    """The smallest scale of each Gaussian, with its gradient on that axis. (N, 3) -> (N,)"""
    return scales.gather(-1, smallest_axis(scales)[..., None]).squeeze(-1)


def covariances(quats: Tensor, scales: Tensor) -> Tensor:
    """Covariance matrices R diag(s^2) R^T. (N, 4), (N, 3) -> (N, 3, 3) world units squared"""
    half = rotation_matrices(quats) * scales[:, None, :]
    return half @ half.transpose(1, 2)


def inverse_square_roots(quats: Tensor, scales: Tensor) -> Tensor:
    """Matrices A = R diag(1 / s), so that the inverse covariance is A A^T. (N, 3, 3)

    The Mahalanobis distance of x is the length of A^T (x - mean); s is at least ``MIN_SCALE``.
    """
    return rotation_matrices(quats) / scales.clamp_min(MIN_SCALE)[:, None, :]


def std_along_view(means: Tensor, quats: Tensor, scales: Tensor, camera_center: Tensor) -> Tensor:
    """Standard deviation along the line of sight: |s * R^T u|, u towards the camera. (N,)"""
    sight = torch.nn.functional.normalize(camera_center - means, dim=-1)
    local = (rotation_matrices(quats).transpose(1, 2) @ sight[..., None]).squeeze(-1)
    return (scales * local).norm(dim=-1)


def diamond_vertices(means: Tensor, quats: Tensor, scales: Tensor, extent: float = 2.0) -> Tensor:
    """Corners of the diamonds. (N, 4, 3) world units

    With the axes renumbered so that the shortest comes first: -axis 1, axis 2, axis 1, -axis 2.
    """
    axes = (smallest_axis(scales)[:, None] + torch.arange(1, 3, device=scales.device)) % 3
    half = rotation_matrices(quats) * (extent * scales)[:, None, :]
    first, second = half.gather(-1, axes[:, None, :].expand(-1, 3, -1)).unbind(-1)
    return means[:, None] + torch.stack((-first, second, first, -second), dim=1)


def diamond_faces(n_gaussians: int, device: torch.device | str = "cpu") -> Tensor:
    """Two triangles per diamond: face ``f`` belongs to Gaussian ``f // 2``. (2 N, 3) int64"""
    quad = torch.tensor([[0, 2, 1], [0, 3, 2]], device=device)
    corners = 4 * torch.arange(n_gaussians, device=device)
    return (corners[:, None, None] + quad).reshape(-1, 3)
