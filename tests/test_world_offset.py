# SPDX-License-Identifier: Apache-2.0
"""Captures far from the origin, as in UTM coordinates, are as good as those around it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pycolmap
import pytest
import trimesh
from numpy.lib import recfunctions
from plyfile import PlyData, PlyElement
from pxr import Usd, UsdGeom

import train
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.colmap import write_poses
from gaussian_splatting.data.world_offset import read_offset, world_offset, write_offset
from gaussian_splatting.formats.ply import read_gaussian_ply, read_point_ply, write_gaussian_ply
from gaussian_splatting.scenes.reference_layout import (
    load_reference_checkpoint,
    point_cloud_path,
    write_cameras_json,
)
from gaussian_splatting.scenes.scene import VanillaSize, load_scene, load_scene_for_checkpoint
from sugar_extractors.export.format_types import World
from sugar_extractors.export.formats import FORMATS
from sugar_extractors.mesh.loading import region_boxes
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_pipeline.blocks.tracks import read_capture_points
from sugar_pipeline.pipeline.conclusion import _measure
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_pipeline.quality import mesh_quality
from sugar_pipeline.quality.mesh_quality import make_reference
from sugar_scene.mesh_files.textured_mesh_io import write_textured_mesh
from sugar_scene.surface_queries import sample_surface
from sugar_scene.triangle_mesh import write_mesh_ply
from tests.support.command_words import train_plan
from tests.support.mesh_scenes import sphere
from tests.support.tiny_scene import (
    TinyScene,
    events,
    make_tiny_scene,
    refusal,
    run_cli,
    write_model,
)
from tests.support.verbs import export
from tests.test_export_placement import four_colored_faces

UTM = np.array([655_321.25, 4_215_678.5, 312.75])
FULL = VanillaSize(1)


def moved_scene(root: Path) -> TinyScene:
    """The tiny scene in UTM coordinates."""
    scene = make_tiny_scene(root)
    cameras = [replace(c, translation=c.translation - c.rotation @ UTM) for c in scene.cameras]
    model = scene.root / "sparse" / "0"
    shutil.rmtree(model)
    write_model(model, cameras, scene.points + UTM, scene.points_rgb)
    return replace(scene, cameras=cameras, points=scene.points + UTM)


def write_wide_ply(path: Path, cloud: GaussianCloud, shift: np.ndarray) -> None:
    """Write a cloud as a PLY with float64 positions."""
    write_gaussian_ply(path, cloud)
    vertices = PlyData.read(path)["vertex"].data
    wide = np.dtype([(n, "<f8" if n in "xyz" else "<f4") for n in vertices.dtype.names])
    vertices = recfunctions.repack_fields(vertices).astype(wide)
    for axis, value in zip("xyz", shift, strict=True):
        vertices[axis] = cloud.means[:, "xyz".index(axis)].double().numpy() + value
    PlyData([PlyElement.describe(vertices, "vertex")]).write(str(path))


@pytest.fixture(scope="module")
def far_scene(tmp_path_factory) -> TinyScene:
    return moved_scene(tmp_path_factory.mktemp("far") / "scene")


@pytest.mark.parametrize(
    ("shift", "moves"),
    [((0, 0, 0), False), ((500, 0, 0), False), ((2e4, 0, 0), True), ((5e3, 0, 0), True)],
)
def test_only_what_is_far_from_the_origin_is_moved(shift, moves):
    centers = np.array([[0.0, 0, 0], [1, 0, 0], [0, 2, 0]]) + shift
    offset = world_offset(centers)
    assert offset.any() == moves
    if moves:
        assert np.linalg.norm((centers - offset).mean(axis=0)) < 2


def test_points_keep_their_digits_and_one_line_says_what_was_subtracted(far_scene):
    messages = []
    scene = load_scene(far_scene.root, size_rule=FULL, notify=messages.append)
    np.testing.assert_allclose(scene.points + scene.offset, far_scene.points, atol=1e-6)
    # The camera's own place is known to fewer digits where its translation is large.
    centers = [camera.center + scene.offset for camera in scene.original_train_cameras]
    names = {camera.name: camera for camera in far_scene.cameras}
    expected = [names[camera.name].center for camera in scene.original_train_cameras]
    np.testing.assert_allclose(centers, expected, atol=1e-6)
    assert scene.extent < 10
    assert any("far from the origin" in message for message in messages)


@pytest.mark.slow
def test_training_is_as_good_as_at_the_origin(far_scene, tmp_path):
    scenes = {"near": make_tiny_scene(tmp_path / "scene"), "far": far_scene}
    psnr = {}
    for name, scene in scenes.items():
        output = tmp_path / name
        short = ("-s", scene.root, "-m", output, "--eval", "--iterations", 60)
        assert run_cli(vanilla_train.main, *short) == 0
        psnr[name] = events(output / "checkpoints").Scalars("Test/PSNR")[-1].value
    assert psnr["far"] == pytest.approx(psnr["near"], abs=0.2)
    offset = read_offset(tmp_path / "far")
    cloud = read_gaussian_ply(point_cloud_path(tmp_path / "far", 60))
    middle = cloud.means.double().mean(dim=0).numpy() + offset
    np.testing.assert_allclose(middle, UTM, atol=0.5)
    assert read_offset(tmp_path / "near") is None
    record = json.loads((tmp_path / "far" / "checkpoints" / "run.json").read_text())
    assert record["world_offset"] == offset.tolist()
    # The next stage finds cameras, points and Gaussians in one world.
    checkpoint = load_reference_checkpoint(tmp_path / "far", 60)
    again = load_scene_for_checkpoint(far_scene.root, checkpoint, size_rule=FULL, notify=print)
    np.testing.assert_allclose(again.points + again.offset, far_scene.points, atol=1e-6)
    assert (
        run_cli(
            train.main,
            s=far_scene.root,
            c=tmp_path / "far",
            i=60,
            r="density",
            stop_after="coarse",
            output_dir=tmp_path / "sugar",
            schedule_scale=0.0003,
            sdf_samples=100,
            force=True,
        )
        == 0
    )


def test_a_checkpoint_of_another_program_is_moved_with_its_cameras(far_scene, tmp_path):
    """It was trained in the original coordinates, so its Gaussians have what digits are left."""
    shutil.copytree(far_scene.root / "images", tmp_path / "scene" / "images")
    points = make_tiny_scene(tmp_path / "near")
    ply = point_cloud_path(tmp_path / "checkpoint", 7000)
    cloud = points.cloud
    write_wide_ply(ply, cloud, UTM)
    write_cameras_json(tmp_path / "checkpoint", far_scene.cameras, [])
    checkpoint = load_reference_checkpoint(tmp_path / "checkpoint", 7000)
    for root in (far_scene.root, tmp_path / "scene"):
        scene = load_scene_for_checkpoint(root, checkpoint, size_rule=FULL, notify=print)
        found = checkpoint.read_cloud().means.double().numpy() + scene.offset
        np.testing.assert_allclose(found, cloud.means.double().numpy() + UTM, atol=1e-6)
        assert np.linalg.norm(scene.train_cameras[0].center) < 10


def test_points_to_start_from_may_be_in_either_coordinates(far_scene, tmp_path):
    offset = world_offset(np.stack([camera.center for camera in far_scene.cameras]))
    cloud = make_tiny_scene(tmp_path / "near").cloud
    read = {}
    for name, shift in (("original", UTM), ("moved", UTM - offset)):
        write_wide_ply(tmp_path / f"{name}.ply", cloud, shift)
        read[name], _ = read_point_ply(tmp_path / f"{name}.ply", print, offset)
    np.testing.assert_allclose(read["original"], read["moved"], atol=1e-6)


def capture_with_offset(root: Path, is_far: bool, folder_offset: np.ndarray) -> TinyScene:
    """A capture in UTM coordinates or near the origin, moved by an offset before it was written."""
    scene = moved_scene(root) if is_far else make_tiny_scene(root)
    write_offset(root, folder_offset)
    return scene


@pytest.mark.parametrize(
    ("is_far", "folder_offset"),
    [(True, np.zeros(3)), (False, UTM), (True, np.array([0.0, 5e4, 0]))],
)
def test_points_for_blocks_lie_where_those_of_the_scene_do(is_far, folder_offset, tmp_path):
    capture = capture_with_offset(tmp_path / "scan", is_far, folder_offset)
    scene = load_scene(capture.root, size_rule=FULL, notify=print)
    points = read_capture_points(capture.root, scene).positions
    np.testing.assert_allclose(points, scene.points, atol=1e-6)
    original = capture.points + folder_offset
    np.testing.assert_allclose(scene.points + scene.offset, original, atol=1e-5)


@pytest.mark.parametrize("is_far", [True, False])
@pytest.mark.parametrize("folder_offset", [np.zeros(3), UTM])
def test_files_beside_a_capture_may_have_its_coordinates_or_the_original_ones(
    is_far, folder_offset, tmp_path
):
    capture = capture_with_offset(tmp_path / "scan", is_far, folder_offset)
    scene = load_scene(capture.root, size_rule=FULL, notify=print)
    for points in (capture.points, capture.points + folder_offset):
        found = points - scene.offset_in_folder(points)
        np.testing.assert_allclose(found, scene.points, atol=1e-6)


def test_a_checkpoint_keeps_its_offset_where_the_scene_has_no_model(far_scene, tmp_path):
    output = tmp_path / "vanilla"
    assert run_cli(vanilla_train.main, "-s", far_scene.root, "-m", output, "--iterations", 2) == 0
    shutil.copytree(far_scene.root / "images", tmp_path / "scan" / "images")
    checkpoint = load_reference_checkpoint(output, 2, print)
    scene = load_scene_for_checkpoint(tmp_path / "scan", checkpoint, size_rule=FULL, notify=print)
    np.testing.assert_array_equal(scene.offset, read_offset(output))


def test_poses_are_written_in_the_coordinates_of_the_model(far_scene, tmp_path):
    scene = load_scene(far_scene.root, size_rule=FULL, eval_split=False, notify=print)
    folder = write_poses(far_scene.root / "sparse/0", tmp_path / "model", scene.train_cameras)
    model = pycolmap.Reconstruction(str(folder))
    expected = {camera.name: camera.center for camera in far_scene.cameras}
    for image in model.images.values():
        np.testing.assert_allclose(image.projection_center(), expected[image.name], atol=1e-5)
    points = np.array([model.points3D[i].xyz for i in sorted(model.points3D)])
    np.testing.assert_allclose(points, far_scene.points, atol=1e-6)


def test_transforms_far_away_are_moved_with_their_points(far_scene, tmp_path):
    shutil.copytree(far_scene.root / "images", tmp_path / "images")
    flip = np.diag([1.0, -1.0, -1.0])
    frames = []
    for camera in far_scene.cameras:
        matrix = np.eye(4)
        matrix[:3, :3] = camera.rotation.T @ flip
        matrix[:3, 3] = camera.center
        frames.append({"file_path": f"images/{camera.name}", "transform_matrix": matrix.tolist()})
    first = far_scene.cameras[0]
    lens = {"fl_x": first.fx, "fl_y": first.fy, "cx": first.cx, "cy": first.cy}
    cloud = make_tiny_scene(tmp_path / "near").cloud
    write_wide_ply(tmp_path / "points.ply", cloud, UTM)
    content = {**lens, "frames": frames, "ply_file_path": "points.ply"}
    (tmp_path / "transforms.json").write_text(json.dumps(content))
    scene = load_scene(tmp_path, size_rule=FULL, notify=print)
    expected = cloud.means.double().numpy() + UTM
    np.testing.assert_allclose(scene.points + scene.offset, expected, atol=1e-6)
    assert np.linalg.norm(scene.train_cameras[0].center) < 10


def test_a_box_may_be_in_either_coordinates(far_scene):
    scene = load_scene(far_scene.root, size_rule=FULL, notify=print)
    half = np.ones(3)
    middle = UTM - scene.offset
    boxes = [
        region_boxes(SimpleNamespace(bboxmin=c - half, bboxmax=c + half, center_bbox=None), scene)
        for c in (UTM, middle)
    ]
    assert boxes[0] == boxes[1]
    np.testing.assert_allclose(boxes[0][0].low, middle - half)


@pytest.fixture(scope="module")
def far_result(far_scene, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("far_result") / "vanilla"
    assert run_cli(vanilla_train.main, "-s", far_scene.root, "-m", output, "--iterations", 2) == 0
    return output


def test_known_geometry_is_moved_with_the_capture(far_scene, far_result, tmp_path, monkeypatch):
    ball = sphere()
    samples = sample_surface(ball.vertices, ball.faces, 5_000)
    box = np.stack([ball.vertices.min(axis=0), ball.vertices.max(axis=0)])
    reference = make_reference(ball, samples.points, samples.normals, box)
    monkeypatch.setattr(mesh_quality, "read_reference", lambda root: reference.moved_back(-UTM))
    (far_scene.root / mesh_quality.OBJECT_FILE).touch()
    mesh_path = tmp_path / "mesh.ply"
    write_mesh_ply(mesh_path, replace(ball, vertices=ball.vertices + UTM - read_offset(far_result)))
    words = ["-s", str(far_scene.root), "-c", str(far_result), "-i", "2", "-r", "density"]
    plan = train_plan(*words)
    quality = _measure(plan, PipelineResult(coarse_mesh=mesh_path))["coarse mesh"]
    assert quality.chamfer < 1e-4
    assert quality.f_scores[-1] == 1.0


@pytest.mark.parametrize("to", ["ply", "gltf", "usd", "las"])
def test_gaussians_are_exported_in_the_coordinates_of_the_original(far_result, tmp_path, to):
    target = tmp_path / {"gltf": "out.gltf.glb"}.get(to, f"out.{to}")
    words = (far_result, "--to", to, "-o", target, "--original_frame")
    assert run_cli(export.main, *words) == 0
    local = read_gaussian_ply(point_cloud_path(far_result, 2)).means.double().numpy()
    expected = local + read_offset(far_result)
    if to == "ply":
        vertices = PlyData.read(target)["vertex"].data
        found = np.stack([vertices[axis] for axis in "xyz"], axis=1)
    elif to == "gltf":
        scene = trimesh.load(target)
        (cloud,) = scene.dump()
        found = np.asarray(cloud.vertices) * (1, -1, -1)
    elif to == "las":
        found = np.array(pytest.importorskip("laspy").read(target).xyz)
    else:
        stage = Usd.Stage.Open(str(target))
        prim = stage.GetDefaultPrim()
        shift = UsdGeom.Xformable(prim).GetLocalTransformation().ExtractTranslation()
        found = (np.array(prim.GetAttribute("positions").Get()) + np.array(shift)) * (1, -1, -1)
    order = np.lexsort(expected.T), np.lexsort(found.T)
    np.testing.assert_allclose(found[order[1]], expected[order[0]], atol=1e-5)


@pytest.mark.parametrize("to", ["ply", "gltf"])
def test_files_of_the_folder_of_results_are_brought_back_first(far_scene, far_result, to, tmp_path):
    ply = point_cloud_path(far_result, 2)
    checkpoint = load_reference_checkpoint(far_result, None, print)
    scene = load_scene_for_checkpoint(far_scene.root, checkpoint, size_rule=FULL, notify=print)
    made = FinalResults(None, ply, lambda: read_gaussian_ply(ply))
    write_result_folder(tmp_path / "scan", made, scene, PlacementOptions(scale_factor=2.0))
    files = {}
    for name, source in (("upright", tmp_path / "scan" / "splats.ply"), ("plain", far_result)):
        target = tmp_path / f"{name}.{to}.glb" if to == "gltf" else tmp_path / f"{name}.{to}"
        words = ("--to", to, "-o", target, "-s", far_scene.root, "-c", far_result)
        assert run_cli(export.main, source, *words, "--original_frame") == 0
        loaded = trimesh.load(target, process=False, force="scene")
        files[name] = np.concatenate([np.asarray(part.vertices) for part in loaded.dump()])
    np.testing.assert_allclose(files["upright"], files["plain"], atol=1e-4)


def test_formats_without_digits_for_it_are_refused(far_result, tmp_path, capsys):
    words = (far_result, "--to", "splat", "-o", tmp_path / "out.splat", "--original_frame")
    assert "choose --to ply, gltf, usd, glb, obj" in refusal(capsys, export.main, *words)
    assert not list(tmp_path.iterdir())


def test_meshes_are_moved_to_the_coordinates_of_the_original(tmp_path):
    mesh = four_colored_faces()
    write_textured_mesh(tmp_path / "mesh.obj", mesh)
    for to in ("obj", "glb"):
        path = tmp_path / f"mesh.{to}"
        turn = FORMATS[to].matrix(World.CAPTURE)[:3, :3]
        FORMATS[to].move_to_original(path, turn @ UTM)
        scene = trimesh.load(path, process=False, force="scene")
        found = np.concatenate([np.asarray(part.vertices) for part in scene.dump()])
        if to == "glb":
            found = found * (1, -1, -1)
        low, high = mesh.vertices.numpy().min(axis=0), mesh.vertices.numpy().max(axis=0)
        np.testing.assert_allclose(found.min(axis=0), low + UTM, atol=1e-5)
        np.testing.assert_allclose(found.max(axis=0), high + UTM, atol=1e-5)
