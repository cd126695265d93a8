# SPDX-License-Identifier: Apache-2.0
"""How L1 and SSIM make the colour loss, and what its gradient says to their sums."""

from __future__ import annotations

import torch
from torch import Tensor

from sugar_utils.device import constants


def weighted_color_loss(l1: Tensor, ssim: Tensor, weight: float, share: float = 1.0) -> Tensor:
    """(1 - weight) L1 + weight (share - SSIM), for the ``share`` of an image that was counted."""
    return (1.0 - weight) * l1 + weight * (share - ssim)


def gradient_weights(
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None], weight: float, n_values: int
) -> Tensor:
    """Gradients of the sums of |x - y| and of SSIM.

    Args:
        gradients: Those of the colour loss, of L1 and of SSIM, not all None; None is zero. ()
        weight: As of :func:`weighted_color_loss`.
        n_values: What the sums were divided by.

    Returns:
        (2,)
    """
    d_loss, d_l1, d_ssim = gradients
    given = d_loss if d_loss is not None else d_l1 if d_l1 is not None else d_ssim
    factors = constants(((1.0 - weight) / n_values, -weight / n_values), given.device)
    weights = torch.zeros_like(factors) if d_loss is None else d_loss * factors
    if d_l1 is not None or d_ssim is not None:
        zero = torch.zeros_like(given)
        own = torch.stack([zero if d is None else d for d in (d_l1, d_ssim)])
        weights = weights + own / n_values
    return weights
