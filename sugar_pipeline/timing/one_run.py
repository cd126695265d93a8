# SPDX-License-Identifier: Apache-2.0
"""One scene from its flags to its result: checks, mode, plan, and times of stages."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

from sugar_pipeline.pipeline.input_checks import check_files_of_flags, check_names_of_photographs
from sugar_pipeline.pipeline.pipeline_flags import full_parser
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_pipeline.pipeline.pipeline_run import run_stages
from sugar_pipeline.pipeline.plan import PipelinePlan, full_plan, with_mode
from sugar_pipeline.timing.time_plan import ExpectedTimes, TimePlan, announce_end, require_plannable
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.settings import given_flags, with_flags


def run_one(args: argparse.Namespace, console: Console) -> PipelineResult:
    """Run all stages of ``train_full_pipeline.py`` on one scene that is not divided."""
    start = time.monotonic()
    args = with_checked_mode(args, console)
    return run_planned(args, full_plan, given_flags(args, full_parser(None)), console, start)


def with_checked_mode(args: argparse.Namespace, console: Console) -> argparse.Namespace:
    """Return the flags of ``train_full_pipeline.py`` with the mode that suits the capture.

    Flags and files of all stages are checked before: cameras may be computed to choose the mode.
    """
    _check_before_cameras(args)
    announce_end(args.minutes, console)
    return with_mode(args, console)


def _check_before_cameras(args: argparse.Namespace) -> None:
    """Check flags and files of all stages before camera poses are computed, which takes minutes.

    The mode that suits the capture is not known yet, so the plan is made with one that always fits.
    """
    changed_flags = given_flags(args, full_parser(None))
    require_plannable(args, changed_flags)
    mode = args.regularization_type or "dn_consistency"
    plan = full_plan(with_flags(args, regularization_type=mode))
    check_files_of_flags(plan)
    if plan.convert is not None:
        check_names_of_photographs(plan)


def run_planned(
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
        return run_stages(plan, console, None, start)
    if args.minutes is None:
        return run_stages(plan, console, ExpectedTimes(console), start)
    times = TimePlan(args, make, changed_flags, console, start)
    return run_stages(plan, console, times, start)
