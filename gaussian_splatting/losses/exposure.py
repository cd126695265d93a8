# SPDX-License-Identifier: Apache-2.0
"""Exposure of an image: a gain and an offset per colour channel, applied and found.

An exposure is a (2, 3) tensor: logarithms of gains a, then offsets b, per channel. An image of this
exposure shows I' = exp(a) I + b where the model renders I.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Colours of saturated pixels; lossy files have one step of 8 bits less.
WHITE = 253.5 / 255
BLACK = 1.5 / 255
MIN_VARIANCE = 1e-6  # of a channel; below, there is no gain to be fitted, only an offset
_REWEIGHTINGS = 8  # of least squares, towards least absolute differences
_LARGE_DIFFERENCE = 0.02  # of colours; larger ones weigh less
_ROBUST_GAINS = (0.1, 10.0)
_BLACK_SUM = 1e-3  # of colours; images that are black have a gain of 1
_DARK = 12.0  # of 255: too dark to tell an exposure
_MOST_GAIN = 1.5  # between photographs of one round of a turntable


class _Exposed(torch.autograd.Function):
    """Image and (2, 3) log gains and offsets -> image; gradients sum within rows first."""

    @staticmethod
    def forward(ctx, image: Tensor, exposure: Tensor) -> Tensor:
        gain = exposure[0].exp()
        ctx.save_for_backward(image, gain)
        return torch.addcmul(exposure[1], image, gain)

    @staticmethod
    def backward(ctx, d_exposed: Tensor) -> tuple[Tensor, Tensor]:
        image, gain = ctx.saved_tensors
        d_log_gain = gain * _sum_of_pixels(d_exposed * image)
        d_exposure = torch.stack([d_log_gain, _sum_of_pixels(d_exposed)])
        return d_exposed * gain, d_exposure


def exposed(image: Tensor, exposure: Tensor | None, inside: Tensor | None = None) -> Tensor:
    """Apply an exposure, (2, 3), to a rendered image, (H, W, 3).

    Args:
        exposure: None leaves the image as it is.
        inside: Pixels whose gradient reaches the exposure; None for all. The background of a masked
            object is synthetic and must not reach it. (H, W) bool
    """
    if exposure is None:
        return image
    if inside is None:
        return _Exposed.apply(image, exposure)
    fixed = _Exposed.apply(image, exposure.detach())
    return torch.where(inside[..., None], _Exposed.apply(image, exposure), fixed)


def unexposed(image: Tensor, exposure: Tensor) -> Tensor:
    """Invert :func:`exposed`, within 0 to 1: colours of the model. (H, W, 3), (2, 3)"""
    return ((image - exposure[1]) / exposure[0].exp()).clamp(0, 1)


def beyond_saturation(target: Tensor, image: Tensor) -> Tensor:
    """Replace saturated pixels by the render where it exceeds the image's range.

    A camera clips what is brighter than white. There a render of at least that brightness differs
    from the photograph by nothing that can be known; the same holds below black.

    Args:
        target: The photograph, (..., 3) float in [0, 1].
        image: The render in the exposure of the photograph, without bounds. (..., 3)
    """
    image = image.detach()
    is_beyond = (target >= WHITE) & (image > target)
    is_beyond |= (target <= BLACK) & (image < target)
    return torch.where(is_beyond, image, target)


def mean_exposure(values: Tensor) -> Tensor:
    """Return the exposure with the mean gain and the mean offset. (V, 2, 3) -> (2, 3)

    A model in this exposure has the mean colours of the images; with the mean logarithm of gains
    it would be darker where they differ much.
    """
    exposures = values.double()
    log_gain = exposures[:, 0].exp().mean(dim=0).log()
    return torch.stack([log_gain, exposures[:, 1].mean(dim=0)]).to(values.dtype)


def fit_gain_and_offset(
    image: Tensor,
    target: Tensor,
    weights: Tensor | None = None,
    gain_limits: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Fit the gains and offsets, (3,) float64 each, that bring one (H, W, 3) image to another.

    By least squares: of all exposures it has the least error, so that it is a fair score. Noise of
    the image makes the gain smaller.

    Args:
        weights: How much each pixel counts, (H, W), or each channel of it, (H, W, 3); None for all
            alike.
        gain_limits: The least and the largest gain; None for any.
    """
    if weights is not None and weights.dim() == 2:
        weights = weights[..., None]
    mean_x = _mean_of_pixels(image, weights)
    mean_y = _mean_of_pixels(target, weights)
    x = image.double() - mean_x
    y = target.double() - mean_y
    variance = _mean_of_pixels(x * x, weights)
    covariance = _mean_of_pixels(x * y, weights)
    is_flat = variance < MIN_VARIANCE
    gain = torch.where(is_flat, 1.0, covariance / variance.clamp_min(MIN_VARIANCE))
    if gain_limits is not None:
        gain = gain.clamp(*gain_limits)
    return gain, mean_y - gain * mean_x


def fit_robustly(colors: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Fit gains and offsets, (3,) each, where some colours have nothing to do with the target.

    Large differences count by their absolute values, through least squares weighted anew: points
    that something covers, or that shine, do not decide.

    Args:
        colors: (N, 3) float64 in [0, 1]
        target: Likewise.
    """
    colors = colors[None]
    target = target[None]
    weights = torch.ones_like(colors)
    gain = torch.ones_like(colors[0, 0])
    offset = torch.zeros_like(gain)
    for _ in range(_REWEIGHTINGS):
        gain, offset = fit_gain_and_offset(colors, target, weights, _ROBUST_GAINS)
        difference = (gain * colors + offset - target).abs()
        weights = _LARGE_DIFFERENCE / difference.clamp_min(_LARGE_DIFFERENCE)
    return gain, offset


def gain_of_means(image: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Return the gain per channel that gives an image the mean colours of another. (3, 1, 1)

    Least squares would darken, because noise counts as a smaller gain.

    Args:
        image: (3, H, W) in [0, 1]
        target: Likewise.
        weights: How much each pixel counts. (1, H, W)
    """
    target_sum = (target * weights).sum(dim=(1, 2)) + _BLACK_SUM
    image_sum = (image * weights).sum(dim=(1, 2)) + _BLACK_SUM
    return (target_sum / image_sum)[:, None, None]


def median_gain(colors: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the gain per channel that most colours need, whatever the others show. (3,) float32

    Args:
        colors: (P, 3) from 0 to 255
        target: Likewise; pixels that are dark in one of both do not count.
    """
    bright = np.minimum(colors, target).min(axis=1) > _DARK
    if not bright.any():
        return np.ones(3, dtype=np.float32)
    gain = np.median(target[bright] / colors[bright], axis=0)
    return gain.clip(1 / _MOST_GAIN, _MOST_GAIN).astype(np.float32)


def _mean_of_pixels(image: Tensor, weights: Tensor | None = None) -> Tensor:
    if weights is None:
        return _sum_of_pixels(image) / (image.shape[0] * image.shape[1])
    return _sum_of_pixels(image * weights) / _sum_of_pixels(weights)


def _sum_of_pixels(image: Tensor) -> Tensor:
    """Sums per channel; those of rows are added up in float64. (H, W, 3) -> (3,)"""
    row_sums = image.sum(dim=1)
    return row_sums.sum(dim=0, dtype=torch.float64).to(image.dtype)
