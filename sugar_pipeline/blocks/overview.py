# SPDX-License-Identifier: Apache-2.0
"""The overview: a small model of the whole capture, which says where the pixels of its views lie.

It is trained as the vanilla stage trains, on small copies of the photographs and with a limit on
the number of Gaussians, so it fits into memory whatever the size of the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.core.subsets import finite_points
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.scenes.reference_layout import (
    ReferenceCheckpoint,
    load_reference_checkpoint,
)
from gaussian_splatting.scenes.scene import Scene, load_scene_for_checkpoint, whole_pixels
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_extractors.mesh.depth_views import view_renderer
from sugar_pipeline.blocks.automatic import count_photographs
from sugar_pipeline.pipeline.plan import PipelinePlan, plan_of
from sugar_pipeline.pipeline.watched_stage import run_watched_stage
from sugar_scene.depth_view import Renderer
from sugar_trainers.capture import SugarSize
from sugar_utils.console import Console
from sugar_utils.flags import FlagValues

LONGEST_SIDE = 400  # pixels of the small photographs
SMALLER = 2  # times smaller than in training, at least
ITERATIONS = 3_000  # at least, by whole schedules
MAX_GAUSSIANS = 200_000
MIN_ALPHA = 0.5  # pixels that the Gaussians cover less show nothing
SAMPLE_STEP = 8  # pixels between the samples that the work is measured by


@dataclass(frozen=True)
class Overview:
    """The trained overview, and the capture in its world at the size of the training."""

    checkpoint: ReferenceCheckpoint
    scene: Scene
    render: Renderer

    def pixel_positions(self, camera: Camera) -> np.ndarray:
        """World positions that the pixels of a small view show. (h, w, 3), NaN where unknown"""
        with torch.no_grad():
            view = self.render(small(camera))
            points = view.world_points(view.depth)
            points = torch.where(view.depth.reshape(-1, 1) > 0, points, torch.nan)
        return points.reshape(*view.depth.shape, 3).cpu().numpy().astype(np.float64)

    def sampled_positions(self) -> Iterator[np.ndarray]:
        """Positions that some pixels of each view show, evenly spread. (P, 3) world units each"""
        for camera in self.scene.train_cameras:
            positions = self.pixel_positions(camera)
            sample = positions[SAMPLE_STEP // 2 :: SAMPLE_STEP, SAMPLE_STEP // 2 :: SAMPLE_STEP]
            sample = sample.reshape(-1, 3)
            yield finite_points(sample)


@dataclass(frozen=True)
class SmallSize:
    """The size of the overview's photographs: much smaller than those of the training."""

    training: SugarSize

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels for a file of the given size."""
        training_width, training_height = self.training.target(width, height)
        share = _small_share(max(training_width, training_height))
        return whole_pixels(training_width * share, training_height * share)


def _small_share(longest_side: int) -> float:
    """Share of the size of the training, given its longest side in pixels."""
    return min(LONGEST_SIDE / longest_side, 1 / SMALLER)


def small(camera: Camera) -> Camera:
    """The view at the size of the overview."""
    return camera.scaled(_small_share(camera.longest_side))


def train_overview(plan: PipelinePlan, folder: Path, console: Console) -> Overview:
    """Train the overview of a capture, unless it is there.

    Args:
        plan: Of the whole run, with the number of blocks.
        folder: Of the overview, like a checkpoint of 3DGS.
    """
    options = overview_options(plan.flags, folder)
    ply_path = run_watched_stage(options, console=console)
    checkpoint = load_reference_checkpoint(folder, options.config.iterations, console.info)
    scene = load_scene_for_checkpoint(
        options.source_path,
        checkpoint,
        size_rule=plan.coarse.size,
        images_dir=options.images,
        eval_split=options.eval,
        white_background=options.config.white_background,
        seed=options.config.random_seed,
        masks=options.mask_options,
        view_options=options.view_options,
        notify=console.info,
    )
    console.info(f"overview: {ply_path}")
    cloud = checkpoint.read_cloud(console.info, scene.offset).to(options.compute.device)
    return Overview(checkpoint, scene, view_renderer(cloud, MIN_ALPHA))


def overview_options(flags: FlagValues, folder: Path) -> VanillaOptions:
    """Options of the run that trains the overview."""
    limit = MAX_GAUSSIANS
    if flags["max_gaussians"] is not None:
        limit = min(flags["blocks"] * flags["max_gaussians"], MAX_GAUSSIANS)
    # Each photograph is visited about once at least, or it may see through what lies there.
    n_photographs = count_photographs(flags) or 0
    iterations = max(ITERATIONS, n_photographs)
    short_flags = flags.replaced(
        vanilla_iterations=iterations,
        schedule_scale=max(flags["schedule_scale"], min(1.0, n_photographs / iterations)),
        max_gaussians=limit,
        gs_output_dir=None,
        resume="auto",
    )
    plan = plan_of(short_flags)
    assert plan.vanilla is not None, "no checkpoint is given, so one is trained"
    return replace(plan.vanilla, model_path=folder, size=SmallSize(plan.coarse.size))
