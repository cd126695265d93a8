# SPDX-License-Identifier: Apache-2.0
"""Whole runs beside other programs: ``python benchmarks/whole_runs.py SCENE --out DIR``.

From known cameras to a textured mesh, in turns on the same capture: this program's multi-view mode,
and where their binaries are given, OpenMVS (``--openmvs``, a folder) and OpenSplat
(``--opensplat``, Gaussians alone). Seconds of CPU are those of all processes of a run; its memory
is that of the largest, at least that of this script. Meshes are compared with the known surface,
where the scene has one. Nothing is held out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from benchmarks.rasterizer import print_machine, print_table
from sugar_extractors.any_mesh import read_any_mesh
from sugar_pipeline.quality.mesh_quality import OBJECT_FILE, compare_surfaces, read_reference
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.flags import Parser, positive_int

REPOSITORY = Path(__file__).resolve().parent.parent
Steps = list[list[str]]


def this_program(scene: Path, folder: Path, flags: list[str]) -> Steps:
    command = [sys.executable, str(REPOSITORY / "train_full_pipeline.py"), "-s", str(scene)]
    given = ["-r", "multiview", "--eval", "False", "--output_dir", str(folder)]
    return [[*command, *given, *flags]]


def openmvs(scene: Path, folder: Path, binaries: Path) -> Steps:
    """Default settings, in the order of its documentation; names of files are its own."""
    (folder / "sparse").mkdir(parents=True)
    for path in sorted((scene / "sparse" / "0").iterdir()):
        shutil.copy(path, folder / "sparse")
    (folder / "images").symlink_to((scene / "images").resolve())
    work = ["--working-folder", str(folder)]
    refined = ["--mesh-file", "refined.ply"]
    steps = [
        ["InterfaceCOLMAP", "-i", str(folder), "-o", "scene.mvs", "--image-folder", "images"],
        ["DensifyPointCloud", "scene.mvs"],
        ["ReconstructMesh", "scene_dense.mvs", "-o", "mesh.ply"],
        ["RefineMesh", "scene.mvs", "--mesh-file", "mesh.ply", "-o", "refined.ply"],
        ["TextureMesh", "scene.mvs", *refined, "-o", "textured.obj", "--export-type", "obj"],
    ]
    return [[str(binaries / name), *arguments, *work] for name, *arguments in steps]


def opensplat(scene: Path, folder: Path, binary: Path) -> Steps:
    folder.mkdir(parents=True)
    return [[str(binary), str(scene), "-o", str(folder / "gaussians.ply"), "--cpu"]]


def measured(steps: Steps, log: Path) -> tuple[float, float, float]:
    """Run commands one after the other: seconds of CPU and of wall, GiB of the largest process."""
    cpu, largest, start = 0.0, 0, time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        for command in steps:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
            if code := os.waitstatus_to_exitcode(status):
                raise UserError(f"{Path(command[0]).name} ended with {code}; see {log}")
            cpu, largest = cpu + usage.ru_utime + usage.ru_stime, max(largest, usage.ru_maxrss)
    return cpu, time.perf_counter() - start, largest / 2**20


def distances(scene: Path, folder: Path) -> list[str]:
    """Chamfer distance and F-score at 0.5 % of the newest mesh, where the surface is known."""
    if not (scene / OBJECT_FILE).is_file():
        return ["", ""]
    meshes = [*folder.rglob("*.obj")] or [*folder.rglob("refined.ply")]
    if not meshes:
        return ["", ""]
    mesh = read_any_mesh(max(meshes, key=lambda path: path.stat().st_mtime))
    rows = dict(compare_surfaces(mesh, read_reference(scene)).rows())
    return [rows["Chamfer distance"], rows["F-score at 0.5%"]]


def main() -> None:
    flags = Parser(description="Time photographs with cameras to a textured mesh.")
    flags.add_argument("scene", type=Path, help="scene folder with images/ and sparse/0/")
    flags.add_argument("--out", type=Path, required=True, help="new folder for all results")
    flags.add_argument("--openmvs", type=Path, help="folder of the binaries of OpenMVS")
    flags.add_argument("--opensplat", type=Path, help="binary of OpenSplat")
    flags.add_argument("--turns", type=positive_int, default=1, help="runs of each program")
    flags.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of this program")
    args = flags.parse_args()
    programs: dict[str, Callable[[Path], Steps]] = {
        "this program": lambda folder: this_program(args.scene, folder, args.flags)
    }
    if args.openmvs is not None:
        programs["OpenMVS"] = lambda folder: openmvs(args.scene, folder, args.openmvs)
    if args.opensplat is not None:
        programs["OpenSplat"] = lambda folder: opensplat(args.scene, folder, args.opensplat)
    args.out.mkdir(parents=True)
    rows = []
    for turn in range(args.turns):
        for name, steps in programs.items():
            folder = args.out / f"{name.replace(' ', '_')}_{turn}"
            cpu, wall, memory = measured(steps(folder), folder.with_suffix(".log"))
            figures = [f"{cpu:.0f} s", f"{wall:.0f} s", f"{memory:.2f} GiB"]
            rows.append([name, *figures, *distances(args.scene, folder)])
    print_machine()
    print_table(["program", "CPU", "wall", "resident set", "Chamfer distance", "F-score"], rows)


if __name__ == "__main__":
    sys.exit(run_main(main))
