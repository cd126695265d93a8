# SPDX-License-Identifier: Apache-2.0
"""Settings of the vanilla stage, with the values of 3DGS (Kerbl et al. 2023) as defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from gaussian_splatting.components.densification import DensificationConfig
from gaussian_splatting.components.exposures import NO_EXPOSURE, ExposureConfig
from gaussian_splatting.components.growing_resolution import GrowthConfig
from gaussian_splatting.components.pruning_scores import DensificationRule, ScoreConfig
from gaussian_splatting.components.sky_sphere import NOT_ROBUST, RobustConfig
from gaussian_splatting.components.transients import NO_TRANSIENTS, TransientConfig
from gaussian_splatting.core.cloud import MAX_SH_DEGREE
from gaussian_splatting.core.milestones import scaled
from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.losses.photometric import DSSIM_WEIGHT
from gaussian_splatting.optim.optimizer_config import (
    DEFAULT_OPTIMIZER,
    OptimizerConfig,
    fields_without,
)
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.shared_flags import Preset, preset, random_seed, white_background
from sugar_utils.flags import positive_float, positive_int, unit_float
from sugar_utils.settings import flag

Init = Literal["sparse", "dense"]

_DENSIFICATION: dict[Preset, DensificationRule] = {"reference": "reference", "fast": "scored"}

_flag = partial(flag, group="vanilla trainer")


@dataclass(frozen=True)
class VanillaConfig:
    """Settings that decide a vanilla model, and how its memory is saved."""

    preset: Preset = preset("vanilla stage")
    iterations: int = _flag(
        30_000,
        "number of iterations, not touched by --schedule_scale; unset: 30000, scaled",
        parse=positive_int,
        unset=True,
    )
    rates: LearningRates = field(default_factory=LearningRates)
    densification: DensificationConfig = field(default_factory=DensificationConfig)
    exposure: ExposureConfig = NO_EXPOSURE
    transient: TransientConfig = NO_TRANSIENTS
    robustness: RobustConfig = NOT_ROBUST  # measures against floaters
    scoring: ScoreConfig = field(default_factory=ScoreConfig)
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    sh_interval: int = 1000  # iterations until the degree grows by one
    sh_degree: int = _flag(MAX_SH_DEGREE, "highest degree of the colour", choices=(0, 1, 2, 3))
    lambda_dssim: float = _flag(
        DSSIM_WEIGHT, "weight of 1 - SSIM in the colour loss; the rest is L1", parse=unit_float
    )
    white_background: bool = white_background()
    random_background: bool = _flag(
        False, "a random background colour in every iteration", action="store_true"
    )
    refine_poses: bool = flag(
        False,
        "learn a small rotation and shift of every training photograph's camera; the poses "
        "that were found are written beside the result, and later stages use them",
        group="vanilla stage",
        no_effect_when="with --gs_output_dir",
    )
    init: Init | None = flag(
        None,
        "sparse: start from the points of the reconstruction; dense: and from points that "
        "neighbouring photographs agree on; unset: dense with --robust, else sparse",
        group="vanilla stage",
        choices=get_args(Init),
        no_effect_when="with --gs_output_dir; with --init_ply that holds Gaussians",
    )
    optimizer: OptimizerConfig = DEFAULT_OPTIMIZER
    split: ImageSplit = WHOLE_IMAGE
    random_seed: int = random_seed()
    schedule_scale: float = _flag(
        1.0,
        "multiply the milestones of learning rates, densification and opacity reset, for "
        "quick runs; --iterations and lists of iterations are taken as they are",
        parse=positive_float,
        task="time and memory",
    )

    @classmethod
    def from_flags(cls, schedule_scale: float = 1.0, **flags: Any) -> VanillaConfig:
        """Build from values of flags; an unset number of iterations follows the scale."""
        flags.setdefault("iterations", scaled(cls.iterations, schedule_scale))
        return cls(**flags).with_schedule(schedule_scale)

    @property
    def scores(self) -> bool:
        """Whether Gaussians grow where pixels are wrong, and only there."""
        return (self.scoring.densification or _DENSIFICATION[self.preset]) == "scored"

    def resolved(self, object_alone: bool) -> VanillaConfig:
        """Return the settings with all values that depend on the scene.

        Args:
            object_alone: Whether masks show an object before nothing. It needs few Gaussians,
                learns nothing from small images, and has nothing behind it.
        """
        fast = self.preset == "fast" and not object_alone
        grows = self.growth.growing_resolution
        robust = self.robustness.robust
        return replace(
            self,
            growth=replace(self.growth, growing_resolution=fast if grows is None else grows),
            robustness=replace(self.robustness, robust=fast if robust is None else robust),
        )

    @property
    def starts_dense(self) -> bool:
        """Whether it starts from points that photographs agree on, too."""
        if self.init is None:
            return bool(self.robustness.robust)
        return self.init == "dense"

    @property
    def densifies_until(self) -> int:
        """The last iteration but for those that densification leaves for refinement."""
        return min(self.iterations, self.densification.densify_until_iter)

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the result, as JSON values, once they are resolved."""
        values = fields_without(
            self,
            "preset",
            "optimizer",
            "split",
            "exposure",
            "transient",
            "robustness",
            "scoring",
            "growth",
            "init",
            "schedule_scale",
        )
        if self.starts_dense:
            values["init"] = "dense"
        chosen = {
            **self.exposure.identity(),
            **self.transient.identity(),
            **self.robustness.identity(),
        }
        if self.scores:
            chosen["scoring"] = {**asdict(self.scoring), "densification": "scored"}
        if self.growth.growing_resolution:
            chosen["growth"] = asdict(self.growth)
        return {**values, **chosen, **self.optimizer.identity()}

    def with_schedule(self, scale: float) -> VanillaConfig:
        """The same settings with every milestone and interval but the length scaled."""
        steps = scaled(self.rates.position_lr_max_steps, scale)
        names = (
            "densify_from_iter",
            "densify_until_iter",
            "densification_interval",
            "opacity_reset_interval",
        )
        milestones = {n: scaled(getattr(self.densification, n), scale) for n in names}
        return replace(
            self,
            rates=replace(self.rates, position_lr_max_steps=steps),
            densification=replace(self.densification, **milestones),
            exposure=self.exposure.with_schedule(scale),
            sh_interval=scaled(self.sh_interval, scale),
            schedule_scale=self.schedule_scale * scale,
        )
