# SPDX-License-Identifier: Apache-2.0
"""The page of a pipeline."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.reporting.run_logger import RunLogger
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_pipeline.pipeline.conclusion import TITLE, _is_current
from sugar_pipeline.pipeline.pipeline_report import (
    ReportContent,
    compare_with_photographs,
    write_report,
)
from sugar_pipeline.pipeline.pipeline_result import StageRecord
from sugar_pipeline.quality.mesh_quality import MeshQuality
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import make_tiny_scene, tiny_cloud

QUALITY = MeshQuality(
    accuracy=0.00343,
    completeness=0.002,
    thresholds=(0.005, 0.01),
    precisions=(0.8, 0.9),
    recalls=(0.8, 0.9),
    normal_agreement=0.95,
    non_manifold_edge_share=0.0,
    open_edge_share=0.0123,
    components=4,
    triangles=38731,
    object_triangles=15802,
)


def coarse_run(root: Path) -> Path:
    folder = root / "coarse" / "run <1>"
    with closing(RunLogger(folder / "tensorboard")) as logger:
        for iteration in range(1, 6):
            logger.scalars(
                {
                    "Loss/loss": 1.0 / iteration,
                    "Test/PSNR": 25.0 + iteration,
                    "Gaussians/count": 23078.0,
                },
                iteration,
            )
    (folder / "run.json").write_text(
        json.dumps(
            {
                "status": "finished",
                "settings": {"regularization": "dn_consistency"},
                "timings": {"geometry": {"seconds": 62.0, "peak_bytes": 2**30}},
            }
        )
    )
    (folder / "15000.pt").write_bytes(bytes(4096))
    return folder


def stages_in(root: Path) -> list[StageRecord]:
    run = coarse_run(root)
    mesh = root / "mesh.ply"
    mesh.write_bytes(bytes(1024))
    return [
        StageRecord("coarse SuGaR", 62.0, 2**30, (run / "15000.pt",), run),
        StageRecord("mesh", 21.0, 2**29, (mesh,), figures={"faces": 38731, "backend": "<b>"}),
        StageRecord("texture", outputs=(root / "gone.obj",), status="skipped"),
    ]


def test_a_pipeline_report_has_it_all(tmp_path):
    rows = {
        "Coarse mesh": [np.full((6, 8, 3), k, dtype=np.uint8) for k in range(4)],
        "Textured mesh": [],
    }
    path = write_report(
        tmp_path / "report.html",
        "SuGaR of fox & co",
        stages_in(tmp_path),
        ReportContent(
            settings={"seed": 12345, "mesh": {"level": 0.3}},
            pictures=rows,
            quality={"mesh": QUALITY},
        ),
        notify=pytest.fail,
    )
    text = path.read_text(encoding="utf-8")
    for words in (
        "SuGaR of fox &amp; co",
        "1 min 23 s",
        "23,078 Gaussians",
        "38,731 triangles",
        "1.00 GiB",
        "skipped",
        "coarse/run%20%3C1%3E/15000.pt",
        "mesh.level",
        "12345",
        "0.343%",
        "Coarse mesh",
        "30.00 dB",
        "Last value of each curve",
        "&lt;b&gt;",
        "4.00 KiB",
        "Not there:",
    ):
        assert words in text, words
    assert text.count("<img ") == 4
    assert "Textured mesh" not in text
    assert "<b>" not in text


@pytest.mark.parametrize("eval_split", [True, False])
def test_photographs_stand_above_what_was_made_of_them(tmp_path, monkeypatch, eval_split):
    monkeypatch.setattr("sugar_pipeline.pipeline.pipeline_report.N_VIEWS", 2)
    root = make_tiny_scene(tmp_path / "scene").root
    scene = load_scene(root, size_rule=VanillaSize(), eval_split=eval_split, notify=print)
    ball = icosahedron()
    mesh = TexturedMesh(
        torch.tensor(ball.vertices).float(),
        torch.tensor(ball.faces),
        torch.rand(len(ball.faces), 3, 2),
        torch.full((8, 8, 3), 90).byte(),
    )
    with ImageStore() as images:
        found = compare_with_photographs(scene, images, tiny_cloud().activate(), mesh)
        nothing = compare_with_photographs(scene, images, None, None)
    assert found.title == ("Held-out views" if eval_split else "Training views")
    assert list(found.rows) == ["Photograph", "Refined Gaussians", "Textured mesh"]
    # The photographs are renders of these Gaussians, rounded to bytes.
    assert all(float(p.caption.split()[0]) > 50 for p in found.rows["Refined Gaussians"])
    assert all("that it covers" in p.caption for p in found.rows["Textured mesh"])
    share = int(re.search(r"covers (\d+)%", found.coverage)[1])
    assert 0 < share < 100
    page = write_report(
        tmp_path / "r.html", "t", [], ReportContent(comparison=found), notify=pytest.fail
    )
    assert page.read_text(encoding="utf-8").count("<img ") == 6
    assert list(nothing.rows) == ["Photograph"]


def test_the_viewer_of_the_results_stands_at_the_top(tmp_path):
    path = write_report(
        tmp_path / "report.html",
        "A run",
        stages_in(tmp_path),
        ReportContent(viewer=tmp_path / "a scan" / "index.html"),
        notify=pytest.fail,
    )
    text = path.read_text(encoding="utf-8")
    body = text[text.index("<body>") :]
    assert '<iframe src="a%20scan/index.html"' in body
    assert body.index("<iframe") < body.index("<table")
    assert body.index("<iframe") < body.index("<h2>")
    assert "<script" not in text


def test_several_meshes_stand_side_by_side(tmp_path):
    quality = {"coarse": QUALITY, "refined": QUALITY}
    path = write_report(
        tmp_path / "r.html", "t", [], ReportContent(quality=quality), notify=pytest.fail
    )
    header = re.search(r"(?s)<thead>.*?</thead>", path.read_text(encoding="utf-8"))[0]
    assert header.index("coarse") < header.index("refined")


def test_a_stage_that_was_not_run_has_no_time(tmp_path):
    stage = StageRecord("vanilla", 0.0, 0, status="finished before")
    path = write_report(tmp_path / "r.html", "t", [stage], ReportContent(), notify=pytest.fail)
    text = path.read_text(encoding="utf-8")
    assert "finished before" in text
    assert "0 B" not in text


def test_a_report_of_another_program_is_not_taken_for_ours(tmp_path):
    path = tmp_path / "report.html"
    path.write_bytes("<title>Größe".encode("cp1252"))
    assert not _is_current(path, [])
    path.write_text(f"<title>{TITLE}", encoding="utf-8")
    assert _is_current(path, [])


def test_a_pipeline_report_never_costs_a_result(tmp_path):
    said: list[str] = []
    stages = [StageRecord("coarse", 1.0, 1, (), tmp_path / "no such run")]
    content = ReportContent()
    assert write_report(tmp_path / "r.html", "t", stages, content, notify=said.append) is None
    assert "the results themselves are complete" in said[0]
    (tmp_path / "file").write_text("")
    assert write_report(tmp_path / "file" / "r.html", "t", [], content, notify=said.append) is None
    assert len(said) == 2
