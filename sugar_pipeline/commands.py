# SPDX-License-Identifier: Apache-2.0
"""Run ``train.py`` and ``train_full_pipeline.py`` with the flags that were parsed."""

from __future__ import annotations

import argparse
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
from sugar_pipeline.pipeline.finished_run import FinishedRun
from sugar_pipeline.pipeline.pipeline_flags import DEMO_FLAGS, full_parser, train_parser
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_pipeline.pipeline.pipeline_run import print_result
from sugar_pipeline.pipeline.plan import full_plan, train_plan
from sugar_pipeline.timing.one_run import run_planned, with_checked_mode
from sugar_trainers.naming import scene_name
from sugar_utils.console import Console
from sugar_utils.entrypoint import report
from sugar_utils.errors import UserError, reason_of
from sugar_utils.libraries import package_or_none
from sugar_utils.settings import given_flags, with_flags
from sugar_utils.torchrun import Launch


def run_train(args: argparse.Namespace) -> PipelineResult | None:
    """Run ``train.py``: the stages, the demo, or the doctor, which has no result."""
    if args.doctor:
        run_doctor(args)
        return None
    changed_flags = given_flags(args, train_parser(None))
    if not args.demo:
        console = console_of(args)
        return _unless_finished(
            args, console, lambda: run_planned(args, train_plan, changed_flags, console)
        )
    ignored = [f"--{name}" for name in changed_flags if name not in DEMO_FLAGS]
    if ignored and Launch.read().rank == 0:
        print(f"{', '.join(ignored)}: no effect with --demo, which chooses its own settings")
    if args.minutes is None:
        return run_demo(args)
    return run_scene(timed_demo(args), console_of(args))


def console_of(args: argparse.Namespace) -> Console:
    """The console of the run; of several processes only the first one prints."""
    return Console(verbose=args.verbose) if Launch.read().rank == 0 else Console.silent()


def run_full(args: argparse.Namespace, console: Console | None = None) -> PipelineResult | None:
    """Run ``train_full_pipeline.py``: from photographs on, one scene or several in turn.

    Several scenes have no common result: None.
    """
    if console is None:
        console = console_of(args)
    scenes: list[Path] = []
    for path in getattr(args, "all_scene_path", []):
        scenes += _scenes_in(path)
    if len(scenes) > 1:
        _run_each(args, scenes, console)
        return None
    scene = scenes[0] if scenes else None
    return run_scene(with_flags(args, scene_path=scene), console)


def _unless_finished(
    args: argparse.Namespace, console: Console, run: Callable[[], PipelineResult]
) -> PipelineResult:
    """Run all stages on one scene, unless an earlier process did and nothing has changed."""
    missing = args.scene_path is None or not args.scene_path.exists()
    if missing or Launch.read().size > 1:
        return run()
    finished = FinishedRun(args)
    result = finished.result()
    if result is None:
        result = run()
        finished.note(result)
        return result
    for record in result.records:
        console.headline(f"finished already: {record.outputs[0]}")
    print_result(result, console, args.minutes)
    return result


def run_scene(args: argparse.Namespace, console: Console) -> PipelineResult:
    """Run all stages on one scene, in blocks where it does not fit into memory."""
    return _unless_finished(args, console, lambda: _run_unfinished(args, console))


def _run_unfinished(args: argparse.Namespace, console: Console) -> PipelineResult:
    # Cameras may be computed to choose the mode: minutes that count.
    start = time.monotonic()
    blocks = package_or_none("sugar_pipeline.blocks.entry")
    if blocks is not None:
        blocks.check(args)
    args = with_checked_mode(args, console)
    result = None if blocks is None else blocks.run(args, console)
    if result is not None:
        return result
    return run_planned(args, full_plan, given_flags(args, full_parser(None)), console, start)


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


def _run_each(args: argparse.Namespace, scenes: list[Path], console: Console) -> None:
    """Run scenes one after the other; one that fails stops none of the others.

    Raises:
        UserError: Some failed; its exit code is that of the first one.
    """
    names = [scene_name(scene) for scene in scenes]
    if len(set(names)) < len(names):
        raise UserError("two scenes have the same name; results are named after it, so rename one")
    if Launch.read().size > 1 or args.gs_output_dir is not None:
        raise UserError(
            "several scenes need one process, and no --gs_output_dir; run them one by one"
        )
    rows = []
    failed_codes = []
    for number, scene in enumerate(scenes, start=1):
        console.headline(f"scene {number} of {len(scenes)}: {scene}")
        start = time.monotonic()
        outcome = _outcome_of(args, scene, console)
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


def _outcome_of(args: argparse.Namespace, scene: Path, console: Console) -> _Outcome:
    """Run one scene of several, and print its error if there is one."""
    try:
        folder = scene_folder(scene, output_folders(args), console.info)
        result = run_scene(with_flags(args, scene_path=folder), console)
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
