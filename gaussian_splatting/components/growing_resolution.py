# SPDX-License-Identifier: Apache-2.0
"""Growing training resolution, as a component: images start small and reach full size.

After DashGaussian (Chen et al. 2025): an iteration's images hold as large a share of the spectrum
as the share of the schedule that has passed, and Gaussians may grow with the number of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera, LoadImage
from gaussian_splatting.engine.component import Component, IterationRules
from gaussian_splatting.engine.state_schema import StateRule
from sugar_utils.flags import boolean
from sugar_utils.settings import flag

LEVELS = 16  # sizes, evenly spaced up to the full one
BUDGET = "gaussian_budget"  # name of the numbers in checkpoints
MAX_SURVEYED = 16  # photographs whose spectrum is taken; of more, evenly spaced ones
FIRST_GUESS = 5.0  # Gaussians at the end per one at the start
MEMORY = 0.98  # decay of the expected number per round of densification


@dataclass(frozen=True)
class GrowthConfig:
    """Whether images grow, and until when."""

    growing_resolution: bool | None = flag(
        None,
        "begin with small images, which grow to the full size while Gaussians are added, "
        "and let the number of Gaussians grow with them; unset: as --preset, but not where masks "
        "show an object",
        parse=boolean,
        nargs="?",
        const=True,
        group="vanilla stage",
        no_effect_when="with --gs_output_dir",
    )
    until: float = 1.0  # share of the densification until large photographs have full size
    small_until: float = 0.5  # for small ones; between, in proportion to the pixels
    large: int = 128_000  # pixels
    smallest: int = 6  # first of LEVELS

    def until_of(self, cameras: Sequence[Camera]) -> float:
        """Share of the densification after which these photographs have their full size."""
        pixels = sum(camera.n_pixels for camera in cameras) / len(cameras)
        return max(self.small_until, self.until * min(1.0, pixels / self.large))


@dataclass(frozen=True)
class ResolutionGrowth:
    """Sizes of the images by iteration."""

    ends: tuple[int, ...]  # last iteration of each size but the full one, ascending

    @classmethod
    def of(cls, shares: Sequence[float], until: int, smallest: int) -> ResolutionGrowth:
        """The schedule of :func:`spectrum_shares`, which ends after ``until``, inclusive."""
        return cls(tuple(int(share * until) for share in shares[smallest - 1 : -1]))

    def scale(self, iteration: int) -> float:
        """Width and height of an iteration's images, as shares of the full ones."""
        return (LEVELS - sum(iteration <= end for end in self.ends)) / LEVELS

    def passed(self, iteration: int) -> float:
        """Share of the growth that has passed, at most 1."""
        return min(1.0, iteration / max(1, self.ends[-1]))


class GrowingResolution(Component):
    """Sizes of the images of a run, and how many Gaussians there may be while they grow.

    How many Gaussians there may be while images grow, from ``first`` to an expected ``last``.

    DashGaussian: P_i = P_first + (P_last - P_first) / r^(2 - i / S), where r is how many times
    smaller images are than the full ones, and S is when they have their full size. P_last is five
    times P_first to begin with, and follows what the rounds of densification ask for.
    """

    name = "growing resolution"
    schema = (StateRule(BUDGET, (2,)),)

    def __init__(self, growth: ResolutionGrowth, first: int) -> None:
        self._growth = growth
        self.first = float(first)
        self.last = FIRST_GUESS * first

    def rules(self, iteration: int) -> IterationRules:
        """The size of an iteration's images."""
        return IterationRules(view_scale=self._growth.scale(iteration))

    def allowed(self, iteration: int, wanted: int) -> int:
        """The most Gaussians after a round of densification that would add ``wanted``."""
        self.last = max(self.last, MEMORY * self.last + wanted)
        share = self._growth.scale(iteration) ** (2.0 - self._growth.passed(iteration))
        return math.floor(self.first + (self.last - self.first) * share)

    def state(self) -> dict[str, Tensor]:
        """First and expected last number of Gaussians. (2,) float64"""
        return {BUDGET: torch.tensor([self.first, self.last], dtype=torch.float64, device="cpu")}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take the numbers back."""
        if BUDGET in state:
            self.first, self.last = state[BUDGET].tolist()


def spectrum_shares(photographs: Sequence[np.ndarray]) -> list[float]:
    """Mean shares of the amplitudes of grey images that copies of each of LEVELS sizes hold."""
    shares = np.zeros(LEVELS)
    for grey in photographs:
        amplitudes = np.abs(np.fft.fft2(grey - grey.mean()))
        # The finest detail of either axis, as a share of what the full size can hold.
        row_detail, column_detail = (2 * np.abs(np.fft.fftfreq(n)) for n in grey.shape)
        finest = np.maximum(row_detail[:, None], column_detail[None, :])
        level = np.clip(np.ceil(finest * LEVELS).astype(int), 1, LEVELS) - 1
        by_level = np.bincount(level.ravel(), amplitudes.ravel(), minlength=LEVELS)
        cumulated = by_level.cumsum()
        shares += cumulated / cumulated[-1] if cumulated[-1] > 0 else 1.0
    return (shares / len(photographs)).tolist()


def measured_growth(
    cameras: Sequence[Camera],
    load_image: LoadImage,
    config: GrowthConfig,
    densified: int,
) -> ResolutionGrowth:
    """The schedule for some photographs. load_image: (H, W, 3), or (H, W, 4) uint8 with a mask"""
    chosen = np.linspace(0, len(cameras) - 1, min(len(cameras), MAX_SURVEYED)).astype(int)
    grey = []
    for row in chosen:
        colors = load_image(cameras[row])[..., :3].double()
        grey.append(colors.mean(dim=-1).numpy())
    until = round(config.until_of(cameras) * densified)
    return ResolutionGrowth.of(spectrum_shares(grey), until, config.smallest)
