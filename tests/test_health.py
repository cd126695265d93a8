# SPDX-License-Identifier: Apache-2.0
"""A run whose result is a failure says so, and pipelines stop after it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import gaussian_splatting.train as vanilla
import train
from gaussian_splatting.data import masks
from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.engine.reporting.evaluation import constant_psnr
from gaussian_splatting.engine.reporting.health import problem_of
from sugar_pipeline.quality.grading import mesh_health
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_scene.triangle_mesh import TriangleMesh
from tests.support.faulty_captures import copy_scene, faults
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import (
    SHORT_PIPELINE,
    make_tiny_checkpoint,
    make_tiny_scene,
    run_cli,
    tiny_cameras,
)
from tests.support.tracks import make_observed_scene

GOOD = {"psnr": 28.0, "constant_psnr": 14.0, "mask_iou": 0.95, "gap": 2.0, "covered_share": 0.4}


def test_a_good_result_has_no_problem():
    assert problem_of(GOOD) is None
    assert problem_of({}) is None


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"psnr": 8.6}, "worse than one constant colour"),
        ({"mask_iou": 0.16}, "fills 16% of the masks"),
        ({"gap": 15.0}, "15.0 dB better than held-out ones"),
        ({"covered_share": 0.001}, "covers 0.1% of the images"),
    ],
)
def test_each_limit_names_problem_and_remedy_in_one_line(figures, words):
    line = problem_of({**GOOD, **figures})
    assert words in line
    assert "--" in line or "python" in line
    assert "\n" not in line


def test_constant_psnr_is_that_of_the_mean_colour():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    counted = torch.zeros(5, 7, dtype=torch.bool)
    counted[1:4, 2:6] = True
    inside = image[1:4, 2:6].reshape(-1, 3) / 255
    expected = -10 * np.log10(((inside - inside.mean(axis=0)) ** 2).mean())
    assert constant_psnr(torch.from_numpy(image), counted) == pytest.approx(expected)
    assert constant_psnr(torch.full((2, 2, 3), 7, dtype=torch.uint8)) == 100.0


def scaled_mesh(size: float) -> TriangleMesh:
    mesh = icosahedron()
    return replace(mesh, vertices=mesh.vertices * size)


def test_coverage_of_a_mesh_is_compared_with_the_masks():
    from sugar_scene.triangle_rasterizer import rasterize_triangles

    mesh = scaled_mesh(1.0)
    vertices, faces = torch.tensor(mesh.vertices).float(), torch.tensor(mesh.faces)
    cameras = tiny_cameras(4)
    masked = [replace(c, mask=ViewMask(None, "object")) for c in cameras]

    def image_of(camera):
        inside = rasterize_triangles(vertices, faces, camera).covered
        colors = torch.full((*inside.shape, 3), 200, dtype=torch.uint8)
        return torch.cat([colors, inside[..., None].to(torch.uint8) * 255], dim=-1)

    assert mesh_health(mesh, masked, image_of)["mask_iou"] == 1.0
    assert mesh_health(scaled_mesh(0.4), masked, image_of)["mask_iou"] < 0.3
    bare = mesh_health(mesh, cameras, lambda c: image_of(c)[..., :3])
    assert 0.05 < bare["covered_share"] < 0.9
    assert mesh_health(scaled_mesh(0.01), cameras, image_of)["covered_share"] < 0.01


def test_colours_of_a_textured_mesh_are_compared_where_it_covers():
    mesh = scaled_mesh(1.0)
    faces = torch.tensor(mesh.faces).long()
    uvs = torch.full((len(faces), 3, 2), 0.5)
    texture = torch.full((4, 4, 3), 120, dtype=torch.uint8)
    textured = TexturedMesh(torch.tensor(mesh.vertices).float(), faces, uvs, texture)
    rng = np.random.default_rng(0)

    def image_of(camera):
        noise = rng.integers(100, 141, (camera.height, camera.width, 3), dtype=np.uint8)
        return torch.from_numpy(noise)

    found = mesh_health(textured, tiny_cameras(2), image_of)
    assert found["psnr"] == pytest.approx(found["constant_psnr"], abs=0.3)


@pytest.fixture(scope="module")
def ruined(tmp_path_factory):
    """A tiny scene and checkpoint whose images are swapped around, so that nothing fits."""
    root = tmp_path_factory.mktemp("ruined")
    scene = make_tiny_scene(root / "scene")
    rng = np.random.default_rng(0)
    for camera in scene.cameras:
        noise = rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((camera.width, camera.height))
        image.save(camera.image_path)
    return scene, make_tiny_checkpoint(root / "vanilla", scene)


def coarse(ruined, output, *flags) -> int:
    scene, checkpoint = ruined
    short = [word for word in SHORT_PIPELINE if word not in ("--force", True)]
    return run_cli(
        train.main, "-s", scene.root, "-c", checkpoint, *short, "--output_dir", output, *flags
    )


@pytest.mark.slow
def test_a_pipeline_stops_after_a_failed_stage_and_goes_on_when_told_to(ruined, tmp_path, capsys):
    assert coarse(ruined, tmp_path) == 5
    said = capsys.readouterr()
    assert "failed: coarse SuGaR, dn_consistency: renders are worse than" in said.err
    assert "--force True goes on" in said.err
    assert not list(tmp_path.rglob("*.ply"))
    (record,) = tmp_path.rglob("run.json")
    assert problem_of(json.loads(record.read_text())["health"]) is not None
    report = record.with_name("report.html").read_text(encoding="utf-8")
    first = report.index("Failed: coarse SuGaR")
    assert first < report.index("<table")
    # What was made is kept, and the same command with --force goes on from it.
    assert coarse(ruined, tmp_path, "--force", True, "--stop_after", "mesh") == 0
    assert "finished already" in capsys.readouterr().out
    assert list(tmp_path.rglob("*.ply"))


@pytest.fixture(scope="module")
def masked_capture(tmp_path_factory):
    return make_observed_scene(tmp_path_factory.mktemp("observed") / "scene").root


@pytest.mark.slow
@pytest.mark.parametrize("veto", [False, True])
@pytest.mark.parametrize("name", ["none", "mask inverted", "mask of another view"])
def test_what_wrong_masks_ruin_is_a_failure(masked_capture, tmp_path, monkeypatch, name, veto):
    """Where each mask alone excludes points, two ruin a model; where masks vote, they do not."""
    if veto:
        monkeypatch.setattr(masks, "is_outside", lambda votes, shown_by: votes > 0)
    root, spoilt = copy_scene(masked_capture, tmp_path / "scene"), ["view_05.png", "view_11.png"]
    if name != "none":
        faults(Path())[name](root, spoilt, np.random.default_rng(0))
    flags = "--eval", "--iterations", 80, "--robust", False, "--keep_views", ",".join(spoilt)
    assert run_cli(vanilla.main, "-s", root, "-m", tmp_path / "vanilla", *flags) == 0
    (record,) = (tmp_path / "vanilla").rglob("run.json")
    problem = problem_of(json.loads(record.read_text())["health"])
    assert (problem is not None) == (veto and name != "none")
