# SPDX-License-Identifier: Apache-2.0
"""``metrics.py --exported``: the file that a person takes away, against known photographs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from PIL import Image

import metrics
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_extractors.texture.placed_copy import write_placed
from sugar_pipeline.quality.exported_mesh import Shape, read_exported
from sugar_pipeline.quality.model_metrics import measure, metrics_options, metrics_parser
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, write_textured_mesh
from sugar_utils.console import Console
from tests.support.textured_box import N_TRIANGLES, box_mesh, write_box_scene
from tests.support.tiny_scene import run_cli, tiny_cloud
from tests.support.verbs import export

UTM = np.array([655_321.25, 4_215_678.5, 312.75])
KINDS = ("glb", "obj")


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Path:
    return write_box_scene(tmp_path_factory.mktemp("box") / "scene")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The OBJ of the box, with a GLB beside it."""
    path = tmp_path_factory.mktemp("written") / "box.obj"
    write_textured_mesh(path, box_mesh())
    return path


@pytest.fixture(scope="module")
def plain_figures(scene, written, tmp_path_factory) -> dict[str, Any]:
    return figures_of(written, scene, tmp_path_factory.mktemp("plain"))


def figures_of(path: Path, scene: Path, output: Path, *words: object) -> dict[str, Any]:
    """Measure a file and return its figures."""
    flags = ["--exported", path, "-s", scene, "--output_dir", output, *words]
    options = metrics_options(metrics_parser(None).parse_flags([*map(str, flags)]))
    content = json.loads(measure(options, Console.silent()).read_text())
    return content[scene.name][path.name]


def refusal(capsys, *words: object) -> str:
    """Run the program, which refuses, and return its one line of error."""
    assert run_cli(metrics.main, *words) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text]
    return line


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_the_colours_of_the_photographs_is_as_good_as_them(
    scene, written, tmp_path, kind
):
    row = figures_of(written.with_suffix(f".{kind}"), scene, tmp_path)
    assert row["psnr_covered"] > 40
    assert row["ssim_covered"] > 0.99
    assert row["psnr"] > 40
    assert row["n_views"] == row["n_views_covered"] == 2
    assert set(row["views"]) == {"view_00.png", "view_08.png"}
    assert row["frame"] == "not moved"


def test_pixels_of_the_outline_are_not_covered(scene, plain_figures):
    box_shares = []
    covered_shares = []
    for name, view in plain_figures["views"].items():
        photograph = np.asarray(Image.open(scene / "images" / name)).max(axis=-1)
        box_shares.append((photograph > 0).mean())
        covered_shares.append(view["covered_share"])
    for box_share, covered_share in zip(box_shares, covered_shares, strict=True):
        assert 0.8 * box_share < covered_share < box_share
    assert plain_figures["covered_share"] == pytest.approx(np.mean(covered_shares))


def test_what_no_mesh_covers_counts_in_whole_pictures_only(scene, written, tmp_path):
    row = figures_of(written, scene, tmp_path, "--white_background", True)
    plain = figures_of(written, scene, tmp_path)
    assert row["psnr_covered"] == pytest.approx(plain["psnr_covered"], abs=1e-6)
    # The photographs have a black background.
    background = 1 - plain["covered_share"]
    assert row["psnr"] == pytest.approx(-10 * np.log10(background), abs=0.4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_export_measures_the_same(scene, written, plain_figures, tmp_path, kind):
    target = tmp_path / f"upright.{kind}"
    words = (written, "--to", kind, "-o", target, "-s", scene, "--orient", "up")
    assert run_cli(export.main, *words, "--scale_factor", 2.5) == 0
    row = figures_of(target, scene, tmp_path)
    assert row["frame"] == f"moved as upright.{kind}.json says"
    assert_same_quality(row, plain_figures)
    # A file that was copied without its record has one inside.
    record = target.with_name(f"{target.name}.json").rename(tmp_path / "elsewhere.json")
    row = figures_of(target, scene, tmp_path)
    assert row["frame"] == f"moved as upright.{kind} says"
    assert_same_quality(row, plain_figures)
    wrong = figures_of(target, scene, tmp_path, "--exported_transform", "none")
    assert wrong["psnr_covered"] < plain_figures["psnr_covered"] - 10
    row = figures_of(target, scene, tmp_path, "--exported_transform", record)
    assert_same_quality(row, plain_figures)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orient", ["up", "none"])
def test_a_placed_copy_and_the_folder_of_results_measure_the_same(
    scene, plain_figures, tmp_path, kind, orient
):
    obj = tmp_path / "box.obj"
    write_textured_mesh(obj, box_mesh())
    capture = load_scene(scene, size_rule=VanillaSize(1), notify=print)
    options = PlacementOptions(orient=orient, scale_factor=3.0)
    write_placed(obj, capture, tiny_cloud, options, glb=True, notify=print)
    results = FinalResults(mesh=obj, splats=None, read_splats=tiny_cloud)
    write_result_folder(tmp_path / "results", results, capture, options)
    for path in (tmp_path / f"box_placed.{kind}", tmp_path / "results" / f"mesh.{kind}"):
        row = figures_of(path, scene, tmp_path)
        assert row["frame"].startswith("moved as")
        assert_same_quality(row, plain_figures)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_in_the_coordinates_of_the_original_measures_the_same(
    plain_figures, tmp_path, kind
):
    far_scene = write_box_scene(tmp_path / "scene", UTM)
    offset = load_scene(far_scene, size_rule=VanillaSize(1), notify=print).offset
    mesh = box_mesh()
    vertices = (mesh.vertices.double().numpy() + UTM - offset).astype(np.float32)
    local = tmp_path / "box.obj"
    write_textured_mesh(local, replace(mesh, vertices=torch.from_numpy(vertices)))
    target = tmp_path / f"wide.{kind}"
    words = (local, "--to", kind, "-o", target, "-s", far_scene, "--original_frame")
    assert run_cli(export.main, *words) == 0
    for path in (local.with_suffix(f".{kind}"), target):
        row = figures_of(path, far_scene, tmp_path)
        assert_same_quality(row, plain_figures, tolerance=0.1)


def assert_same_quality(row: dict, expected: dict, tolerance: float = 0.02) -> None:
    for name in ("psnr", "psnr_covered"):
        assert row[name] == pytest.approx(expected[name], abs=tolerance)
    for name in ("ssim", "ssim_covered", "covered_share"):
        assert row[name] == pytest.approx(expected[name], abs=2e-3)
    for name in ("triangles", "positions", "open_edges", "components"):
        assert row[name] == expected[name]


def test_an_export_that_is_not_moved_leaves_no_record_of_an_earlier_one(written, scene, tmp_path):
    target = tmp_path / "box.glb"
    words = (written, "--to", "glb", "-o", target, "-s", scene)
    assert run_cli(export.main, *words, "--scale_factor", 2) == 0
    assert (tmp_path / "box.glb.json").is_file()
    assert run_cli(export.main, *words, "--overwrite", True) == 0
    assert not (tmp_path / "box.glb.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_texture_measures_worse(scene, plain_figures, tmp_path, kind):
    mesh = box_mesh()
    darker = (mesh.texture.float() * 0.9).to(torch.uint8)
    for name, texture in (("darker", darker), ("mirrored", mesh.texture.flip(1))):
        write_textured_mesh(tmp_path / f"{name}.obj", replace(mesh, texture=texture))
        row = figures_of(tmp_path / f"{name}.{kind}", scene, tmp_path)
        assert row["psnr_covered"] < plain_figures["psnr_covered"] - 10


def test_darker_photographs_do_not_matter_after_gain_and_offset(scene, tmp_path):
    mesh = box_mesh()
    darker = (mesh.texture.float() * 0.8).to(torch.uint8)
    write_textured_mesh(tmp_path / "box.obj", replace(mesh, texture=darker))
    row = figures_of(tmp_path / "box.obj", scene, tmp_path, "--exposure_compensation", True)
    assert row["psnr_after_gain_and_offset"] > row["psnr"] + 5
    assert row["psnr_after_gain_and_offset_covered"] > 40


@pytest.mark.parametrize(("n_sides", "open_edges"), [(6, 0), (5, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_the_box(tmp_path, kind, n_sides, open_edges):
    path = tmp_path / "box.obj"
    files = write_textured_mesh(path, box_mesh(n_sides))
    mesh = read_exported(path.with_suffix(f".{kind}"))
    shape = Shape.of(mesh)
    assert mesh.n_faces == 2 * n_sides
    # Each side has its own place in the picture, so that its corners are there anew.
    assert len(mesh.vertices) == 4 * n_sides
    assert shape.positions == 8
    assert shape.open_edges == open_edges
    assert shape.components == 1
    belonging = {file for file in files if (file.suffix == ".glb") == (kind == "glb")}
    assert set(mesh.files) == belonging
    assert mesh.n_bytes == sum(len(file.read_bytes()) for file in belonging)
    assert [texture.shape for texture in mesh.textures] == [(128, 192, 3)]


def test_figures_of_the_file_are_in_the_result(written, plain_figures):
    assert plain_figures["triangles"] == N_TRIANGLES
    assert plain_figures["textures"] == [[192, 128]]
    assert plain_figures["bytes"] == sum(plain_figures["files"].values())
    assert set(plain_figures["files"]) == {"box.obj", "box.mtl", "box.png"}


def test_the_table_and_the_name_of_the_result(scene, written, plain_figures, tmp_path, capsys):
    words = ("--exported", written, "-s", scene, "--output_dir", tmp_path)
    assert run_cli(metrics.main, *words) == 0
    shown = capsys.readouterr().out
    assert f"PSNR {plain_figures['psnr_covered']:.2f} dB" in shown
    assert "192 x 128" in shown
    assert (tmp_path / "metrics" / "results_exported_box_obj.json").is_file()


@pytest.mark.slow
def test_training_photographs_are_the_other_ones(scene, written, tmp_path):
    row = figures_of(written, scene, tmp_path, "--split", "train")
    assert row["n_views"] == 8
    assert not {"view_00.png", "view_08.png"} & set(row["views"])
    assert (tmp_path / "metrics" / "results_exported_box_obj_train.json").is_file()


def test_gaussians_are_measured_on_the_same_pixels(scene, written, tmp_path):
    write_gaussian_ply(tmp_path / "ball.ply", tiny_cloud())
    row = figures_of(written, scene, tmp_path, "--exported_gaussians", tmp_path / "ball.ply")
    assert row["gaussians"]["covered_share"] == row["covered_share"]
    # They show another body.
    assert row["gaussians"]["psnr_covered"] < row["psnr_covered"] - 10


@pytest.mark.parametrize("kind", ["glb", "ply"])
def test_a_mesh_with_colours_at_its_vertices_is_measured(scene, tmp_path, kind):
    box = box_mesh()
    colors = np.full((8, 4), 255, np.uint8)
    colors[:, :3] = 128
    vertices = box.vertices.numpy()
    if kind == "glb":
        vertices = vertices * (1, -1, -1)
    body = trimesh.Trimesh(vertices, box.faces.numpy(), vertex_colors=colors, process=False)
    body.export(tmp_path / f"grey.{kind}")
    row = figures_of(tmp_path / f"grey.{kind}", scene, tmp_path)
    assert row["textures"] == []
    # The colours of the photographs have a deviation of about a quarter from grey.
    assert 10 < row["psnr_covered"] < 14


def test_a_node_of_a_file_moves_what_hangs_on_it(written, tmp_path):
    scene = trimesh.load_scene(written.with_suffix(".glb"), process=False)
    shift = np.eye(4)
    shift[:3, 3] = (1.0, 2.0, 3.0)
    scene.apply_transform(shift)
    scene.export(tmp_path / "moved.glb")
    moved = read_exported(tmp_path / "moved.glb").vertices
    before = read_exported(written.with_suffix(".glb")).vertices
    np.testing.assert_allclose(moved, before + shift[:3, 3], atol=1e-6)


def test_files_that_cannot_be_measured_are_refused_in_one_line(scene, written, tmp_path, capsys):
    common = ("-s", scene, "--output_dir", tmp_path)
    missing = tmp_path / "missing.glb"
    assert "missing.glb: no such file" in refusal(capsys, "--exported", missing, *common)
    other = tmp_path / "mesh.stl"
    other.write_bytes(b"solid")
    assert "pass one of .glb, .obj, .ply" in refusal(capsys, "--exported", other, *common)
    for name, content in (("cut.glb", written.with_suffix(".glb").read_bytes()[:300]),):
        (tmp_path / name).write_bytes(content)
        assert "damaged" in refusal(capsys, "--exported", tmp_path / name, *common)
    assert "-s/--scene_path is missing" in refusal(capsys, "--exported", written)
    assert not (tmp_path / "metrics").exists()


def test_a_file_without_colours_is_refused(scene, tmp_path, capsys):
    mesh = box_mesh()
    path = tmp_path / "box.obj"
    write_textured_mesh(path, mesh, glb=False)
    common = ("--exported", path, "-s", scene)
    path.with_suffix(".png").unlink()
    assert "box.png is not beside it" in refusal(capsys, *common)
    path.with_suffix(".mtl").unlink()
    assert "box.mtl is not beside it" in refusal(capsys, *common)
    plain = trimesh.Trimesh(mesh.vertices.numpy(), mesh.faces.numpy(), process=False)
    for kind in ("glb", "obj", "ply"):
        plain.export(tmp_path / f"plain.{kind}")
        line = refusal(capsys, "--exported", tmp_path / f"plain.{kind}", "-s", scene)
        assert "has neither a texture nor vertex colours" in line


def test_a_material_without_a_picture_has_its_colour(tmp_path):
    path = tmp_path / "box.obj"
    write_textured_mesh(path, box_mesh(), glb=False)
    material = path.with_suffix(".mtl")
    material.write_text(material.read_text() + "\nnewmtl plain\nKd 1 0 0\n")
    n_faces = read_exported(path).n_faces
    path.write_text(path.read_text() + "\nusemtl plain\nf 1/1 2/2 3/3\n")
    mesh = read_exported(path)
    assert (mesh.face_textures < 0).sum() == 1
    assert len(mesh.textures) == 1
    assert mesh.n_faces == n_faces + 1
    assert (
        mesh.colors[mesh.faces[mesh.face_textures < 0]].reshape(-1, 3).tolist() == [[255, 0, 0]] * 3
    )


def test_a_mesh_that_no_view_shows_has_no_figures(scene, tmp_path, capsys):
    mesh = box_mesh()
    far = TexturedMesh(mesh.vertices + 1000, mesh.faces, mesh.uvs, mesh.texture)
    write_textured_mesh(tmp_path / "box.obj", far)
    for kind in KINDS:
        path = tmp_path / f"box.{kind}"
        line = refusal(capsys, "--exported", path, "-s", scene, "--output_dir", tmp_path)
        assert "none of 2 test views shows it" in line
        assert "--exported_transform" in line
    assert not list(tmp_path.glob("metrics/*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mesh", "box_placed"])
def test_a_copy_whose_record_is_lost_is_refused(scene, tmp_path, capsys, name):
    write_textured_mesh(tmp_path / f"{name}.obj", box_mesh())
    for kind in KINDS:
        words = ("--exported", tmp_path / f"{name}.{kind}", "-s", scene, "--output_dir", tmp_path)
        line = refusal(capsys, *words)
        assert "says where it stands; pass it as --exported_transform" in line
        assert run_cli(metrics.main, *words, "--exported_transform", "none") == 0
        assert "PSNR" in capsys.readouterr().out


def test_records_that_say_nothing_are_refused(scene, written, tmp_path, capsys):
    words = ("--exported", written, "-s", scene, "--exported_transform")
    assert "no such file" in refusal(capsys, *words, tmp_path / "missing.json")
    record = tmp_path / "record.json"
    record.write_text("{}")
    assert "has no matrix" in refusal(capsys, *words, record)
    record.write_text(json.dumps({"matrix": np.zeros((4, 4)).tolist()}))
    assert "cannot be undone" in refusal(capsys, *words, record)
    record.write_text(json.dumps({"matrix": [[1, 2]]}))
    assert "record.json" in refusal(capsys, *words, record)
