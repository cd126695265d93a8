# SPDX-License-Identifier: Apache-2.0
"""Learning rates as functions of the iteration."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial

from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag

SH_REST_DIVISOR = 20.0
_rate = partial(flag, group="vanilla trainer", parse=positive_float)


@dataclass(frozen=True)
class LearningRates:
    """Learning rates of 3DGS (Kerbl et al. 2023); that of positions decays log-linearly."""

    position_lr_init: float = _rate(1.6e-4, "first learning rate of positions, times camera extent")
    position_lr_final: float = _rate(1.6e-6, "their last learning rate")
    position_lr_max_steps: int = _rate(
        30_000, "iterations from the first to the last", parse=positive_int
    )
    feature_lr: float = _rate(2.5e-3, "learning rate of colours; higher bands take a twentieth")
    opacity_lr: float = _rate(0.05, "learning rate of opacities")
    scaling_lr: float = _rate(0.005, "learning rate of sizes")
    rotation_lr: float = _rate(0.001, "learning rate of rotations")

    def position(self, iteration: float, extent: float) -> float:
        """Return the position rate at an absolute iteration, in world units per step."""
        progress = min(max(iteration / self.position_lr_max_steps, 0.0), 1.0)
        low = math.log(self.position_lr_init)
        high = math.log(self.position_lr_final)
        return extent * math.exp(low + (high - low) * progress)

    def times(self, factor: float) -> LearningRates:
        """Return all rates multiplied by a factor."""
        rates = {}
        for name, value in asdict(self).items():
            if name != "position_lr_max_steps":
                rates[name] = factor * value
        return replace(self, **rates)

    def by_name(self, iteration: float, extent: float) -> dict[str, float]:
        """Return the rates of the six Gaussian parameters by attribute name."""
        return {
            "means": self.position(iteration, extent),
            "sh_dc": self.feature_lr,
            "sh_rest": self.feature_lr / SH_REST_DIVISOR,
            "opacity_logits": self.opacity_lr,
            "log_scales": self.scaling_lr,
            "quats": self.rotation_lr,
        }
