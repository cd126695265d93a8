# SPDX-License-Identifier: Apache-2.0
"""What ``train.py`` and ``train_full_pipeline.py`` do with their flags."""

from __future__ import annotations

import argparse

from sugar_pipeline.demo_scene import run_demo
from sugar_pipeline.doctor import run_doctor
from sugar_pipeline.pipeline_flags import DEMO_FLAGS, changed_flags, train_parser
from sugar_pipeline.pipeline_run import PipelineResult, run_stages
from sugar_pipeline.plan import full_plan, train_plan, with_mode
from sugar_utils.console import Console
from sugar_utils.torchrun import Launch


def run_train(args: argparse.Namespace) -> PipelineResult | None:
    """Run ``train.py``: the stages after a vanilla checkpoint, the demo, or the doctor."""
    if args.doctor:
        run_doctor(args)
        return None
    if not args.demo:
        return run_stages(train_plan(args))
    ignored = [flag for flag in changed_flags(args, train_parser(None)) if flag not in DEMO_FLAGS]
    if ignored and Launch.read().rank == 0:
        print(f"{', '.join(ignored)}: no effect with --demo, which chooses its own settings")
    return run_demo(args)


def run_full(args: argparse.Namespace) -> PipelineResult:
    """Run ``train_full_pipeline.py``: from photographs on."""
    console = Console() if Launch.read().rank == 0 else Console.silent()
    return run_stages(full_plan(with_mode(args, console)), console)
