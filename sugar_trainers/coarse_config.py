# SPDX-License-Identifier: Apache-2.0
"""Settings of the coarse SuGaR stage, with the values of the paper as defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.optim.learned_exposure import NO_LATER_EXPOSURE, LaterExposure
from gaussian_splatting.optim.optimizer_config import (
    DEFAULT_OPTIMIZER,
    OptimizerConfig,
    stage_identity,
)
from gaussian_splatting.optim.schedule import LearningRates, scaled
from gaussian_splatting.shared_flags import random_seed, schedule_scale, white_background
from sugar_utils.errors import UserError
from sugar_utils.flags import AUTO, Automatic, non_negative_float, positive_int, positive_or_auto
from sugar_utils.settings import flag, without_flags

Regularization = Literal["density", "sdf", "dn_consistency"]
REGULARIZATIONS: tuple[Regularization, ...] = ("sdf", "density", "dn_consistency")  # those of SuGaR

MULTIVIEW = "multiview"
MODES = (*REGULARIZATIONS, MULTIVIEW)

MOST_SAMPLES = 1_000_000
SAMPLES_EACH = 4
"""Points for each Gaussian with ``--sdf_samples auto``. They add as much variance to gradients as
the choice of the view does; 16 and 33 give the same surface."""


_coarse = partial(flag, group="coarse stage")
_weight = partial(flag, group="single coarse stage", parse=non_negative_float)


@dataclass(frozen=True)
class CoarseSchedule:
    """Milestones in absolute iterations (SuGaR, section 5.1).

    The count goes on where the paper's vanilla stage ends, whatever checkpoint is loaded.
    """

    first: int = 7_000
    last: int = 15_000  # inclusive
    entropy_start: int = 7_000  # exclusive
    entropy_stop: int = 9_000  # exclusive
    prune: int = 9_000  # after it, faint Gaussians are removed
    regularize: int = 9_000  # after it, the geometric terms act
    neighbor_interval: int = 500
    log_interval: int = 200
    schedule_scale: float = schedule_scale()  # of all above; rates follow the paper's clock

    @classmethod
    def from_flags(cls, schedule_scale: float = 1.0) -> CoarseSchedule:
        """The paper's schedule, scaled."""
        return cls().scaled(schedule_scale)

    def scaled(self, scale: float) -> CoarseSchedule:
        """The same schedule, shorter or longer."""
        values = {n: scaled(v, scale) for n, v in asdict(self).items() if n != "schedule_scale"}
        return CoarseSchedule(**values, schedule_scale=self.schedule_scale * scale)

    def entropy_active(self, iteration: int) -> bool:
        """Whether the entropy term acts."""
        return self.entropy_start < iteration < self.entropy_stop

    def prune_due(self, iteration: int) -> bool:
        """Whether faint Gaussians are removed before this iteration."""
        return iteration - 1 == self.prune

    def regularization_active(self, iteration: int) -> bool:
        """Whether the geometric terms act."""
        return iteration > self.regularize

    def neighbors_due(self, iteration: int) -> bool:
        """Whether neighbours are searched anew, if a term needs them."""
        return iteration % self.neighbor_interval == 0


@dataclass(frozen=True)
class CoarseConfig:
    """Everything that decides the result of the coarse stage."""

    regularization_type: Regularization = "dn_consistency"
    schedule: CoarseSchedule = field(default_factory=CoarseSchedule)
    rates: LearningRates = without_flags(LearningRates)
    estimation_factor: float = _weight(
        0.2, "weight of the density or sdf term; part of the folder's name", short="-e"
    )
    normal_factor: float = _weight(
        0.2, "weight of the better-normal term; part of the folder's name", short="-n"
    )
    entropy_factor: float = 0.1
    dn_factor: float = 0.05  # weight of depth-normal consistency
    n_neighbors: int = 16  # of the density field, the Gaussian itself included
    sdf_samples: Automatic = _coarse(
        MOST_SAMPLES, "points drawn per iteration for the surface terms of all modes; auto: 4 for "
        "each Gaussian that may be drawn, at most 1000000; unset: 1000000, auto with --preset fast",
        parse=positive_or_auto, metavar="{N,auto}", modes={"fast": AUTO},
    )  # fmt: skip
    sample_chunk: int = 1_000_000  # points evaluated at once; does not change the result
    knn_batch_size: int | None = _coarse(
        None, "points per launch of the neighbour search; the result does not depend on it; unset: "
        "100000 on a CPU, all of them on a GPU", parse=positive_int,
    )  # fmt: skip
    prune_opacity: float = 0.5  # less opaque Gaussians are removed when geometric terms begin
    full_res_normals: bool = _coarse(
        True, "depth-normal consistency at the training size, in the colour's own raster pass; "
        "False: in a pass of its own at half the size, which needs less memory and time",
        no_effect_when="unless -r dn_consistency",
    )  # fmt: skip
    white_background: bool = white_background()
    exposure: LaterExposure = NO_LATER_EXPOSURE
    optimizer: OptimizerConfig = DEFAULT_OPTIMIZER
    split: ImageSplit = WHOLE_IMAGE
    random_seed: int = random_seed()

    def __post_init__(self) -> None:
        if self.regularization_type not in REGULARIZATIONS:
            raise UserError(
                f"--regularization_type {self.regularization_type} is unknown; choose one of "
                f"{', '.join(REGULARIZATIONS)} (dn_consistency is the recommended one)"
            )

    @property
    def named_weights(self) -> tuple[float, float]:
        """Weights that are part of the folder's name."""
        return self.estimation_factor, self.normal_factor

    @property
    def uses_sdf(self) -> bool:
        """Whether the sdf term takes the place of the density term."""
        return self.regularization_type == "sdf"

    @property
    def uses_depth_normals(self) -> bool:
        """Whether depth-normal consistency is enforced."""
        return self.regularization_type == "dn_consistency"

    @property
    def density_factor(self) -> float:
        """Factor of the density field; its reciprocal K keeps the sdf field below 1."""
        return 1.0 / 16.0 if self.uses_sdf else 1.0

    def samples_for(self, n_candidates: int) -> int:
        """Points to draw where so many Gaussians may be drawn."""
        if self.sdf_samples == AUTO:
            return min(MOST_SAMPLES, SAMPLES_EACH * n_candidates)
        return self.sdf_samples

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        return stage_identity(self, "sample_chunk", "knn_batch_size")
