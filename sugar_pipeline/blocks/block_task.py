# SPDX-License-Identifier: Apache-2.0
"""One task: a stage of one block, ``python -m sugar_pipeline.blocks.block_task STAGE FOLDER N``.

A task reads and writes files of its plan's folder alone and knows nothing of who started it: this
machine in turn, or a worker of a cluster. What is finished is not repeated, and what was
interrupted goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from sugar_utils.console import Console, clock_text
from sugar_utils.entrypoint import EXIT_OF_SIGNAL, run_main
from sugar_utils.errors import UserError
from sugar_utils.libraries import running_module

if TYPE_CHECKING:
    from sugar_pipeline.blocks.block_plan import Block
    from sugar_pipeline.pipeline.plan import PipelinePlan
    from sugar_utils.flags import FlagValues

STAGES = ("train", "depths", "mesh", "refine")  # of a block, in their order
AFTER_ALL = ("mesh", "refine")  # stages that read what the one before has made of all blocks

_MADE = {
    "train": "results/coarse/**/*.pt",
    "depths": "splats.ply",
    "mesh": "mesh.ply",
    "refine": "results/refined/**/*.pt",
}
"""Files in the folder of a block that a task of a stage makes."""
SAVING = 120.0  # seconds for which a task that is stopped may save its work


def _time_of(path: Path) -> float:
    return path.stat().st_mtime


class BlockTask(NamedTuple):
    """A stage of one block."""

    stage: str
    folder: str  # of the plan, an absolute path
    number: int

    @property
    def name(self) -> str:
        """Its name in messages and dashboards."""
        return f"{self.stage}-block-{self.number:02d}"

    @property
    def log(self) -> Path:
        """File of the task's output on a worker."""
        return self.folder_of_block / f"log_{self.stage}.txt"

    @property
    def folder_of_block(self) -> Path:
        """Folder of its block."""
        return Path(self.folder) / f"block_{self.number:02d}"

    @property
    def done_file(self) -> Path:
        """The newest of the task's final files; without one, its folder."""
        files = sorted(self.folder_of_block.glob(_MADE[self.stage]), key=_time_of)
        return files[-1] if files else self.folder_of_block

    def state(self, seconds: float) -> str:
        """Return a line about the running task: its time and the last line of its logs."""
        line = f"{self.name}: {clock_text(seconds)} so far"
        with contextlib.suppress(OSError):
            logs = sorted(self.folder_of_block.rglob("log*.txt"), key=_time_of)
            if logs:
                last_lines = (
                    logs[-1].read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
                )
                # A line of a log begins with date and time.
                words = [last.split(" ", 2)[-1].strip() for last in last_lines]
                line = "; ".join([line, *words])
        return line


class TaskFailed(UserError):
    """A task ended with an error, which it has printed."""

    def __init__(self, task: BlockTask, exit_code: int, log: Path | None) -> None:
        place = "above" if log is None else f"in {log}"
        super().__init__(
            f"{task.name} ended with exit code {exit_code}, its reason stands {place}; what is "
            "finished is kept, the same command goes on"
        )
        self.exit_code = exit_code if exit_code > 0 else 1


def run_task(task: BlockTask, output: IO[bytes] | None = None) -> None:
    """Run a task in a process of its own, which ends with this one.

    Args:
        output: Gets what it prints; None: where this process prints.

    Raises:
        TaskFailed: It ended with an error.
        KeyboardInterrupt: It was stopped.
    """
    words = [task.stage, task.folder, str(task.number)]
    module = "sugar_pipeline.blocks.block_task"
    with running_module(module, words, output, SAVING) as process:
        code = process.wait()
    if code in EXIT_OF_SIGNAL.values():
        raise KeyboardInterrupt
    if code:
        raise TaskFailed(task, code, None if output is None else task.log)


def perform(task: BlockTask) -> None:
    """Do the work of a task in this process."""
    from sugar_pipeline.blocks.block_depths import write_depths
    from sugar_pipeline.blocks.block_meshes import write_block_mesh
    from sugar_pipeline.blocks.block_plan import PLAN_FILE, read_plan
    from sugar_pipeline.blocks.block_refinement import refine_block
    from sugar_pipeline.blocks.joining import write_block_splats
    from sugar_pipeline.pipeline.pipeline_flags import full_parser
    from sugar_pipeline.timing.one_run import run_one

    folder = Path(task.folder)
    plan = read_plan(folder)
    if plan is None or task.number >= len(plan.blocks):
        raise UserError(
            f"{folder / PLAN_FILE}: has no block {task.number}; the folder must be seen under the "
            "same path by all workers"
        )
    block = plan.blocks[task.number]
    flags = full_parser(None).parse_flags(["--config", str(block.settings)])
    console = Console(verbose=flags["verbose"])
    if task.stage == "train":
        run_one(flags, console)
        return
    stages = later_stages(block, flags)
    mesh = stages.mesh
    assert mesh is not None, "the plan does not end before the mesh"
    assert mesh.model is not None, "a block has a coarse model"
    if task.stage == "depths":
        write_depths(block, plan.margin, mesh, console)
        write_block_splats(block, mesh.model)
    elif task.stage == "mesh":
        write_block_mesh(plan, block, mesh, console)
    else:
        refine_block(plan, block, stages, console)


def later_stages(block: Block, flags: FlagValues, stop_after: str | None = None) -> PipelinePlan:
    """Return the plan of a block's run beyond its training.

    Args:
        flags: Of the block's training, which end with the coarse stage.
        stop_after: Its last stage; None for all.
    """
    from sugar_pipeline.blocks.block_refinement import with_surrounded_mesh
    from sugar_pipeline.pipeline.plan import plan_of

    return with_surrounded_mesh(plan_of(flags.replaced(stop_after=stop_after)), block)


def main() -> None:
    """Perform the task of the command line."""
    parser = argparse.ArgumentParser(description="Perform a stage of one block.")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("folder")
    parser.add_argument("number", type=int)
    args = parser.parse_args()
    perform(BlockTask(args.stage, args.folder, args.number))


if __name__ == "__main__":
    sys.exit(run_main(main))
