# SPDX-License-Identifier: Apache-2.0
"""The folder of results: plain names, upright and alike, with the matrix to the scene."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trimesh

from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_pipeline.pipeline.plan import result_folder
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh, write_textured_mesh
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_utils.console import Console
from sugar_viewer.result_search import find_results
from sugar_viewer.view_run import ViewOptions, _capture
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import make_tiny_scene, refusal, run_cli
from tests.support.verbs import export
from tests.test_export_placement import four_colored_faces

RECORDS = {"transform.json", "photographs.json"}
NAMES = {"mesh.obj", "mesh.glb", "mesh.mtl", "mesh.png", "splats.ply", *RECORDS}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A scene, a textured mesh in its world, and the results of both."""
    root = tmp_path_factory.mktemp("results")
    tiny = make_tiny_scene(root / "scene")
    scene = load_scene(tiny.root, size_rule=VanillaSize(1), notify=lambda line: None)
    mesh = four_colored_faces()
    write_textured_mesh(root / "sugarfine.obj", mesh)
    splats = root / "refined.pt"
    splats.write_bytes(b"stands for a model")
    return root, scene, mesh, FinalResults(root / "sugarfine.obj", splats, lambda: tiny.cloud)


def written(made, folder: Path, options: PlacementOptions | None = None) -> dict:
    _, scene, _, final_results = made
    files = write_result_folder(folder, final_results, scene, options or PlacementOptions())
    assert {path.name for path in files} == NAMES
    assert all(path.is_file() for path in files)
    return json.loads((folder / "transform.json").read_text())


def test_mesh_and_gaussians_stand_upright_in_one_place(made, tmp_path):
    _, scene, mesh, final_results = made
    note = written(made, tmp_path)
    matrix = np.array(note["matrix"])
    up = -np.mean([camera.rotation[1] for camera in scene.train_cameras], axis=0)
    turned = matrix[:3, :3] @ up / np.linalg.norm(up)
    assert turned[1] > np.cos(np.radians(10))
    vertices = read_textured_mesh(tmp_path / "mesh.obj").vertices.double().numpy()
    expected = mesh.vertices.double().numpy() @ matrix[:3, :3].T + matrix[:3, 3]
    np.testing.assert_allclose(vertices, expected, atol=1e-5)
    assert vertices[:, 1].min() == pytest.approx(0.0, abs=1e-5)
    assert note["up"] == "+y"
    parts = trimesh.load(tmp_path / "mesh.glb", process=False, force="scene").dump()
    corners = np.concatenate([np.asarray(part.vertices) for part in parts])
    np.testing.assert_allclose(corners.min(axis=0), vertices.min(axis=0), atol=1e-5)
    np.testing.assert_allclose(corners.max(axis=0), vertices.max(axis=0), atol=1e-5)
    means = read_gaussian_ply(tmp_path / "splats.ply").means.double().numpy()
    original = final_results.read_splats().means.double().numpy()
    back = np.array(note["matrix_to_scene"])
    np.testing.assert_allclose(means @ back[:3, :3].T + back[:3, 3], original, atol=1e-5)


def test_photographs_are_found_and_their_cameras_see_the_mesh_as_before(made, tmp_path):
    _, scene, mesh, final_results = made
    written(made, tmp_path, PlacementOptions(scale_factor=3.0))
    entries = json.loads((tmp_path / "photographs.json").read_text())
    assert [entry["img_name"] for entry in entries] == [c.name for c in scene.calibrated_cameras]
    moved = read_textured_mesh(tmp_path / "mesh.obj").vertices.double().numpy()
    vertices = mesh.vertices.double().numpy()
    for entry, camera in zip(entries, scene.calibrated_cameras, strict=True):
        assert (tmp_path / entry["image"]).samefile(camera.image_file)
        assert not Path(entry["image"]).is_absolute()
        local = (moved - entry["position"]) @ np.array(entry["rotation"])
        expected = 3 * (vertices @ camera.rotation.T + camera.translation)
        np.testing.assert_allclose(local, expected, atol=1e-4)
    note = json.loads((tmp_path / "transform.json").read_text())
    assert (tmp_path / note["model"]).samefile(final_results.splats)


def test_files_stay_where_they_are_when_nothing_changed(made, tmp_path):
    written(made, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    written(made, tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    (tmp_path / "mesh.png").unlink()
    written(made, tmp_path)


def test_files_of_an_earlier_run_do_not_stay_beside_those_of_this_one(made, tmp_path):
    root, scene, _, final_results = made
    written(made, tmp_path)
    write_mesh_ply(root / "sugarmesh.ply", icosahedron())
    coarse = replace(final_results, mesh=root / "sugarmesh.ply")
    write_result_folder(tmp_path, coarse, scene, PlacementOptions())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"mesh.ply", "splats.ply", *RECORDS}


def test_files_of_runs_of_other_kinds_go_and_those_of_others_stay(made, tmp_path):
    (tmp_path / "tiles").mkdir()
    earlier = ["mesh_00.png", "mesh_104.png", "mesh.ply", "report.html", "index.html"]
    earlier += ["tiles/tileset.json", "tiles/tile_00.glb", "tiles/overview_0.glb"]
    others = ["log.txt", "mesh_notes.png", "tiles/mine.glb"]
    for name in (*earlier, *others):
        (tmp_path / name).write_text("of an earlier run")
    written(made, tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert files == {*NAMES, *others, "tiles"}


def test_coordinates_of_the_scene_are_kept_where_that_is_asked_for(made, tmp_path):
    note = written(made, tmp_path, PlacementOptions(orient="none"))
    np.testing.assert_array_equal(note["matrix"], np.eye(4))
    assert note["up"] is None


def test_the_viewer_shows_the_folder_and_passes_it_over_among_others(made, tmp_path):
    written(made, tmp_path / "output" / "scan")
    shown = find_results([tmp_path / "output" / "scan"], lambda line: None)
    assert [one.title for one in shown] == ["Gaussians", "textured mesh"]
    (tmp_path / "output" / "refined_mesh").mkdir()
    write_textured_mesh(tmp_path / "output" / "refined_mesh" / "a.obj", made[2])
    (only,) = find_results([tmp_path / "output"], lambda line: None)
    assert only.path.name == "a.obj"


@pytest.mark.parametrize("damage", ["gone", "without images"])
def test_the_viewer_takes_the_cameras_of_the_folder_where_there_is_no_capture(
    made, tmp_path, damage
):
    root, _, _, final_results = made
    copy = shutil.copytree(root / "scene", tmp_path / "scene")
    scene = load_scene(copy, size_rule=VanillaSize(1), notify=lambda line: None)
    folder = tmp_path / "out" / "scan"
    write_result_folder(folder, final_results, scene, PlacementOptions(scale_factor=2.0))
    if damage == "gone":
        shutil.rmtree(copy)
    else:
        shutil.rmtree(copy / "images")
    options = ViewOptions((folder,))
    paths = [result.path for result in find_results([folder], lambda line: None)]
    found = _capture(paths, options, Console.silent())
    cameras = {camera.name: camera for camera in found.calibrated_cameras}
    assert set(cameras) == {camera.name for camera in scene.calibrated_cameras}
    for camera in scene.calibrated_cameras:
        np.testing.assert_allclose(cameras[camera.name].center, camera.center, atol=1e-9)
        np.testing.assert_allclose(cameras[camera.name].rotation, camera.rotation, atol=1e-9)
        assert cameras[camera.name].image_path is None
    assert found.extent == pytest.approx(scene.extent, rel=0.3)


@pytest.mark.parametrize(
    ("to", "source"),
    [("spz", "splats.ply"), ("splat", "splats.ply"), ("glb", "mesh.obj"), ("obj", "mesh.obj")],
)
def test_the_folder_is_exported_like_its_file_for_the_format(made, tmp_path, to, source):
    folder = tmp_path / "scan"
    written(made, folder)
    targets = [tmp_path / "of_folder" / f"a.{to}", tmp_path / "of_file" / f"a.{to}"]
    for result, target in zip((folder, folder / source), targets, strict=True):
        target.parent.mkdir()
        assert run_cli(export.main, result, "--to", to, "-o", target) == 0
    assert targets[0].read_bytes() == targets[1].read_bytes()


def test_points_of_the_folder_are_those_of_its_mesh(made, tmp_path):
    laspy = pytest.importorskip("laspy")
    folder = tmp_path / "scan"
    written(made, folder)
    target = tmp_path / "a.las"
    assert run_cli(export.main, folder, "--to", "las", "-o", target) == 0
    n_vertices = len(read_textured_mesh(folder / "mesh.obj").vertices)
    assert len(laspy.read(target).points) == n_vertices


def test_a_folder_without_what_the_format_needs_is_one_line(made, tmp_path, capsys):
    folder = tmp_path / "scan"
    written(made, folder)
    (folder / "mesh.obj").unlink()
    assert "has no mesh.obj" in refusal(
        capsys, export.main, folder, "--to", "glb", "-o", tmp_path / "a.glb"
    )


@pytest.mark.parametrize(
    ("scene", "folder"),
    [
        ("scans/cup", "output/cup"),
        ("scans/coarse", "output/coarse_result"),
        ("output/cup", "output/cup_result"),
    ],
)
def test_the_folder_is_no_other_one(scene, folder):
    assert result_folder(Path(scene), Path("output")) == Path(folder)
