# SPDX-License-Identifier: Apache-2.0
"""The colour loss of 3DGS from L1 and SSIM, and the types its implementations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sugar_utils.device import constants


class ColorLoss(NamedTuple):
    """The colour loss of an image and its parts; scalars that add up over strips."""

    total: Tensor  # (1 - weight) * l1 + weight * (1 - ssim)
    l1: Tensor  # mean absolute error
    ssim: Tensor  # mean structural similarity


class ColorGradient(NamedTuple):
    """The colour loss of an image, and its gradient by the image."""

    loss: ColorLoss
    gradient: Tensor  # (H, W, 3)


class CountedRows(NamedTuple):
    """Rows of an image that the loss counts; the others are the halo of a strip."""

    top: int  # first counted row
    end: int  # row past the last counted one
    n_values: int  # values of the whole image, by which sums are divided
    weight: float  # of 1 - SSIM; the rest is that of L1
    share: float  # counted rows divided by those of the whole image


class SavedImages(NamedTuple):
    """Tensors that the backward pass of a colour loss reads; layouts are those of the kernels."""

    image: Tensor
    target: Tensor
    partials: Tensor  # derivatives of SSIM by the blurred x, x^2 and x y


class Comparison(NamedTuple):
    """Result of :meth:`PhotometricKernels.compare`."""

    loss: ColorLoss
    saved: SavedImages


class PhotometricKernels(Protocol):
    """Modules that implement the colour loss for a kind of device."""

    def compare(
        self, image: Tensor, target: Tensor, rows: CountedRows, keep_partials: bool
    ) -> Comparison:
        """Compare two images, (H, W, 3) float32; the partials are empty unless they are kept."""
        ...

    def differentiate(
        self, shape: torch.Size, rows: CountedRows, weights: Tensor, saved: SavedImages
    ) -> Tensor:
        """Return the image's gradient, (H, W, 3); ``weights`` as of :func:`gradient_weights`."""
        ...


def weighted_color_loss(l1: Tensor, ssim: Tensor, weight: float, share: float = 1.0) -> Tensor:
    """Return (1 - weight) L1 + weight (share - SSIM) for the counted share of an image."""
    return (1.0 - weight) * l1 + weight * (share - ssim)


def loss_weights(rows: CountedRows, device: torch.device) -> Tensor:
    """Gradients of the loss by the sums of |x - y| and SSIM; never change them in place. (2,)"""
    return constants(((1.0 - rows.weight) / rows.n_values, -rows.weight / rows.n_values), device)


def gradient_weights(gradients: Sequence[Tensor | None], rows: CountedRows) -> Tensor:
    """Turn the gradients of loss, L1 and SSIM into those of the sums of |x - y| and SSIM. (2,)

    At least one of the gradients is not None.
    """
    d_loss, d_l1, d_ssim = gradients
    existing = [gradient for gradient in gradients if gradient is not None]
    factors = loss_weights(rows, existing[0].device)
    weights = torch.zeros_like(factors) if d_loss is None else d_loss * factors
    if d_l1 is not None or d_ssim is not None:
        zero = torch.zeros_like(existing[0])
        d_parts = torch.stack([zero if d_l1 is None else d_l1, zero if d_ssim is None else d_ssim])
        weights = weights + d_parts / rows.n_values
    return weights
