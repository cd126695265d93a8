# SPDX-License-Identifier: Apache-2.0
"""Run ``train.py`` and ``train_full_pipeline.py`` with the flags that were parsed."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gaussian_splatting.engine.loop import Interrupted
from gaussian_splatting.scenes.scene_path import output_folders, scene_folder
from sugar_capture.scene_folder import is_scene
from sugar_pipeline.demo.demo_scene import run_demo, timed_demo
from sugar_pipeline.doctor import run_doctor
from sugar_pipeline.pipeline.conclusion import print_result
from sugar_pipeline.pipeline.finished_run import FinishedRun
from sugar_pipeline.pipeline.pipeline_flags import DEMO_FLAGS
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_pipeline.pipeline.plan import plan_of
from sugar_pipeline.timing.one_run import checked_plan, run_planned
from sugar_trainers.naming import scene_name
from sugar_utils.console import Console
from sugar_utils.entrypoint import report
from sugar_utils.errors import UserError, reason_of
from sugar_utils.flags import FlagValues
from sugar_utils.libraries import package_or_none
from sugar_utils.torchrun import Launch


def run_train(flags: FlagValues) -> PipelineResult | None:
    """Run ``train.py``: the stages, the demo, or the doctor, which has no result."""
    if flags["doctor"]:
        run_doctor(flags)
        return None
    if not flags["demo"]:
        console = console_of(flags)
        return _unless_finished(flags, console, lambda: run_planned(plan_of(flags), console))
    ignored = [f"--{name}" for name in flags.given if name not in DEMO_FLAGS]
    if ignored and Launch.read().rank == 0:
        print(f"{', '.join(ignored)}: no effect with --demo, which chooses its own settings")
    if flags["minutes"] is None:
        return run_demo(flags)
    return run_scene(timed_demo(flags), console_of(flags))


def console_of(flags: FlagValues) -> Console:
    """The console of the run; of several processes only the first one prints."""
    return Console(verbose=flags["verbose"]) if Launch.read().rank == 0 else Console.silent()


def run_full(flags: FlagValues, console: Console | None = None) -> PipelineResult | None:
    """Run ``train_full_pipeline.py``: from photographs on, one scene or several in turn.

    Several scenes have no common result: None.
    """
    if console is None:
        console = console_of(flags)
    scenes: list[Path] = []
    for path in flags.get("all_scene_path", []):
        scenes += _scenes_in(path)
    if len(scenes) > 1:
        _run_each(flags, scenes, console)
        return None
    scene = scenes[0] if scenes else None
    return run_scene(flags.replaced(scene_path=scene), console)


def _unless_finished(
    flags: FlagValues, console: Console, run: Callable[[], PipelineResult]
) -> PipelineResult:
    """Run all stages on one scene, unless an earlier process did and nothing has changed."""
    missing = flags["scene_path"] is None or not flags["scene_path"].exists()
    if missing or Launch.read().size > 1:
        return run()
    finished = FinishedRun(flags)
    result = finished.result()
    if result is None:
        result = run()
        finished.note(result)
        return result
    for record in result.records:
        console.headline(f"finished already: {record.outputs[0]}")
    print_result(result, console, flags["minutes"])
    return result


def run_scene(flags: FlagValues, console: Console) -> PipelineResult:
    """Run all stages on one scene, in blocks where it does not fit into memory."""
    return _unless_finished(flags, console, lambda: _run_unfinished(flags, console))


def _run_unfinished(flags: FlagValues, console: Console) -> PipelineResult:
    # Cameras may be computed to choose the mode: minutes that count.
    start = time.monotonic()
    blocks = package_or_none("sugar_pipeline.blocks.entry")
    if blocks is not None:
        blocks.check_block_flags(flags)
    plan = checked_plan(flags, console)
    if blocks is not None:
        plan = blocks.with_number(plan, console)
        if blocks.is_divided(plan):
            return blocks.run(plan, console)
    return run_planned(plan, console, start)


def _scenes_in(path: Path) -> list[Path]:
    """The path itself if it is a scene or missing, else the scenes in that folder."""
    if is_scene(path) or not path.is_dir():
        return [path]
    scenes = sorted(child for child in path.iterdir() if is_scene(child))
    return scenes or [path]


@dataclass(frozen=True)
class _Outcome:
    """The end of one scene of several."""

    exit_code: int  # 0 where it succeeded
    text: str  # the report or the mesh, or the error
    seconds: float | None = None  # that the run took by its own account


def _run_each(flags: FlagValues, scenes: list[Path], console: Console) -> None:
    """Run scenes one after the other; one that fails stops none of the others.

    Raises:
        UserError: Some failed; its exit code is that of the first one.
    """
    names = [scene_name(scene) for scene in scenes]
    if len(set(names)) < len(names):
        raise UserError("two scenes have the same name; results are named after it, so rename one")
    if Launch.read().size > 1 or flags["gs_output_dir"] is not None:
        raise UserError(
            "several scenes need one process, and no --gs_output_dir; run them one by one"
        )
    rows = []
    failed_codes = []
    for number, scene in enumerate(scenes, start=1):
        console.headline(f"scene {number} of {len(scenes)}: {scene}")
        start = time.monotonic()
        outcome = _outcome_of(flags, scene, console)
        seconds = outcome.seconds
        if seconds is None:
            seconds = time.monotonic() - start
        minutes = seconds / 60
        code_text = outcome.exit_code or "ok"
        rows.append((str(scene), f"{code_text:>2}  {minutes:6.1f} min  {outcome.text}"))
        if outcome.exit_code:
            failed_codes.append(outcome.exit_code)
    console.table("scenes: exit code or ok, time, result", rows, headline=True)
    if failed_codes:
        failure = UserError(f"{len(failed_codes)} of {len(scenes)} scenes failed, see the table")
        failure.exit_code = failed_codes[0]
        raise failure


def _outcome_of(flags: FlagValues, scene: Path, console: Console) -> _Outcome:
    """Run one scene of several, and print its error if there is one."""
    try:
        folder = scene_folder(scene, output_folders(flags), console.info)
        result = run_scene(flags.replaced(scene_path=folder), console)
        return _Outcome(0, f"{result.report or result.mesh}", result.seconds)
    except Interrupted:
        raise
    except Exception as error:
        reason = reason_of(error)
        try:
            exit_code = report(error)
        except Exception:
            traceback.print_exc()
            exit_code = 1
        return _Outcome(exit_code, reason)
