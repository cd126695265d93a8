# SPDX-License-Identifier: Apache-2.0
"""From a capture to the folders of its blocks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from gaussian_splatting.core.subsets import box_of_most
from gaussian_splatting.data.cameras import middle_of
from gaussian_splatting.engine.run_identity import scene_inputs
from gaussian_splatting.scenes.scene import Scene
from sugar_pipeline.blocks import block_scenes
from sugar_pipeline.blocks.block_flags import MIN_VIEWS, require_views
from sugar_pipeline.blocks.block_plan import (
    OVERVIEW,
    PLAN_FILE,
    Block,
    BlockPlan,
    block_folder,
    read_plan,
)
from sugar_pipeline.blocks.block_scenes import CutOut
from sugar_pipeline.blocks.overview import Overview, train_overview
from sugar_pipeline.blocks.partition import BlockBox, Partition, cut_space, margin_of
from sugar_pipeline.blocks.tracks import read_capture_points
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable, file_digest, in_parallel
from sugar_utils.flags import FlagValues
from sugar_utils.memory import trim_heap
from sugar_utils.recipe import Recipe
from sugar_utils.settings import write_settings

MIN_VISITS = 20  # of each photograph in the steps of a stage, if the whole capture has as many
FARTHEST = 4.0  # of the meshed space from the middle of the cameras, in camera extents
_ENDS = 0.005  # of the points at either end that do not count for the meshed space
_ROOM = 0.1  # of its longest side that is added to it on all sides
_AT_ONCE = 64  # photographs that are written by several threads
_OF_WHOLE = (
    "blocks",
    "cluster",
    "scene_path",
    "all_scene_path",
    "checkpoint_path",
    "output_dir",
    "stop_after",
    "eval",
    "images",
    "img_resolution",
    "img_size_limit",
    "resolution_factor",
    "schedule_scale",
    "masks",
    "mask_mode",
    "min_observations",
    "keep_views",
    "refine_poses",
    "orient",
    "scale_factor",
    "known_distance",
)
"""Flags that are answered for the whole capture and have other values in its blocks."""
_LEAN = {"keep_checkpoints": 1, "checkpoint_milestones": [1]}
"""Defaults of the runs of blocks: many lie on one disk, and rarely is one looked at.

Iteration 1 comes before the first one of coarse training: there are no milestones.
"""


def prepare_blocks(whole: PipelinePlan, folder: Path, console: Console) -> tuple[BlockPlan, Scene]:
    """Train the overview, cut the capture, and write the blocks' folders, unless they are there.

    Args:
        whole: Plan of the whole run, with the number of blocks.
        folder: Of the capture; other numbers of blocks share its overview.

    Raises:
        UserError: There are too few photographs or points.
    """
    n = whole.flags["blocks"]
    console.headline("overview of the capture")
    overview = train_overview(whole, folder / OVERVIEW, console)
    scene = overview.scene
    require_views(n, len(scene.train_cameras), scene.root)
    recipe = _recipe(overview, n)
    folder = folder / f"{n}_blocks"
    plan = read_plan(folder)
    if plan is not None and recipe.is_current(folder / PLAN_FILE):
        console.info(f"the {n} blocks are there: {folder}")
    else:
        check_writable(folder)
        plan = _cut(overview, folder, n, recipe, console)
    for block in plan.blocks:
        flags = block_flags(whole.flags, block, len(scene.train_cameras))
        write_settings(block.folder, flags)
    return plan, scene


def block_flags(whole: FlagValues, block: Block, n_views: int) -> dict[str, object]:
    """Return the flags of a block's training.

    It takes as many steps for each of its photographs as the training of the whole capture would,
    and at least ``MIN_VISITS``, or all steps where those are fewer.

    Args:
        whole: Flags of the whole run.
        n_views: Training views of the whole capture.
    """
    flags: dict[str, object] = dict(_LEAN)
    flags.update({name: value for name, value in whole.given.items() if name not in _OF_WHOLE})
    share = block.n_views / n_views
    visited = MIN_VISITS * block.n_views / (whole["vanilla_iterations"] * whole["schedule_scale"])
    steps = min(1.0, max(share, visited))
    flags.update(
        scene_path=str(block.scene),
        output_dir=str(block.results),
        regularization_type=whole["regularization_type"],
        stop_after="coarse",
        eval=False,
        resolution_factor=1.0,
        schedule_scale=round(whole["schedule_scale"] * steps, 4),
        mask_mode="ignore",
        min_observations=0,
        keep_views=["all"],
        blocks=1,
    )
    return flags


def _recipe(overview: Overview, n: int) -> Recipe:
    """Return the recipe of the blocks."""
    sizes = sorted({camera.size for camera in overview.scene.train_cameras})
    inputs = {"overview": file_digest(overview.checkpoint.ply_path)}
    return Recipe({"blocks": n, "sizes": sizes}, {**inputs, **scene_inputs(overview.scene)})


def _cut(overview: Overview, folder: Path, n: int, recipe: Recipe, console: Console) -> BlockPlan:
    """Cut the capture and write the scenes of its blocks; the plan is written last."""
    scene = overview.scene
    points = read_capture_points(scene.root, scene)
    bounds = meshed_space(points.positions, scene)
    positions = np.concatenate(list(overview.sampled_positions()))
    # The sky and what is far behind everything belong to no block.
    positions = positions[bounds.contains(positions)]
    try:
        boxes = cut_space(positions, np.ones(len(positions)), n)
    except ValueError as error:
        raise UserError(f"--blocks {n}: {error}; use fewer") from error
    partition = Partition(tuple(boxes), margin_of(boxes, bounds), bounds)
    (folder / PLAN_FILE).unlink(missing_ok=True)
    for number in range(n):
        shutil.rmtree(block_folder(folder, number) / "scene", ignore_errors=True)
    cuts = _write_photographs(overview, folder, partition, console)
    blocks = []
    for number, (box, of_block) in enumerate(zip(boxes, cuts, strict=True)):
        block = Block(number, block_folder(folder, number), box, len(of_block))
        if len(of_block) < MIN_VIEWS:
            raise UserError(
                f"--blocks {n}: only {len(of_block)} photographs show block {number}; use fewer"
            )
        is_inside = box.contains(points.positions, partition.margin)
        block_scenes.write_block_model(block.scene, of_block, points, is_inside, scene.offset)
        blocks.append(block)
        n_whole = sum(cut.share for cut in of_block)
        console.info(
            f"block {number}: {len(of_block)} photographs, as many pixels as {n_whole:.0f} whole"
        )
    plan = BlockPlan(folder, tuple(blocks), partition.margin, bounds)
    plan.write(recipe)
    return plan


def _write_photographs(
    overview: Overview, folder: Path, partition: Partition, console: Console
) -> list[list[CutOut]]:
    """Write the rectangles of all photographs; return those of each block."""
    cuts: list[list[CutOut]] = [[] for _ in partition.boxes]
    cameras = overview.scene.train_cameras
    white = overview.scene.white_background
    with console.progress("photographs", 1, len(cameras)) as progress:
        for first in range(0, len(cameras), _AT_ONCE):
            jobs = []
            for camera in cameras[first : first + _AT_ONCE]:
                positions = overview.pixel_positions(camera)
                targets = []
                for number, of_block in enumerate(cuts):
                    cut = block_scenes.cut_out(camera, positions, partition, number)
                    if cut is not None:
                        of_block.append(replace(cut, counts=None))
                        targets.append((block_folder(folder, number) / "scene", cut))
                jobs.append((targets, camera, white))
            in_parallel(lambda job: block_scenes.write_photograph(*job), jobs)
            # Whole photographs leave gaps in the heap, which later ones do not always fit in.
            trim_heap()
            progress.update(min(first + _AT_ONCE, len(cameras)))
    return cuts


def meshed_space(points: np.ndarray, scene: Scene) -> BlockBox:
    """Return the space that is meshed: where the points are, but not endlessly far.

    Args:
        points: Of the reconstruction. (P, 3) world units

    Raises:
        UserError: There are no points.
    """
    if len(points) == 0:
        raise UserError(
            f"{scene.root}: has no points of a reconstruction, which blocks are cut by; train it "
            "whole with --blocks 1"
        )
    low, high = box_of_most(points, _ENDS)
    room = _ROOM * float((high - low).max())
    middle = middle_of(scene.train_cameras)
    reach = FARTHEST * scene.extent
    low = np.maximum(low - room, middle - reach)
    high = np.minimum(high + room, middle + reach)
    low_corner = low.tolist()
    high_corner = high.tolist()
    return BlockBox(tuple(low_corner), tuple(high_corner))
