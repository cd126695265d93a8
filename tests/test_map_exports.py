# SPDX-License-Identifier: Apache-2.0
"""Exports on a map lie where the survey says, in every format that programs for maps read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import trimesh
from plyfile import PlyData

from gaussian_splatting.core.moved import moved_points
from gaussian_splatting.formats.placement import Placement
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_extractors.export.las_files import write_las
from sugar_extractors.export_contents import PointCloud, PointExport
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh, written_normals
from sugar_scene.triangle_mesh import write_mesh_ply
from tests.support.mesh_scenes import icosahedron
from tests.support.survey import EPSG, SCALE, TO_MAP, list_lines, places, write_list
from tests.support.tiny_scene import refusal, run_cli
from tests.support.verbs import export
from tests.test_export_placement import Inputs, inputs

__all__ = ["inputs"]
TOLERANCE = 0.01
"""Metres; pixels are written with three decimals."""


def in_scene(path: Path, points: np.ndarray) -> np.ndarray:
    """Points of an exported file, (N, 3), in the scene that its record tells of."""
    placement = Placement.of(path)
    return moved_points(points - placement.offset, placement.to_scene())


@pytest.fixture(scope="module")
def gcp(inputs, tmp_path_factory) -> Path:
    """Control points of the tiny scene, without errors."""
    points = places(8)
    lines = list_lines(inputs.scene.cameras, points, TO_MAP.moved(points))
    return write_list(tmp_path_factory.mktemp("survey") / "gcp_list.txt", lines)


def exported(inputs: Inputs, source: Path, to: str, target: Path, gcp: Path, *words) -> dict:
    """The record of an export on the map."""
    words = ("--to", to, "-o", target, "-s", inputs.scene.root, "--gcp", gcp, *words)
    assert run_cli(export.main, source, *words) == 0
    return json.loads(target.with_name(f"{target.name}.json").read_text())


def map_positions(points) -> np.ndarray:
    return TO_MAP.moved(np.asarray(points, np.float64))


def test_vertices_of_a_mesh_become_las_in_coordinates_of_the_map(inputs, gcp, tmp_path):
    laspy = pytest.importorskip("laspy")
    record = exported(inputs, inputs.obj, "las", tmp_path / "a.las", gcp)
    las = laspy.read(tmp_path / "a.las")
    assert str(las.header.version) == "1.4"
    assert las.header.point_format.id == 7
    assert las.header.parse_crs().to_epsg() == EPSG
    mesh = read_textured_mesh(inputs.obj)
    np.testing.assert_allclose(las.xyz, map_positions(mesh.vertices), atol=TOLERANCE)
    np.testing.assert_array_equal(las.header.offsets, record["map"]["offset"])
    normals = np.stack([las[name] for name in ("NormalX", "NormalY", "NormalZ")], axis=1)
    expected = written_normals(mesh).double().numpy() @ TO_MAP.rotation.T
    np.testing.assert_allclose(normals, expected, atol=1e-3)
    colors = np.stack([las.red, las.green, las.blue], axis=1)
    faces = mesh.texture.reshape(-1, 3).unique(dim=0).numpy().astype(int) * 257
    assert all((color == faces).all(axis=1).any() for color in colors)
    assert record["map"]["epsg"] == EPSG
    assert record["map"]["scale"] == pytest.approx(SCALE, rel=1e-4)
    assert record["map"]["rms"] < TOLERANCE
    assert {row["role"] for row in record["map"]["residuals"]} == {"control", "check"}


@pytest.mark.parametrize("kind", ["Gaussians", "mesh"])
def test_gaussians_and_meshes_of_ply_become_laz(kind, inputs, gcp, tmp_path):
    laspy = pytest.importorskip("laspy")
    pytest.importorskip("lazrs")
    source = inputs.ply
    points = inputs.cloud.means
    if kind == "mesh":
        source = tmp_path / "mesh.ply"
        write_mesh_ply(source, icosahedron())
        points = icosahedron().vertices
    exported(inputs, source, "laz", tmp_path / "a.laz", gcp)
    las = laspy.read(tmp_path / "a.laz")
    assert las.header.are_points_compressed
    np.testing.assert_allclose(las.xyz, map_positions(points), atol=TOLERANCE)
    if kind == "Gaussians":
        expected = inputs.cloud.opacity_logits.sigmoid()[:, 0].numpy() * 65_535
        np.testing.assert_allclose(las.intensity, expected, atol=0.6)


def test_a_glb_has_y_up_and_the_offset_in_its_extras(inputs, gcp, tmp_path):
    record = exported(inputs, inputs.obj, "glb", tmp_path / "a.glb", gcp)
    scene = trimesh.load(tmp_path / "a.glb")
    (mesh,) = scene.geometry.values()
    content = (tmp_path / "a.glb").read_bytes()
    description = json.loads(content[20 : 20 + int.from_bytes(content[12:16], "little")])
    extras = description["nodes"][description["scenes"][0]["nodes"][0]]["extras"]
    assert extras["epsg"] == EPSG
    assert extras["map_offset"] == record["map"]["offset"]
    x, y, z = np.asarray(mesh.vertices).T
    found = np.stack([x, -z, y], axis=1) + extras["map_offset"]
    corners = read_textured_mesh(inputs.obj)
    expected = map_positions(corners.vertices)
    for vertex in expected:
        assert np.linalg.norm(found - vertex, axis=1).min() < TOLERANCE
    back = in_scene(tmp_path / "a.glb", np.asarray(mesh.vertices))
    assert np.linalg.norm(back - corners.vertices.numpy()[0], axis=1).min() < 1e-3


@pytest.mark.parametrize("far", [False, True], ids=["near zero", "full coordinates"])
def test_mesh_and_gaussians_of_one_glb_lie_on_the_map(far, inputs, gcp, tmp_path):
    target = tmp_path / "a.both.glb"
    words = ("--gaussians", inputs.ply, *(["--original_frame"] if far else []))
    record = exported(inputs, inputs.obj, "glb_both", target, gcp, *words)
    scene = trimesh.load_scene(target, process=False)
    expected = {
        "Mesh": map_positions(read_textured_mesh(inputs.obj).vertices),
        "Gaussians": map_positions(inputs.cloud.means),
    }
    offset = np.zeros(3) if far else np.array(record["map"]["offset"])
    for node, positions in expected.items():
        matrix, name = scene.graph[node]
        x, y, z = (scene.geometry[name].vertices @ matrix[:3, :3].T + matrix[:3, 3]).T
        found = np.stack([x, -z, y], axis=1) + offset
        for position in positions:
            assert np.linalg.norm(found - position, axis=1).min() < TOLERANCE


def obj_vertices(path: Path) -> np.ndarray:
    rows = [line.split()[1:4] for line in path.read_text().splitlines() if line.startswith("v ")]
    return np.array(rows, dtype=np.float64)


def test_an_obj_has_a_file_with_its_offset_or_full_coordinates(inputs, gcp, tmp_path):
    target = tmp_path / "a.obj"
    exported(inputs, inputs.obj, "obj", target, gcp)
    system, numbers = (tmp_path / "a_offset.txt").read_text().splitlines()
    assert system == f"EPSG:{EPSG}"
    offset = np.array(numbers.split(), dtype=np.float64)
    expected = map_positions(read_textured_mesh(inputs.obj).vertices)
    vertices = obj_vertices(target)
    assert np.abs(vertices).max() < 100
    np.testing.assert_allclose(vertices + offset, expected, atol=TOLERANCE)
    exported(inputs, inputs.obj, "obj", target, gcp, "--original_frame", "--overwrite", "True")
    np.testing.assert_allclose(obj_vertices(target), expected, atol=TOLERANCE)
    # The file of the earlier export would be added once more.
    assert not (tmp_path / "a_offset.txt").exists()
    back = in_scene(target, obj_vertices(target))
    np.testing.assert_allclose(back, read_textured_mesh(inputs.obj).vertices, atol=1e-3)


def test_gaussians_are_turned_to_the_map_and_keep_their_digits(inputs, gcp, tmp_path):
    record = exported(inputs, inputs.ply, "ply", tmp_path / "a.ply", gcp)
    cloud = read_gaussian_ply(tmp_path / "a.ply")
    found = cloud.means.double().numpy() + record["map"]["offset"]
    np.testing.assert_allclose(found, map_positions(inputs.cloud.means), atol=TOLERANCE)
    growth = (cloud.log_scales - inputs.cloud.log_scales).exp()
    np.testing.assert_allclose(growth, SCALE, rtol=1e-3)
    exported(inputs, inputs.ply, "ply", tmp_path / "b.ply", gcp, "--original_frame")
    rows = PlyData.read(tmp_path / "b.ply")["vertex"].data
    full = np.stack([rows[axis] for axis in "xyz"], axis=1)
    assert full.dtype == np.float64
    np.testing.assert_allclose(full, map_positions(inputs.cloud.means), atol=TOLERANCE)


def test_printed_meshes_on_a_map_are_millimetres_with_z_up(inputs, gcp, tmp_path):
    exported(inputs, inputs.obj, "stl", tmp_path / "a.stl", gcp)
    sides = np.ptp(trimesh.load(tmp_path / "a.stl").vertices, axis=0)
    expected = 1000 * np.ptp(map_positions(read_textured_mesh(inputs.obj).vertices), axis=0)
    np.testing.assert_allclose(sides, expected, rtol=1e-3)


def test_las_without_a_map_is_in_the_world_of_the_capture(inputs, tmp_path):
    laspy = pytest.importorskip("laspy")
    assert run_cli(export.main, inputs.obj, "--to", "las", "-o", tmp_path / "a.las") == 0
    las = laspy.read(tmp_path / "a.las")
    assert las.header.parse_crs() is None
    vertices = read_textured_mesh(inputs.obj).vertices
    np.testing.assert_allclose(las.xyz, vertices, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["a.las"]


def test_upright_las_has_z_up_and_stands_on_zero(inputs, tmp_path):
    laspy = pytest.importorskip("laspy")
    words = ("-s", inputs.scene.root, "--orient", "up", "--known_distance", "0,0,0", "0,0,1", "7.5")
    target = tmp_path / "a.las"
    assert run_cli(export.main, inputs.obj, "--to", "las", "-o", target, *words) == 0
    las = laspy.read(target)
    heights = 7.5 * read_textured_mesh(inputs.obj).vertices.double().numpy() @ inputs.up
    np.testing.assert_allclose(las.z, heights - heights.min(), atol=0.001)
    assert las.header.scales[2] == 0.001


def test_points_that_reach_too_far_for_millimetres_are_rounded_and_a_line_says_so(tmp_path):
    laspy = pytest.importorskip("laspy")
    positions = np.array([[0.0, 0, 0], [3e7, 0, 0]])
    lines: list[str] = []
    points = PointCloud(positions, np.zeros((2, 3), np.uint8))
    write_las(PointExport(points, np.zeros(3), None, True, tmp_path / "a.las", lines.append))
    np.testing.assert_allclose(laspy.read(tmp_path / "a.las").xyz, positions, atol=0.05)
    assert "rounded to 0.1 m" in lines[0]


def test_files_of_the_folder_of_results_are_brought_back_first(inputs, gcp, tmp_path, capsys):
    laspy = pytest.importorskip("laspy")
    folder = tmp_path / "results"
    scene = load_scene(inputs.scene.root, size_rule=VanillaSize(1), notify=lambda _: None)
    made = FinalResults(inputs.obj, inputs.ply, lambda: read_gaussian_ply(inputs.ply))
    write_result_folder(folder, made, scene, PlacementOptions(scale_factor=3.0))
    for name, points in (
        ("mesh.obj", read_textured_mesh(inputs.obj).vertices),
        ("splats.ply", inputs.cloud.means),
    ):
        exported(inputs, folder / name, "las", tmp_path / f"{name}.las", gcp)
        las = laspy.read(tmp_path / f"{name}.las")
        np.testing.assert_allclose(las.xyz, map_positions(points), atol=TOLERANCE)
    capsys.readouterr()
    (folder / "transform.json").unlink()
    exported(inputs, folder / "mesh.obj", "las", tmp_path / "b.las", gcp)
    assert "no transform.json beside mesh.obj" in capsys.readouterr().out


def test_an_export_in_other_axes_is_brought_back_for_a_map(inputs, gcp, tmp_path):
    words = ("--scale_factor", 2, "-o", tmp_path / "a.spz")
    assert run_cli(export.main, inputs.ply, "--to", "spz", *words) == 0
    exported(inputs, tmp_path / "a.spz", "ply", tmp_path / "b.ply", gcp, "--original_frame")
    table = PlyData.read(str(tmp_path / "b.ply"))["vertex"].data
    found = np.stack([table[axis] for axis in "xyz"], axis=1)
    np.testing.assert_allclose(found, map_positions(inputs.cloud.means), atol=TOLERANCE)


def refused(inputs: Inputs, capsys, *words) -> str:
    error = refusal(capsys, export.main, inputs.obj, "-s", inputs.scene.root, *words)
    return error


def test_what_cannot_be_put_on_a_map_is_refused_before_anything_is_written(
    inputs, gcp, tmp_path, capsys, monkeypatch
):
    target = ("-o", tmp_path / "a.obj")
    words = ("--to", "obj", *target, "--gcp", gcp)
    assert "leave out --orient" in refused(inputs, capsys, *words, "--orient", "up")
    assert "pass --gcp or --gps auto" in refused(
        inputs, capsys, "--to", "obj", *target, "--epsg", EPSG
    )
    assert "have GPS in their EXIF data" in refused(
        inputs, capsys, "--to", "obj", *target, "--gps", "auto"
    )
    bad = tmp_path.parent / "bad_list.txt"
    bad.write_text(gcp.read_text().replace("view_00.png", "view_77.png"))
    assert "bad_list.txt, line " in refused(inputs, capsys, "--to", "obj", *target, "--gcp", bad)
    monkeypatch.setitem(sys.modules, "laspy", None)
    las = ("--to", "las", "-o", tmp_path / "a.las")
    assert "pip install '.[geo]'" in refused(inputs, capsys, *las)
    assert not list(tmp_path.iterdir())
