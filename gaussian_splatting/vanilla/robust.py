# SPDX-License-Identifier: Apache-2.0
"""What keeps the vanilla stage from explaining each photograph by itself: fog and floaters.

Few photographs leave the space in front of cameras free, and Gaussians there cost nothing. The
points of the reconstruction say where surfaces are; what no other photograph confirms is made
expensive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.observations import Observations, SeenPoints
from gaussian_splatting.engine.strips import ImageTerm
from gaussian_splatting.losses.sparse_depth import sparse_depth_term
from sugar_utils.flags import boolean
from sugar_utils.random import draw_labels, generator
from sugar_utils.settings import flag

SHELL_RADIUS = 20.0
"""In camera extents: beyond all that a reconstruction places, and what mesh extraction looks at."""

SHELL_GREY = 128

FADED = 0.01
"""Share of its weight that the depth term has left at the end."""


@dataclass(frozen=True)
class RobustConfig:
    """The parts, each of which can be left out.

    Attributes:
        depth_weight: Of the depth term at observed points, at the start; fades out.
        guard_share: Gaussians nearer to a training camera than this share of the depth of the
            nearest point that it observes are removed when densification is due.
        opacity_weight: Of the mean opacity.
        scale_weight: Of the mean scale, in units of the camera extent.
        drop_rate: Share of the Gaussians that is left out of a step, growing from 0 to this.
        shell_points: Gaussians on a sphere far outside, a place for sky and distance.
    """

    robust: bool = flag(
        False, "against fog and floaters, for few photographs: a depth term at the points that a "
        "photograph observes, a guard around cameras, random dropping of Gaussians",
        group="vanilla stage", parse=boolean, nargs="?", const=True, idle="with --gs_output_dir",
    )  # fmt: skip
    depth_weight: float = 0.2
    guard_share: float = 0.5
    opacity_weight: float = 0.01
    scale_weight: float = 0.01
    drop_rate: float = 0.2
    shell_points: int = 1_000

    def identity(self) -> dict[str, Any]:
        """What decides a result; empty where nothing is done, as in earlier versions."""
        return {"robust": asdict(self)} if self.robust else {}


NOT_ROBUST = RobustConfig()


class Robustness:
    """The parts at work in one run; keeps no state, so there is nothing to save.

    Args:
        config: Settings.
        cameras: Training views.
        observations: Points that they observe; None where none are known.
        iterations: Length of the run.
        extent: Camera extent in world units.
        seed: Seed of the run.
        device: Where to compute.
    """

    def __init__(
        self,
        config: RobustConfig,
        cameras: Sequence[Camera],
        observations: Observations | None,
        *,
        iterations: int,
        extent: float,
        seed: int,
        device: torch.device,
    ) -> None:
        self._config = config
        self._iterations = iterations
        self._extent = extent or 1.0
        self._seed = seed
        self._device = device
        seen = {} if observations is None else {c.name: observations.seen(c) for c in cameras}
        self._seen: dict[str, SeenPoints] = {name: s for name, s in seen.items() if s is not None}
        guarded = [camera for camera in cameras if camera.name in self._seen]
        centers = np.array([camera.center for camera in guarded]).reshape(-1, 3)
        radii = [config.guard_share * self._seen[camera.name].nearest for camera in guarded]
        middle = np.mean([camera.center for camera in cameras], axis=0)
        self._middle = torch.tensor(middle, dtype=torch.float32, device=device)
        self._centers = torch.tensor(centers, dtype=torch.float32, device=device)
        self._radii = torch.tensor(radii, dtype=torch.float32, device=device)

    def depth_term(self, camera: Camera, iteration: int) -> ImageTerm | None:
        """The term at the points that a photograph observes; None without any."""
        seen = self._seen.get(camera.name)
        if seen is None or self._config.depth_weight == 0:
            return None
        return sparse_depth_term(seen, self.depth_weight(iteration), self._device)

    def depth_weight(self, iteration: int) -> float:
        """Weight of the depth term in an iteration."""
        return self._config.depth_weight * FADED ** (iteration / self._iterations)

    def dropped(self, gaussians: Gaussians, iteration: int, view_index: int) -> Gaussians:
        """The Gaussians with some left out and the others more opaque by as much in the mean.

        What stands behind fog is then seen, and has to be right as well (Park, Ryu and Kim,
        "DropGaussian", CVPR 2025).
        """
        rate = self._config.drop_rate * iteration / self._iterations
        if rate == 0:
            return gaussians
        labels = draw_labels(iteration, view_index)
        rng = generator(self._seed, "drop", *labels, device=self._device)
        kept = torch.rand(len(gaussians), generator=rng, device=self._device) >= rate
        opacities = (gaussians.opacities * kept / (1.0 - rate)).clamp_max(1.0)
        return replace(gaussians, opacities=opacities)

    def regularisers(self, cloud: GaussianCloud) -> Tensor:
        """Weighted means of opacities and scales (Kheradmand et al., NeurIPS 2024). ()"""
        opacity = cloud.opacity_logits.sigmoid().mean()
        scale = cloud.log_scales.exp().mean() / self._extent
        return self._config.opacity_weight * opacity + self._config.scale_weight * scale

    def far_away(self, means: Tensor) -> Tensor:
        """Gaussians of the shell, which may be large. (N, 3) world units -> (N,) bool"""
        return (means - self._middle).norm(dim=-1) > 0.5 * SHELL_RADIUS * self._extent

    def outside_guards(self, means: Tensor) -> Tensor:
        """Which Gaussians no camera is too near to. (N, 3) world units -> (N,) bool"""
        keep = torch.ones(len(means), dtype=torch.bool, device=means.device)
        # One camera after the other: cameras times Gaussians may be many.
        for center, radius in zip(self._centers, self._radii, strict=True):
            keep &= (means - center).norm(dim=-1) >= radius
        return keep


def with_shell(
    points: Tensor, colors: Tensor, cameras: Sequence[Camera], extent: float, config: RobustConfig
) -> tuple[Tensor, Tensor]:
    """Points to start from with grey ones evenly on a sphere around the cameras (Fibonacci).

    What no reconstruction has points of, such as the sky, otherwise becomes fog near the cameras.

    Args:
        points: (N, 3) world units
        colors: (N, 3) uint8
        cameras: Training views.
        extent: Camera extent in world units.
        config: Settings.
    """
    n = config.shell_points if config.robust else 0
    if n == 0 or extent <= 0:
        return points, colors
    turn = torch.arange(n, dtype=torch.float64, device="cpu") + 0.5
    height, angle = 1.0 - 2.0 * turn / n, turn * math.pi * (3.0 - math.sqrt(5.0))
    ring = (1.0 - height * height).sqrt()
    sphere = torch.stack([ring * angle.cos(), ring * angle.sin(), height], dim=1)
    center = torch.tensor(np.mean([c.center for c in cameras], axis=0), device="cpu")
    shell = (center + SHELL_RADIUS * extent * sphere).to(points)
    return torch.cat([points, shell]), torch.cat(
        [colors, torch.full_like(colors[:1], SHELL_GREY).expand(n, 3)]
    )


def robustness_of(
    config: RobustConfig,
    cameras: Sequence[Camera],
    observations: Observations | None,
    **more: Any,
) -> Robustness | None:
    """The parts at work; None where they are not asked for. Arguments of :class:`Robustness`."""
    return Robustness(config, cameras, observations, **more) if config.robust else None
