# SPDX-License-Identifier: Apache-2.0
"""Options of SuGaR's training stages, and what all of them read before they train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from gaussian_splatting.compute import BackendFlags, Compute
from gaussian_splatting.data import reference_layout
from gaussian_splatting.data.depth_maps import NO_DEPTHS, DepthOptions
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.reference_layout import ReferenceCheckpoint
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.memory_plan import MemoryOptions
from gaussian_splatting.engine.run_directory import Identity, RunDirectory, scene_inputs
from gaussian_splatting.engine.runner import Messages, RunOptions, StageRun
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.optim.learned_exposure import MIN_NOISE, Exposures
from sugar_trainers.capture import CaptureOptions, load_views
from sugar_trainers.stage_memory import StageSettings, with_memory_plan
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.settings import made_of

Model = TypeVar("Model")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(CaptureOptions):
    """Options of a stage, which defines what has no body here."""

    depth_options: ClassVar[DepthOptions] = NO_DEPTHS
    reads_tracks: ClassVar[bool] = False  # whether it depends on which points photographs observe

    config: StageSettings
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    run: RunOptions = field(default_factory=RunOptions)
    compute: Compute = made_of(BackendFlags, Compute)

    title: ClassVar[str]

    @property
    def messages(self) -> tuple[str, ...]:
        """One line for each flag that was given but cannot act beside the others."""
        return (*self.memory.messages, *self.size.messages)

    @property
    def directory(self) -> Path:
        """The run's folder."""

    @property
    def result(self) -> Path:
        """The final ``.pt``."""

    @property
    def results(self) -> tuple[Path, ...]:
        return (self.result,)

    @property
    def loop(self) -> LoopConfig:
        """When the loop does what."""

    def initial(
        self, checkpoint: ReferenceCheckpoint, scene: Scene, messages: Messages
    ) -> tuple[Model, dict[str, Any]]:
        """The initial model on the device, and digests of the files that it was read from."""

    def stage(
        self,
        model: Model,
        config: StageSettings,
        scene: Scene,
        store: ImageStore,
        console: Console,
        exposures: Exposures | None,
    ) -> Stage:
        """The stage; ``config`` has a memory plan."""

    def identity(self) -> dict[str, Any]:
        return {**self.capture_identity(), **self.config.identity()}

    def prepare(self, messages: Messages) -> tuple[StageRun[Model], Model]:
        """The run and the initial model; the run's folder is not touched yet."""
        checkpoint, scene = load_capture(self, messages)
        learned = checkpoint.ply_path.with_name(reference_layout.EXPOSURE_FILE).is_file()
        exposure = self.config.exposure.resolved(learned or scene.exposure_noise >= MIN_NOISE)
        run = replace(self, config=replace(self.config, exposure=exposure))
        # Read before the run's folder is touched: a damaged file must not leave one behind.
        initial, digests = run.initial(checkpoint, scene, messages)
        exposures, known = run._exposures(checkpoint, scene, messages)
        inputs = {**scene_inputs(scene, tracks=run.reads_tracks), **digests, **known}
        identity = Identity(run.identity(), inputs, run.sources())

        def build(model: Model, store: ImageStore, console: Console) -> Stage:
            config = with_memory_plan(run.config, model, run.memory, scene, store, console)
            return run.stage(model, config, scene, store, console, exposures)

        directory = RunDirectory(run.directory, identity)
        return StageRun(run.title, scene, directory, run.loop, build, run.results), initial

    def _exposures(
        self, checkpoint: ReferenceCheckpoint, scene: Scene, notify: Callable[[str], None]
    ) -> tuple[Exposures | None, dict[str, str]]:
        """Exposures that go on from those of the checkpoint, and the digest of what was read."""
        path = checkpoint.ply_path.with_name(reference_layout.EXPOSURE_FILE)
        if not self.config.exposure.exposure_compensation:
            if path.is_file():
                notify(
                    f"note: the checkpoint was trained with exposures ({path}); pass "
                    "--exposure_compensation True to go on with them"
                )
            return None, {}
        initial = reference_layout.read_exposures(path, notify)
        names = [camera.name for camera in scene.train_cameras]
        known = sum(name in initial for name in names)
        notify(f"exposures: {known} of {len(names)} taken over from {path.parent}")
        span = (self.loop.first, self.loop.last)
        device = self.compute.device
        exposures = Exposures(self.config.exposure, names, device, span, initial)
        return exposures, {"exposures": file_digest(path)} if path.is_file() else {}


def load_capture(
    options: TrainingOptions, notify: Callable[[str], None]
) -> tuple[ReferenceCheckpoint, Scene]:
    """Find the checkpoint and read the scene; no Gaussians and no photographs yet."""
    config = options.config
    checkpoint, scene = load_views(
        options,
        notify,
        white_background=config.white_background,
        seed=config.random_seed,
        require_images=True,
        depths=options.depth_options,
    )
    if scene.extent <= 0:
        raise UserError(
            f"all training cameras of {options.scene_path} stand in one place, so the scene has "
            "no scale; SuGaR needs photographs from different positions"
        )
    return checkpoint, scene
