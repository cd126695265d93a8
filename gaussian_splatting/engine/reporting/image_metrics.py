# SPDX-License-Identifier: Apache-2.0
"""Image quality of a render against a photograph, as reported (not as optimised).

Every function takes (H, W, 3) images, float in [0, 1] or uint8 in [0, 255], in any mix; floats are
clamped to [0, 1] first. Sums run in float64, row by row, so that the figures do not depend on the
number of threads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gaussian_splatting.losses.photometric import l1_and_ssim
from gaussian_splatting.losses.ssim_reference import ssim_map_reference


@torch.no_grad()
def l1(image: Tensor, target: Tensor) -> float:
    """Mean absolute difference over all pixels and channels.

    Raises:
        ValueError: The images differ in shape or are not (H, W, 3).
    """
    image, target = _unit_pair(image, target)
    return _mean((image - target).abs())


@torch.no_grad()
def psnr(image: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Peak signal-to-noise ratio in dB, of the mean squared error over the whole image.

    Args:
        image: (H, W, 3)
        target: (H, W, 3)
        weights: How much each pixel counts; None for all alike. (H, W), some above 0

    Returns:
        -10 log10(MSE); infinity for equal images.

    Raises:
        ValueError: The images differ in shape or are not (H, W, 3).
    """
    image, target = _unit_pair(image, target)
    error = _mean((image - target) ** 2, weights)
    return math.inf if error == 0 else -10 * math.log10(error)


@torch.no_grad()
def ssim(image: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Mean structural similarity; see ``ssim_reference``. Arguments as of :func:`psnr`.

    Raises:
        ValueError: The images differ in shape or are not (H, W, 3).
    """
    image, target = _unit_pair(image, target)
    if weights is None and image.device.type == "cpu" and image.dtype == torch.float32:
        # The same to six digits in a fiftieth of the time.
        return float(l1_and_ssim(image, target)[1])
    if image.device.type != "cpu":
        # A GPU's convolutions may round float32 to the 10 bits of TF32, which moves SSIM by 0.07.
        image, target = image.double(), target.double()
    return _mean(ssim_map_reference(image, target), weights)


def to_unit(image: Tensor) -> Tensor:
    """Float image in [0, 1] from uint8 or float. Same shape, float32 or wider."""
    if image.dtype == torch.uint8:
        return image.float() / 255
    if not image.dtype.is_floating_point:
        raise ValueError(f"an image is uint8 or float, not {image.dtype}")
    if image.element_size() < 4:
        image = image.float()
    return image.clamp(0, 1)


def to_uint8(image: Tensor) -> Tensor:
    """The image as an 8-bit file would keep it, rounded to nearest. Same shape."""
    return (to_unit(image) * 255).round().to(torch.uint8)


def _unit_pair(image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if image.shape != target.shape or image.dim() != 3 or image.shape[2] != 3:
        raise ValueError(
            f"metrics compare (H, W, 3) images of one shape, got {tuple(image.shape)} and "
            f"{tuple(target.shape)}"
        )
    if image.numel() == 0:
        raise ValueError("metrics need at least one pixel")
    return to_unit(image), to_unit(target)


def _mean(values: Tensor, weights: Tensor | None = None) -> float:
    """Mean whose order of summation is fixed: within rows first, then over rows.

    Of (H, W, 3), where each pixel may have a weight. (H, W)
    """
    if weights is not None:
        total = 3 * float(weights.sum(dim=1, dtype=torch.float64).sum())
        values = values * weights[..., None]
    rows = values.flatten(1).sum(dim=1, dtype=torch.float64)
    return float(rows.sum()) / (values.numel() if weights is None else total)
