# SPDX-License-Identifier: Apache-2.0
"""The demo: a small scene made on the spot, taken all the way, and measured."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from gaussian_splatting.optim.densification import DensificationConfig
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_pipeline.demo.demo_scene import make_demo_scene
from sugar_pipeline.pipeline_flags import full_parser
from sugar_pipeline.pipeline_run import PipelineResult, run_stages
from sugar_pipeline.plan import PipelinePlan, full_plan

VANILLA_ITERATIONS = 1_500
FLAGS = "-r dn_consistency --schedule_scale 0.08 -v 20000 -f 7500"
"""Settings of the stages: short schedules, small meshes."""


def run_demo(args: argparse.Namespace) -> PipelineResult:
    """Make the scene and run every stage on it; its true geometry is known, so it is measured.

    Args:
        args: Flags of ``train.py``; the output folder, the last stage, the seed and the treatment
            of earlier runs are taken from them.
    """
    # A GPU draws the same scene with other roundings, so the scene comes from the CPU everywhere.
    root = args.output_dir / "demo_scene"
    plan = demo_plan(args, root)
    group = plan.coarse.compute.group
    with group.single_report():
        if group.is_first:
            make_demo_scene(root, seed=args.random_seed, notify=print)
        group.barrier()
    return run_stages(plan)


def demo_plan(args: argparse.Namespace, scene: Path) -> PipelinePlan:
    """The plan of ``train_full_pipeline.py`` with a vanilla stage that suits the small scene."""
    own = full_parser(None).parse_args(FLAGS.split())
    own.scene_path = scene
    for name in (
        "output_dir", "force", "stop_after", "resume", "overwrite", "keep_checkpoints",
        "random_seed", "device", "gpu", "rasterizer", "views_per_step",
    ):  # fmt: skip
        setattr(own, name, getattr(args, name))
    own.vanilla_iterations = round(VANILLA_ITERATIONS / own.schedule_scale)
    plan = full_plan(own)
    config = VanillaConfig(
        preset=plan.vanilla.config.preset,
        iterations=VANILLA_ITERATIONS,
        rates=LearningRates(position_lr_max_steps=VANILLA_ITERATIONS),
        sh_interval=VANILLA_ITERATIONS // 2,
        densification=DensificationConfig(
            densify_from_iter=100, densify_until_iter=1_000, densification_interval=100
        ),
        optimizer=plan.vanilla.config.optimizer,
        random_seed=args.random_seed,
        robustness=plan.vanilla.config.robustness,
    )
    return replace(plan, vanilla=replace(plan.vanilla, config=config))
