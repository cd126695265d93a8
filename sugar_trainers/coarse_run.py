# SPDX-License-Identifier: Apache-2.0
"""A coarse SuGaR run from vanilla checkpoint to ``.pt`` file."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.reference_layout import ReferenceCheckpoint
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.data.visual_hull import hull_of
from gaussian_splatting.engine.identity import Identity, scene_inputs
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.memory_plan import MemoryOptions
from gaussian_splatting.engine.run_directory import RunDirectory
from gaussian_splatting.engine.runner import Notices, RunOptions, StageRun, run_stage
from gaussian_splatting.optim.learned_exposure import Exposures
from gaussian_splatting.optim.schedule import scaled, scaled_all
from gaussian_splatting.shared_flags import Preset, checkpoint_interval, preset
from sugar_trainers.capture import CaptureOptions, capture_exposures, load_capture
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.naming import OUTPUT_ROOT, coarse_directory, scene_name
from sugar_trainers.stage_memory import plan_coarse
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.settings import flag

INTENDED_START = 7_000
_flag = partial(flag, group="coarse stage")


@dataclass(frozen=True, kw_only=True)
class CoarseOptions(CaptureOptions):
    """A coarse run.

    Milestones and intervals are in iterations of the paper's schedule; the schedule's scale
    applies to them as well.

    Attributes:
        config: What decides the optimisation.
        memory: How much memory there is.
        run: Treatment of an occupied folder.
        notices: Lines to print at the start.
    """

    output_dir: Path | None = flag(
        None, "folder in which the run's folder is made; unset: output/coarse/<scene>",
        group="single coarse stage", short="-o", parse=Path,
    )  # fmt: skip
    preset: Preset = preset("single coarse stage")
    config: CoarseConfig = field(default_factory=CoarseConfig)
    checkpoint_interval: int = checkpoint_interval("coarse stage")
    checkpoint_milestones: tuple[int, ...] = _flag(
        (5_000, 7_000, 10_000, 13_000, 15_000), "further checkpoints, never thinned out; those "
        "before the first iteration, 7000, never come",
    )  # fmt: skip
    test_iterations: tuple[int, ...] = _flag(
        (7_000, 8_000, 9_000, 10_000, 12_000, 15_000), "when to measure the held-out views and "
        "picture some; the last iteration always",
        idle="with --eval False nothing is measured; pictures are then of training views",
    )  # fmt: skip
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    run: RunOptions = field(default_factory=RunOptions)
    notices: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        """The run's folder."""
        parent = self.output_dir or OUTPUT_ROOT / "coarse" / scene_name(self.scene_path)
        return coarse_directory(
            parent,
            self.iteration_to_load,
            self.config.regularization_type,
            self.config.estimation_factor,
            self.config.normal_factor,
        )

    @property
    def result(self) -> Path:
        """The final ``.pt``."""
        return self.directory / f"{self.config.schedule.last}.pt"

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result."""
        return {**self.capture_identity(), **self.config.identity()}


def train_coarse(options: CoarseOptions, images: ImageStore | None = None) -> Path:
    """Train the coarse stage.

    Args:
        options: What to do.
        images: Decoded photographs that other stages use, too; an own store if None.

    Returns:
        The final ``.pt``. A finished run with the same settings is not repeated.

    Raises:
        UserError: For anything the user can fix.
    """
    return run_stage(_prepared, options, images)


def open_coarse(
    options: CoarseOptions, notices: Notices, *, tracks: bool = False
) -> tuple[ReferenceCheckpoint, Scene, Exposures | None, Identity]:
    """Read what a coarse run of any mode starts from, and what identifies it.

    Args:
        options: The run.
        notices: Told what was found.
        tracks: Whether the result depends on which points the photographs observe.

    Raises:
        UserError: If something is missing or damaged.
    """
    config = options.config
    checkpoint, scene = load_capture(options, config.white_background, config.random_seed, notices)
    advise(options, checkpoint, notices)
    span = config.schedule.first, config.schedule.last
    exposures, known = capture_exposures(
        checkpoint, scene, config.exposure, span, options.compute.device, notices
    )
    read = scene_inputs(scene, tracks=tracks)
    inputs = {**read, "Gaussians": file_digest(checkpoint.ply_path), **known}
    return checkpoint, scene, exposures, Identity(options.identity(), inputs, options.sources())


def _prepared(
    options: CoarseOptions, notices: Notices
) -> tuple[StageRun[GaussianCloud], GaussianCloud]:
    config, compute = options.config, options.compute
    checkpoint, scene, exposures, identity = open_coarse(options, notices)

    def build(cloud: GaussianCloud, store: ImageStore, console: Console) -> CoarseStage:
        planned = plan_coarse(cloud, config, options.memory, scene, store, console)
        return CoarseStage(
            cloud,
            planned,
            scene.extent,
            console.info,
            rasterizer=compute.rasterizer,
            hull=hull_of(scene.train_cameras, compute.device),
            exposures=exposures,
        )

    title = f"coarse SuGaR, {config.regularization_type}"
    directory = RunDirectory(options.directory, identity)
    run = StageRun(title, scene, directory, loop_of(options), build, (options.result,))
    # Read before the run's folder is touched: a damaged file must not leave one behind.
    return run, start_cloud(checkpoint, notices).to(compute.device)


def advise(options: CoarseOptions, checkpoint: ReferenceCheckpoint, notices: Notices) -> None:
    """Point out inputs that work but seldom do what was meant."""
    if checkpoint.iteration is not None and checkpoint.iteration > INTENDED_START:
        notices(
            f"note: SuGaR is made to start from iteration {INTENDED_START}; the Gaussians of "
            f"iteration {checkpoint.iteration} have settled and align less well with the surface"
        )
    if (
        options.checkpoint_path.suffix.lower() == ".ply"
        and options.iteration_to_load != INTENDED_START
    ):
        notices("-i/--iteration_to_load only names the output: the checkpoint is a single PLY")
    trained_on_white = checkpoint.settings.get("white_background")
    if trained_on_white is not None and trained_on_white != options.config.white_background:
        notices(
            f"note: the checkpoint was trained with white_background={trained_on_white}; pass "
            f"--white_background {trained_on_white} unless the difference is wanted"
        )


def start_cloud(checkpoint: ReferenceCheckpoint, notices: Notices) -> GaussianCloud:
    """The Gaussians of the checkpoint.

    Raises:
        UserError: There are none.
    """
    cloud = checkpoint.read_cloud(notices)
    if len(cloud) == 0:
        raise UserError(f"{checkpoint.ply_path} holds no Gaussians; train the vanilla stage again")
    notices(f"{len(cloud):,} Gaussians of {checkpoint.ply_path}")
    return cloud


def loop_of(options: CoarseOptions) -> LoopConfig:
    """When the loop does what."""
    schedule, scale = options.config.schedule, options.config.schedule.scale
    return LoopConfig(
        first=schedule.first,
        last=schedule.last,
        seed=options.config.random_seed,
        log_interval=schedule.log_interval,
        checkpoint_interval=scaled(options.checkpoint_interval, scale),
        checkpoint_milestones=scaled_all(options.checkpoint_milestones, scale),
        keep_checkpoints=options.run.keep_checkpoints,
        test_iterations=scaled_all(options.test_iterations, scale),
    )
