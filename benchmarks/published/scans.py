# SPDX-License-Identifier: Apache-2.0
"""Training one scan of a data set after the other, scoring each, and one table in the end.

Training is ``train_full_pipeline.py`` by its own functions, so every mode and every flag works, and
a stage that is finished is not repeated. A score is kept beside its mesh and counts as long as mesh
and truth are the same files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.data.colmap import find_model, read_colmap
from gaussian_splatting.data.images import ImageFolder
from sugar_extractors.quality.mesh_report import read_any_mesh
from sugar_pipeline.pipeline_flags import full_parser
from sugar_pipeline.pipeline_run import run_stages
from sugar_pipeline.plan import full_plan
from sugar_scene.mesh.triangle_mesh import TriangleMesh
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest, read_json, write_json_atomic
from sugar_utils.flags import Parser

MESHES = ("coarse", "refined")
SCORE_FILE, RESULT_FILE = "score.json", "results.json"
DEFAULT_MODE = "multiview"


@dataclass(frozen=True)
class Case:
    """One scan of a data set.

    Attributes:
        name: As the table shows it.
        scene: Makes or finds the scene folder to train on.
        truth: File that the mesh is compared with.
        score: Figures of a mesh in the scene's world, given the camera centres there.
    """

    name: str
    scene: Callable[[], Path]
    truth: Path
    score: Callable[[TriangleMesh, dict[str, np.ndarray]], dict[str, float]]


@dataclass(frozen=True)
class Published:
    """A row of a published table.

    Attributes:
        method: Its name.
        values: By the names of cases; those that were not published are absent.
        mean: Over all cases, as published.
    """

    method: str
    values: Mapping[str, float]
    mean: float


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and those of the pipeline behind ``--``."""
    arguments = list(arguments)
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def add_common_flags(flags: Parser, output: str) -> None:
    """Flags of every data set."""
    add = flags.add_argument
    add("data", type=Path, metavar="DATA", help="folder of the data set")
    add("--truth", type=Path, help="folder of the true points; unset: in DATA")
    add("--mesh", choices=MESHES, default=MESHES[0], help="which mesh is scored")
    add("--output", type=Path, default=Path("output") / output, help="folder of all results")


def run_cases(
    cases: Sequence[Case],
    args: argparse.Namespace,
    flags: Sequence[str],
    key: str,
    digits: int,
    published: Sequence[Published],
    expected: Sequence[str],
) -> dict[str, dict[str, float]]:
    """Train and score every case, print the table.

    A case that fails is named in the end, after all others were done.

    Args:
        cases: What to do.
        args: The common flags.
        flags: Of ``train_full_pipeline.py``.
        key: The figure that the table compares.
        digits: Of its values.
        published: Rows to compare with.
        expected: Names of all cases of the data set: a mean of fewer is no mean.

    Returns:
        Figures by case.

    Raises:
        UserError: A case failed.
    """
    about = print_machine()
    results: dict[str, dict[str, float]] = {}
    failures = {}
    for case in cases:
        try:
            results[case.name] = _one(case, args.output / case.name, args.mesh, flags)
        except UserError as error:
            failures[case.name] = str(error)
            print(f"{case.name}: {error}", file=sys.stderr)
    record = {"about": about, "flags": list(flags), "mesh": args.mesh, "figures": results}
    write_json_atomic(args.output / RESULT_FILE, record)
    print_comparison(results, key, digits, published, expected)
    if failures:
        raise UserError(f"{len(failures)} of {len(cases)} failed: {', '.join(failures)}; see above")
    return results


def _one(case: Case, folder: Path, mesh_name: str, flags: Sequence[str]) -> dict[str, float]:
    """Figures of one case, trained or scored before or now."""
    scene = case.scene()
    path = trained_mesh(scene, folder, mesh_name, flags)
    identity = {"mesh": file_digest(path), "truth": file_digest(case.truth)}
    note = folder / f"{mesh_name}_{SCORE_FILE}"
    stored: Any = read_json(note) if note.is_file() else {}
    if isinstance(stored, dict) and stored.get("identity") == identity:
        return stored["figures"]
    figures = case.score(read_any_mesh(path), camera_centers(scene))
    write_json_atomic(note, {"identity": identity, "figures": figures})
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    print(f"{case.name}: {shown}")
    return figures


def trained_mesh(scene: Path, folder: Path, mesh_name: str, flags: Sequence[str]) -> Path:
    """The mesh of a scene, trained as far as that mesh needs."""
    stage = "mesh" if mesh_name == "coarse" else "refine"
    own = ["-s", str(scene), "--output_dir", str(folder), "--stop_after", stage]
    args = full_parser(None).parse_args(["-r", DEFAULT_MODE, *flags, *own])
    result = run_stages(full_plan(args))
    path = result.coarse_mesh if mesh_name == "coarse" else result.refined
    if path is None:
        raise UserError(f"{scene}: no {mesh_name} mesh was made; check the flags behind --")
    return path


def camera_centers(scene: Path) -> dict[str, np.ndarray]:
    """Where the photographs of a COLMAP scene were taken, by their file names."""
    model = find_model(scene)
    if model is None:
        raise UserError(f"{scene}: has no COLMAP model, so nobody knows where its world is")
    cameras = read_colmap(
        model, ImageFolder(scene / "images"), missing_ok=True, notify=lambda _: None
    ).cameras
    return {Path(camera.name).name: camera.center for camera in cameras}


def print_comparison(
    results: Mapping[str, Mapping[str, float]],
    key: str,
    digits: int,
    published: Sequence[Published],
    expected: Sequence[str],
) -> None:
    """Our row first, then the published ones."""
    values = {name: figures[key] for name, figures in results.items()}
    whole = set(values) >= set(expected)
    mean = float(np.mean([values[name] for name in expected])) if whole else None
    rows = [_row("this program", values, mean, digits, expected)]
    rows += [_row(row.method, row.values, row.mean, digits, expected) for row in published]
    print()
    print_table(["", *expected, "mean"], rows)
    if not whole:
        print(f"\n{len(values)} of {len(expected)} scored; no mean of fewer than all")


def _row(
    method: str,
    values: Mapping[str, float],
    mean: float | None,
    digits: int,
    expected: Sequence[str],
) -> list[str]:
    cells = [values.get(name) for name in expected]
    return [method, *("" if v is None else f"{v:.{digits}f}" for v in (*cells, mean))]
