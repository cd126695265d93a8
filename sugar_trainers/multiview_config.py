# SPDX-License-Identifier: Apache-2.0
"""Settings of the multi-view mode of the coarse stage."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar

from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.optim.densification import DensificationConfig
from gaussian_splatting.optim.learned_exposure import LaterExposure
from gaussian_splatting.optim.optimizer_config import (
    DEFAULT_OPTIMIZER,
    OptimizerConfig,
    stage_identity,
)
from gaussian_splatting.optim.schedule import LearningRates, scaled
from gaussian_splatting.shared_flags import (
    max_gaussians,
    random_seed,
    schedule_scale,
    white_background,
)
from sugar_trainers.coarse_config import MULTIVIEW
from sugar_utils.flags import non_negative_float, positive_int
from sugar_utils.settings import flag, made_of, without_flags

LEAST_INTERVALS = {"densification_interval": 50, "trim_interval": 200}
"""However short a schedule is: Gaussians need so long between two rounds of densification, and a
trim costs as much as an epoch."""

_factor = partial(
    flag, group="multi-view mode", parse=non_negative_float, no_effect_when="unless -r multiview"
)


@dataclass(frozen=True)
class MultiviewSchedule:
    """Milestones in absolute iterations; the count goes on where the vanilla stage ends."""

    first: int = 7_000
    last: int = 20_000  # inclusive
    densify_until: int = 15_000  # exclusive
    densification_interval: int = 100
    trim_interval: int = 1_000  # of what too few views see
    log_interval: int = 200
    schedule_scale: float = schedule_scale()  # of all above; rates follow the paper's clock

    @classmethod
    def from_flags(cls, schedule_scale: float = 1.0) -> MultiviewSchedule:
        """The mode's schedule, scaled."""
        return cls().scaled(schedule_scale)

    def scaled(self, scale: float) -> MultiviewSchedule:
        """The same schedule, shorter or longer."""
        values = {n: scaled(v, scale) for n, v in asdict(self).items() if n != "schedule_scale"}
        for name, floor in LEAST_INTERVALS.items():
            values[name] = max(values[name], min(getattr(self, name), floor))
        return MultiviewSchedule(**values, schedule_scale=self.schedule_scale * scale)

    def densifies(self, iteration: int) -> bool:
        """Whether Gaussians are still cloned and split."""
        return iteration < self.densify_until

    def densification_due(self, iteration: int) -> bool:
        """Whether a round follows this iteration."""
        passed = iteration - self.first
        return (
            self.densifies(iteration) and passed > 0 and passed % self.densification_interval == 0
        )

    def trim_due(self, iteration: int) -> bool:
        """Whether Gaussians that too few views see are dropped before this iteration."""
        passed = iteration - self.first
        return passed > 0 and passed % self.trim_interval == 0


@dataclass(frozen=True)
class DensificationLimit:
    """What users choose of the densification."""

    max_gaussians: int | None = max_gaussians()

    @classmethod
    def from_flags(cls, max_gaussians: int | None = None) -> DensificationConfig:
        """Thresholds of the mode."""
        return DensificationConfig(prune_opacity=0.05, max_gaussians=max_gaussians)


@dataclass(frozen=True)
class MultiviewConfig:
    """Everything that decides the result of the multi-view mode."""

    regularization_type: ClassVar[str] = MULTIVIEW
    named_weights: ClassVar[tuple[float, ...]] = ()  # weights that are part of the folder's name

    schedule: MultiviewSchedule = field(default_factory=MultiviewSchedule)
    rates: LearningRates = without_flags(LearningRates)
    densification: DensificationConfig = made_of(DensificationLimit, DensificationLimit.from_flags)
    plane_normal_factor: float = _factor(
        0.05, "weight of the agreement of planes' normals with those of their depth"
    )
    photometric_factor: float = _factor(
        0.6, "weight of 1 - NCC of patches in a view and its neighbour"
    )
    geometric_factor: float = _factor(
        0.02, "weight of the pixels by which the way to a neighbour and back misses"
    )
    flatten_factor: float = _factor(
        10.0, "weight of the Gaussians' smallest scales, in camera extents"
    )
    multiview_pixels: int = flag(
        16_384, "pixels of a view that are compared with a neighbour, per iteration",
        group="multi-view mode", parse=positive_int, no_effect_when="unless -r multiview",
    )  # fmt: skip
    min_views: int = 2  # Gaussians that fewer training views see are dropped
    white_background: bool = white_background()
    exposure: LaterExposure = LaterExposure(exposure_compensation=True)
    optimizer: OptimizerConfig = DEFAULT_OPTIMIZER
    split: ImageSplit = WHOLE_IMAGE
    random_seed: int = random_seed()

    @property
    def compares_views(self) -> bool:
        """Whether any term looks at a neighbour."""
        return self.photometric_factor > 0 or self.geometric_factor > 0

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        return {"regularization_type": self.regularization_type, **stage_identity(self)}
