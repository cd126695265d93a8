# SPDX-License-Identifier: Apache-2.0
"""Exports stand upright and in metres where that is asked for, and nothing else moves."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from scipy.spatial.transform import Rotation

from gaussian_splatting.core.cloud import rotation_matrices
from gaussian_splatting.data.cameras import Camera, up_direction, upright_rotation
from gaussian_splatting.formats.placement import placed_gaussians, placed_path
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.placing import PlacementOptions, placing_matrix
from sugar_extractors.texture.placed_copy import write_placed
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, write_textured_mesh
from sugar_utils.errors import UserError
from tests.support.photographed_room import camera_poses
from tests.test_moved_cloud import cloud_of


def cameras_in(world: np.ndarray, n: int = 12, reach: float = 5.0) -> list[Camera]:
    """Cameras on an arc around z, in a world that is turned."""
    return [
        Camera(f"IMG {k}.jpg", 64, 48, 50, 50, 32, 24, r @ world.T, -r @ c)
        for k, (r, c) in enumerate(camera_poses(n, reach))
    ]


def ground(n: int = 400) -> np.ndarray:
    """Points of a floor z = 0, and some above it."""
    rng = np.random.default_rng(0)
    flat = np.concatenate([rng.uniform(-2, 2, (n, 2)), np.zeros((n, 1))], axis=1)
    return np.concatenate([flat, rng.uniform(-0.5, 0.5, (n, 3)) + [0, 0, 0.6]])


def scene_of(cameras: list[Camera]) -> Scene:
    """A scene of cameras alone."""
    scene = object.__new__(Scene)
    for field in dataclasses.fields(Scene):
        object.__setattr__(scene, field.name, None)
    object.__setattr__(scene, "original_train_cameras", cameras)
    object.__setattr__(scene, "original_test_cameras", [])
    object.__setattr__(scene, "dropped_views", {})
    object.__setattr__(scene, "points", np.zeros((0, 3)))
    return scene


@pytest.fixture(params=[0, 1, 2])
def world(request) -> np.ndarray:
    q, r = np.linalg.qr(np.random.default_rng(request.param).normal(size=(3, 3)))
    q = q * np.sign(np.diag(r))
    return q * np.sign(np.linalg.det(q))


def angle_to(direction: np.ndarray, up: np.ndarray) -> float:
    return float(np.degrees(np.arccos(np.clip(direction @ up, -1, 1))))


def test_up_is_found_in_any_world(world):
    cameras = cameras_in(world)
    rotations = np.stack([camera.rotation for camera in cameras])
    up = world @ [0.0, 0.0, 1.0]
    assert angle_to(up_direction(rotations, np.zeros((0, 3))), up) < 1e-3
    assert angle_to(up_direction(rotations, ground() @ world.T), up) < 0.1


def test_the_ground_corrects_cameras_that_were_all_held_askew(world):
    roll = np.radians(8)
    turn = np.array([[np.cos(roll), -np.sin(roll), 0], [np.sin(roll), np.cos(roll), 0], [0, 0, 1]])
    # On a short arc a roll that all have looks like another vertical.
    rotations = np.stack([turn @ camera.rotation for camera in cameras_in(world, 6, 0.3)])
    up = world @ [0.0, 0.0, 1.0]
    assert angle_to(up_direction(rotations, np.zeros((0, 3))), up) > 3
    assert angle_to(up_direction(rotations, ground() @ world.T), up) < 0.1


def test_a_wall_is_no_ground(world):
    rng = np.random.default_rng(1)
    wall = np.concatenate([rng.uniform(-2, 2, (800, 2)), np.zeros((800, 1))], axis=1)[:, [2, 0, 1]]
    rotations = np.stack([camera.rotation for camera in cameras_in(world)])
    assert angle_to(up_direction(rotations, wall @ world.T), world @ [0.0, 0.0, 1.0]) < 1e-3


def test_the_rotation_is_one_and_brings_up_to_y(world):
    up, front = world[:, 2], world[:, 0] + 0.7 * world[:, 2]
    rotation = upright_rotation(up, front)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1)
    np.testing.assert_allclose(rotation @ up, [0, 1, 0], atol=1e-12)
    np.testing.assert_allclose(rotation @ world[:, 0], [0, 0, 1], atol=1e-12)
    above = upright_rotation(up, up)
    np.testing.assert_allclose(above @ up, [0, 1, 0], atol=1e-12)


def test_a_known_distance_gives_metres(world):
    cameras = cameras_in(world)
    vertices = ground() @ world.T
    for a, b in (("IMG 2.jpg", "IMG 7"), ("1,0,0", "(1, 0, 2.5)")):
        options = PlacementOptions(known_distance=(a, b, "1.25"))
        matrix = placing_matrix(cameras, ground(), vertices, options)
        apart = 2.5
        if a == "IMG 2.jpg":
            apart = np.linalg.norm(cameras[2].center - cameras[7].center)
        np.testing.assert_allclose(matrix, np.diag([*[1.25 / apart] * 3, 1.0]))


def test_a_point_in_original_coordinates_and_a_photograph_give_metres(world):
    cameras = cameras_in(world)
    offset = np.array([20_000.0, 5_000.0, 300.0])
    point = cameras[2].center + [0, 0, 2.5]
    for shift in (offset, np.zeros(3)):
        text = ",".join(f"{value:.17g}" for value in point + shift)
        options = PlacementOptions(known_distance=("IMG 2.jpg", text, "1.25"))
        matrix = placing_matrix(cameras, ground(), ground(), options, offset)
        np.testing.assert_allclose(matrix, np.diag([0.5, 0.5, 0.5, 1.0]), atol=1e-9)


def test_upright_meshes_stand_on_zero(world):
    vertices = ground() @ world.T + 3
    options = PlacementOptions(orient="up", scale_factor=2.0)
    matrix = placing_matrix(cameras_in(world), ground() @ world.T + 3, vertices, options)
    moved = vertices @ matrix[:3, :3].T + matrix[:3, 3]
    assert moved[:, 1].min() == pytest.approx(0, abs=1e-9)
    assert np.ptp(moved[:, 1]) == pytest.approx(2 * 1.1, abs=0.1)
    assert np.abs(np.median(moved[:, [0, 2]], axis=0)).max() < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"known_distance": ("IMG 1.jpg", "IMG 99.jpg", "1")},
            "IMG 99.jpg: neither a registered photograph",
        ),
        ({"known_distance": ("IMG 1.jpg", "IMG 1", "1")}, "both are the same place"),
        ({"known_distance": ("a", "b", "far")}, "must be a number of metres"),
        ({"known_distance": ("a", "b", "-1")}, "must be a number of metres"),
        ({"known_distance": ("a", "b", "1"), "scale_factor": 2.0}, "both give a scale"),
    ],
)
def test_what_gives_no_scale_is_one_line(options, message):
    with pytest.raises(UserError, match=message):
        placing_matrix(cameras_in(np.eye(3)), ground(), ground(), PlacementOptions(**options))


def test_the_copy_opens_upright_in_another_program(tmp_path, world):
    corners = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 2.0]])
    faces = [[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]]
    mesh = TexturedMesh(
        torch.tensor(corners @ world.T, dtype=torch.float32),
        torch.tensor(faces),
        torch.rand(4, 3, 2),
        torch.zeros(4, 4, 3, dtype=torch.uint8),
    )
    obj = tmp_path / "mesh.obj"
    write_textured_mesh(obj, mesh)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    scene = scene_of(cameras_in(world))
    options = PlacementOptions(orient="up", known_distance=("0,0,0", "0,0,1", "0.5"))
    lines: list[str] = []
    # A Gaussian at each corner, its longest axis along what was up.
    cloud = cloud_of(4)
    up = torch.from_numpy(Rotation.align_vectors([world[:, 2]], [[1.0, 0, 0]])[0].as_quat())
    cloud = replace(cloud, means=mesh.vertices.double(), quats=up[[3, 0, 1, 2]].expand(4, 4))
    write_placed(obj, scene, lambda: cloud, options, True, lines.append)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    note = json.loads((tmp_path / "mesh_placed.json").read_text())
    assert (note["up"], note["unit"]) == ("+y", "metre")
    matrix = np.array(note["matrix"])
    expected = mesh.vertices.numpy() @ matrix[:3, :3].T + matrix[:3, 3]
    for suffix in (".obj", ".glb"):
        loaded = trimesh.load(placed_path(obj).with_suffix(suffix), force="mesh", process=False)
        assert np.ptp(loaded.vertices[:, 1]) == pytest.approx(1.0, abs=1e-5)
        assert loaded.vertices[:, 1].min() == pytest.approx(0.0, abs=1e-5)
        found = np.unique(loaded.vertices.round(4), axis=0)
        np.testing.assert_allclose(found, np.unique(expected.round(4), axis=0), atol=2e-4)
    gaussians = read_gaussian_ply(placed_gaussians(obj))
    np.testing.assert_allclose(gaussians.means.numpy(), expected, atol=1e-5)
    scales = gaussians.log_scales - cloud.log_scales.float()
    np.testing.assert_allclose(scales.numpy(), np.log(0.5), atol=1e-6)
    axes = rotation_matrices(gaussians.quats)[:, :, 0].numpy()
    np.testing.assert_allclose(axes, [[0, 1, 0]] * 4, atol=1e-5)
    times = placed_path(obj).stat().st_mtime_ns
    write_placed(obj, scene, None, options, True, lines.append)
    assert placed_path(obj).stat().st_mtime_ns == times
    assert all("m: " in line for line in lines)


@pytest.mark.parametrize("orient", ["none", "up"])
def test_the_note_tells_where_each_file_is(tmp_path, world, orient):
    """OBJ and Gaussians by ``matrix``, the GLB by ``glb_matrix``: its format wants y up."""
    corners = torch.tensor(np.random.default_rng(3).normal(size=(3, 3)), dtype=torch.float32)
    mesh = TexturedMesh(
        corners, torch.tensor([[0, 1, 2]]), torch.rand(1, 3, 2), torch.zeros(4, 4, 3).byte()
    )
    obj = tmp_path / "mesh.obj"
    write_textured_mesh(obj, mesh)
    cloud = replace(cloud_of(3), means=corners.double())
    options = PlacementOptions(orient=orient, scale_factor=3.0)
    write_placed(obj, scene_of(cameras_in(world)), lambda: cloud, options, True, lambda _: None)
    note = json.loads(placed_path(obj).with_suffix(".json").read_text())
    for suffix, key in ((".obj", "matrix"), (".glb", "glb_matrix")):
        matrix = np.array(note[key])
        expected = corners.numpy() @ matrix[:3, :3].T + matrix[:3, 3]
        loaded = trimesh.load(placed_path(obj).with_suffix(suffix), force="mesh", process=False)
        found = loaded.vertices[np.lexsort(loaded.vertices.T)]
        np.testing.assert_allclose(found, expected[np.lexsort(expected.T)], atol=1e-4)
    found = read_gaussian_ply(placed_gaussians(obj)).means.numpy()
    matrix = np.array(note["matrix"])
    np.testing.assert_allclose(found, corners.numpy() @ matrix[:3, :3].T + matrix[:3, 3], atol=1e-4)


def test_paths_of_the_copy_lie_beside_the_mesh():
    assert placed_path(Path("a/b.obj")) == Path("a/b_placed.obj")
