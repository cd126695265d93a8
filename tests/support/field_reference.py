# SPDX-License-Identifier: Apache-2.0
"""All fields at random points in plain torch: what the kernels of the fields are compared with."""

from torch import Tensor

from gaussian_splatting.core.cloud import rotation_matrices
from sugar_scene.geometry import (
    MIN_NORMAL_SCALE,
    MIN_WEIGHT_SUM,
    FieldSamples,
    neighbor_opacities,
    sample_points,
    smallest_axis,
    smallest_scales,
)


def smallest_axis_normals(quats: Tensor, scales: Tensor) -> Tensor:
    """Local axes of the smallest scales, of arbitrary sign; quats wxyz get gradients. (N, 3)"""
    axis = smallest_axis(scales)[:, None, None].expand(-1, 3, 1)
    return rotation_matrices(quats).gather(-1, axis).squeeze(-1)


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
    """Fields at samples of Gaussians, (S, K, 3, 3) in memory.

    The neighbours of a sample are those of its Gaussian. Weights of neighbour normals are constants
    for the gradient, so ``normal_error`` moves quaternions only. A neighbour whose normal is
    exactly orthogonal to that of the sample's Gaussian is left out (the sign of 0 is 0).
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
