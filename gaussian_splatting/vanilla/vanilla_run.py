# SPDX-License-Identifier: Apache-2.0
"""A vanilla 3DGS run from scene folder to checkpoint directory."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gaussian_splatting.components.densification import DensificationConfig, Region
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.recording.recorded_runner import step_runner
from gaussian_splatting.engine.run_directory import RunDirectory
from gaussian_splatting.engine.runner import Messages, StageRun, kernels_ahead, run_stage
from gaussian_splatting.scenes import reference_layout as layout
from gaussian_splatting.scenes.scene import Scene, VanillaSize, load_scene
from gaussian_splatting.vanilla.estimated_masks import ITERATIONS, MaskEstimation
from gaussian_splatting.vanilla.image_start import completed_from_images, starts_from_points
from gaussian_splatting.vanilla.initial_gaussians import initial_gaussians
from gaussian_splatting.vanilla.scene_decisions import region_of, resolved_for
from gaussian_splatting.vanilla.vanilla_components import (
    PAYLOAD_CHECK,
    components_of,
    rendered_channels,
)
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_export import LayoutExport
from gaussian_splatting.vanilla.vanilla_options import InertVanillaFlags, VanillaFlags
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_utils.console import Console
from sugar_utils.recipe import Recipe
from sugar_utils.settings import parser_of

KERNEL_PACKAGES = ("gaussian_splatting", "sugar_utils")  # of the kernels that the stage launches


@dataclass(frozen=True, kw_only=True)
class VanillaOptions(VanillaFlags):
    """A vanilla run as its flags ask for it."""

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
    config = resolved_for(scene, options.config, messages)
    device = options.compute.device
    region = region_of(scene, config, device)
    # Read before the folder is touched: a damaged file must not leave one behind.
    cloud = initial_gaussians(scene, options.init_ply, config, region, device, messages)
    run = _VanillaRun(scene, region, replace(options, config=config))
    return run.stage_run(), cloud


class _VanillaRun:
    """A vanilla run on one scene: builds the stage with its components.

    Settings are resolved: nothing is left to the scene.
    """

    def __init__(self, scene: Scene, region: Region, options: VanillaOptions) -> None:
        self._scene = scene
        self._region = region
        self._options = options

    def stage_run(self) -> StageRun[GaussianCloud]:
        """Return the run that the engine trains."""
        scene = self._scene
        options = self._options
        directory = RunDirectory(
            options.model_path / layout.CHECKPOINT_FOLDER,
            Recipe(options.identity(), options.inputs(scene), options.sources()),
            output_flag="-m/--model_path",
            products=(options.model_path / "point_cloud",),
            check=PAYLOAD_CHECK,
        )
        result = layout.point_cloud_path(options.model_path, options.config.iterations)
        return StageRun(
            "vanilla 3DGS",
            scene,
            directory,
            options.loop,
            self.build,
            (result,),
            self.complete if starts_from_points(options.init_ply) else None,
            rendered_channels(options.config, scene),
            KERNEL_PACKAGES,
            step_runner(options.compute),
        )

    def complete(self, cloud: GaussianCloud, store: ImageStore, console: Console) -> GaussianCloud:
        """Add to the initial Gaussians what photographs say."""
        config = self._options.config
        return completed_from_images(cloud, self._scene, store, config, self._region, console)

    def build(self, cloud: GaussianCloud, store: ImageStore, console: Console) -> VanillaStage:
        """The stage on its initial model."""
        options = self._options
        memory = options.memory
        device = options.compute.device
        config = options.config
        if memory.budget is not None and device.type == "cpu":
            store.limit(memory.budget // 2)  # the other half is for tensors
        views = options.view_options
        components = components_of(config, self._scene, store, views, device, len(cloud))
        # Gaussians grow in number: what fits now says nothing.
        on_host = memory.keeps_bands_on_host(device)
        optimizer = replace(config.optimizer, bands_on_host=on_host)
        return VanillaStage(
            cloud,
            replace(config, split=memory.split, optimizer=optimizer),
            self._region,
            LayoutExport(self._scene, options, console),
            options.compute.rasterizer,
            components,
        )


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
