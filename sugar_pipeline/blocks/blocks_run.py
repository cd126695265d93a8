# SPDX-License-Identifier: Apache-2.0
"""``--blocks``: a capture cut into blocks, trained one by one or by a cluster, and joined."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from gaussian_splatting.formats.placement import TRANSFORM
from sugar_extractors.outputs.result_folder import TILE_FOLDER
from sugar_extractors.outputs.result_page import write_index
from sugar_extractors.placing import PlacementOptions, scale_of
from sugar_pipeline.blocks.automatic import read_capture
from sugar_pipeline.blocks.block_flags import check_capture
from sugar_pipeline.blocks.block_plan import PLAN_FILE, Block, BlockPlan
from sugar_pipeline.blocks.block_task import STAGES, BlockTask, later_stages, run_task
from sugar_pipeline.blocks.cluster import run_on_cluster
from sugar_pipeline.blocks.joining import JoinedParts, join_results
from sugar_pipeline.blocks.preparation import prepare_blocks
from sugar_pipeline.pipeline.conclusion import print_result
from sugar_pipeline.pipeline.pipeline_flags import full_parser, runs_stage
from sugar_pipeline.pipeline.pipeline_result import PipelineResult, StageRecord, training_record
from sugar_pipeline.pipeline.plan import PipelinePlan, with_cameras
from sugar_pipeline.pipeline.run_times import TIMES_FILE, RunTimes
from sugar_pipeline.quality.grading import worst
from sugar_trainers.naming import INDEX, LOG, scene_name
from sugar_utils.console import Console, clock_text
from sugar_utils.files import check_writable
from sugar_utils.flags import FlagValues
from sugar_utils.memory import format_bytes

_LARGEST_ON_PAGE = 2 << 30  # bytes of results, in uncompressed files, that are put on one page


def run_in_blocks(plan: PipelinePlan, console: Console) -> PipelineResult:
    """Run all stages on the blocks of a capture, and join their results.

    Args:
        plan: Of the whole capture, with the number of blocks.

    Raises:
        UserError: A flag cannot act with blocks, or a block has failed.
    """
    start = time.monotonic()
    plan = with_cameras(plan, console)
    flags = plan.flags
    placement = PlacementOptions() if plan.texture is None else plan.texture.placement
    capture = read_capture(plan)
    check_capture(flags["blocks"], capture)
    if placement.is_scaled:
        scale_of(capture.calibrated_cameras, placement, capture.offset)
    console.open_log(check_writable(plan.result_folder) / LOG)
    folder = (flags["output_dir"] / "blocks" / scene_name(flags["scene_path"])).resolve()
    blocks, scene = prepare_blocks(plan, folder, console)
    times = RunTimes(plan.result_folder / TIMES_FILE)
    times.add("overview", time.monotonic() - start, blocks.folder / PLAN_FILE)
    _run_tasks(tasks_of(flags, blocks), flags["cluster"], times, console)
    joining_start = time.monotonic()
    console.headline("joining the blocks")
    stages = [stages_of(flags, block) for block in blocks.blocks]
    with console.reporting(lambda seconds: f"joining: {clock_text(seconds)} so far"):
        parts = JoinedParts.of(blocks, stages, scene, placement)
        files = join_results(parts, scene, plan.result_folder, console)
        files += _write_page(plan, files, placement, console)
    result = PipelineResult(records=_records(blocks, stages), coarse_mesh=files[0], files=files)
    textured = [path for path in files if path.suffix == ".obj"]
    result.textured = textured[0] if textured else None
    result.grade = worst([record.grade for record in result.records if record.grade is not None])
    times.add("joining", time.monotonic() - joining_start, plan.result_folder / TRANSFORM)
    times.write()
    result.seconds = times.total
    print_result(result, console)
    console.close()
    return result


def _run_tasks(
    tasks: Sequence[BlockTask], cluster: str | None, times: RunTimes, console: Console
) -> None:
    """Run all tasks, here in turn or on a cluster, and note how long they took."""
    if cluster is not None:
        start = time.monotonic()
        run_on_cluster(tasks, cluster, console)
        times.add("tasks", time.monotonic() - start, tasks[-1].done_file)
        return
    for number, task in enumerate(tasks, start=1):
        console.headline(f"task {number} of {len(tasks)}: {task.name}")
        start = time.monotonic()
        with console.reporting(task.state):
            run_task(task)
        times.add(task.name, time.monotonic() - start, task.done_file)
        times.write()


def _records(plan: BlockPlan, stages: Sequence[PipelinePlan]) -> list[StageRecord]:
    """Return the record of the last training of each block, with its grade."""
    records = []
    for block, of_block in zip(plan.blocks, stages, strict=True):
        refined = of_block.refine
        last = of_block.coarse.result
        if refined is not None and refined.result.is_file():
            last = refined.result
        records.append(training_record(f"block {block.number:02d}", last.parent, [last]))
    return records


def _write_page(
    plan: PipelinePlan, files: Sequence[Path], placement: PlacementOptions, console: Console
) -> list[Path]:
    """Write the page of the results, which holds them all, where these are small."""
    if plan.texture is None:
        return []
    n_bytes = sum(path.stat().st_size for path in files if path.parent == plan.result_folder)
    if n_bytes > _LARGEST_ON_PAGE:
        console.info(
            f"no {INDEX}: the results have {format_bytes(n_bytes)}; open {TILE_FOLDER}/tileset.json"
        )
        return []
    page = write_index(
        plan.result_folder,
        upright=placement.orient in (None, "up"),
        lit=plan.texture.lit,
        notify=console.info,
    )
    return [] if page is None else [page]


def tasks_of(flags: FlagValues, plan: BlockPlan) -> list[BlockTask]:
    """All tasks in an order that satisfies their dependencies."""
    folder = str(plan.folder)
    stages = STAGES if runs_stage(flags, "refine") else STAGES[: STAGES.index("refine")]
    return [BlockTask(stage, folder, block.number) for stage in stages for block in plan.blocks]


def stages_of(flags: FlagValues, block: Block) -> PipelinePlan:
    """The plan of a block's run up to the last stage of the whole run."""
    block_flags = full_parser(None).parse_flags(["--config", str(block.settings)])
    return later_stages(block, block_flags, flags["stop_after"])
