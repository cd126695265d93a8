# SPDX-License-Identifier: Apache-2.0
"""A coarse run in multi-view mode from vanilla checkpoint to ``.pt`` file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.data.visual_hull import hull_of
from gaussian_splatting.engine.run_directory import RunDirectory
from gaussian_splatting.engine.runner import Notices, StageRun, run_stage
from sugar_scene.multiview.neighbor_views import NeighborViews
from sugar_trainers.coarse_config import MULTIVIEW
from sugar_trainers.coarse_run import (
    CoarseOptions,
    loop_of,
    open_coarse,
    start_cloud,
    train_coarse,
)
from sugar_trainers.multiview_config import MultiviewConfig
from sugar_trainers.multiview_stage import MultiviewStage
from sugar_trainers.naming import (
    ESTIMATION_FACTOR,
    NORMAL_FACTOR,
    OUTPUT_ROOT,
    coarse_directory,
    scene_name,
)
from sugar_trainers.stage_memory import plan_strips
from sugar_utils.console import Console

_NAMED_VIEWS = 3


@dataclass(frozen=True, kw_only=True)
class MultiviewOptions(CoarseOptions):
    """A coarse run in multi-view mode.

    Attributes:
        config: What decides the optimisation.
    """

    config: MultiviewConfig = field(default_factory=MultiviewConfig)

    @property
    def directory(self) -> Path:
        """The run's folder."""
        parent = self.output_dir or OUTPUT_ROOT / "coarse" / scene_name(self.scene_path)
        return coarse_directory(
            parent, self.iteration_to_load, MULTIVIEW, ESTIMATION_FACTOR, NORMAL_FACTOR
        )


def train_multiview(options: MultiviewOptions, images: ImageStore | None = None) -> Path:
    """Train the coarse stage in multi-view mode.

    Args:
        options: What to do.
        images: Decoded photographs that other stages use, too; an own store if None.

    Returns:
        The final ``.pt``. A finished run with the same settings is not repeated.

    Raises:
        UserError: For anything the user can fix.
    """
    return run_stage(_prepared, options, images)


def train_mode(options: CoarseOptions, images: ImageStore | None = None) -> Path:
    """Train the coarse stage in the mode that its options are of; as the function of that mode."""
    if isinstance(options, MultiviewOptions):
        return train_multiview(options, images)
    return train_coarse(options, images)


def _prepared(
    options: MultiviewOptions, notices: Notices
) -> tuple[StageRun[GaussianCloud], GaussianCloud]:
    config, compute = options.config, options.compute
    checkpoint, scene, exposures, identity = open_coarse(options, notices, tracks=True)
    neighbors = _neighbors(scene, notices)

    def build(cloud: GaussianCloud, store: ImageStore, console: Console) -> MultiviewStage:
        planned = plan_strips(cloud, config, options.memory, scene, store, console)
        return MultiviewStage(
            cloud,
            planned,
            scene.extent,
            scene.train_cameras,
            neighbors,
            store,
            console.info,
            rasterizer=compute.rasterizer,
            hull=hull_of(scene.train_cameras, compute.device),
            exposures=exposures,
        )

    directory = RunDirectory(options.directory, identity)
    title = "coarse stage, multiview"
    run = StageRun(title, scene, directory, loop_of(options), build, (options.result,))
    return run, start_cloud(checkpoint, notices).to(compute.device)


def _neighbors(scene: Scene, notices: Notices) -> NeighborViews:
    """The neighbours of the training views; says which have none."""
    neighbors = NeighborViews(scene.train_cameras, scene.extent, observations=scene.observations)
    lonely = neighbors.lonely
    if lonely:
        shown = ", ".join(lonely[:_NAMED_VIEWS]) + (", ..." if len(lonely) > _NAMED_VIEWS else "")
        notices(
            f"{len(lonely)} of {len(scene.train_cameras)} views have no neighbour to be compared "
            f"with ({shown}); they train without the terms that need one"
        )
    return neighbors
