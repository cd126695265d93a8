# SPDX-License-Identifier: Apache-2.0
"""Every program finds results where they stand: upright, in metres, far away, on a map.

The same mesh and the same Gaussians are written as each kind of file. Each program must bring them
to the place where the cameras of the capture see them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import metrics
from gaussian_splatting.components.densification import Region
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_points
from gaussian_splatting.formats.placement import Placement
from gaussian_splatting.formats.ply import read_gaussian_ply, write_gaussian_ply
from gaussian_splatting.scenes.reference_layout import load_reference_checkpoint
from gaussian_splatting.scenes.scene import Scene, VanillaSize, load_scene
from gaussian_splatting.vanilla.initial_gaussians import initial_gaussians
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_extractors.results import capture_of
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh, write_textured_mesh
from sugar_viewer.placed_results import common_placement, moved_scene
from sugar_viewer.shown_models import read_in_scene
from tests.support.tiny_scene import TinyScene, psnr_of_files, run_cli, tiny_cloud, write_model
from tests.support.verbs import export, render
from tests.test_export_placement import four_colored_faces
from tests.test_world_offset import UTM
from tests.test_world_offset import moved_scene as far_away

OFFSETS = {"folder": None, "export": None, "original": None, "foreign": None}
TOLERANCE = 2e-4
"""Of positions, in units of a capture of 4 units; files have float32."""


@dataclass(frozen=True)
class Kinds:
    """The same results as files of each kind, and where they are in the scene."""

    tiny: TinyScene
    scene: Scene
    cloud: GaussianCloud
    vertices: np.ndarray  # of the mesh, in the scene, (V, 3)
    meshes: dict[str, Path]
    splats: dict[str, Path]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> Kinds:
    root = tmp_path_factory.mktemp("kinds")
    tiny = far_away(root / "scene")
    scene = load_scene(tiny.root, size_rule=VanillaSize(1), notify=lambda _: None)
    shift = torch.tensor(UTM - scene.offset)
    cloud = tiny_cloud()
    cloud = replace(cloud, means=(cloud.means.double() + shift).float())
    mesh = four_colored_faces()
    mesh = replace(mesh, vertices=(mesh.vertices.double() + shift).float())
    tree = root / "refined"
    tree.mkdir()
    write_textured_mesh(tree / "mesh_.obj", mesh, glb=False)
    write_gaussian_ply(tree / "cloud.ply", cloud)
    folder = root / "folder"
    first, second = (camera.name for camera in scene.calibrated_cameras[:2])
    scaled = PlacementOptions("up", known_distance=(first, second, "0.5"))
    results = FinalResults(tree / "mesh_.obj", tree / "cloud.ply", lambda: cloud)
    write_result_folder(folder, results, scene, scaled)
    meshes = {"foreign": tree / "mesh_.obj", "folder": folder / "mesh.obj"}
    splats = {"foreign": tree / "cloud.ply", "folder": folder / "splats.ply"}
    for kind, words in {
        "export": ("--orient", "up", "--scale_factor", 3),
        "original": ("--original_frame",),
    }.items():
        for source, found in ((meshes, "obj"), (splats, "ply")):
            target = root / f"{kind}.{found}"
            command = (source["foreign"], "--to", found, "-s", tiny.root, "-o", target, *words)
            assert run_cli(export.main, *command) == 0
            source[kind] = target
    return Kinds(tiny, scene, cloud, mesh.vertices.double().numpy(), meshes, splats)


@pytest.fixture(params=OFFSETS)
def kind(request) -> str:
    return request.param


def centers(cloud: GaussianCloud) -> np.ndarray:
    return cloud.means.double().cpu().numpy()


def test_shown_results_are_where_the_cameras_see_them(kinds, kind):
    mesh = read_in_scene(kinds.meshes[kind], kinds.scene.offset, pytest.fail)
    np.testing.assert_allclose(mesh.vertices.numpy(), kinds.vertices, atol=TOLERANCE)
    cloud = read_in_scene(kinds.splats[kind], kinds.scene.offset, pytest.fail)
    np.testing.assert_allclose(centers(cloud), centers(kinds.cloud), atol=TOLERANCE)
    expected = kinds.cloud.log_scales.exp()
    torch.testing.assert_close(cloud.log_scales.exp(), expected, rtol=1e-3, atol=0)


def test_a_checkpoint_or_a_start_is_brought_to_the_scene(kinds, kind):
    checkpoint = load_reference_checkpoint(kinds.splats[kind], None, pytest.fail)
    cloud = checkpoint.read_cloud(pytest.fail, kinds.scene.offset)
    np.testing.assert_allclose(centers(cloud), centers(kinds.cloud), atol=TOLERANCE)
    start = initial_gaussians(
        kinds.scene,
        kinds.splats[kind],
        VanillaConfig(),
        Region(None, None),
        torch.device("cpu"),
        pytest.fail,
    )
    np.testing.assert_allclose(centers(start), centers(kinds.cloud), atol=TOLERANCE)


def test_exports_reach_the_original_coordinates_once(kinds, kind, tmp_path):
    for source, to, expected in (
        (kinds.meshes[kind], "obj", kinds.vertices),
        (kinds.splats[kind], "ply", centers(kinds.cloud)),
    ):
        target = tmp_path / f"a.{to}"
        words = ("--to", to, "-s", kinds.tiny.root, "-o", target, "--original_frame")
        assert run_cli(export.main, source, *words) == 0
        placement = Placement.of(target)
        np.testing.assert_allclose(placement.offset, kinds.scene.offset)
        found = points_of(target, placement.offset)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def points_of(path: Path, offset: np.ndarray) -> np.ndarray:
    """Vertices or centres of a file less an offset, in float64. (N, 3)"""
    if path.suffix == ".obj":
        lines = [line.split()[1:] for line in path.read_text().splitlines() if line[:2] == "v "]
        return np.array(lines, dtype=np.float64) - offset
    return centers(read_gaussian_ply(path, pytest.fail, offset))


def test_a_page_has_its_cameras_around_the_results(kinds, kind):
    path = kinds.meshes[kind]
    placement = common_placement([path])
    scene = moved_scene(kinds.scene, np.linalg.inv(placement.to_scene(kinds.scene.offset)))
    near = read_textured_mesh(path, pytest.fail, placement.offset).vertices.double().numpy()
    for before, after in zip(kinds.scene.calibrated_cameras, scene.calibrated_cameras, strict=True):
        expected = kinds.vertices @ before.rotation.T + before.translation
        found = near @ after.rotation.T + after.translation
        np.testing.assert_allclose(found, expected * placement.scale, atol=TOLERANCE * 10)


def test_pictures_of_the_folder_of_results_are_those_of_its_sources(kinds, tmp_path):
    pictures = {}
    for kind in OFFSETS:
        words = ("-s", kinds.tiny.root, "--path", "all", "--every", 1, "-o", tmp_path / kind)
        assert run_cli(render.main, kinds.splats[kind], *words) == 0
        pictures[kind] = sorted((tmp_path / kind).glob("*.png"))
    for kind, paths in pictures.items():
        for path, expected in zip(paths, pictures["foreign"], strict=True):
            assert psnr_of_files(path, expected) > 45, kind


def test_metrics_measure_gaussians_where_their_record_brings_them(kinds, tmp_path):
    figures = {}
    for kind in OFFSETS:
        words = ("--exported", kinds.meshes[kind], "--exported_gaussians", kinds.splats[kind])
        words = (*words, "-s", kinds.tiny.root, "--output_dir", tmp_path / kind)
        assert run_cli(metrics.main, *words) == 0
        (path,) = (tmp_path / kind / "metrics").glob("*.json")
        (scene_row,) = json.loads(path.read_text()).values()
        (figures[kind],) = scene_row.values()
    expected = figures["foreign"]
    for row in figures.values():
        assert row["psnr"] == pytest.approx(expected["psnr"], abs=0.02)
        assert row["gaussians"]["psnr"] == pytest.approx(expected["gaussians"]["psnr"], abs=0.02)


def test_results_find_the_way_back_to_another_selection_of_their_photographs(kinds, tmp_path):
    """The offset is the rounded mean of the cameras, so it is another one without some of them."""
    cameras = kinds.tiny.cameras[:2]
    other = tmp_path / "scene"
    shutil.copytree(kinds.tiny.root / "images", other / "images")
    (other / "sparse").mkdir()
    write_model(other / "sparse" / "0", cameras, kinds.tiny.points, kinds.tiny.points_rgb)
    scene = load_scene(other, size_rule=VanillaSize(1), notify=lambda _: None)
    assert not np.array_equal(scene.offset, kinds.scene.offset)
    mesh = read_in_scene(kinds.meshes["folder"], scene.offset, pytest.fail)
    original = mesh.vertices.double().numpy() + scene.offset
    np.testing.assert_allclose(original, kinds.vertices + kinds.scene.offset, atol=2e-3)


def test_a_folder_of_results_names_the_scene_it_was_made_of(kinds):
    capture = capture_of([kinds.meshes["folder"]])
    assert capture.scene is not None
    assert capture.scene.resolve() == kinds.tiny.root.resolve()


@pytest.mark.parametrize("flag", ["--known_distance", "--scale_factor"])
def test_a_scale_to_metres_is_not_applied_twice(kinds, flag, tmp_path):
    first, second = kinds.scene.calibrated_cameras[:2]
    distance = float(np.linalg.norm(first.center - second.center))
    words = (flag, first.name, second.name, 0.5)
    if flag == "--scale_factor":
        words = (flag, 0.5 / distance)
    sizes = []
    for kind in ("folder", "foreign"):
        target = tmp_path / f"{kind}.obj"
        command = (kinds.meshes[kind], "--to", "obj", "-s", kinds.tiny.root, "-o", target, *words)
        assert run_cli(export.main, *command) == 0
        points = points_of(target, np.zeros(3))
        sizes.append(np.linalg.norm(np.ptp(points[:, None] - points[None], axis=0)))
        lengths = np.linalg.norm(points[1:] - points[:-1], axis=1)
        expected = np.linalg.norm(np.diff(kinds.vertices, axis=0), axis=1) * 0.5 / distance
        np.testing.assert_allclose(lengths, expected, rtol=1e-3)


def test_a_result_in_metres_can_be_printed_without_a_flag(kinds, tmp_path):
    words = ("--to", "stl", "-o", tmp_path / "a.stl")
    assert run_cli(export.main, kinds.meshes["folder"], *words) == 0
    assert run_cli(export.main, kinds.meshes["foreign"], *words[:-1], tmp_path / "b.stl") == 2


def test_far_files_that_nobody_can_place_are_told(kinds, tmp_path, capsys):
    original = kinds.meshes["original"]
    lines = original.read_text().splitlines(keepends=True)
    alone = tmp_path / "alone.obj"
    alone.write_text("".join(line for line in lines if not line.startswith("# placement")))
    for name in ("mesh_.mtl", "original.mtl", "original.png", "mesh_.png"):
        for folder in (original.parent, original.parent / "refined"):
            if (folder / name).is_file():
                (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert run_cli(export.main, alone, "--to", "glb", "-o", tmp_path / "a.glb") == 0
    assert "lies far from the origin and nothing says where" in capsys.readouterr().out


def test_what_is_moved_on_from_a_placement_keeps_the_way_back():
    first = np.diag([2.0, -2.0, -2.0, 1.0])
    second = np.diag([0.3, -0.3, -0.3, 1.0])
    points = np.arange(6.0).reshape(2, 3)
    moved = moved_points(moved_points(points, first), second)
    placement = Placement(first).moved(second)
    np.testing.assert_allclose(moved_points(moved, placement.to_scene()), points)
