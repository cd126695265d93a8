# SPDX-License-Identifier: Apache-2.0
"""Run ``train.py`` and ``train_full_pipeline.py`` with the flags that were parsed."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gaussian_splatting.data.scene_path import output_folders, scene_folder
from gaussian_splatting.engine.loop import Interrupted
from sugar_capture.scene_folder import is_scene
from sugar_pipeline.blocks.automatic import automatic_blocks
from sugar_pipeline.blocks.block_flags import check_block_flags
from sugar_pipeline.demo_scene import run_demo, timed_demo
from sugar_pipeline.doctor import run_doctor
from sugar_pipeline.input_checks import check_files_of_flags, check_names_of_photographs
from sugar_pipeline.pipeline_flags import DEMO_FLAGS, full_parser, train_parser
from sugar_pipeline.pipeline_result import PipelineResult
from sugar_pipeline.pipeline_run import run_stages
from sugar_pipeline.plan import PipelinePlan, full_plan, train_plan, with_mode
from sugar_pipeline.timing.time_plan import TimePlan, announce_end, require_plannable
from sugar_trainers.naming import scene_name
from sugar_utils.console import Console
from sugar_utils.entrypoint import report
from sugar_utils.errors import UserError, reason_of
from sugar_utils.flags import AUTO
from sugar_utils.settings import given_flags, with_flags
from sugar_utils.torchrun import Launch


def run_train(args: argparse.Namespace) -> PipelineResult | None:
    """Run ``train.py``: the stages, the demo, or the doctor, which has no result."""
    if args.doctor:
        run_doctor(args)
        return None
    changed_flags = given_flags(args, train_parser(None))
    if not args.demo:
        return _run(args, train_plan, changed_flags, _console(args))
    ignored = [f"--{name}" for name in changed_flags if name not in DEMO_FLAGS]
    if ignored and Launch.read().rank == 0:
        print(f"{', '.join(ignored)}: no effect with --demo, which chooses its own settings")
    if args.minutes is None:
        return run_demo(args)
    return run_scene(timed_demo(args), _console(args))


def _console(args: argparse.Namespace) -> Console:
    """The console of the run; of several processes only the first one prints."""
    return Console(verbose=args.verbose) if Launch.read().rank == 0 else Console.silent()


def run_full(args: argparse.Namespace, console: Console | None = None) -> PipelineResult | None:
    """Run ``train_full_pipeline.py``: from photographs on, one scene or several in turn.

    Several scenes have no common result: None.
    """
    if console is None:
        console = _console(args)
    scenes: list[Path] = []
    for path in getattr(args, "all_scene_path", []):
        scenes += _scenes_in(path)
    if len(scenes) > 1:
        _run_each(args, scenes, console)
        return None
    scene = scenes[0] if scenes else None
    return run_scene(with_flags(args, scene_path=scene), console)


def run_scene(args: argparse.Namespace, console: Console) -> PipelineResult:
    """Run all stages on one scene."""
    # Cameras may be computed to choose the mode: minutes that count.
    start = time.monotonic()
    _check_before_cameras(args)
    announce_end(args.minutes, console)
    args = with_mode(args, console)
    changed_flags = given_flags(args, full_parser(None))
    n_blocks = args.blocks
    if n_blocks == AUTO:
        n_blocks = automatic_blocks(args, changed_flags, console)
    if n_blocks > 1:
        # Here and not above: most runs are whole.
        from sugar_pipeline.blocks.blocks_run import run_in_blocks

        return run_in_blocks(with_flags(args, blocks=n_blocks), changed_flags, console)
    return _run(args, full_plan, changed_flags, console, start)


def _check_before_cameras(args: argparse.Namespace) -> None:
    """Check flags and files of all stages before camera poses are computed, which takes minutes.

    The mode that suits the capture is not known yet, so the plan is made with one that always fits.
    """
    changed_flags = given_flags(args, full_parser(None))
    require_plannable(args, changed_flags)
    check_block_flags(args, changed_flags)
    mode = args.regularization_type or "dn_consistency"
    plan = full_plan(with_flags(args, regularization_type=mode))
    check_files_of_flags(plan)
    if plan.convert is not None:
        check_names_of_photographs(plan)


def _run(
    args: argparse.Namespace,
    make: Callable[[argparse.Namespace], PipelinePlan],
    changed_flags: dict[str, object],
    console: Console,
    start: float | None = None,
) -> PipelineResult:
    """Run the stages of a plan; a single process estimates or plans their time.

    Args:
        start: When the run began, by ``time.monotonic``; None: now.
    """
    plan = replace(make(args), given=changed_flags)
    if plan.coarse.compute.group.size > 1:
        if args.minutes is not None:
            raise UserError("--minutes needs one process; run without torchrun")
        return run_stages(plan, console)
    times = TimePlan(args, make, changed_flags, console, start)
    result = run_stages(plan, console, times)
    times.conclude()
    return result


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
        minutes = (time.monotonic() - start) / 60
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
        return _Outcome(0, f"{result.report or result.mesh}")
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
