# SPDX-License-Identifier: Apache-2.0
"""``--blocks``: a capture cut into blocks, trained one by one or by a cluster, and joined."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from gaussian_splatting.data.masks import NONE
from sugar_pipeline.blocks.automatic import ALONE, count_photographs, find_cameras
from sugar_pipeline.blocks.block_plan import BlockPlan
from sugar_pipeline.blocks.block_task import STAGES, BlockTask, later_stages, run_task
from sugar_pipeline.blocks.cluster import check_cluster, run_on_cluster
from sugar_pipeline.blocks.joined_refinement import RefinedPart
from sugar_pipeline.blocks.joining import JoinedParts, join_results
from sugar_pipeline.blocks.preparation import prepare_blocks, require_views
from sugar_pipeline.pipeline_flags import full_parser, runs_stage
from sugar_pipeline.pipeline_result import PipelineResult
from sugar_pipeline.plan import full_plan
from sugar_trainers.naming import scene_name
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.flags import AUTO
from sugar_utils.torchrun import Launch


def run_in_blocks(
    args: argparse.Namespace, given: Mapping[str, object], console: Console
) -> PipelineResult:
    """Run all stages on the blocks of a capture, and join their results.

    Args:
        args: Flags of the run, with its mode.
        given: Those that are not the defaults.

    Raises:
        UserError: A flag cannot act with blocks, or a block has failed.
    """
    find_cameras(args, console)
    plan = full_plan(args)
    folder = (args.output_dir / "blocks" / scene_name(args.scene_path)).resolve()
    blocks, scene = prepare_blocks(args, given, folder, console)
    tasks = tasks_of(args, blocks)
    if args.cluster is None:
        for number, task in enumerate(tasks, start=1):
            console.headline(f"task {number} of {len(tasks)}: {task.name}")
            run_task(task)
    else:
        run_on_cluster(tasks, args.cluster, console)
    console.headline("joining the blocks")
    parts = JoinedParts.of(blocks, refined_parts(args, blocks), scene)
    files = join_results(parts, scene, plan.result_folder, console)
    return PipelineResult(coarse_mesh=files[0], files=files)


def tasks_of(args: argparse.Namespace, plan: BlockPlan) -> list[BlockTask]:
    """All tasks, in an order in which each finds what it reads."""
    folder = str(plan.folder)
    stages = STAGES if runs_stage(args, "refine") else STAGES[: STAGES.index("refine")]
    return [BlockTask(stage, folder, block.number) for stage in stages for block in plan.blocks]


def refined_parts(args: argparse.Namespace, plan: BlockPlan) -> list[RefinedPart]:
    """The refined parts of the blocks that have a surface; none where nothing is refined."""
    parts = []
    for block in plan.blocks:
        if not runs_stage(args, "refine"):
            break
        block_args = full_parser(None).parse_args(["--config", str(block.settings)])
        part = RefinedPart.of(block, later_stages(block, block_args))
        if part is not None:
            parts.append(part)
    return parts


def check_block_flags(args: argparse.Namespace, given: Mapping[str, object]) -> None:
    """Refuse flags that cannot act with blocks, before anything is done.

    Raises:
        UserError: One was given.
    """
    if args.cluster is not None:
        if args.blocks == 1:
            raise UserError("--cluster spreads blocks; give their number with --blocks")
        check_cluster(args.cluster)
    if args.blocks in (AUTO, 1):
        return
    names = [f"--{name}" for name in ALONE if name in given]
    if names:
        raise UserError(f"{', '.join(names)}: not with --blocks; leave one of them out")
    if not runs_stage(args, "mesh"):
        raise UserError(f"--stop_after {args.stop_after}: not with --blocks, which end in a mesh")
    if args.mask_mode == "object" and args.masks not in (None, NONE):
        raise UserError(
            "--blocks: masks of an object do not go with blocks; an object fits into one. Pass "
            "--mask_mode ignore if the masks hide what is in the way"
        )
    n_photographs = count_photographs(args)
    if n_photographs is not None:
        # Of these some are held out: a second check follows.
        require_views(args.blocks, n_photographs, args.scene_path)
    if Launch.read().size > 1:
        raise UserError("--blocks needs one process; --cluster spreads them over GPUs and machines")
