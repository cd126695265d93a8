# SPDX-License-Identifier: Apache-2.0
"""The Tanks and Temples table: ``python benchmarks/tanks_and_temples.py DATA [-- FLAGS]``.

Trains every scene with ``train_full_pipeline.py FLAGS`` (``-r multiview`` unless given), scores it
by the benchmark's protocol, and prints F1 beside published ones. Scenes without cameras get some
first. A second call goes on where the first one stopped. Which files are expected stands at the top
of ``benchmarks/published/tanks_data.py``, how they score at that of ``tanks_score.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np

from benchmarks.published.scans import (
    Case,
    Published,
    add_common_flags,
    run_cases,
    split_command,
)
from benchmarks.published.tanks_data import (
    THRESHOLDS,
    TanksScene,
    find_scenes,
    read_true_points,
    read_volume,
    to_scanner,
)
from benchmarks.published.tanks_score import score_mesh
from sugar_scene.mesh.triangle_mesh import TriangleMesh
from sugar_utils.flags import Parser
from sugar_utils.frame import run_main

SCENES = tuple(THRESHOLDS)


def _published(method: str, values: tuple[float, ...], mean: float) -> Published:
    return Published(method, dict(zip(SCENES, values, strict=True)), mean)


PUBLISHED = (
    _published("SuGaR", (0.14, 0.16, 0.08, 0.33, 0.15, 0.26), 0.19),
    _published("3DGS", (0.13, 0.08, 0.09, 0.04, 0.01, 0.19), 0.09),
    _published("2DGS", (0.41, 0.23, 0.16, 0.51, 0.17, 0.45), 0.32),
    _published("GOF", (0.51, 0.41, 0.28, 0.68, 0.28, 0.58), 0.46),
    _published("PGSR", (0.66, 0.41, 0.21, 0.80, 0.29, 0.60), 0.50),
    _published("Neuralangelo", (0.70, 0.36, 0.28, 0.89, 0.32, 0.48), 0.50),
    Published("CoMe", {}, 0.52),
    Published("GGGS", {}, 0.60),
)
"""As the papers of 2DGS, PGSR and GGGS tell."""


def case_of(scene: TanksScene) -> Case:
    """What to do with one scene."""

    def score(mesh: TriangleMesh, centers: dict[str, np.ndarray]) -> dict[str, float]:
        moved = to_scanner(scene, centers).apply(mesh.vertices)
        found = score_mesh(
            TriangleMesh(moved, mesh.faces, mesh.colors),
            read_true_points(scene),
            read_volume(scene),
            scene.threshold,
        )
        return {"f1": found.f1, "precision": found.precision, "recall": found.recall}

    return Case(scene.name, lambda: scene.root, scene.file(".ply"), score)


def run(args: argparse.Namespace, flags: list[str]) -> dict[str, dict[str, float]]:
    """All scenes, one table."""
    scenes = find_scenes(args.data, args.truth, args.scenes)
    for scene in scenes:
        # A damaged file must not cost the hours before it is read.
        read_volume(scene)
    return run_cases([case_of(scene) for scene in scenes], args, flags, "f1", 2, PUBLISHED, SCENES)


def parser() -> Parser:
    """The flags."""
    flags = Parser(
        description="Train and score scenes of Tanks and Temples. What stands behind -- goes to "
        "the pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_common_flags(flags, "tanks_and_temples")
    flags.add_argument("--scenes", nargs="+", choices=SCENES, default=SCENES, help="which")
    return flags


def main() -> None:
    """Parse and run."""
    own, flags = split_command(sys.argv[1:])
    run(parser().parse_args(own), flags)


if __name__ == "__main__":
    sys.exit(run_main(main))
