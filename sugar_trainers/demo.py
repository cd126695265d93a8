# SPDX-License-Identifier: Apache-2.0
"""The demo: a small scene made on the spot, trained from scratch."""

from __future__ import annotations

import argparse
from pathlib import Path

from gaussian_splatting.demo_scene import make_demo_scene
from gaussian_splatting.densification import DensificationConfig
from gaussian_splatting.engine.session import RunOptions
from gaussian_splatting.schedule import LearningRates
from gaussian_splatting.training import VanillaOptions, train_vanilla
from gaussian_splatting.vanilla import VanillaConfig
from sugar_trainers.coarse_config import CoarseConfig, CoarseSchedule
from sugar_trainers.coarse_training import CoarseOptions, train_coarse

VANILLA_ITERATIONS = 1_500
COARSE_SCALE = 0.08
COARSE_SAMPLES = 100_000


def run_demo(args: argparse.Namespace) -> Path:
    """Make the scene, train vanilla 3DGS for a short schedule, then the coarse stage.

    Args:
        args: Flags of ``train.py``; the output folder, the seed and the treatment of earlier
            runs are taken from them.

    Returns:
        The coarse model.
    """
    root: Path = args.output_dir
    run = RunOptions(args.resume, args.overwrite, args.keep_checkpoints)
    scene = make_demo_scene(root / "demo_scene", seed=args.random_seed, notify=print)
    checkpoint = root / "vanilla_gs" / "demo_scene"
    train_vanilla(
        VanillaOptions(
            scene_path=scene.root,
            output=checkpoint,
            eval_split=True,
            config=VanillaConfig(
                iterations=VANILLA_ITERATIONS,
                rates=LearningRates(position_steps=VANILLA_ITERATIONS),
                sh_interval=VANILLA_ITERATIONS // 2,
                densification=DensificationConfig(start=100, stop=1_000, interval=100),
                seed=args.random_seed,
            ),
            test_iterations=(),
            run=run,
        )
    )
    result = train_coarse(
        CoarseOptions(
            scene_path=scene.root,
            checkpoint_path=checkpoint,
            iteration_to_load=VANILLA_ITERATIONS,
            output_dir=root / "coarse" / "demo_scene",
            config=CoarseConfig(
                schedule=CoarseSchedule().scaled(COARSE_SCALE),
                samples=COARSE_SAMPLES,
                seed=args.random_seed,
            ),
            run=run,
        )
    )
    print(f"coarse model: {result}")
    print(f"what it looks like: {result.parent / 'views.png'}")
    print(f"curves and pictures: tensorboard --logdir {result.parent / 'tensorboard'}")
    return result
