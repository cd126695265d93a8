# SPDX-License-Identifier: Apache-2.0
"""Fog: what a render shows nearer to the camera than anything that its photograph observed."""

from __future__ import annotations

import torch
from torch import Tensor

FOG_MARGIN = 0.1
"""Share of the nearest observed point's depth that a pixel must be in front of it."""

SOLID = 0.5
"""Accumulated opacity from which a pixel has a depth."""


def fog_share(depth: Tensor, alpha: Tensor, nearest: float) -> float:
    """Share of the pixels that lie in front of all observed points, by more than a margin.

    Args:
        depth: Blended depth, not divided by alpha. (H, W) world units
        alpha: Accumulated opacity. (H, W)
        nearest: Depth of the nearest observed point, world units.
    """
    solid = alpha > SOLID
    in_front = depth < (1.0 - FOG_MARGIN) * nearest * alpha
    return float((solid & in_front).to(torch.float64).mean())
