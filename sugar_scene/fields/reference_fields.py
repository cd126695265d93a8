# SPDX-License-Identifier: Apache-2.0
"""Density and signed distance of Gaussians at points, by the formulas of SuGaR in plain torch.

N Gaussians, K neighbours, S samples (Guédon & Lepetit, CVPR 2024, section 4.1). Training uses
:func:`.field_kernels.evaluate_fields`, which needs no (S, K) memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sugar_scene.geometry import inverse_square_roots
from sugar_utils.quaternions import rotation_matrices

SAMPLE_SPREAD = 1.5  # samples are drawn from Gaussians this much wider than those they belong to
MAX_SQ_MAHALANOBIS = 1e8  # squared Mahalanobis distances are clamped to this before the exponential
MIN_NORMAL_SCALE = 1e-6  # world units, in the weights of neighbour normals
MIN_WEIGHT_SUM = 1e-6  # lower clamp of the sum of weights that neighbour normals are averaged with
_MIN_DENSITY = 1e-16
_SINGULAR_SQUARE = 1e-6


class FieldSamples(NamedTuple):
    points: Tensor  # where the fields are evaluated, (S, 3) world units
    density: Tensor  # sum of the opacities of the neighbours at the point; may exceed 1, (S,)
    beta: Tensor  # mean of the smallest scales of the neighbours, (S,) world units
    plane_distance: Tensor  # signed, to the tangent plane of the sample's Gaussian, (S,)
    normal_error: Tensor  # square of that normal less the weighted mean of the neighbours', (S,)


def sample_points(
    means: Tensor, quats: Tensor, scales: Tensor, indices: Tensor, noise: Tensor
) -> Tensor:
    """Points drawn from Gaussians: x = mean + R (1.5 s * noise), differentiable. (S, 3)"""
    local = SAMPLE_SPREAD * scales[indices] * noise
    return means[indices] + (rotation_matrices(quats[indices]) @ local[..., None]).squeeze(-1)


def neighbor_opacities(
    points: Tensor, neighbor_rows: Tensor, means: Tensor, quats: Tensor, scales: Tensor,
    opacities: Tensor, density_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Opacity o_j(x) = f a_j exp(-m / 2) of neighbours, m the squared Mahalanobis distance. (S, K)

    Args:
        neighbor_rows: Gaussians to evaluate at each point. (S, K)
        quats: Unit quaternions, wxyz. (N, 4)
    """
    rows = neighbor_rows.long()
    offset = points[:, None] - means[rows]  # (S, K, 3)
    local = (inverse_square_roots(quats, scales).transpose(1, 2)[rows] @ offset[..., None])[..., 0]
    square = (local * local).sum(dim=-1).clamp(0.0, MAX_SQ_MAHALANOBIS)
    return density_factor * opacities[rows] * torch.exp(-0.5 * square)


def density_at(
    points: Tensor, neighbor_rows: Tensor, means: Tensor, quats: Tensor, scales: Tensor,
    opacities: Tensor, density_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Density at arbitrary points, unclamped: the sum of :func:`neighbor_opacities`. (S,)"""
    gaussians = means, quats, scales, opacities
    return neighbor_opacities(points, neighbor_rows, *gaussians, density_factor).sum(dim=-1)


def sdf_from_density(density: Tensor, beta: Tensor, threshold: float = 1.0) -> Tensor:
    """Distance to the level set at which the density equals ``threshold``. (S,) world units

    sdf = beta (sqrt(-2 ln d) - sqrt(-2 ln threshold)), with densities of 1 and more set to 1 (their
    gradient divided by the density) and densities below 1e-16 to 1e-16.

    The square root has an infinite slope where the density reaches 1. Values are exact there; the
    gradient is left out for -2 ln d < 1e-6, densities within a few float32 steps of 1 and above,
    where it would be rounding noise over nearly zero.
    """
    saturated = density / (density.detach() + 1e-12)
    clamped = torch.where(density < 1, density, saturated).clamp_min(_MIN_DENSITY)
    square = (-2 * clamped.log()).clamp_min(0)
    regular = square > _SINGULAR_SQUARE
    root = torch.where(regular, torch.where(regular, square, 1.0).sqrt(), square.detach().sqrt())
    return beta * (root - math.sqrt(-2 * math.log(min(threshold, 1.0))))
