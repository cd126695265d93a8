# SPDX-License-Identifier: Apache-2.0
"""Shapes of Gaussians (SuGaR, Guédon & Lepetit, CVPR 2024, sections 4.1 and 4.2).

A Gaussian close to a surface is flat, so its shortest axis stands for the surface normal. A diamond
in the plane of the two larger axes, with its corners on them, is what rays are cast against.

Density and distance take N Gaussians with K neighbours and S samples; training uses
:func:`.field_kernels.evaluate_fields`, which needs no (S, K) memory.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.core.cloud import rotation_matrices
from sugar_utils.device import float32_tensor
from sugar_utils.warp_arrays import Bools, Floats, Ints, Longs, Vec3s
from sugar_utils.warp_launch import as_array, launch
from sugar_utils.warp_math import hashed

wp.set_module_options({"enable_backward": False, "cpu_compiler_flags": "-march=native"})

MIN_SCALE = 1e-8  # scales are clamped to this before they are inverted. World units.

SAMPLE_SPREAD = 1.5  # samples are drawn from Gaussians this much wider than those they belong to
MAX_SQ_MAHALANOBIS = 1e8  # squared Mahalanobis distances are clamped to this before the exponential
MIN_NORMAL_SCALE = 1e-6  # world units, in the weights of neighbour normals
MIN_WEIGHT_SUM = 1e-6  # lower clamp of the sum of weights that neighbour normals are averaged with
_MIN_DENSITY = 1e-16
_SINGULAR_SQUARE = 1e-6
_QUANTILE_BITS = 16
_SHIFT = wp.constant(wp.uint32(32 - _QUANTILE_BITS))
_LOW_HALF = wp.constant(wp.uint32(0xFFFF))
_SECOND = wp.constant(wp.uint32(0x9E3779B9))
_THIRD = wp.constant(wp.uint32(0x3C6EF372))
_WORD = wp.constant(wp.uint64(32))
_MIN_SAMPLES = 4_096


def smallest_axis(scales: Tensor) -> Tensor:
    """Return the index of the smallest scale, the first on ties. (N, 3) -> (N,) int64"""
    return scales.argmin(dim=-1)


def smallest_scales(scales: Tensor) -> Tensor:
    """Return the smallest scale of each Gaussian, differentiable. (N, 3) -> (N,)"""
    return scales.gather(-1, smallest_axis(scales)[..., None]).squeeze(-1)


def covariances(quats: Tensor, scales: Tensor) -> Tensor:
    """Return R diag(s^2) R^T. (N, 4), (N, 3) -> (N, 3, 3) world units squared"""
    half = rotation_matrices(quats) * scales[:, None, :]
    return half @ half.transpose(1, 2)


def inverse_square_roots(quats: Tensor, scales: Tensor) -> Tensor:
    """Return A = R diag(1 / s), so that the inverse covariance is A A^T. (N, 3, 3)

    The Mahalanobis distance of x is the length of A^T (x - mean); s is at least ``MIN_SCALE``.
    """
    return rotation_matrices(quats) / scales.clamp_min(MIN_SCALE)[:, None, :]


def std_along_view(means: Tensor, quats: Tensor, scales: Tensor, camera_center: Tensor) -> Tensor:
    """Return the standard deviation along the view ray: |s * R^T u|, u towards the camera. (N,)"""
    sight = torch.nn.functional.normalize(camera_center - means, dim=-1)
    local = (rotation_matrices(quats).transpose(1, 2) @ sight[..., None]).squeeze(-1)
    return (scales * local).norm(dim=-1)


def diamond_vertices(means: Tensor, quats: Tensor, scales: Tensor, extent: float = 2.0) -> Tensor:
    """Return the corners of the diamonds. (N, 4, 3) world units

    With the axes renumbered so that the shortest comes first: -axis 1, axis 2, axis 1, -axis 2.
    """
    offsets = torch.arange(1, 3, device=scales.device)
    larger_axes = (smallest_axis(scales)[:, None] + offsets) % 3
    half_axes = rotation_matrices(quats) * (extent * scales)[:, None, :]
    columns = larger_axes[:, None, :].expand(-1, 3, -1)
    first, second = half_axes.gather(-1, columns).unbind(-1)
    return means[:, None] + torch.stack((-first, second, first, -second), dim=1)


def diamond_faces(n_gaussians: int, device: torch.device | str = "cpu") -> Tensor:
    """Return two triangles per diamond; face f belongs to Gaussian f // 2. (2 N, 3) int64"""
    quad = torch.tensor([[0, 2, 1], [0, 3, 2]], device=device)
    corners = 4 * torch.arange(n_gaussians, device=device)
    return (corners[:, None, None] + quad).reshape(-1, 3)


class FieldSamples(NamedTuple):
    """Fields at S sample points."""

    points: Tensor  # where the fields are evaluated, (S, 3) world units
    density: Tensor  # sum of the opacities of the neighbours at the point; may exceed 1, (S,)
    beta: Tensor  # mean of the smallest scales of the neighbours, (S,) world units
    plane_distance: Tensor  # signed, to the tangent plane of the sample's Gaussian, (S,)
    normal_error: Tensor  # square of that normal less the weighted mean of the neighbours', (S,)


def sample_points(
    means: Tensor, quats: Tensor, scales: Tensor, indices: Tensor, noise: Tensor
) -> Tensor:
    """Return points drawn from Gaussians: x = mean + R (1.5 s * noise), differentiable. (S, 3)"""
    local = SAMPLE_SPREAD * scales[indices] * noise
    offset = rotation_matrices(quats[indices]) @ local[..., None]
    return means[indices] + offset.squeeze(-1)


def neighbor_opacities(
    points: Tensor,
    neighbor_rows: Tensor,
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    density_factor: float = 1.0,
) -> Tensor:
    """Return the opacities of neighbours at points. (S, K)

    o_j(x) = f a_j exp(-m / 2), where m is the squared Mahalanobis distance.

    Args:
        points: (S, 3) world units
        neighbor_rows: Gaussians to evaluate at each point. (S, K)
        quats: Unit quaternions, wxyz. (N, 4)
        density_factor: f
    """
    rows = neighbor_rows.long()
    offset = points[:, None] - means[rows]  # (S, K, 3)
    whitening = inverse_square_roots(quats, scales).transpose(1, 2)
    local = (whitening[rows] @ offset[..., None]).squeeze(-1)
    square = (local * local).sum(dim=-1).clamp(0.0, MAX_SQ_MAHALANOBIS)
    return density_factor * opacities[rows] * torch.exp(-0.5 * square)


def sdf_from_density(density: Tensor, beta: Tensor) -> Tensor:
    """Return the distance to the level set at which the density equals 1. (S,) world units

    sdf = beta sqrt(-2 ln d), with densities of 1 and more set to 1 (their gradient divided by the
    density) and densities below 1e-16 to 1e-16. The square root has an infinite slope where the
    density reaches 1. Values are exact there; the gradient is left out for -2 ln d < 1e-6,
    densities within a few float32 steps of 1 and above, where it would be rounding noise.
    """
    saturated = density / (density.detach() + 1e-12)
    clamped = torch.where(density < 1, density, saturated).clamp_min(_MIN_DENSITY)
    square = (-2 * clamped.log()).clamp_min(0)
    regular = square > _SINGULAR_SQUARE
    # The inner choice keeps an infinite slope out of the gradient.
    differentiable_root = torch.where(regular, square, 1.0).sqrt()
    root = torch.where(regular, differentiable_root, square.detach().sqrt())
    return beta * root


class SampleRule(NamedTuple):
    """Numbers of samples that are drawn, by that of Gaussians to draw in, the candidates."""

    each: int  # for each candidate
    most: int  # in all

    def number(self, n_candidates: int) -> int:
        """Return the number of samples."""
        return min(self.most, self.each * n_candidates)


class CountedSamples(NamedTuple):
    """Samples in S rows, with their number on the device."""

    indices: Tensor  # Gaussian of each sample, rising; 0 in other rows. (S,) int64
    noise: Tensor  # offsets; 0 in other rows. (S, 3) float32
    is_used: Tensor  # rows that hold a sample, the first ones. (S,) bool
    n_used: Tensor  # number of these rows. (1,) int32


@wp.kernel
def _place_samples(
    first: int,
    seed: Ints,
    n_candidates: Longs,
    each: int,
    most: int,
    quantiles: Floats,
    candidates: Longs,
    indices: Longs,
    noise: Vec3s,
    is_used: Bools,
    n_used: Ints,
):
    """Draw one sample: a candidate, and a normal offset."""
    i = first + wp.tid()
    n_drawn = wp.min(n_candidates[0], wp.int64(candidates.shape[0]))
    n = wp.min(wp.int64(each) * n_drawn, wp.int64(most))
    if i == 0:
        n_used[0] = int(n)
    if wp.int64(i) >= n:
        indices[i] = wp.int64(0)
        noise[i] = wp.vec3()
        is_used[i] = False
        return
    is_used[i] = True
    bits = hashed(hashed(wp.uint32(i) ^ wp.uint32(seed[0])) + wp.uint32(seed[1]))
    # (i + u) * candidates / n with u of 32 bits: somewhere in the i-th of n equal parts.
    offset = (wp.uint64(bits) * wp.uint64(n_drawn)) >> _WORD
    indices[i] = candidates[int((wp.int64(i) * n_drawn + wp.int64(offset)) / n)]
    second = hashed(bits + _SECOND)
    third = hashed(bits + _THIRD)
    x = int(second >> _SHIFT)
    y = int(second & _LOW_HALF)
    z = int(third >> _SHIFT)
    noise[i] = wp.vec3(quantiles[x], quantiles[y], quantiles[z])


def draw_counted_samples(
    mask: Tensor, n_candidates: Tensor, seed: Tensor, rule: SampleRule, capacity: int
) -> CountedSamples:
    """Draw Gaussians of a mask uniformly, and a standard normal offset for each draw.

    Draws are hashes of the seed and the number of the sample (generators of GPUs differ between
    models), made with integers and a table, so that no rounding differs either. They are
    stratified: each Gaussian gets as many samples as any other, give or take two, which leaves less
    noise in their mean. The host need not know how many candidates there are.

    Args:
        mask: Gaussians that may be drawn. (N,) bool
        n_candidates: Number of the mask's Gaussians. () int64
        seed: See :func:`halves_of`. (2,) int32
        capacity: Number of candidates that there is room for; those beyond it are not drawn.

    Returns:
        As many rows as samples of so many candidates: Gaussians, rising, and offsets of 2^16 values
        for each coordinate.
    """
    n_rows = rule.number(capacity)
    candidates = torch.nonzero_static(mask, size=capacity, fill_value=0).squeeze(1)
    drawn = CountedSamples(
        indices=torch.empty(n_rows, dtype=torch.int64, device=mask.device),
        noise=torch.empty((n_rows, 3), dtype=torch.float32, device=mask.device),
        is_used=torch.empty(n_rows, dtype=torch.bool, device=mask.device),
        n_used=torch.empty(1, dtype=torch.int32, device=mask.device),
    )
    arguments = [
        seed,
        n_candidates.reshape(1),
        rule.each,
        rule.most,
        _normal_quantiles(mask.device),
        candidates,
        drawn.indices,
        as_array(drawn.noise, wp.vec3),
        drawn.is_used,
        drawn.n_used,
    ]
    launch(_place_samples, n_rows, arguments, min_items=_MIN_SAMPLES)
    return drawn


def halves_of(seed: int) -> Tensor:
    """Return the low and the high 32 bits of a seed as kernels read them. (2,) int32, on the CPU"""
    halves = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], dtype=np.uint32)
    return torch.from_numpy(halves.view(np.int32))


@functools.lru_cache(maxsize=4)
def _normal_quantiles(device: torch.device) -> Tensor:
    """Return the normal distribution's quantiles at the middles of 2^16 equal parts. (2^16,)

    They are scaled to a variance of 1.
    """
    from scipy.special import ndtri

    n = 1 << _QUANTILE_BITS
    values = ndtri((np.arange(n) + 0.5) / n)
    return float32_tensor(values / values.std()).to(device)
