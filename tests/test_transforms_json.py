# SPDX-License-Identifier: Apache-2.0
"""Scenes described by transforms*.json."""

import json
import math

import numpy as np
import pytest

from gaussian_splatting.data.ply import write_point_ply
from gaussian_splatting.data.transforms_json import find_transforms, random_points, read_transforms
from sugar_utils.errors import UserError
from tests.support.captures import ANGLE, write_scene


def test_opengl_axes_become_colmap_axes(tmp_path):
    write_scene(tmp_path)
    model = read_transforms(tmp_path)
    for i, camera in enumerate(model.train_cameras):
        np.testing.assert_allclose(camera.center, [3.0, 0.5 * i - 0.4, 1.0], atol=1e-12)
        origin = camera.translation
        np.testing.assert_allclose(origin[:2], 0, atol=1e-12)
        assert origin[2] > 3
        # World up is up in the image: y points down in COLMAP's axes.
        assert (camera.rotation @ [0, 0, 1])[1] < 0
        assert np.linalg.det(camera.rotation) == pytest.approx(1)


def test_train_and_test_files_are_read_with_unique_names(tmp_path):
    write_scene(tmp_path)
    write_scene(tmp_path, "transforms_test.json")
    model = read_transforms(tmp_path)
    assert [c.name for c in model.train_cameras] == [f"train/r_{i}.png" for i in range(3)]
    assert [c.name for c in model.test_cameras] == [f"test/r_{i}.png" for i in range(3)]
    camera = model.train_cameras[0]
    assert (camera.width, camera.height, camera.cx, camera.cy) == (20, 16, 10.0, 8.0)
    assert camera.fx == camera.fy == pytest.approx(10 / math.tan(ANGLE / 2))
    assert camera.image_path == tmp_path / "train/r_0.png"


def test_intrinsics_of_a_single_file_are_used_with_frames_overriding(tmp_path):
    path = write_scene(
        tmp_path, "transforms.json", fl_x=30.0, fl_y=31.0, cx=9.0, cy=7.5, w=40, h=32, k1=0.0
    )
    content = json.loads(path.read_text())
    content["frames"][1]["fl_x"] = 33.0
    path.write_text(json.dumps(content))
    assert find_transforms(tmp_path) == [path]
    first, second, _ = read_transforms(tmp_path).train_cameras
    assert (first.width, first.height, first.fx, first.fy, first.cx, first.cy) == (
        *(40, 32, 30.0, 31.0),
        *(9.0, 7.5),
    )
    assert second.fx == 33.0


@pytest.mark.parametrize(
    "extra", [{"k1": 0.1}, {"p2": -0.01}, {"camera_model": "OPENCV_FISHEYE"}, {"is_fisheye": True}]
)
def test_a_distorted_lens_is_refused_with_a_way_out(tmp_path, extra):
    write_scene(tmp_path, "transforms.json", **extra)
    with pytest.raises(UserError, match="undistort the images"):
        read_transforms(tmp_path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"frames": []}, "frames"),
        ({"frames": [{"file_path": 3}]}, "file_path"),
        ({"camera_angle_x": None}, "focal length"),
        ({"camera_angle_x": "wide"}, "camera_angle_x"),
        ({"fl_x": float("inf")}, "fl_x"),
        ({"w": 10**300}, "w"),
        ({"camera_model": 3}, "camera_model"),
        ({"ply_file_path": ["a"]}, "ply_file_path"),
    ],
)
def test_unusable_files_are_named(tmp_path, extra, message):
    write_scene(tmp_path, **extra)
    with pytest.raises(UserError, match=rf"transforms_train\.json.*{message}"):
        read_transforms(tmp_path)


@pytest.mark.parametrize("matrix", [None, [[1, 2]], np.diag([2.0, 2, 2, 1]).tolist(), "pose"])
def test_a_matrix_that_is_no_pose_is_refused(tmp_path, matrix):
    path = write_scene(tmp_path)
    content = json.loads(path.read_text())
    content["frames"][2]["transform_matrix"] = matrix
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"(frames\[2\]|r_2).*transform_matrix"):
        read_transforms(tmp_path)


def test_missing_images_are_one_error(tmp_path):
    write_scene(tmp_path)
    (tmp_path / "train/r_1.png").unlink()
    with pytest.raises(UserError, match="1 of 3 images are missing.*r_1"):
        read_transforms(tmp_path)
    assert len(read_transforms(tmp_path, missing_ok=True).train_cameras) == 2


def test_random_points_depend_on_the_seed_alone():
    points, colors = random_points(1)
    assert points.shape == colors.shape == (100_000, 3)
    assert points.dtype == np.float32
    assert colors.dtype == np.uint8
    assert np.abs(points).max() <= 1.3
    assert np.abs(points.mean(axis=0)).max() < 0.02
    assert colors.min() == 0
    assert colors.max() == 255
    np.testing.assert_array_equal(points, random_points(1)[0])
    assert (points != random_points(2)[0]).any()


def test_points_of_a_nerfstudio_scene_are_used(tmp_path):
    write_scene(tmp_path, "transforms.json", ply_file_path="sparse_pc.ply")
    write_point_ply(tmp_path / "sparse_pc.ply", np.ones((4, 3)), np.full((4, 3), 9, np.uint8))
    model = read_transforms(tmp_path, notify=lambda message: None)
    np.testing.assert_array_equal(model.points, np.ones((4, 3)))
    assert (model.points_rgb == 9).all()
