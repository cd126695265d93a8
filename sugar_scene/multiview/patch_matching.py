# SPDX-License-Identifier: Apache-2.0
"""How well patches of one view match those of another through planes, with the planes' gradient.

A pixel's plane m . X = 1 in the reference's camera axes carries its patch to a neighbouring view:
the ray r of a patch pixel meets it at X = r / (m . r), which the neighbour has at R X + T, hence at
the pixel of R r + T (m . r), the homography K' (R + T m^T) K^-1. Grey values there are read
bilinearly and compared with the reference's by normalised cross-correlation, which differences of
exposure leave as it is. One work item is one patch; value and gradient are made together, because
both need the same sums.
"""

from __future__ import annotations

import torch
import warp as wp
from torch import Tensor

from sugar_scene.multiview.reprojection import ViewPair
from sugar_utils.warp_launch import as_array, launch

wp.set_module_options({"enable_backward": False})

PATCH_RADIUS = 3
"""Patches have 7 x 7 pixels."""

MIN_VARIANCE = 4e-5
"""Patches of the reference whose grey values, in [0, 1], vary less have nothing to match."""

EPSILON = 1e-6
"""Added to both variances."""

UNCOUNTED = -1.0
"""Grey value of pixels that a mask leaves out; a patch that touches one does not count."""

_MIN_ITEMS = 64
_RADIUS = wp.constant(PATCH_RADIUS)
_LEAST = wp.constant(MIN_VARIANCE)
_EPS = wp.constant(EPSILON)


@wp.struct
class Pair:
    """Two pinhole views and the motion between them, as a kernel argument."""

    rotation: wp.mat33
    translation: wp.vec3
    fx: float
    fy: float
    cx: float
    cy: float
    fx2: float
    fy2: float
    cx2: float
    cy2: float


def _pair_argument(pair: ViewPair) -> Pair:
    filled = Pair()
    filled.rotation = wp.mat33(*(float(v) for v in pair.rotation.ravel()))
    filled.translation = wp.vec3(*(float(v) for v in pair.translation))
    for camera, suffix in ((pair.reference, ""), (pair.neighbor, "2")):
        for name in ("fx", "fy", "cx", "cy"):
            setattr(filled, name + suffix, float(getattr(camera, name)))
    return filled


@wp.kernel
def match_patches(
    first: int,
    pair: Pair,
    pixels: wp.array(dtype=wp.vec2i),
    planes: wp.array(dtype=wp.vec3),
    gray: wp.array2d(dtype=float),
    gray2: wp.array2d(dtype=float),
    correlation: wp.array(dtype=float),
    gradient: wp.array(dtype=wp.vec3),
    counts: wp.array(dtype=wp.uint8),
):
    """Correlation of one patch and its gradient to the plane; rows that do not count stay zero."""
    i = first + wp.tid()
    pixel = pixels[i]
    m = planes[i]
    column = pixel[0]
    row = pixel[1]
    if column < _RADIUS or row < _RADIUS:
        return
    if column + _RADIUS >= gray.shape[1] or row + _RADIUS >= gray.shape[0]:
        return
    r0 = pair.rotation
    t = pair.translation
    # Grey values are taken relative to the middle ones: their squares would cancel in float32.
    base = gray[row, column]
    base2 = float(0.0)
    sum_a = float(0.0)
    sum_b = float(0.0)
    sum_aa = float(0.0)
    sum_bb = float(0.0)
    sum_ab = float(0.0)
    d_b = wp.vec3()
    d_ab = wp.vec3()
    d_bb = wp.vec3()
    for j in range(-_RADIUS, _RADIUS + 1):
        for k in range(-_RADIUS, _RADIUS + 1):
            a = gray[row + j, column + k]
            ray = wp.vec3(
                (float(column + k) + 0.5 - pair.cx) / pair.fx,
                (float(row + j) + 0.5 - pair.cy) / pair.fy,
                1.0,
            )
            inverse_depth = wp.dot(m, ray)
            y = r0 * ray + t * inverse_depth
            if not (a >= 0.0 and inverse_depth > 0.0 and y[2] > 1.0e-6):
                return
            iz = 1.0 / y[2]
            u = pair.fx2 * y[0] * iz + pair.cx2 - 0.5
            v = pair.fy2 * y[1] * iz + pair.cy2 - 0.5
            if not (u >= 0.0 and v >= 0.0):
                return
            if not (u < float(gray2.shape[1] - 1) and v < float(gray2.shape[0] - 1)):
                return
            x0 = int(u)
            y0 = int(v)
            p00 = gray2[y0, x0]
            p01 = gray2[y0, x0 + 1]
            p10 = gray2[y0 + 1, x0]
            p11 = gray2[y0 + 1, x0 + 1]
            if wp.min(wp.min(p00, p01), wp.min(p10, p11)) < 0.0:
                return
            fu = u - float(x0)
            fv = v - float(y0)
            top = p00 + (p01 - p00) * fu
            bottom = p10 + (p11 - p10) * fu
            slope_u = (p01 - p00) + ((p11 - p10) - (p01 - p00)) * fv
            slope_v = bottom - top
            b = top + (bottom - top) * fv
            if j == -_RADIUS and k == -_RADIUS:
                base2 = b
            # Both coordinates move along the ray's derivative T (dm . ray).
            du = pair.fx2 * iz * (t[0] - t[2] * y[0] * iz)
            dv = pair.fy2 * iz * (t[1] - t[2] * y[1] * iz)
            step = (slope_u * du + slope_v * dv) * ray
            a -= base
            b -= base2
            sum_a += a
            sum_b += b
            sum_aa += a * a
            sum_bb += b * b
            sum_ab += a * b
            d_b += step
            d_ab += a * step
            d_bb += b * step
    share = 1.0 / float((2 * _RADIUS + 1) * (2 * _RADIUS + 1))
    mean_a = sum_a * share
    mean_b = sum_b * share
    variance_a = wp.max(sum_aa * share - mean_a * mean_a, 0.0)
    variance_b = wp.max(sum_bb * share - mean_b * mean_b, 0.0)
    if variance_a < _LEAST:
        return
    covariance = sum_ab * share - mean_a * mean_b
    scale = 1.0 / wp.sqrt((variance_a + _EPS) * (variance_b + _EPS))
    value = covariance * scale
    counts[i] = wp.uint8(1)
    correlation[i] = value
    d_covariance = (d_ab - mean_a * d_b) * share
    half_d_variance = (d_bb - mean_b * d_b) * share
    gradient[i] = scale * d_covariance - (value / (variance_b + _EPS)) * half_d_variance


class _Matched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, planes: Tensor, pixels: Tensor, gray: Tensor, gray2: Tensor, pair: ViewPair):
        n, device = planes.shape[0], planes.device
        correlation = torch.zeros(n, device=device)
        gradient = torch.zeros(n, 3, device=device)
        counts = torch.zeros(n, dtype=torch.uint8, device=device)
        launch(
            match_patches,
            n,
            [
                _pair_argument(pair), as_array(pixels, wp.vec2i),
                as_array(planes.detach().contiguous(), wp.vec3), gray, gray2, correlation,
                as_array(gradient, wp.vec3), counts,
            ],
            device=device,
            min_items=_MIN_ITEMS,
        )  # fmt: skip
        counted = counts.bool()
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(counted)
        return correlation, counted

    @staticmethod
    def backward(ctx, d_correlation: Tensor, _):
        (gradient,) = ctx.saved_tensors
        return gradient * d_correlation[:, None], None, None, None, None


def patch_correlation(
    planes: Tensor, pixels: Tensor, gray: Tensor, neighbor_gray: Tensor, pair: ViewPair
) -> tuple[Tensor, Tensor]:
    """Normalised cross-correlation of patches with what planes say is the same in another view.

    Args:
        planes: m of the planes m . X = 1 in the reference's camera axes, differentiable. (n, 3)
            per world unit
        pixels: Column and row of the patches' middles. (n, 2) int32
        gray: Grey values of the reference in [0, 1], ``UNCOUNTED`` where a mask leaves them out.
            (H, W) float32
        neighbor_gray: The same of the neighbour. (H', W') float32

    Returns:
        Correlations in [-1, 1], 0 where there is none, and where there is one: the patch lies in
        both images, counts in both, and has something to match. (n,) each
    """
    return _Matched.apply(
        planes, pixels.contiguous(), gray.contiguous(), neighbor_gray.contiguous(), pair
    )
