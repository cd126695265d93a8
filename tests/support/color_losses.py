# SPDX-License-Identifier: Apache-2.0
"""The photometric loss of 3DGS and the mean similarity, each in one call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gaussian_splatting.losses.photometric import DSSIM_WEIGHT, color_terms
from gaussian_splatting.losses.ssim_reference import ssim_map_reference


def color_loss(image: Tensor, target: Tensor, **rows: Any) -> Tensor:
    """0.8 L1 + 0.2 (1 - SSIM) (Kerbl et al. 2023, equation 7); arguments as ``color_terms``."""
    return color_terms(image, target, DSSIM_WEIGHT, **rows)[0]


def ssim_reference(image: Tensor, target: Tensor) -> Tensor:
    """Mean similarity over all pixels and channels. ()"""
    return ssim_map_reference(image, target).mean()


def l1_and_ssim(image: Tensor, target: Tensor, **rows: Any) -> tuple[Tensor, Tensor]:
    """Mean absolute error and mean SSIM; arguments as of ``color_terms``."""
    return color_terms(image, target, DSSIM_WEIGHT, **rows)[1:]
