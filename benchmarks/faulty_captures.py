# SPDX-License-Identifier: Apache-2.0
"""Pipelines on captures with a fault: ``python benchmarks/faulty_captures.py SCENE --out DIR``.

For every fault of ``tests/support/faulty_captures.py`` the whole pipeline runs on a copy of the
scene with that fault, and on the clean scene. All models are measured on the held-out views of the
clean scene without the faulty ones: PSNR of the vanilla and of the refined Gaussians (of the masked
pixels where there are masks), and the Chamfer distance of the coarse mesh where the geometry is
known. Shown beside them are the views that the program named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np

from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.engine.reporting.evaluation import EvaluationResult, score_views
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.rasterization import render_view
from gaussian_splatting.scenes.scene import Scene, load_scene
from sugar_extractors.any_mesh import read_any_mesh
from sugar_pipeline.quality.mesh_quality import OBJECT_FILE, compare_surfaces, read_reference
from sugar_trainers.capture import SugarSize
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.flags import Parser, integer, name_list, positive_float
from tests.support.faulty_captures import OF_MASKS, copy_scene, faults, view_names

REPOSITORY = Path(__file__).resolve().parent.parent
CLEAN, THREE = "none", "three at once"
SHORT = [
    *("-v", "20000", "-g", "1", "--refinement_iterations", "2000", "--square_size", "8"),
    *("--sdf_samples", "20000", "--test_iterations", "15000", "--eval", "True"),
]
_STEP = 0.618034
Row = dict[str, Any]


def add_fault(scene: Path, name: str, target: Path, foreign: Path, seed: int) -> set[str]:
    """Copy a scene with a fault; returns the names of the faulty views."""
    copy_scene(scene, target)
    every, rng = view_names(target), np.random.default_rng(seed)
    # Views that are trained on, spread over the capture.
    trained = [view for index, view in enumerate(every) if index % 8]
    chosen = [trained[int((seed + 1 + k) * _STEP * len(trained)) % len(trained)] for k in range(3)]
    known = faults(foreign)
    if name == CLEAN:
        return set()
    if name != THREE:
        return known[name](target, chosen[:1], rng)
    parts = ["pose turned by 20 degrees", "image of another place", "image overexposed by 2 stops"]
    if (target / "masks").is_dir():
        parts[2] = "mask inverted"
    faulty = [known[part](target, [view], rng) for part, view in zip(parts, chosen, strict=True)]
    return set().union(*faulty)


def named_views(lines: list[str], every: list[str]) -> set[str]:
    """Views that messages call wrong."""
    told = [line for line in lines if "left out" in line or "estimated the poses" in line]
    return {name for name in every if any(name in line for line in told)}


def train(scene: Path, out: Path, args: argparse.Namespace) -> tuple[int, list[str]]:
    """Run the pipeline; returns its exit code and output."""
    command = [
        sys.executable,
        "train_full_pipeline.py",
        "-s",
        str(scene),
        "-r",
        args.mode,
        "--schedule_scale",
        str(args.schedule_scale),
        "--resolution_factor",
        str(args.resolution_factor),
        "--output_dir",
        str(out),
        *SHORT,
        *args.flags,
    ]
    return run_logged(command, out.parent.with_suffix(".log"))


def run_logged(command: list[str], log: Path) -> tuple[int, list[str]]:
    """Run a program of the repository; returns its exit code and output, which a log keeps."""
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    log.write_text("\n".join(lines), encoding="utf-8")
    return done.returncode, lines


def score_in(views: list[Camera], cloud: Gaussians, fitted: bool) -> EvaluationResult:
    """Figures of Gaussians in some views."""
    with ImageStore() as images:
        return score_views(
            lambda view: render_view(cloud, view, white=False, geometry=False).image,
            views,
            images.shown,
            fitted=fitted,
        )


def measure(out: Path, clean: Scene, root: Path, faulty: set[str]) -> Row:
    """Figures of what a pipeline made, on the views of the clean scene."""
    views = [camera for camera in clean.test_cameras if camera.name not in faulty]
    row: Row = {}
    models = {
        "vanilla": sorted(out.glob("vanilla_gs/*/point_cloud/*/point_cloud.ply")),
        "refined": sorted(out.glob("refined_ply/*/*.ply")),
    }
    for name, paths in models.items():
        if paths:
            cloud = read_gaussian_ply(paths[-1], lambda line: None).activate()
            found = score_in(views, cloud, fitted=False)
            row[name] = found.counted.get("psnr", found.psnr)
    meshes = sorted(out.glob("coarse_mesh/*/*.ply"))
    if meshes and (root / OBJECT_FILE).is_file():
        try:
            quality = compare_surfaces(read_any_mesh(meshes[-1]), read_reference(root))
            row["chamfer"] = quality.chamfer
        except UserError as error:
            row |= {"chamfer": float("nan"), "error": str(error)}
    return row


def run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    clean = load_scene(
        args.scene,
        size_rule=SugarSize(resolution_factor=args.resolution_factor),
        masks=MaskOptions(),
        view_options=ViewOptions(),
        notify=lambda line: None,
    )
    masked = (args.scene / "masks").is_dir()
    names = [n for n in faults(args.foreign) if masked or not n.startswith(OF_MASKS)]
    every, rows = view_names(args.scene), {}
    right = wrong = missed = 0
    for name in args.faults or [CLEAN, *names, THREE]:
        capture = args.out / f"{name.replace(' ', '_').replace('%', 'percent')}"
        shutil.rmtree(capture, ignore_errors=True)
        faulty = add_fault(args.scene, name, capture, args.foreign, args.seed)
        start = time.monotonic()
        code, lines = train(capture, capture / "output", args)
        row = {"exit": code, **measure(capture / "output", clean, args.scene, faulty)}
        named = named_views(lines, every)
        right, wrong = right + len(named & faulty), wrong + len(named - faulty)
        missed += len(faulty - named)
        row["seconds"] = time.monotonic() - start
        rows[name] = row | {"faulty": sorted(faulty), "named": sorted(named)}
        print(name, rows[name], flush=True)
        (args.out / "rows.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        shutil.rmtree(capture, ignore_errors=True)
    print_machine()
    columns = ("vanilla", "refined", "chamfer", "exit", "seconds")
    cells = [[n, *(_text(r.get(c), c) for c in columns), _verdict(r)] for n, r in rows.items()]
    print_table(["fault", *columns, "named"], cells)
    print(f"views named: {right} right, {wrong} wrong, {missed} missed")


def _text(value: float | None, column: str) -> str:
    if value is None:
        return ""
    forms = {"exit": "{:d}", "seconds": "{:.0f}", "chamfer": "{:.3%}"}
    return forms.get(column, "{:.2f}").format(value)


def _verdict(row: Row) -> str:
    missed, wrong = set(row["faulty"]) - set(row["named"]), set(row["named"]) - set(row["faulty"])
    if not missed and not wrong:
        return "all" if row["faulty"] else "none"
    return f"missed {sorted(missed)}, wrong {sorted(wrong)}"


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--foreign", type=Path, required=True, help="image of another place")
    parser.add_argument("--faults", type=name_list, default=(), help="separated by commas")
    parser.add_argument("--mode", default="dn_consistency")
    parser.add_argument("--schedule_scale", type=positive_float, default=0.05)
    parser.add_argument("--resolution_factor", type=positive_float, default=0.5)
    parser.add_argument("--seed", type=integer, default=0)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of the pipeline")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
