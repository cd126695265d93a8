# SPDX-License-Identifier: Apache-2.0
"""One scene from its flags to its result: checks, mode, plan, and times of stages."""

from __future__ import annotations

import time

from sugar_pipeline.pipeline.input_checks import check_files_of_flags, check_names_of_photographs
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_pipeline.pipeline.pipeline_run import run_stages
from sugar_pipeline.pipeline.plan import PipelinePlan, plan_of, with_mode
from sugar_pipeline.timing.time_plan import ExpectedTimes, TimePlan, announce_end, require_plannable
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.flags import FlagValues


def run_one(flags: FlagValues, console: Console) -> PipelineResult:
    """Run all stages of ``train_full_pipeline.py`` on one scene that is not divided."""
    start = time.monotonic()
    return run_planned(checked_plan(flags, console), console, start)


def checked_plan(flags: FlagValues, console: Console) -> PipelinePlan:
    """Plan ``train_full_pipeline.py``, in the mode that suits the capture if none is given.

    Flags and files of all stages are checked first: camera poses may be computed to choose the
    mode, which takes minutes. The plan that is checked has a mode that always fits.
    """
    require_plannable(flags)
    has_mode = flags["regularization_type"] is not None
    plan = plan_of(flags if has_mode else flags.replaced(regularization_type="dn_consistency"))
    check_files_of_flags(plan)
    if plan.convert is not None:
        check_names_of_photographs(plan)
    announce_end(flags["minutes"], console)
    return plan if has_mode else with_mode(plan, console)


def run_planned(plan: PipelinePlan, console: Console, start: float | None = None) -> PipelineResult:
    """Run the stages of a plan; a single process estimates or plans their time.

    Args:
        start: When the run began, by ``time.monotonic``; None: now.
    """
    has_limit = plan.flags["minutes"] is not None
    if plan.coarse.compute.group.size > 1:
        if has_limit:
            raise UserError("--minutes needs one process; run without torchrun")
        return run_stages(plan, console, None, start)
    times = TimePlan(plan, console, start) if has_limit else ExpectedTimes(console)
    return run_stages(plan, console, times, start)
