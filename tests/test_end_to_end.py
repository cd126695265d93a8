# SPDX-License-Identifier: Apache-2.0
"""The program as users start it, in processes of its own: nothing is replaced for the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import train
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh
from tests.support.repository import ROOT
from tests.support.tiny_scene import SHORT_PIPELINE, run_cli


def run(program: str, folder: Path, *words: object) -> str:
    command = [sys.executable, str(ROOT / program), *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_photographs_to_a_textured_mesh_and_on_from_there(scene, checkpoint, tmp_path, monkeypatch):
    vanilla = ("-s", scene.root, "-m", tmp_path / "vanilla", "--eval", "--iterations", 30)
    run("gaussian_splatting/train.py", tmp_path, *vanilla)
    assert (tmp_path / "vanilla" / "point_cloud" / "iteration_30" / "point_cloud.ply").is_file()
    # Poisson in a process of its own, files on the disk, TensorBoard's own checksums.
    flags = ("-s", scene.root, "-c", checkpoint, *SHORT_PIPELINE)
    run("train.py", tmp_path, *flags)
    (obj,) = (tmp_path / "output" / "refined_mesh").rglob("*.obj")
    assert read_textured_mesh(obj).n_faces > 100
    final_results = tmp_path / "output" / scene.root.name
    names = {path.name for path in final_results.iterdir()}
    assert {"mesh.obj", "mesh.glb", "report.html", "index.html"} <= names
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("run.json")]
    assert {record["status"] for record in records} == {"finished"}
    # A finished run is not repeated.
    before = obj.stat().st_mtime_ns
    monkeypatch.chdir(tmp_path)
    assert run_cli(train.main, *flags) == 0
    assert obj.stat().st_mtime_ns == before
    run(
        "sugar_pipeline",
        tmp_path,
        "export",
        final_results / "splats.ply",
        "--to",
        "spz",
        "--output",
        "a.spz",
    )
    assert (tmp_path / "a.spz").stat().st_size > 1_000
