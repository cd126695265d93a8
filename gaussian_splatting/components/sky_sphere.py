# SPDX-License-Identifier: Apache-2.0
"""Sky sphere: Gaussians around the cameras for infinitely distant background.

A reconstruction has no points of the sky. A sphere of Gaussians far outside takes what floaters
near the cameras would explain; densification keeps them at the size of a piece of sky.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera, middle_of
from sugar_utils.flags import boolean
from sugar_utils.settings import flag

SKY_RADIUS = 20.0
"""In camera extents: beyond all that a reconstruction places, and what mesh extraction looks at."""

SKY_GREY = 128
SKY_OPACITY = 0.9  # resets leave it: what shines through the sky is explained by floaters
SKY_SHARE = 0.1  # of the Gaussians that are allowed, at most, to begin with


@dataclass(frozen=True)
class SkySphere:
    """Identifies the Gaussians of the sky sphere."""

    middle: np.ndarray  # of the cameras, (3,) world units
    nearest: float  # distance from there beyond which they do, in world units

    @classmethod
    def around(cls, cameras: Sequence[Camera], extent: float) -> SkySphere | None:
        """Beyond half the radius of a sky around cameras of this extent; None without an extent."""
        return cls(middle_of(cameras), 0.5 * SKY_RADIUS * extent) if extent > 0 else None

    def distance(self, means: Tensor) -> Tensor:
        """Return distances from the middle, 0 for those that are not far. (N, 3) -> (N,)"""
        away = (means - means.new_tensor(self.middle)).norm(dim=-1)
        return torch.where(away > self.nearest, away, 0.0)

    def returned(self, means: Tensor, distance: Tensor) -> Tensor:
        """Centres, (N, 3), on their rays from the middle, as far as ``distance``, (N,), says."""
        middle = means.new_tensor(self.middle)
        direction = torch.nn.functional.normalize(means - middle, dim=-1)
        return torch.where(distance[:, None] > 0, middle + direction * distance[:, None], means)


@dataclass(frozen=True)
class RobustConfig:
    """Measures against floaters."""

    robust: bool | None = flag(
        None,
        "against floaters: begin with a sphere of Gaussians far outside, a place "
        "for the sky and all else that the reconstruction has no points of, and with --init dense; "
        "unset: True in train_full_pipeline.py, and with --preset fast where "
        "masks show no object; else False",
        group="vanilla stage",
        parse=boolean,
        nargs="?",
        const=True,
        no_effect_when="with --gs_output_dir; with --init_ply that holds Gaussians",
    )
    sky_points: int = 1_000

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide a result; empty where nothing is done."""
        return {"robust": asdict(self)} if self.robust else {}


NOT_ROBUST = RobustConfig()


def with_sky(
    points: Tensor, colors: Tensor, cameras: Sequence[Camera], extent: float, config: RobustConfig
) -> tuple[Tensor, Tensor]:
    """Points with grey ones evenly on a sphere around the cameras (Fibonacci)."""
    n = config.sky_points if config.robust else 0
    if n == 0 or extent <= 0:
        return points, colors
    turn = torch.arange(n, dtype=torch.float64, device="cpu") + 0.5
    height = 1.0 - 2.0 * turn / n
    angle = turn * math.pi * (3.0 - math.sqrt(5.0))
    ring = (1.0 - height * height).sqrt()
    sphere = torch.stack([ring * angle.cos(), ring * angle.sin(), height], dim=1)
    center = torch.tensor(middle_of(cameras), device="cpu")
    sky = (center + SKY_RADIUS * extent * sphere).to(points)
    shade = torch.full_like(colors[:1], SKY_GREY).expand(n, 3)
    return torch.cat([points, sky]), torch.cat([colors, shade])


def opaque_sky(cloud: GaussianCloud, sky: SkySphere | None) -> GaussianCloud:
    """Make the Gaussians of a sky opaque; without a sky all stay as they are."""
    if sky is None:
        return cloud
    opaque = torch.full_like(cloud.opacity_logits, math.log(SKY_OPACITY / (1 - SKY_OPACITY)))
    belongs = (sky.distance(cloud.means) > 0)[:, None]
    return replace(cloud, opacity_logits=torch.where(belongs, opaque, cloud.opacity_logits))


def sky_of(cameras: Sequence[Camera], extent: float, config: RobustConfig) -> SkySphere | None:
    """Which Gaussians are of the sky; None without one."""
    return SkySphere.around(cameras, extent) if config.robust else None
