# SPDX-License-Identifier: Apache-2.0
"""Photographs with a mask as their fourth byte: put on a background, or shown with an outline."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

COUNTS = 128
"""From this value of the mask's byte on, a pixel counts where it must count or not."""

OUTLINE = (255, 0, 200)
_ROWS = 64


def composited(photograph: Tensor, color: Tensor) -> Tensor:
    """The object of a photograph on a plain background, rounded to 8 bits.

    Args:
        photograph: Colours and mask. (H, W, 4) uint8
        color: The background. (3,) uint8

    Returns:
        (H, W, 3) uint8
    """
    result = torch.empty_like(photograph[..., :3])
    # Some rows at a time: wider numbers of the whole image would take four times its bytes.
    for first in range(0, photograph.shape[0], _ROWS):
        rows = photograph[first : first + _ROWS].to(torch.int32)
        share = rows[..., 3:]
        mixed = rows[..., :3] * share + color.to(torch.int32) * (255 - share)
        result[first : first + _ROWS] = ((mixed + 127) // 255).to(torch.uint8)
    return result


def dilated(mask: Tensor, pixels: int) -> Tensor:
    """A mask grown by some pixels on each side, diagonals included. (H, W) bool -> (H, W) bool"""
    if pixels == 0:
        return mask
    grown = functional.max_pool2d(mask[None, None].float(), 2 * pixels + 1, 1, pixels)
    return grown[0, 0] > 0


def eroded(mask: Tensor, pixels: int) -> Tensor:
    """A mask shrunk by some pixels on each side; nothing is lost at the border of the image."""
    return ~dilated(~mask, pixels)


def outlined(photograph: Tensor) -> Tensor:
    """A photograph for people: the outline of its mask, if it has one, drawn into it.

    Args:
        photograph: (H, W, 3) or (H, W, 4) uint8

    Returns:
        (H, W, 3) uint8
    """
    if photograph.shape[-1] == 3:
        return photograph
    counted = photograph[..., 3] >= COUNTS
    # A line that is still seen where the picture is shown small.
    width = max(1, max(counted.shape) // 400)
    edge = dilated(counted, width) & ~counted
    color = torch.tensor(OUTLINE, dtype=torch.uint8, device=photograph.device)
    return torch.where(edge[..., None], color, photograph[..., :3])
