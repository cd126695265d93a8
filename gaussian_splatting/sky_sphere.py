# SPDX-License-Identifier: Apache-2.0
"""Where Gaussians stand for what is infinitely far: beyond a sphere around the cameras."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera, middle_of

SKY_RADIUS = 20.0
"""In camera extents: beyond all that a reconstruction places, and what mesh extraction looks at."""


@dataclass(frozen=True)
class SkySphere:
    """Tells which Gaussians stand for what is infinitely far."""

    middle: np.ndarray  # of the cameras, (3,) world units
    nearest: float  # distance from there beyond which they do, in world units

    @classmethod
    def around(cls, cameras: Sequence[Camera], extent: float) -> SkySphere | None:
        """Beyond half the radius of a sky around cameras of this extent; None without an extent."""
        return cls(middle_of(cameras), 0.5 * SKY_RADIUS * extent) if extent > 0 else None

    def distance(self, means: Tensor) -> Tensor:
        """How far they are from the middle, 0 for those that are not far. (N, 3) -> (N,)"""
        away = (means - means.new_tensor(self.middle)).norm(dim=-1)
        return torch.where(away > self.nearest, away, 0.0)

    def returned(self, means: Tensor, distance: Tensor) -> Tensor:
        """Centres, (N, 3), on their rays from the middle, as far as ``distance``, (N,), says."""
        middle = means.new_tensor(self.middle)
        direction = torch.nn.functional.normalize(means - middle, dim=-1)
        return torch.where(distance[:, None] > 0, middle + direction * distance[:, None], means)
