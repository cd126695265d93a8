# SPDX-License-Identifier: Apache-2.0
"""What a smaller image costs: ``python benchmarks/compare_resolutions.py -s SCENE -c CHECKPOINT``.

Runs ``train.py`` once per ``--resolution_factor``, each in a process and a folder of its own, and
puts side by side: seconds and peak memory of every stage, held-out PSNR of the refined model at
the size that it trained on, triangles, open edges, and, where the scene knows its own geometry,
distances to it. Flags after ``--`` go to ``train.py`` as they are. A finished run is not
repeated, so the table can be printed again at any time.

The picture shows the refined mesh of each run, a row each, from four views.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np
from PIL import Image

from benchmarks.rasterizer import describe_machine, print_table
from gaussian_splatting.engine.reporting.run_report import last_value, read_curves
from sugar_extractors.quality.any_mesh import read_any_mesh
from sugar_extractors.quality.mesh_pictures import pick_views, shaded_views
from sugar_extractors.quality.mesh_quality import OBJECT_FILE, compare_surfaces, read_reference
from sugar_pipeline.pipeline_flags import train_parser
from sugar_pipeline.plan import PipelinePlan, train_plan
from sugar_scene.mesh.triangle_mesh import open_edge_share
from sugar_trainers.capture import load_capture
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, read_json, write_json_atomic
from sugar_utils.flags import Parser, integer, positive_float
from sugar_utils.frame import run_main
from sugar_utils.memory import format_bytes

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
FACTORS = (1.0, 1.6, 2.4, 3.0)
WIDTH = 480


@dataclass(frozen=True)
class Run:
    """One finished pipeline.

    Attributes:
        factor: Divisor of the image size.
        plan: Its settings, which tell where its files are.
        figures: Name and value of what is compared.
    """

    factor: float
    plan: PipelinePlan
    figures: dict[str, Any]


def run_pipeline(args: argparse.Namespace, factor: float) -> Run:
    """Run ``train.py`` at one size and collect its figures.

    Raises:
        UserError: It failed.
    """
    output = args.output / f"factor_{factor:g}"
    words = [
        "-s", str(args.scene), "-c", str(args.checkpoint), "-i", str(args.iteration),
        "--resolution_factor", str(factor), "--output_dir", str(output), *args.rest,
    ]  # fmt: skip
    done = subprocess.run([sys.executable, str(TRAIN), *words], check=False)
    if done.returncode != 0:
        raise UserError(f"train.py {' '.join(words)} ended with code {done.returncode}")
    plan = train_plan(train_parser(None).parse_args(words))
    if plan.refine is None:
        raise UserError("--stop_after ends before the refinement; leave it out")
    return Run(factor, plan, figures_of(plan))


def figures_of(plan: PipelinePlan) -> dict[str, Any]:
    """What the files of a pipeline tell."""
    figures: dict[str, Any] = {}
    for name, folder in (("coarse", plan.coarse.directory), ("refine", plan.refine.directory)):
        phases = read_json(folder / "run.json")["timings"].values()
        figures[f"{name} seconds"] = round(sum(phase["seconds"] for phase in phases), 1)
        figures[f"{name} peak bytes"] = max(phase["peak_bytes"] for phase in phases)
    for name, path in (
        ("mesh", plan.mesh.mesh_paths[0]),
        ("texture", plan.texture.obj_path if plan.texture else None),
    ):
        if path is not None:
            result = read_json(path.with_suffix(".json"))["result"]
            figures[f"{name} seconds"] = round(result["seconds"], 1)
            figures[f"{name} peak bytes"] = result["peak_bytes"]
    curves = read_curves(plan.refine.directory / "tensorboard")
    figures["held-out PSNR (dB)"] = last_value(curves, "Test/PSNR")
    mesh = read_any_mesh(plan.refine.result)
    figures["triangles"] = mesh.n_faces
    figures["open edges"] = open_edge_share(mesh)
    if (plan.coarse.scene_path / OBJECT_FILE).is_file():
        quality = compare_surfaces(mesh, read_reference(plan.coarse.scene_path))
        figures.update({name: value for name, value in quality.rows() if name != "triangles"})
    return figures


def print_runs(runs: list[Run]) -> None:
    """One column per factor."""
    names = list(dict.fromkeys(name for run in runs for name in run.figures))
    rows = [[name, *(shown(name, run.figures.get(name)) for run in runs)] for name in names]
    print_table(["resolution factor", *(f"{run.factor:g}" for run in runs)], rows)


def shown(name: str, value: Any) -> str:
    """A figure for people."""
    if value is None:
        return ""
    if name.endswith("bytes"):
        return format_bytes(value)
    if name == "open edges" and isinstance(value, float):
        return f"{value:.2%}"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(
        value, int
    ) else str(value)  # fmt: skip


def write_picture(path: Path, runs: list[Run]) -> None:
    """Four views of each refined mesh, a row per factor; the same cameras for all."""
    first = runs[0].plan.coarse
    _, scene = load_capture(first, first.config.white_background, first.config.random_seed, print)
    views = pick_views(scene.train_cameras)
    rows = [
        np.concatenate(shaded_views(read_any_mesh(run.plan.refine.result), views, WIDTH), axis=1)
        for run in runs
    ]
    with atomic_path(path) as temporary:
        Image.fromarray(np.concatenate(rows)).save(temporary, format="PNG")


def compare(args: argparse.Namespace) -> None:
    """Run all sizes, print the table, write the picture and the JSON file."""
    about = describe_machine()
    runs = [run_pipeline(args, factor) for factor in args.factors]
    for name, value in about.items():
        print(f"{name}: {value}")
    print(f"scene: {args.scene}; train.py {' '.join(args.rest)}\n")
    print_runs(runs)
    picture = args.output / "compare_resolutions.png"
    write_picture(picture, runs)
    record = {"about": about, "flags": args.rest, "runs": {r.factor: r.figures for r in runs}}
    write_json_atomic(args.output / "compare_resolutions.json", record)
    print(f"\nwritten: {picture}")


def parser() -> Parser:
    """The flags."""
    flags = Parser(
        description="Compare image sizes. Flags after -- go to train.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = flags.add_argument
    add("-s", "--scene", type=Path, required=True, help="scene folder")
    add("-c", "--checkpoint", type=Path, required=True, help="vanilla checkpoint folder")
    add("-i", "--iteration", type=integer, default=7_000, help="its iteration")
    add("--factors", type=positive_float, nargs="+", default=list(FACTORS), help="divisors")
    add("--output", type=Path, default=Path("output/resolutions"), help="folder of all runs")
    return flags


def main() -> None:
    """Parse the flags before and after ``--``."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:cut])
    args.rest = words[cut + 1 :]
    compare(args)


if __name__ == "__main__":
    sys.exit(run_main(main))
