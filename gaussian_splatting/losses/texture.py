# SPDX-License-Identifier: Apache-2.0
"""Weights of depth and normal maps, high where an image has no texture."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

TEXTURE = 4.0  # standard deviation of grey values, of 255, from which a map counts half or less
WINDOW = 7  # pixels along the side of the square in which they vary


def texture_weights(photograph: Tensor) -> Tensor:
    """Weigh a map at each pixel: 1 on even colours, near 0 on texture. (H, W)

    Args:
        photograph: (H, W, 3) or (H, W, 4) uint8
    """
    gray = photograph[None, ..., :3].float().mean(dim=-1)
    moments = torch.stack([gray, gray.square()], dim=1)
    mean, mean_square = avg_pool2d(
        moments, WINDOW, stride=1, padding=WINDOW // 2, count_include_pad=False
    )[0].unbind()
    variance = (mean_square - mean.square()).clamp_min(0)
    return 1 / (1 + variance / TEXTURE**2)
