# SPDX-License-Identifier: Apache-2.0
"""Random draws that place samples in Gaussians."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_samples(mask: Tensor, n_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw Gaussians uniformly with replacement, and a standard normal offset for each draw.

    Integers are drawn directly: torch's categorical sampling stops at 2**24 categories, which
    large scenes exceed. The draws come sorted by Gaussian, as the field kernels want them; the
    offsets are independent of the draws, so sorting changes no distribution.

    Args:
        mask: Gaussians that may be drawn. (N,) bool
        n_samples: Number of draws S.
        generator: Source of randomness, on any device.

    Returns:
        Gaussian of each sample, sorted, (S,) int64, and standard normal offsets, (S, 3) float32,
        on the device of ``mask``. Both have S = 0 where the mask is empty.
    """
    candidates = mask.nonzero().squeeze(1)
    if candidates.numel() == 0:
        n_samples = 0
    high, source = max(candidates.numel(), 1), generator.device
    draws = torch.randint(high, (n_samples,), generator=generator, device=source)
    noise = torch.randn((n_samples, 3), generator=generator, device=source)
    return candidates[draws.to(mask.device).sort().values], noise.to(mask.device)
