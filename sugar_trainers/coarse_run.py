# SPDX-License-Identifier: Apache-2.0
"""Options of a coarse run, in any of its modes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from gaussian_splatting.components.densification import Densification
from gaussian_splatting.components.exposures import Exposures
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.milestones import scaled_all, spaced
from gaussian_splatting.data.maps.depth_maps import DepthOptions
from gaussian_splatting.data.maps.normal_maps import NormalOptions
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.model import check_free_payload, count_gaussians
from gaussian_splatting.engine.runner import Messages
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.engine.state_schema import PayloadCheck, payload_check
from gaussian_splatting.scenes.reference_layout import ReferenceCheckpoint
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.shared_flags import (
    Preset,
    checkpoint_interval,
    least_checkpoint_interval,
    preset,
    scaled_checkpoint_interval,
)
from sugar_trainers.coarse_stage import build_coarse_stage
from sugar_trainers.multiview_stage import build_multiview_stage
from sugar_trainers.naming import (
    COARSE_FOLDER,
    coarse_name,
    stage_folder,
)
from sugar_trainers.neighbor_search import NeighborSearch
from sugar_trainers.stage_config import MULTIVIEW, CoarseConfig, MultiviewConfig
from sugar_trainers.stage_options import StageContext, TrainingOptions
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.settings import flag

INTENDED_START = 7_000
LEAST_BETWEEN_TESTS = 500  # iterations; to measure all held-out views takes as long as some dozens
_STATE_RULES = (*NeighborSearch.schema, *Densification.schema, *Exposures.schema)
_flag = partial(flag, group="coarse stage")


@dataclass(frozen=True, kw_only=True)
class CoarseOptions(TrainingOptions[GaussianCloud]):
    """A coarse run.

    Milestones and intervals are in iterations of the paper's schedule; the schedule's scale
    applies to them as well.
    """

    output_dir: Path | None = flag(
        None,
        "folder in which the run's folder is made; unset: output/coarse/<scene>",
        group="single coarse stage",
        short="-o",
        parse=Path,
    )
    preset: Preset = preset("single coarse stage")
    config: CoarseConfig = field(default_factory=CoarseConfig)
    depth_options: DepthOptions = field(default_factory=DepthOptions)
    normal_options: NormalOptions = field(default_factory=NormalOptions)
    checkpoint_interval: int = checkpoint_interval("coarse stage")
    checkpoint_milestones: tuple[int, ...] = _flag(
        (5_000, 7_000, 10_000, 13_000, 15_000),
        "further checkpoints, never thinned out; those "
        "before the first iteration, 7000, never come",
    )
    test_iterations: tuple[int, ...] = _flag(
        (7_000, 8_000, 9_000, 10_000, 12_000, 15_000),
        "when to measure the held-out views and "
        "picture some; the last iteration always; on short schedules no closer than 500",
        no_effect_when="with --eval False nothing is measured; pictures are then of training views",
    )

    @property
    def title(self) -> str:  # type: ignore[override]
        """Name of the stage, for people."""
        return f"coarse SuGaR, {self.config.regularization_type}"

    @property
    def messages(self) -> tuple[str, ...]:
        """One message for each flag without effect beside the others."""
        lines = [*super().messages, *self.config.messages]
        if not self.eval and self.test_iterations != CoarseOptions.test_iterations:
            lines.append("--test_iterations has no effect with --eval False: nothing is held out")
        return tuple(lines)

    @property
    def directory(self) -> Path:
        """The run's folder; its name holds mode and weights, as in the original."""
        parent = self.output_dir or stage_folder(COARSE_FOLDER, self.scene_path)
        mode = self.config.regularization_type
        weights = self.config.named_weights
        return parent / coarse_name(self.iteration_to_load, mode, *weights)

    @property
    def result(self) -> Path:
        """The final ``.pt``."""
        return self.directory / f"{self.config.schedule.last}.pt"

    @property
    def payload_check(self) -> PayloadCheck:
        """Check of checkpoint contents: free Gaussians, and the state of components."""
        return payload_check(check_free_payload, count_gaussians, _STATE_RULES)

    @property
    def loop(self) -> LoopConfig:
        """When the loop does what; unset milestones are thinned out on short schedules."""
        schedule = self.config.schedule
        scale = self.config.schedule.schedule_scale
        tests = scaled_all(self.test_iterations, scale)
        if self.test_iterations == CoarseOptions.test_iterations:
            tests = spaced(tests, schedule.last, LEAST_BETWEEN_TESTS)
        length = schedule.last - schedule.first
        milestones = scaled_all(self.checkpoint_milestones, scale)
        if self.checkpoint_milestones == CoarseOptions.checkpoint_milestones:
            milestones = spaced(milestones, schedule.last, least_checkpoint_interval(length))
        return LoopConfig(
            first=schedule.first,
            last=schedule.last,
            seed=self.config.random_seed,
            log_interval=schedule.log_interval,
            checkpoint_interval=scaled_checkpoint_interval(self.checkpoint_interval, scale, length),
            checkpoint_milestones=milestones,
            keep_checkpoints=self.run.keep_checkpoints,
            test_iterations=tests,
        )

    def initial(
        self, checkpoint: ReferenceCheckpoint, scene: Scene, messages: Messages
    ) -> tuple[GaussianCloud, dict[str, Any]]:
        """Read the Gaussians of the checkpoint.

        Raises:
            UserError: There are none.
        """
        advise(self, checkpoint, messages)
        cloud = checkpoint.read_cloud(messages, scene.offset)
        if len(cloud) == 0:
            raise UserError(
                f"{checkpoint.ply_path} holds no Gaussians; train the vanilla stage again"
            )
        messages.detail(f"{len(cloud):,} Gaussians of {checkpoint.ply_path}")
        return cloud.to(self.compute.device), {"Gaussians": file_digest(checkpoint.ply_path)}

    def build(self, model: GaussianCloud, config: CoarseConfig, context: StageContext) -> Stage:
        """Build the stage."""
        return build_coarse_stage(model, config, context)


@dataclass(frozen=True, kw_only=True)
class MultiviewOptions(CoarseOptions):
    """A coarse run in multi-view mode."""

    reads_tracks: ClassVar[bool] = True

    config: MultiviewConfig = field(default_factory=MultiviewConfig)

    def build(self, model: GaussianCloud, config: MultiviewConfig, context: StageContext) -> Stage:
        """Build the stage."""
        return build_multiview_stage(model, config, context)


def options_of_mode(mode: str) -> type[CoarseOptions]:
    """The class of the options of a mode of ``-r``."""
    return MultiviewOptions if mode == MULTIVIEW else CoarseOptions


def advise(options: CoarseOptions, checkpoint: ReferenceCheckpoint, messages: Messages) -> None:
    """Warn about inputs that work but are rarely intended."""
    if checkpoint.iteration is not None and checkpoint.iteration > INTENDED_START:
        messages(
            f"note: SuGaR is made to start from iteration {INTENDED_START}; the Gaussians of "
            f"iteration {checkpoint.iteration} have settled and align less well with the surface"
        )
    lone_ply = options.checkpoint_path.suffix.lower() == ".ply"
    if lone_ply and options.iteration_to_load != INTENDED_START:
        messages("-i/--iteration_to_load only names the output: the checkpoint is a single PLY")
    white = checkpoint.settings.get("white_background")
    if white is not None and white != options.config.white_background:
        messages(
            f"note: the checkpoint was trained with white_background={white}; pass "
            f"--white_background {white} unless the difference is wanted"
        )
