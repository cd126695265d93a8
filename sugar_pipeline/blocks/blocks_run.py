# SPDX-License-Identifier: Apache-2.0
"""``--blocks``: a capture cut into blocks, trained one by one or by a cluster, and joined."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from sugar_extractors.outputs.result_folder import TILE_FOLDER
from sugar_extractors.outputs.result_page import write_index
from sugar_pipeline.blocks.automatic import find_cameras, read_capture
from sugar_pipeline.blocks.block_flags import check_capture
from sugar_pipeline.blocks.block_plan import Block, BlockPlan
from sugar_pipeline.blocks.block_task import STAGES, BlockTask, later_stages, run_task
from sugar_pipeline.blocks.cluster import run_on_cluster
from sugar_pipeline.blocks.joining import JoinedParts, join_results
from sugar_pipeline.blocks.preparation import prepare_blocks
from sugar_pipeline.pipeline.pipeline_flags import full_parser, runs_stage
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_pipeline.pipeline.plan import PipelinePlan, full_plan
from sugar_trainers.naming import INDEX, scene_name
from sugar_utils.console import Console
from sugar_utils.memory import format_bytes

_LARGEST_ON_PAGE = 2 << 30  # bytes of results, in uncompressed files, that are put on one page


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
    check_capture(args.blocks, read_capture(args))
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
    stages = [stages_of(args, block) for block in blocks.blocks]
    parts = JoinedParts.of(blocks, stages, scene)
    files = join_results(parts, scene, plan.result_folder, console)
    files += _write_page(plan, files, console)
    return PipelineResult(coarse_mesh=files[0], files=files)


def _write_page(plan: PipelinePlan, files: Sequence[Path], console: Console) -> list[Path]:
    """Write the page of the results, which holds them all, where these are small."""
    if plan.texture is None:
        return []
    n_bytes = sum(path.stat().st_size for path in files if path.parent == plan.result_folder)
    if n_bytes > _LARGEST_ON_PAGE:
        console.info(
            f"no {INDEX}: the results have {format_bytes(n_bytes)}; open {TILE_FOLDER}/tileset.json"
        )
        return []
    page = write_index(plan.result_folder, upright=True, lit=plan.texture.lit, notify=console.info)
    return [] if page is None else [page]


def tasks_of(args: argparse.Namespace, plan: BlockPlan) -> list[BlockTask]:
    """All tasks, in an order in which each finds what it reads."""
    folder = str(plan.folder)
    stages = STAGES if runs_stage(args, "refine") else STAGES[: STAGES.index("refine")]
    return [BlockTask(stage, folder, block.number) for stage in stages for block in plan.blocks]


def stages_of(args: argparse.Namespace, block: Block) -> PipelinePlan:
    """The plan of a block's run up to the last stage of the whole run."""
    block_args = full_parser(None).parse_args(["--config", str(block.settings)])
    return later_stages(block, block_args, args.stop_after)
