# SPDX-License-Identifier: Apache-2.0
"""Runs of few iterations through an entry point."""

from __future__ import annotations

from pathlib import Path

import train
from tests.support.tiny_scene import TinyScene, run_cli


def brief_coarse(scene: TinyScene, checkpoint: Path, output: Path, *words: object) -> int:
    """Train four iterations of the coarse stage, and return the exit code."""
    return run_cli(
        train.main,
        *words,
        s=scene.root,
        c=checkpoint,
        r="dn_consistency",
        stop_after="coarse",
        output_dir=output,
        schedule_scale=0.0005,
        sdf_samples=100,
    )
