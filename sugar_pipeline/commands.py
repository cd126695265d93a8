# SPDX-License-Identifier: Apache-2.0
"""What ``train.py`` and ``train_full_pipeline.py`` do with their flags."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaussian_splatting.data.scene_path import output_folders, scene_folder
from gaussian_splatting.engine.loop import Interrupted
from sugar_capture.scene_folder import is_scene
from sugar_pipeline.demo_scene import run_demo, timed_demo
from sugar_pipeline.doctor import run_doctor
from sugar_pipeline.pipeline_flags import DEMO_FLAGS, full_parser, train_parser
from sugar_pipeline.pipeline_run import (
    PipelineResult,
    check_files_of_flags,
    check_names_of_photographs,
    run_stages,
)
from sugar_pipeline.plan import PipelinePlan, full_plan, train_plan, with_mode
from sugar_pipeline.time_plan import TimePlan
from sugar_trainers.naming import scene_name
from sugar_utils.console import Console
from sugar_utils.entrypoint import report
from sugar_utils.errors import UserError
from sugar_utils.settings import given_flags, with_flags
from sugar_utils.torchrun import Launch


def run_train(args: argparse.Namespace) -> PipelineResult | None:
    if args.doctor:
        run_doctor(args)
        return None
    given = given_flags(args, train_parser(None))
    if not args.demo:
        return _run(args, train_plan, given, _console(args))
    ignored = [f"--{name}" for name in given if name not in DEMO_FLAGS]
    if ignored and Launch.read().rank == 0:
        print(f"{', '.join(ignored)}: no effect with --demo, which chooses its own settings")
    if args.minutes is None:
        return run_demo(args)
    return run_scene(timed_demo(args), _console(args))


def _console(args: argparse.Namespace) -> Console:
    """The console of the run; of several processes the first one speaks."""
    return Console(verbose=args.verbose) if Launch.read().rank == 0 else Console.silent()


def run_full(args: argparse.Namespace, console: Console | None = None) -> PipelineResult | None:
    """Run ``train_full_pipeline.py``: from photographs on, one scene or one after the other."""
    if console is None:
        console = _console(args)
    scenes = [scene for path in getattr(args, "all_scene_path", []) for scene in _scenes_in(path)]
    if len(scenes) > 1:
        return _run_each(args, scenes, console)
    return run_scene(with_flags(args, scene_path=scenes[0] if scenes else None), console)


def run_scene(args: argparse.Namespace, console: Console) -> PipelineResult:
    _check_before_cameras(args)
    args = with_mode(args, console)
    given = given_flags(args, full_parser(None))
    return _run(args, full_plan, given, console)


def _check_before_cameras(args: argparse.Namespace) -> None:
    """Refuse flags and files of all stages before cameras are looked for, which takes minutes.

    Which mode suits the capture is not known then, so the plan is made with one that always fits.
    """
    mode = args.regularization_type or "dn_consistency"
    plan = full_plan(with_flags(args, regularization_type=mode))
    if plan.convert is not None:
        check_files_of_flags(plan)
        check_names_of_photographs(plan)


def _run(
    args: argparse.Namespace,
    make: Callable[[argparse.Namespace], PipelinePlan],
    given: dict[str, Any],
    console: Console,
) -> PipelineResult:
    """The stages of a plan; one process alone estimates or plans their time."""
    plan = replace(make(args), given=given)
    if plan.coarse.compute.group.size > 1:
        if args.minutes is not None:
            raise UserError("--minutes needs one process; run without torchrun")
        return run_stages(plan, console)
    times = TimePlan(args, make, given, console)
    result = run_stages(plan, console, times)
    times.conclude()
    return result


def _scenes_in(path: Path) -> Iterator[Path]:
    """The path itself if it is a scene or missing, else the scenes in that folder."""
    inside = [] if is_scene(path) or not path.is_dir() else filter(is_scene, path.iterdir())
    yield from sorted(inside) or [path]


def _run_each(args: argparse.Namespace, scenes: list[Path], console: Console) -> None:
    """Scenes one after the other; one that fails stops none of the others.

    Where some failed, the exit code is that of the first one.
    """
    names = [scene_name(scene) for scene in scenes]
    if len(set(names)) < len(names):
        raise UserError(
            "several scenes have the same name, by which results are called; rename one"
        )
    if Launch.read().size > 1 or args.gs_output_dir is not None:
        raise UserError(
            "several scenes need one process, and no --gs_output_dir; run them one by one"
        )
    rows = []
    codes = []
    for scene in scenes:
        console.headline(f"scene {len(rows) + 1} of {len(scenes)}: {scene}")
        start = time.monotonic()
        code = 0
        try:
            folder = scene_folder(scene, output_folders(args), console.info)
            made = run_scene(with_flags(args, scene_path=folder), console)
            outcome = f"{made.report or made.mesh}"
        except Interrupted:
            raise
        except Exception as error:
            outcome = " ".join(str(error).split()) or type(error).__name__
            try:
                code = report(error)
            except Exception:
                traceback.print_exc()
                code = 1
        minutes = (time.monotonic() - start) / 60
        rows.append((str(scene), f"{code or 'ok':>2}  {minutes:6.1f} min  {outcome}"))
        codes += [code] if code else []
    console.table("scenes: exit code or ok, time, result", rows, headline=True)
    if codes:
        failed = UserError(f"{len(codes)} of {len(scenes)} scenes failed, see the table")
        failed.exit_code = codes[0]
        raise failed
