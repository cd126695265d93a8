# SPDX-License-Identifier: Apache-2.0
"""Learning rates and milestones as functions of the iteration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

POSITION_LR_INIT = 1.6e-4
POSITION_LR_FINAL = 1.6e-6
POSITION_LR_STEPS = 30_000
SH_LR = 2.5e-3
SH_REST_DIVISOR = 20.0
OPACITY_LR = 0.05
SCALE_LR = 0.005
ROTATION_LR = 0.001


@dataclass(frozen=True)
class LearningRates:
    """Rates of 3DGS (Kerbl et al. 2023): all constant but that of the positions.

    Attributes:
        position_init: Rate of positions at iteration 0, per unit of camera extent.
        position_final: Rate at ``position_steps``.
        position_steps: Iterations over which the rate falls log-linearly.
        sh: Rate of band 0; the higher bands use a twentieth.
        opacity: Rate of opacity logits.
        scale: Rate of log scales.
        rotation: Rate of quaternions.
    """

    position_init: float = POSITION_LR_INIT
    position_final: float = POSITION_LR_FINAL
    position_steps: int = POSITION_LR_STEPS
    sh: float = SH_LR
    opacity: float = OPACITY_LR
    scale: float = SCALE_LR
    rotation: float = ROTATION_LR

    def position(self, iteration: float, extent: float) -> float:
        """Position rate at an absolute iteration, in world units per step."""
        progress = min(max(iteration / self.position_steps, 0.0), 1.0)
        low, high = math.log(self.position_init), math.log(self.position_final)
        return extent * math.exp(low + (high - low) * progress)

    def by_name(self, iteration: float, extent: float) -> dict[str, float]:
        """Rates of the six Gaussian parameters by attribute name."""
        return {
            "means": self.position(iteration, extent),
            "sh_dc": self.sh,
            "sh_rest": self.sh / SH_REST_DIVISOR,
            "opacity_logits": self.opacity,
            "log_scales": self.scale,
            "quats": self.rotation,
        }


def scaled(iterations: int, scale: float) -> int:
    """A milestone or interval of the paper's schedule, scaled and at least 1."""
    return max(1, round(iterations * scale))


def scaled_all(iterations: Iterable[int], scale: float) -> tuple[int, ...]:
    """Milestones scaled, in order, without duplicates."""
    return tuple(sorted({scaled(i, scale) for i in iterations}))
