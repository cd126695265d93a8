# SPDX-License-Identifier: Apache-2.0
"""Flags of a vanilla 3DGS run."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gaussian_splatting.data.maps.depth_maps import DepthOptions
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.memory_plan import MemoryOptions
from gaussian_splatting.engine.run_identity import points_digest, scene_inputs
from gaussian_splatting.engine.runner import RunOptions
from gaussian_splatting.rasterization.compute import BackendFlags, Compute
from gaussian_splatting.scenes.scene import Scene, SizeRule
from gaussian_splatting.shared_flags import InertFlags, checkpoint_interval, inert
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_utils.files import file_digest
from sugar_utils.settings import flag, made_of

_flag = partial(flag, group="vanilla trainer")
_CHECKED = "non-finite numbers are detected in every iteration"
_SHORT = "output that is not a terminal is short anyway"


@dataclass(frozen=True)
class InertVanillaFlags(InertFlags):
    """Flags of the reference that old commands carry; using one says that it does nothing."""

    position_lr_delay_mult: str | None = inert(None, "it is inert in the reference as well")
    data_device: str | None = inert(None, "photographs stay in memory as bytes")
    ip: str | None = inert(None, "a run is watched with --viewer")
    port: str | None = inert(None, "a run is watched with --viewer")
    debug_from: str | None = inert(None, _CHECKED)
    quiet: bool = inert(False, _SHORT, action="store_true")
    detect_anomaly: bool = inert(False, _CHECKED, action="store_true")


@dataclass(frozen=True, kw_only=True)
class VanillaFlags:
    """Flags of a vanilla run, and what decides its result."""

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
    def from_flags(cls, **flags: Any) -> VanillaFlags:
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

    @property
    def loop(self) -> LoopConfig:
        """When the loop does what."""
        return LoopConfig(
            first=1,
            last=self.config.iterations,
            seed=self.config.random_seed,
            log_interval=self.log_interval,
            checkpoint_interval=self.checkpoint_interval,
            checkpoint_milestones=self.checkpoint_iterations,
            keep_checkpoints=self.run.keep_checkpoints,
            test_iterations=self.test_iterations,
            export_iterations=self.save_iterations,
        )
