# SPDX-License-Identifier: Apache-2.0
"""Exposure of a photograph: one gain and one offset per colour channel, on top of the model.

A camera that chooses exposure and white balance for every photograph shows one surface in many
colours. With I' = exp(a) I + b the differences belong to the photographs and not to the model,
which would otherwise explain them with fog that each camera alone sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_VARIANCE = 1e-6
"""A channel of a render that varies less has no gain to be fitted: it gets an offset only."""


class _Exposed(torch.autograd.Function):
    """Image and (2, 3) log gains and offsets -> image.

    Sums within rows come first, so that they do not depend on the number of threads.
    """

    @staticmethod
    def forward(ctx, image: Tensor, exposure: Tensor) -> Tensor:
        gain = exposure[0].exp()
        ctx.save_for_backward(image, gain)
        return torch.addcmul(exposure[1], image, gain)

    @staticmethod
    def backward(ctx, d_exposed: Tensor):
        image, gain = ctx.saved_tensors
        d_log_gain = gain * _sum_of_pixels(d_exposed * image)
        d_exposure = torch.stack([d_log_gain, _sum_of_pixels(d_exposed)])
        return d_exposed * gain, d_exposure


def exposed(image: Tensor, exposure: Tensor | None, inside: Tensor | None = None) -> Tensor:
    """The image as a photograph of this exposure shows it: exp(a) I + b.

    Args:
        image: Colours of the model, differentiable. (H, W, 3)
        exposure: Logarithms of gains, then offsets, per channel, differentiable. (2, 3); None
            leaves the image as it is, bit for bit.
        inside: Pixels that say what the exposure is; None for all. What lies behind a masked
            object is made up and must not. (H, W) bool
    """
    if exposure is None:
        return image
    if inside is None:
        return _Exposed.apply(image, exposure)
    fixed = _Exposed.apply(image, exposure.detach())
    return torch.where(inside[..., None], _Exposed.apply(image, exposure), fixed)


def unexposed(image: Tensor, exposure: Tensor) -> Tensor:
    """The inverse of :func:`exposed`, within 0 to 1: colours of the model. (H, W, 3), (2, 3)"""
    return ((image - exposure[1]) / exposure[0].exp()).clamp(0, 1)


def fit_gain_and_offset(image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Gain and offset per channel that bring an image closest to another, by least squares.

    Args:
        image: (H, W, 3), floats
        target: (H, W, 3), floats

    Returns:
        Gains and offsets, in float64. (3,) each
    """
    mean_x, mean_y = _mean_of_pixels(image), _mean_of_pixels(target)
    x, y = image.double() - mean_x, target.double() - mean_y
    variance, covariance = _mean_of_pixels(x * x), _mean_of_pixels(x * y)
    flat = variance < MIN_VARIANCE
    gain = torch.where(flat, 1.0, covariance / variance.clamp_min(MIN_VARIANCE))
    return gain, mean_y - gain * mean_x


def _mean_of_pixels(image: Tensor) -> Tensor:
    return _sum_of_pixels(image) / (image.shape[0] * image.shape[1])


def _sum_of_pixels(image: Tensor) -> Tensor:
    """Sums per channel; those of rows are added up in float64. (H, W, 3) -> (3,)"""
    return image.sum(dim=1).sum(dim=0, dtype=torch.float64).to(image.dtype)
