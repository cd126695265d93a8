# SPDX-License-Identifier: Apache-2.0
"""Normalised cross-correlation of windows of two images, and its derivatives.

The correlation of a window is that of its grey values after their mean and deviation were taken
out, so that gain and offset of an image do not change it. Sums over windows are sums of shifted
images, so the time does not depend on where pixels lie, and both devices run the same code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gaussian_splatting.data.images import window_sums

RADIUS = 2  # of the windows, in pixels
_LEAST_VARIANCE = 1e-6  # of grey values in [0, 1], against divisions by zero
_USUAL_VARIANCE = 1e-4  # of windows that count half; noise has less
_LEAST_SHARE = 0.6  # of a window's pixels that have to count


class Correlation(NamedTuple):
    """How well two images agree, and how that changes with the second one.

    The derivatives are those of the sum of weight (1 - score), at fixed weights.
    """

    score: Tensor  # normalised cross-correlation of the window around each pixel, (H, W)
    weight: Tensor  # of the window: 0 without texture, or where it correlates negatively, (H, W)
    gradient: Tensor  # with respect to each pixel of the second image, (H, W)
    curvature: Tensor  # a bound of the second derivative, at least 0, (H, W)


def correlate(first: Tensor, second: Tensor, counts: Tensor) -> Correlation:
    """Correlate the windows of two images of grey values in [0, 1]. (H, W) each

    Args:
        counts: Pixels that count. (H, W) bool
    """
    valid = counts.to(first.dtype)
    first = first * valid
    second = second * valid
    planes = [valid, first, second, first * first, second * second, first * second]
    sums = _sums(torch.stack(planes))
    n = sums[0].clamp_min(1)
    mean_first, mean_second, square_first, square_second, product = sums[1:] / n
    variance_first = (square_first - mean_first * mean_first).clamp_min(0)
    variance_second = (square_second - mean_second * mean_second).clamp_min(0)
    inverse_second = 1 / (variance_second + _LEAST_VARIANCE)
    inverse = torch.rsqrt(variance_first + _LEAST_VARIANCE) * inverse_second.sqrt()
    score = (product - mean_first * mean_second) * inverse
    texture = torch.minimum(variance_first, variance_second)
    is_full = sums[0] >= _LEAST_SHARE * (2 * RADIUS + 1) ** 2
    weight = valid * is_full * texture / (texture + _USUAL_VARIANCE) * score.clamp_min(0)
    # A pixel is part of all windows around it: their factors are added up before they meet it.
    share = weight / n
    by_second = share * score * inverse_second
    by_mean = share * inverse * mean_first - by_second * mean_second
    factors = torch.stack([share * inverse, by_second, by_mean, share * inverse_second])
    sum_inverse, sum_by_second, sum_by_mean, sum_curvature = _sums(factors)
    gradient = valid * (second * sum_by_second + sum_by_mean - first * sum_inverse)
    return Correlation(score, weight, gradient, valid * sum_curvature)


def _sums(planes: Tensor) -> Tensor:
    """Return sums over the windows around pixels, of which none lie outside. (C, H, W)"""
    return window_sums(window_sums(planes, RADIUS, 1), RADIUS, 2)
