# SPDX-License-Identifier: Apache-2.0
"""Whole refinement runs on a tiny scene: what they write, and that they resume."""

import json
from dataclasses import replace

import pytest
import torch

import train_refined
from gaussian_splatting.formats.ply import read_gaussian_ply
from sugar_scene.bound_model import bound_cloud_from_state
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_utils.entrypoint import run_main
from tests.support.golden import GOLDEN_DIR
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import make_tiny_checkpoint, make_tiny_scene

NAME = "sugarfine_3Dgs7000_level03_decim20_normalconsistency01_gaussperface6"
STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("refine")
    scene = make_tiny_scene(root / "scene")
    checkpoint = make_tiny_checkpoint(root / "vanilla", scene)
    mesh = root / "sugarmesh_3Dgs7000_level03_decim20.ply"
    write_mesh_ply(mesh, icosahedron())
    return ["-s", scene.root, "-c", checkpoint, "-m", mesh]


def refine(monkeypatch, inputs, output, *flags) -> int:
    words = [*inputs, "-o", output, "-g", 6, "-v", 1000, "-f", STEPS, *flags]
    monkeypatch.setattr("sys.argv", ["train_refined.py", *map(str, words)])
    return run_main(train_refined.main)


def final(output):
    return torch.load(output / NAME / f"{STEPS}.pt", weights_only=True)


def test_a_run_writes_the_refined_model_under_its_traditional_names(monkeypatch, inputs, tmp_path):
    assert refine(monkeypatch, inputs, tmp_path) == 0
    payload = final(tmp_path)
    listing = json.loads((GOLDEN_DIR / "case10_checkpoint_A" / "pt_listing.json").read_text())
    recorded = listing["refined_pt"]["state_dict"]
    assert list(payload["state_dict"]) == list(recorded)
    for name, tensor in payload["state_dict"].items():
        assert list(tensor.shape)[1:] == recorded[name]["shape"][1:], name
        assert str(tensor.dtype) == f"torch.{recorded[name]['dtype']}", name
    cloud = bound_cloud_from_state(payload["state_dict"])
    assert cloud.per_triangle == 6
    exported = read_gaussian_ply(tmp_path / f"{NAME}.ply")
    gaussians = cloud.activate()
    torch.testing.assert_close(exported.means, gaussians.means)
    torch.testing.assert_close(exported.log_scales.exp(), gaussians.scales)
    assert float(payload["train_losses"][0]) > 0


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bits(monkeypatch, inputs, tmp_path):
    assert refine(monkeypatch, inputs, tmp_path / "a", "--checkpoint_interval", 2) == 0
    assert refine(monkeypatch, inputs, tmp_path / "b", "--checkpoint_interval", 2) == 0
    for later in (4, STEPS):
        (tmp_path / "b" / NAME / f"{later}.pt").unlink()
    assert refine(monkeypatch, inputs, tmp_path / "b", "--checkpoint_interval", 2) == 0
    expected, found = final(tmp_path / "a"), final(tmp_path / "b")
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(tensor, found["state_dict"][name]), name


def test_another_mesh_in_the_same_folder_is_refused(monkeypatch, inputs, tmp_path, capsys):
    assert refine(monkeypatch, inputs, tmp_path) == 0
    assert refine(monkeypatch, inputs, tmp_path, "-n", 0.1, "-v", 2000) == 2
    error = capsys.readouterr().err
    assert "--n_vertices_in_fg 1000 -> 2000" in error
    assert "--overwrite True" in error


def test_a_missing_mesh_is_one_line(monkeypatch, inputs, tmp_path, capsys):
    wrong = [*inputs[:-1], tmp_path / "none.ply"]
    assert refine(monkeypatch, wrong, tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith("error: --mesh_path")
    assert not (tmp_path / "out").exists()


def test_a_mesh_without_triangles_is_one_line(monkeypatch, inputs, tmp_path, capsys):
    empty = tmp_path / "sugarmesh_empty.ply"
    ball = icosahedron()
    write_mesh_ply(empty, replace(ball, faces=ball.faces[:0]))
    assert refine(monkeypatch, [*inputs[:-1], empty], tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "no triangles" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()
