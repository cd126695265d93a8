# SPDX-License-Identifier: Apache-2.0
"""Draws of samples, whose number is known."""

from __future__ import annotations

from torch import Tensor

from sugar_scene.geometry import SampleRule, draw_counted_samples, halves_of


def draw_samples(mask: Tensor, n_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw Gaussians of a mask, (N,) bool, and an offset for each draw.

    Returns:
        Gaussian of each sample, (S,) int64, and offsets, (S, 3); S = 0 where the mask is empty.
    """
    n = mask.sum()
    rule = SampleRule(n_samples, n_samples)
    drawn = draw_counted_samples(mask, n, halves_of(seed).to(mask.device), rule, int(n))
    return drawn.indices, drawn.noise
