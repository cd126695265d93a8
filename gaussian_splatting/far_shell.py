# SPDX-License-Identifier: Apache-2.0
"""Where Gaussians stand for what is infinitely far: beyond a sphere around the cameras."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera, middle_of

SHELL_RADIUS = 20.0
"""In camera extents: beyond all that a reconstruction places, and what mesh extraction looks at."""


def far_distance(cameras: Sequence[Camera], extent: float) -> Callable[[Tensor], Tensor]:
    """What tells how far Gaussians are that stand for what is infinitely far.

    It takes centres, (N, 3) in world units, and returns (N,) world units from the middle of the
    cameras, 0 for Gaussians within half the radius of a shell.

    Args:
        cameras: Training views.
        extent: Camera extent in world units.
    """
    middle, nearest = middle_of(cameras), 0.5 * SHELL_RADIUS * extent

    def distance(means: Tensor) -> Tensor:
        away = (means - means.new_tensor(middle)).norm(dim=-1)
        return torch.where(away > nearest, away, 0.0)

    return distance
