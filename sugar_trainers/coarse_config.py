# SPDX-License-Identifier: Apache-2.0
"""Settings of the coarse SuGaR stage, with the values of the paper as defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates, scaled
from sugar_utils.errors import UserError

Regularization = Literal["density", "sdf", "dn_consistency"]
REGULARIZATIONS: tuple[Regularization, ...] = ("sdf", "density", "dn_consistency")


@dataclass(frozen=True)
class CoarseSchedule:
    """Milestones in absolute iterations (SuGaR, section 5.1).

    The count goes on where the paper's vanilla stage ends, whatever checkpoint is loaded.

    Attributes:
        first: First iteration.
        last: Last iteration, inclusive.
        entropy_start: The entropy term acts after this iteration ...
        entropy_stop: ... and before this one.
        prune: After this iteration faint Gaussians are removed.
        regularize: After this iteration the geometric terms act.
        neighbor_interval: Iterations between two neighbour searches.
        log_interval: Iterations between two log lines.
        scale: What all the above were multiplied with; learning rates follow the paper's clock.
    """

    first: int = 7_000
    last: int = 15_000
    entropy_start: int = 7_000
    entropy_stop: int = 9_000
    prune: int = 9_000
    regularize: int = 9_000
    neighbor_interval: int = 500
    log_interval: int = 200
    scale: float = 1.0

    def scaled(self, scale: float) -> CoarseSchedule:
        """The same schedule, shorter or longer."""
        values = {n: scaled(v, scale) for n, v in asdict(self).items() if n != "scale"}
        return CoarseSchedule(**values, scale=self.scale * scale)

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
    """Everything that decides the result of the coarse stage.

    Attributes:
        regularization: ``density``, ``sdf`` or ``dn_consistency`` (recommended).
        schedule: When what happens.
        rates: Learning rates.
        estimation_factor: Weight of the density or sdf term.
        normal_factor: Weight of the better-normal term.
        entropy_factor: Weight of the opacity entropy.
        dn_factor: Weight of depth-normal consistency.
        n_neighbors: Neighbours K of the density field, the Gaussian itself included.
        samples: Points drawn per iteration.
        sample_chunk: Points evaluated at once; the result does not depend on it.
        knn_batch_size: Points per launch of the neighbour search; the result does not depend on it.
        prune_opacity: Gaussians below are removed when the geometric terms begin.
        full_res_normals: Evaluate depth-normal consistency at the training size; False renders
            depth and normals a second time at half the size instead.
        white_background: Render on white instead of black.
        optimizer: Storage of parameters and moments, and which Gaussians step.
        split: How the memory of one view is saved; no part of the identity.
        seed: Random seed.
    """

    regularization: Regularization = "dn_consistency"
    schedule: CoarseSchedule = field(default_factory=CoarseSchedule)
    rates: LearningRates = field(default_factory=LearningRates)
    estimation_factor: float = 0.2
    normal_factor: float = 0.2
    entropy_factor: float = 0.1
    dn_factor: float = 0.05
    n_neighbors: int = 16
    samples: int = 1_000_000
    sample_chunk: int = 1_000_000
    knn_batch_size: int = 100_000
    prune_opacity: float = 0.5
    full_res_normals: bool = True
    white_background: bool = False
    optimizer: OptimizerConfig = DEFAULT_OPTIMIZER
    split: ImageSplit = WHOLE_IMAGE
    seed: int = 0

    def __post_init__(self) -> None:
        if self.regularization not in REGULARIZATIONS:
            raise UserError(
                f"--regularization_type {self.regularization} is unknown; choose one of "
                f"{', '.join(REGULARIZATIONS)} (dn_consistency is the recommended one)"
            )

    @property
    def uses_sdf(self) -> bool:
        """Whether the sdf term takes the place of the density term."""
        return self.regularization == "sdf"

    @property
    def uses_depth_normals(self) -> bool:
        """Whether depth-normal consistency is enforced."""
        return self.regularization == "dn_consistency"

    @property
    def density_factor(self) -> float:
        """Factor of the density field; its reciprocal K keeps the sdf field below 1."""
        return 1.0 / 16.0 if self.uses_sdf else 1.0

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        values = asdict(self)
        for other in ("sample_chunk", "knn_batch_size", "split", "optimizer"):
            values.pop(other)
        return {**values, **self.optimizer.identity()}
