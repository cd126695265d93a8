# SPDX-License-Identifier: Apache-2.0
"""The DTU table: ``python benchmarks/dtu.py DATA [--scans 24 37] [-- FLAGS]``.

Trains every scan with ``train_full_pipeline.py FLAGS`` (``-r multiview`` unless given), scores it
by DTU's protocol, and prints the distances in millimetres beside published ones. A second call goes
on where the first one stopped. Which files are expected stands at the top of
``benchmarks/published/dtu_data.py``, how they score at that of ``dtu_score.py``.

Papers train on half the size (``-- --resolution_factor 2``) and leave out of the mesh what lies
outside of the masks; so does this.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np
import torch

from benchmarks.published.dtu_data import (
    SCANS,
    Scan,
    find_scans,
    find_truth,
    points_file,
    prepared_scene,
    read_truth,
    to_millimetres,
)
from benchmarks.published.dtu_score import score_mesh
from benchmarks.published.scans import (
    Case,
    Published,
    add_common_flags,
    run_cases,
    split_command,
)
from gaussian_splatting.data.masks import MaskOptions, hull_of
from gaussian_splatting.data.scene import load_scene
from sugar_scene.mesh.triangle_mesh import TriangleMesh, without_unused_vertices
from sugar_trainers.capture import SugarSize
from sugar_utils.flags import Parser, positive_int
from sugar_utils.frame import run_main

_SUGAR = (1.47, 1.33, 1.13, 0.61, 2.25, 1.71, 1.15, 1.63, 1.62, 1.07, 0.79, 2.45, 0.98, 0.88, 0.79)
PUBLISHED = (
    Published("SuGaR", {f"scan{n}": v for n, v in zip(SCANS, _SUGAR, strict=True)}, 1.33),
    Published("3DGS", {}, 1.96),
    Published("2DGS", {}, 0.80),
    Published("GOF", {}, 0.74),
    Published("RaDe-GS", {}, 0.68),
    Published("CoMe", {}, 0.65),
    Published("PGSR", {}, 0.52),
    Published("GGGS", {}, 0.47),
)
"""As the papers of 2DGS, PGSR and GGGS tell; gaps below 0.05 mm are noise."""


def inside_masks(mesh: TriangleMesh, scene: Path) -> TriangleMesh:
    """The mesh without what lies outside of a photograph's mask; whole where there are none."""
    loaded = load_scene(
        scene, size_rule=SugarSize(), eval_split=False, masks=MaskOptions(), notify=lambda _: None
    )
    hull = hull_of(loaded.train_cameras)
    if hull is None:
        return mesh
    inside = hull.contains(torch.from_numpy(mesh.vertices)).numpy()
    faces = mesh.faces[inside[mesh.faces].any(axis=1)]
    return without_unused_vertices(TriangleMesh(mesh.vertices, faces, mesh.colors))


def case_of(scan: Scan, truth: Path, output: Path) -> Case:
    """What to do with one scan."""
    name = f"scan{scan.number}"

    def scene() -> Path:
        return prepared_scene(scan, output / name / "scene" / name, print)

    def score(mesh: TriangleMesh, centers: dict[str, np.ndarray]) -> dict[str, float]:
        mesh = inside_masks(mesh, scene())
        moved = to_millimetres(scan, centers).apply(mesh.vertices)
        found = score_mesh(
            TriangleMesh(moved, mesh.faces, mesh.colors), read_truth(truth, scan.number)
        )
        return {
            "overall": found.overall,
            "accuracy": found.accuracy,
            "completeness": found.completeness,
        }

    return Case(name, scene, points_file(truth, scan.number), score)


def run(args: argparse.Namespace, flags: list[str]) -> dict[str, dict[str, float]]:
    """All scans, one table."""
    scans = find_scans(args.data, args.scans)
    truth = find_truth(args.truth or args.data)
    for scan in scans:
        # A missing file must not cost the hours before it is missed.
        read_truth(truth, scan.number)
    return run_cases(
        [case_of(scan, truth, args.output) for scan in scans],
        args,
        flags,
        "overall",
        2,
        PUBLISHED,
        [f"scan{number}" for number in SCANS],
    )


def parser() -> Parser:
    """The flags."""
    flags = Parser(
        description="Train and score scans of DTU. What stands behind -- goes to the pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_common_flags(flags, "dtu")
    flags.add_argument("--scans", type=positive_int, nargs="+", default=SCANS, help="which")
    return flags


def main() -> None:
    """Parse and run."""
    own, flags = split_command(sys.argv[1:])
    run(parser().parse_args(own), flags)


if __name__ == "__main__":
    sys.exit(run_main(main))
