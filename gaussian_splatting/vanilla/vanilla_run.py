# SPDX-License-Identifier: Apache-2.0
"""A vanilla 3DGS run from scene folder to checkpoint directory."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gaussian_splatting.components.densification import Densification, DensificationConfig, Region
from gaussian_splatting.components.depth_supervision import (
    N_COLUMNS,
    depth_supervision,
    falling_weight,
)
from gaussian_splatting.components.exposures import MIN_NOISE, Exposures
from gaussian_splatting.components.growing_resolution import GrowingResolution, measured_growth
from gaussian_splatting.components.poses import PoseConfig, PoseRefinement
from gaussian_splatting.components.pruning_scores import N_SCORES, PruningScores
from gaussian_splatting.components.sky_sphere import sky_of
from gaussian_splatting.components.track_exposures import track_exposures
from gaussian_splatting.components.transients import Transients, search_iterations
from gaussian_splatting.components.view_checks import ViewChecks
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import find_model, write_poses
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.maps.depth_maps import DepthOptions
from gaussian_splatting.data.masks import MaskOptions, hull_of
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.data.world_offset import write_offset
from gaussian_splatting.engine.component import Component
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.memory_plan import MemoryOptions
from gaussian_splatting.engine.model import check_free_payload, count_gaussians
from gaussian_splatting.engine.run_directory import RunDirectory
from gaussian_splatting.engine.run_identity import points_digest, scene_inputs
from gaussian_splatting.engine.runner import (
    Messages,
    RunOptions,
    StageRun,
    kernels_ahead,
    run_stage,
)
from gaussian_splatting.engine.state_schema import payload_check
from gaussian_splatting.formats import ply as ply_files
from gaussian_splatting.rasterization.compute import BackendFlags, Compute
from gaussian_splatting.scenes import reference_layout as layout
from gaussian_splatting.scenes.scene import Scene, SizeRule, VanillaSize, load_scene
from gaussian_splatting.shared_flags import InertFlags, checkpoint_interval, inert
from gaussian_splatting.vanilla.dense_start import with_dense_points
from gaussian_splatting.vanilla.estimated_masks import ITERATIONS, MaskEstimation
from gaussian_splatting.vanilla.initial_gaussians import holds_gaussians, initial_gaussians
from gaussian_splatting.vanilla.sky_colors import with_sky_colors
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.flags import AUTO
from sugar_utils.recipe import Recipe
from sugar_utils.settings import flag, made_of, parser_of

REFINED_MODEL = "sparse_refined"
POSES_START = 500
_STATE_RULES = (
    *Densification.schema,
    *PruningScores.schema,
    *GrowingResolution.schema,
    *Exposures.schema,
    *Transients.schema,
)
KERNEL_PACKAGES = ("gaussian_splatting", "sugar_utils")  # of the kernels that the stage launches
VIEW_CHECK_SHARE = 0.3  # of the iterations, until contradicting training views are left out
_flag = partial(flag, group="vanilla trainer")


_CHECKED = "non-finite numbers are detected in every iteration"
_SHORT = "output that is not a terminal is short anyway"


@dataclass(frozen=True)
class InertVanillaFlags(InertFlags):
    """Flags of the reference without effect here; using one prints a message."""

    position_lr_delay_mult: str | None = inert(None, "it is inert in the reference as well")
    data_device: str | None = inert(None, "photographs stay in memory as bytes")
    ip: str | None = inert(None, "a run is watched with --viewer")
    port: str | None = inert(None, "a run is watched with --viewer")
    debug_from: str | None = inert(None, _CHECKED)
    quiet: bool = inert(False, _SHORT, action="store_true")
    detect_anomaly: bool = inert(False, _CHECKED, action="store_true")


@dataclass(frozen=True, kw_only=True)
class VanillaOptions:
    """Flags of a vanilla run."""

    source_path: Path = _flag(MISSING, "scene folder; needed", short="-s", parse=Path)
    model_path: Path = _flag(MISSING, "checkpoint folder to write; needed", short="-m", parse=Path)
    images: str = _flag(
        "images",
        "folder of the photographs in the scene folder",
        short="-i",
        no_effect_when="where transforms*.json names its files as they lie",
    )
    resolution: float = _flag(
        -1.0, "-1: at most 1600 px wide; 1, 2, 4, 8: divisor; other: width in pixels", short="-r"
    )
    size: SizeRule | None = None  # replaces resolution
    eval: bool = _flag(
        False, "hold out every 8th view, as train.py does by default", action="store_true"
    )
    mask_options: MaskOptions = field(default_factory=MaskOptions)
    depth_options: DepthOptions = field(default_factory=DepthOptions)
    view_options: ViewOptions = field(default_factory=ViewOptions)
    config: VanillaConfig = field(default_factory=VanillaConfig)
    init_ply: Path | None = flag(
        None,
        "start from this PLY, Gaussians or coloured points, instead of the scene's points; or from "
        "a scan in the world of the scene, .las, .laz or .e57",
        group="vanilla stage",
        parse=Path,
        no_effect_when="with --gs_output_dir",
    )
    log_interval: int = 100
    checkpoint_interval: int | None = checkpoint_interval("vanilla trainer")
    checkpoint_iterations: tuple[int, ...] = _flag(
        (), "further iterations whose checkpoints are kept, never thinned out"
    )
    test_iterations: tuple[int, ...] = _flag(
        (7_000, 30_000),
        "when to measure the held-out views and picture some; the last iteration always",
        no_effect_when="nothing is measured without --eval; pictures are then of training views",
    )
    save_iterations: tuple[int, ...] = _flag(
        (7_000, 30_000), "when to write a PLY; the last iteration always"
    )
    start_checkpoint: Path | None = _flag(
        None,
        "the same as --resume PATH",
        parse=Path,
        no_effect_when="if --resume is given as well",
    )
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    compute: Compute = made_of(BackendFlags, Compute)
    inert: InertVanillaFlags = field(default_factory=InertVanillaFlags)
    run: RunOptions = field(default_factory=RunOptions)

    @classmethod
    def from_flags(cls, **flags: Any) -> VanillaOptions:
        """Build from values of flags; ``--start_checkpoint`` is another ``--resume``."""
        start = flags.get("start_checkpoint")
        run = flags["run"]
        if start is not None and run.resume == "auto":
            flags["run"] = replace(run, resume=str(start))
        return cls(**flags)

    @property
    def messages(self) -> tuple[str, ...]:
        """One line for each flag that was given but cannot act, or acts in part."""
        budget = (
            "--vram_budget bounds photographs alone in vanilla training, whose Gaussians grow in "
            "number: bound them with --max_gaussians",
        )
        lines = () if self.memory.vram_budget is None else budget
        return *self.memory.messages(self.compute.device), *lines, *self.inert.messages

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        size = {"resolution": self.resolution}
        if self.size is not None:
            size = asdict(self.size)  # pyright: ignore[reportArgumentType]  each is a dataclass
        return {**size, "images": self.images, "eval": self.eval, **self.config.identity()}

    def inputs(self, scene: Scene) -> dict[str, Any]:
        """Digests of what was read."""
        if self.init_ply is None:
            return {**scene_inputs(scene), "points": points_digest(scene)}
        return {**scene_inputs(scene), "initial Gaussians": file_digest(self.init_ply)}

    def sources(self) -> dict[str, Any]:
        """Paths of the inputs, for the record of the run."""
        sources = {"scene": self.source_path.resolve()}
        if self.init_ply is not None:
            sources["init_ply"] = self.init_ply.resolve()
        return sources

    def prepare(self, messages: Messages) -> tuple[StageRun[GaussianCloud], GaussianCloud]:
        """The run and the initial model; the run's folder is not touched yet."""
        config = self.config
        with kernels_ahead(self.compute.device, KERNEL_PACKAGES):
            scene = load_scene(
                self.source_path,
                size_rule=self.size or VanillaSize(self.resolution),
                images_dir=self.images,
                eval_split=self.eval,
                white_background=config.white_background,
                seed=config.random_seed,
                masks=self.mask_options,
                depths=self.depth_options,
                view_options=self.view_options,
                notify=messages,
            )
        settings = {"random_seed": config.random_seed, **config.optimizer.identity()}
        iterations = min(ITERATIONS, 2 * config.iterations)
        train = partial(_train_whole, self)
        mask_flag = self.mask_options.masks
        estimation = MaskEstimation(
            self.model_path, self.compute, settings, iterations, train, mask_flag
        )
        return _stage_run(estimation(scene, messages), self, messages)


def _train_whole(options: VanillaOptions, scene: Scene, folder: Path, iterations: int) -> Path:
    """Train a scene shortly for its masks, and return the PLY; settings go to its log alone."""
    config = options.config
    limit = DensificationConfig(max_gaussians=config.densification.max_gaussians)
    short_config = VanillaConfig(
        preset="fast",
        iterations=iterations,
        densification=limit,
        exposure=config.exposure,
        optimizer=config.optimizer,
        random_seed=config.random_seed,
    )
    short = replace(
        options,
        model_path=folder,
        config=short_config,
        init_ply=None,
        test_iterations=(),
        save_iterations=(),
        checkpoint_iterations=(),
        inert=InertVanillaFlags(),
        memory=replace(options.memory, vram_budget=None),
        # The run that needs the masks says where it computes.
        compute=replace(options.compute, device_reason=""),
    )
    first = options.compute.group.is_first
    console = Console(verbose=options.run.verbose) if first else Console.silent()
    console.headline(f"estimating masks: {iterations:,} iterations on the whole scene")
    return run_stage(short, prepare=partial(_stage_run, scene, short), console=console)


def _stage_run(
    scene: Scene, options: VanillaOptions, messages: Messages
) -> tuple[StageRun[GaussianCloud], GaussianCloud]:
    """The run on a scene and its initial model, with all that the scene decides decided."""
    config = options.config.resolved(any(c.shows_object for c in scene.train_cameras))
    noise = scene.exposure_noise
    exposures_differ = noise >= MIN_NOISE
    if config.exposure.exposure_compensation == AUTO and exposures_differ:
        messages(f"exposures differ by {noise:.2f} stops: --exposure_compensation True")
    config = replace(config, exposure=config.exposure.resolved(exposures_differ))
    run = _VanillaRun(scene, replace(options, config=config))
    # Read before the folder is touched: a damaged file must not leave one behind.
    cloud = initial_gaussians(
        scene, options.init_ply, config, run.region, options.compute.device, messages
    )
    return run.stage_run(), cloud


class _VanillaRun:
    """A vanilla run on one scene: builds the stage with its components, and writes its results.

    Settings are resolved: nothing is left to the scene.
    """

    def __init__(self, scene: Scene, options: VanillaOptions) -> None:
        self._scene = scene
        self._options = options
        cameras = scene.train_cameras
        config = options.config
        device = options.compute.device
        sky = sky_of(cameras, scene.extent, config.robustness)
        self.region = Region(scene.extent, sky, hull_of(cameras, device))
        self._poses = _poses(scene, config)
        self._exposures: Exposures | None = None
        if config.exposure.exposure_compensation:
            names = [camera.name for camera in cameras]
            span = (1, config.iterations)
            self._exposures = Exposures(config.exposure, names, device, span, steps_last=False)
        self._transients: Transients | None = None
        if config.transient.transients and not all(c.shows_object for c in cameras):
            densified_from = config.densification.densify_from_iter
            searches = search_iterations(config.iterations, densified_from, len(cameras))
            self._transients = Transients(searches, config.sh_degree, len(cameras))

    def stage_run(self) -> StageRun[GaussianCloud]:
        """Return the run that the engine trains."""
        scene = self._scene
        options = self._options
        directory = RunDirectory(
            options.model_path / layout.CHECKPOINT_FOLDER,
            Recipe(options.identity(), options.inputs(scene), options.sources()),
            output_flag="-m/--model_path",
            products=(options.model_path / "point_cloud",),
            check=payload_check(check_free_payload, count_gaussians, _STATE_RULES),
        )
        n_features = 3 + N_COLUMNS if scene.depths.maps else 3
        channels: tuple[int, ...] = (n_features,)
        if options.config.scores:
            channels = (n_features, n_features + N_SCORES)
        return StageRun(
            "vanilla 3DGS",
            scene,
            directory,
            _loop(options),
            self.build,
            (layout.point_cloud_path(options.model_path, options.config.iterations),),
            self.init_from_images,
            channels,
            KERNEL_PACKAGES,
        )

    def build(self, cloud: GaussianCloud, store: ImageStore, console: Console) -> VanillaStage:
        """The stage on its initial model."""
        options = self._options
        config = options.config
        if options.memory.budget is not None and options.compute.device.type == "cpu":
            store.limit(options.memory.budget // 2)  # the other half is for tensors
        growing = None
        if config.growth.growing_resolution:
            cameras = self._scene.train_cameras
            until = config.densifies_until
            growth = measured_growth(cameras, store.shown, config.growth, until)
            growing = GrowingResolution(growth, len(cloud))
        if self._exposures is not None:
            cameras = self._scene.train_cameras
            observations = self._scene.observations
            self._exposures.begin_with(track_exposures(cameras, observations, store.shown))
        # Gaussians grow in number: what fits now says nothing.
        on_host = options.memory.keeps_bands_on_host(options.compute.device)
        return VanillaStage(
            cloud,
            replace(
                config,
                split=options.memory.split,
                optimizer=replace(config.optimizer, bands_on_host=on_host),
            ),
            self.region,
            partial(self._export, console),
            options.compute.rasterizer,
            self._components(),
            growing,
        )

    def init_from_images(
        self, cloud: GaussianCloud, store: ImageStore, console: Console
    ) -> GaussianCloud:
        """Initialise from images: colours of a sky, dense points."""
        scene = self._scene
        init_ply = self._options.init_ply
        config = self._options.config
        if init_ply is not None and holds_gaussians(init_ply):
            return cloud
        hull = self.region.hull
        if self.region.sky is not None and hull is None:
            cloud = with_sky_colors(cloud, self.region.sky, scene.train_cameras, store.shown)
        if config.starts_dense or scene.depths.maps:
            limit = config.densification.max_gaussians
            cloud = with_dense_points(cloud, scene, store.shown, hull, limit, console.info)
        return cloud

    def _components(self) -> list[Component]:
        """Return the components of the stage, without densification."""
        options = self._options
        last = options.config.iterations
        components: list[Component] = []
        if self._transients is not None:
            components.append(self._transients)
        if self._exposures is not None:
            components.append(self._exposures)
        if self._poses is not None:
            components.append(self._poses)
        components += depth_supervision(self._scene.depths, falling_weight(last))
        if not options.view_options.keeps_all:
            checks = (round(VIEW_CHECK_SHARE * last), last)
            components.append(ViewChecks(checks, options.view_options.keep_views))
        return components

    def _export(self, console: Console, iteration: int, cloud: GaussianCloud) -> None:
        """Write the folder in the 3DGS layout, with the model of an iteration."""
        self._write_layout()
        ply_path = layout.point_cloud_path(self._options.model_path, iteration)
        if self._exposures is not None:
            exposure_path = ply_path.with_name(layout.EXPOSURE_FILE)
            layout.write_exposures(exposure_path, self._exposures.by_name())
        if self._transients is not None:
            self._write_transients(ply_path.with_name(layout.TRANSIENT_MASKS), self._transients)
        ply_files.write_gaussian_ply(ply_path, cloud)
        if self._poses is not None:
            turn, shift = self._poses.size()
            console.headline(f"poses moved by {turn:.3f} degrees and {shift:.4g} units (rms)")

    def _write_transients(self, folder: Path, transients: Transients) -> None:
        """Write masks in place of those of an earlier export."""
        shutil.rmtree(folder, ignore_errors=True)
        transients.write(folder, self._scene.train_cameras)

    def _write_layout(self) -> None:
        scene = self._scene
        options = self._options
        train_cameras = scene.original_train_cameras
        if self._poses is not None:
            train_cameras = self._moved(train_cameras, self._poses)
            model = find_model(scene.root)
            if model is not None:
                write_poses(model, options.model_path / REFINED_MODEL, train_cameras)
        layout.write_cfg_args(
            options.model_path,
            source_path=options.source_path.resolve(),
            sh_degree=options.config.sh_degree,
            images=options.images,
            resolution=options.resolution,
            white_background=options.config.white_background,
            eval_split=options.eval,
        )
        test_cameras = scene.original_test_cameras
        layout.write_cameras_json(options.model_path, train_cameras, test_cameras)
        write_offset(options.model_path, scene.offset)
        input_path = options.model_path / "input.ply"
        ply_files.write_point_ply(input_path, scene.points, scene.points_rgb)

    def _moved(self, cameras: Sequence[Camera], poses: PoseRefinement) -> list[Camera]:
        """Training cameras in their learned poses; those left out from the start as they were."""
        moved = []
        for camera in cameras:
            is_learned = camera.name not in self._scene.dropped_views
            moved.append(poses.calibrated(camera) if is_learned else camera)
        return moved


def _loop(options: VanillaOptions) -> LoopConfig:
    last = options.config.iterations
    return LoopConfig(
        first=1,
        last=last,
        seed=options.config.random_seed,
        log_interval=options.log_interval,
        checkpoint_interval=options.checkpoint_interval,
        checkpoint_milestones=options.checkpoint_iterations,
        keep_checkpoints=options.run.keep_checkpoints,
        test_iterations=options.test_iterations,
        export_iterations=options.save_iterations,
    )


def _poses(scene: Scene, config: VanillaConfig) -> PoseRefinement | None:
    """Poses to learn, if that is asked for; they wait until the Gaussians have converged."""
    if not config.refine_poses:
        return None
    if scene.extent <= 0:
        raise UserError(
            "--refine_poses needs photographs from different positions; all cameras stand in one"
        )
    start = min(POSES_START, config.iterations // 5)
    cameras = scene.train_cameras
    each = config.optimizer.views_per_step
    rates = PoseConfig.of_run(start, config.iterations, len(cameras), each)
    return PoseRefinement(cameras, scene.extent, rates)


def vanilla_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of ``gaussian_splatting/train.py``, with the flags of the original."""
    switch: dict[str, Any] = {
        "short": "-w",
        "group": "vanilla trainer",
        "options": {"action": "store_true"},
    }
    always_acts = {"no_effect_when": ""}
    changes = {
        "white_background": switch,
        "init_ply": always_acts,
        "max_gaussians": always_acts,
    }
    return parser_of(description, VanillaOptions, **changes)
