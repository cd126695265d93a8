# SPDX-License-Identifier: Apache-2.0
"""Runs of few iterations through an entry point, and their command lines."""

from __future__ import annotations

from pathlib import Path

import train
from gaussian_splatting import train as vanilla_train
from tests.support.command_line import WITHOUT_VALUE, as_flags
from tests.support.tiny_scene import TinyScene, run_cli


def vanilla_flags(scene: Path, **settings: object) -> tuple[object, ...]:
    """Flags of 24 vanilla iterations: densification at multiples of 4, opacities lowered at 9.

    Args:
        scene: Scene folder.
        settings: Further flags, and other values of these.
    """
    brief: dict[str, object] = {
        "eval": WITHOUT_VALUE,
        "iterations": 24,
        "densify_from_iter": 2,
        "densification_interval": 4,
        "densify_until_iter": 20,
        "opacity_reset_interval": 9,
    }
    return as_flags(s=scene, **brief | settings)


def coarse_flags(scene: Path, checkpoint: Path, **settings: object) -> tuple[object, ...]:
    """Flags of four iterations of the coarse stage; see :func:`vanilla_flags`."""
    brief: dict[str, object] = {
        "r": "dn_consistency",
        "stop_after": "coarse",
        "schedule_scale": 0.0005,
        "sdf_samples": 100,
    }
    return as_flags(s=scene, c=checkpoint, **brief | settings)


def brief_vanilla(scene: TinyScene, output: Path, *words: object, **settings: object) -> int:
    """Train the vanilla stage, with further words and settings, and return the exit code."""
    return run_cli(vanilla_train.main, *vanilla_flags(scene.root, m=output, **settings), *words)


def brief_coarse(
    scene: TinyScene, checkpoint: Path, output: Path, *words: object, **settings: object
) -> int:
    """Train the coarse stage, with further words and settings, and return the exit code."""
    flags = coarse_flags(scene.root, checkpoint, output_dir=output, **settings)
    return run_cli(train.main, *flags, *words)
