# SPDX-License-Identifier: Apache-2.0
"""Options of SuGaR's training stages, and their common inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from gaussian_splatting.components.densification import Region
from gaussian_splatting.components.depth_supervision import depth_supervision, later_weight
from gaussian_splatting.components.exposures import MIN_NOISE, Exposures
from gaussian_splatting.components.normal_supervision import normal_supervision
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.maps.depth_maps import NO_DEPTHS, DepthOptions
from gaussian_splatting.data.maps.normal_maps import NO_NORMALS, NormalOptions
from gaussian_splatting.data.masks import hull_of
from gaussian_splatting.engine.component import Component
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.memory_plan import MemoryOptions
from gaussian_splatting.engine.recording.recorded_runner import step_runner
from gaussian_splatting.engine.run_directory import RunDirectory
from gaussian_splatting.engine.run_identity import scene_inputs
from gaussian_splatting.engine.runner import Messages, RunOptions, StageRun, kernels_ahead
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.engine.state_schema import PayloadCheck
from gaussian_splatting.rasterization import Rasterizer
from gaussian_splatting.rasterization.compute import BackendFlags, Compute
from gaussian_splatting.scenes import reference_layout
from gaussian_splatting.scenes.reference_layout import ReferenceCheckpoint
from gaussian_splatting.scenes.scene import Scene
from sugar_scene.mesh_bound import BoundCloud
from sugar_trainers.capture import CaptureOptions, load_views
from sugar_trainers.stage_memory import StageSettings, with_memory_plan
from sugar_utils.console import Console
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import file_digest
from sugar_utils.recipe import Recipe
from sugar_utils.settings import made_of

Model = TypeVar("Model", GaussianCloud, BoundCloud)


@dataclass(frozen=True)
class StageContext:
    """Inputs that a stage is built from besides its model and settings."""

    scene: Scene
    images: ImageStore
    console: Console
    rasterizer: Rasterizer
    device: torch.device
    exposures: Exposures | None  # of the training photographs, where they are learned
    components: tuple[Component, ...]  # what is learned beside the model

    def region(self) -> Region:
        """Where free Gaussians may be."""
        hull = hull_of(self.scene.train_cameras, self.device)
        return Region(self.scene.extent, hull=hull)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(CaptureOptions, ABC, Generic[Model]):
    """Abstract base of a stage's options; :meth:`prepare` makes them a run of the engine."""

    title: ClassVar[str]  # of the stage, for people
    depth_options: ClassVar[DepthOptions] = NO_DEPTHS
    normal_options: ClassVar[NormalOptions] = NO_NORMALS
    reads_tracks: ClassVar[bool] = False  # whether it depends on which points photographs observe

    config: StageSettings
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    run: RunOptions = field(default_factory=RunOptions)
    compute: Compute = made_of(BackendFlags, Compute)

    @property
    @abstractmethod
    def directory(self) -> Path:
        """The run's folder."""

    @property
    @abstractmethod
    def result(self) -> Path:
        """The final ``.pt``."""

    @property
    @abstractmethod
    def loop(self) -> LoopConfig:
        """When the loop does what."""

    @property
    @abstractmethod
    def payload_check(self) -> PayloadCheck:
        """Return the check of a checkpoint of the stage."""

    @abstractmethod
    def initial(
        self, checkpoint: ReferenceCheckpoint, scene: Scene, messages: Messages
    ) -> tuple[Model, dict[str, Any]]:
        """Read the initial model to the device; and digests of the files that it was read from."""

    @abstractmethod
    def build(self, model: Model, config: StageSettings, context: StageContext) -> Stage:
        """Build the stage; ``config`` has a memory plan."""

    @property
    def messages(self) -> tuple[str, ...]:
        """One message for each flag without effect beside the others."""
        return (*self.memory.messages(self.compute.device), *self.size.messages)

    @property
    def results(self) -> tuple[Path, ...]:
        """All files that the run makes for other stages."""
        return (self.result,)

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        return {**self.capture_identity(), **self.config.identity()}

    def prepare(self, messages: Messages) -> tuple[StageRun[Model], Model]:
        """Read the inputs: the run and the initial model; the run's folder is not touched yet."""
        with kernels_ahead(self.compute.device):
            checkpoint, scene = load_capture(self, messages)
        has_exposures = _exposure_path(checkpoint).is_file()
        exposures_differ = has_exposures or scene.exposure_noise >= MIN_NOISE
        exposure = self.config.exposure.resolved(exposures_differ)
        options = replace(self, config=replace(self.config, exposure=exposure))
        # Read before the run's folder is touched: a damaged file must not leave one behind.
        initial, digests = options.initial(checkpoint, scene, messages)
        exposures = options._exposures(checkpoint, scene, messages)
        if exposures is not None and has_exposures:
            digests["exposures"] = file_digest(_exposure_path(checkpoint))
        inputs = {**scene_inputs(scene, tracks=options.reads_tracks), **digests}
        identity = Recipe(options.identity(), inputs, options.sources())
        directory = RunDirectory(options.directory, identity, check=options.payload_check)

        def build(model: Model, images: ImageStore, console: Console) -> Stage:
            config = with_memory_plan(options.config, model, options.memory, scene, images, console)
            components: list[Component] = [] if exposures is None else [exposures]
            components += depth_supervision(scene.depths, later_weight)
            components += normal_supervision(scene.normals)
            context = StageContext(
                scene=scene,
                images=images,
                console=console,
                rasterizer=options.compute.rasterizer,
                device=options.compute.device,
                exposures=exposures,
                components=tuple(components),
            )
            return options.build(model, config, context)

        run = StageRun(
            options.title,
            scene,
            directory,
            options.loop,
            build,
            options.results,
            new_runner=step_runner(options.compute),
        )
        return run, initial

    def _exposures(
        self, checkpoint: ReferenceCheckpoint, scene: Scene, notify: Notify
    ) -> Exposures | None:
        """Exposures that continue those of the checkpoint; None if none are learned."""
        path = _exposure_path(checkpoint)
        if not self.config.exposure.exposure_compensation:
            if path.is_file():
                notify(
                    f"note: the checkpoint was trained with exposures ({path}); pass "
                    "--exposure_compensation True to go on with them"
                )
            return None
        initial = reference_layout.read_exposures(path, notify)
        names = [camera.name for camera in scene.train_cameras]
        n_taken_over = sum(name in initial for name in names)
        notify(f"exposures: {n_taken_over} of {len(names)} taken over from {path.parent}")
        span = (self.loop.first, self.loop.last)
        return Exposures(self.config.exposure, names, self.compute.device, span, initial)


def _exposure_path(checkpoint: ReferenceCheckpoint) -> Path:
    return checkpoint.ply_path.with_name(reference_layout.EXPOSURE_FILE)


def load_capture(options: TrainingOptions, notify: Notify) -> tuple[ReferenceCheckpoint, Scene]:
    """Find the checkpoint and read the scene; no Gaussians and no photographs yet."""
    config = options.config
    checkpoint, scene = load_views(
        options,
        notify,
        white_background=config.white_background,
        seed=config.random_seed,
        require_images=True,
        depths=options.depth_options,
        normals=options.normal_options,
    )
    if scene.extent <= 0:
        raise UserError(
            f"all training cameras of {options.scene_path} stand in one place, so the scene has "
            "no scale; SuGaR needs photographs from different positions"
        )
    return checkpoint, scene
