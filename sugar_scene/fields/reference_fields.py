# SPDX-License-Identifier: Apache-2.0
"""Density and signed distance fields of Gaussians at random points: the readable reference.

Letters: N Gaussians, K neighbours, S samples. The formulas are those of SuGaR (Guédon & Lepetit,
CVPR 2024, section 4.1). Everything here is plain differentiable torch of any float type and
materialises (S, K, 3, 3); training uses :func:`.field_kernels.evaluate_fields`, which computes the
same in O(S + N) memory and is tested against this module.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sugar_scene.geometry import inverse_square_roots, smallest_axis_normals, smallest_scales
from sugar_utils.quaternions import rotation_matrices

SAMPLE_SPREAD = 1.5  # samples are drawn from Gaussians this much wider than those they belong to
MAX_SQ_MAHALANOBIS = 1e8  # squared Mahalanobis distances are clamped to this before the exponential
MIN_NORMAL_SCALE = 1e-6  # world units, in the weights of neighbour normals
MIN_WEIGHT_SUM = 1e-6  # lower clamp of the sum of weights that neighbour normals are averaged with
_MIN_DENSITY = 1e-16
_SINGULAR_SQUARE = 1e-6


class FieldSamples(NamedTuple):
    """Fields at sampled points."""

    points: Tensor  # where the fields are evaluated, (S, 3) world units
    density: Tensor  # sum of the opacities of the neighbours at the point; may exceed 1, (S,)
    beta: Tensor  # mean of the smallest scales of the neighbours, (S,) world units
    # Signed distance to the tangent plane of the sample's Gaussian, (S,) world units.
    plane_distance: Tensor
    # Squared distance of that Gaussian's normal to the weighted mean normal of its neighbours, (S,)
    normal_error: Tensor


def sample_points(
    means: Tensor, quats: Tensor, scales: Tensor, indices: Tensor, noise: Tensor
) -> Tensor:
    """Points drawn from Gaussians: x = mean + R (1.5 s * noise), differentiable. (S, 3)"""
    local = SAMPLE_SPREAD * scales[indices] * noise
    return means[indices] + (rotation_matrices(quats[indices]) @ local[..., None]).squeeze(-1)


def neighbor_opacities(
    points: Tensor,
    neighbor_rows: Tensor,
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    density_factor: float = 1.0,
) -> Tensor:
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
    points: Tensor,
    neighbor_rows: Tensor,
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    density_factor: float = 1.0,
) -> Tensor:
    """Density at arbitrary points, unclamped: the sum of :func:`neighbor_opacities`. (S,)"""
    return neighbor_opacities(
        points, neighbor_rows, means, quats, scales, opacities, density_factor
    ).sum(dim=-1)


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


def evaluate_fields_reference(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    neighbors: Tensor,
    indices: Tensor,
    noise: Tensor,
    density_factor: float = 1.0,
) -> FieldSamples:
    """Sample points from Gaussians and evaluate all fields that the losses need.

    The neighbours of a sample are those of its Gaussian; they are not searched again. Weights of
    neighbour normals are constants for the gradient, so ``normal_error`` moves quaternions only. A
    neighbour whose normal is exactly orthogonal to that of the sample's Gaussian has no
    orientation and is left out (the sign of 0 is 0), which is finite in value and gradient.

    Args:
        means, scales: (N, 3) world units.
        quats: Unit quaternions, wxyz. (N, 4)
        neighbors: Neighbours of each Gaussian, usually itself first. (N, K) integers
        indices: Gaussian of each sample. (S,) int64
    """
    rows = neighbors[indices].long()  # (S, K)
    normals = smallest_axis_normals(quats, scales)
    smallest = smallest_scales(scales)
    points = sample_points(means, quats, scales, indices, noise)
    opacity = neighbor_opacities(points, rows, means, quats, scales, opacities, density_factor)
    own_normal = normals[indices]

    neighbor_normals = normals[rows]  # (S, K, 3)
    sign = (neighbor_normals * own_normal[:, None]).sum(dim=-1).sign().detach()
    offset = points[:, None] - means[rows]
    distance = (offset * neighbor_normals).sum(dim=-1).abs() * sign.abs()
    weight = opacity * distance / smallest[rows].clamp_min(MIN_NORMAL_SCALE).square()
    weight = (weight / weight.sum(dim=-1, keepdim=True).clamp_min(MIN_WEIGHT_SUM)).detach()
    mean_normal = ((weight * sign)[..., None] * neighbor_normals).sum(dim=1)
    return FieldSamples(
        points=points,
        density=opacity.sum(dim=-1),
        beta=smallest[rows].mean(dim=-1),
        plane_distance=((points - means[indices]) * own_normal).sum(dim=-1),
        normal_error=(own_normal - mean_normal).square().sum(dim=-1),
    )
