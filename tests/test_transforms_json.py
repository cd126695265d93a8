# SPDX-License-Identifier: Apache-2.0
"""Scenes described by transforms*.json."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from gaussian_splatting.formats.ply import write_point_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from gaussian_splatting.scenes.transforms_json import (
    find_transforms,
    random_points,
    read_transforms,
)
from sugar_utils.errors import UserError
from tests.support.captures import ANGLE, look_at_origin, write_scene


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


def test_matrices_may_lack_their_last_row(tmp_path):
    path = write_scene(tmp_path)
    expected = read_transforms(tmp_path).train_cameras
    content = json.loads(path.read_text())
    for frame in content["frames"]:
        frame["transform_matrix"] = frame["transform_matrix"][:3]
    path.write_text(json.dumps(content))
    for found, camera in zip(read_transforms(tmp_path).train_cameras, expected, strict=True):
        np.testing.assert_array_equal(found.rotation, camera.rotation)
        np.testing.assert_array_equal(found.translation, camera.translation)


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


def with_lists(root, **extra):
    """A scene of six frames, train/r_0 to r_5."""
    path = write_scene(root, "transforms.json")
    content = json.loads(path.read_text())
    for number in range(3, 6):
        Image.new("RGB", (20, 16)).save(root / "train" / f"r_{number}.png")
        pose = look_at_origin((3.0, 0.5 * number, 1.0))
        content["frames"].append({"file_path": f"train/r_{number}.png", "transform_matrix": pose})
    path.write_text(json.dumps(content | extra))


def names_of(cameras):
    return [camera.name[len("train/r_") : -len(".png")] for camera in cameras]


@pytest.mark.parametrize(
    ("lists", "train", "held_out"),
    [
        ({"test_filenames": ["train/r_1.png", "./train/r_4.png"]}, "0235", "14"),
        ({"test_filenames": ["train/r_1"], "val_filenames": ["train\\r_2.png"]}, "0345", "12"),
        ({"train_filenames": ["train/r_0", "r_1.png"]}, "01", "2345"),
        (
            {"train_filenames": ["train/r_0", "train/r_3"], "test_filenames": ["train/r_3"]},
            "0",
            "3",
        ),
        ({"train_filenames": [], "test_filenames": []}, "012345", None),
    ],
)
def test_lists_of_nerfstudio_say_what_is_held_out(tmp_path, lists, train, held_out):
    with_lists(tmp_path, **lists)
    said = []
    model = read_transforms(tmp_path, notify=said.append)
    assert "".join(names_of(model.train_cameras)) == train
    assert (model.test_cameras and "".join(names_of(model.test_cameras))) == held_out
    n_unused = 6 - len(model.cameras)
    assert any(f"{n_unused} views are in no list" in line for line in said) == (n_unused > 0)


def test_views_that_are_declared_as_test_views_are_trained_on_only_without_eval(tmp_path):
    with_lists(tmp_path, test_filenames=["train/r_0", "train/r_5"])
    how = {"size_rule": VanillaSize(), "notify": lambda message: None}
    scene = load_scene(tmp_path, **how)
    assert names_of(scene.test_cameras) == ["0", "5"]
    assert names_of(scene.train_cameras) == ["1", "2", "3", "4"]
    assert len(load_scene(tmp_path, eval_split=False, **how).train_cameras) == 6


def test_a_list_that_names_no_frame_is_an_error_with_the_nearest(tmp_path):
    with_lists(tmp_path, test_filenames=["train/r_2.png", "train/r_55.png"])
    with pytest.raises(UserError, match=r"test_filenames: .*r_55.png; nearest .* train/r_5.png"):
        read_transforms(tmp_path)


def test_keys_that_are_not_used_are_named_in_one_line(tmp_path):
    with_lists(tmp_path, applied_scale=2.0, aabb_scale=16, something_else=1)
    said = []
    read_transforms(tmp_path, notify=said.append)
    assert [line for line in said if "not used" in line] == [
        f"note: {tmp_path / 'transforms.json'}: not used: aabb_scale, applied_scale"
    ]


def test_photographs_are_found_by_paths_of_another_machine_and_in_images(tmp_path):
    path = write_scene(tmp_path, "transforms.json")
    content = json.loads(path.read_text())
    for number, frame in enumerate(content["frames"]):
        frame["file_path"] = f"C:\\Users\\me\\cup\\r_{number}.jpg"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="3 of 3 images are missing.*or fix file_path"):
        read_transforms(tmp_path)
    (tmp_path / "train").rename(tmp_path / "images_2")
    cameras = read_transforms(tmp_path, images_dir="images_2").train_cameras
    assert [camera.name for camera in cameras] == [f"images_2/r_{i}.png" for i in range(3)]
    (tmp_path / "images_2").rename(tmp_path / "images")
    assert len(read_transforms(tmp_path).train_cameras) == 3


@pytest.mark.parametrize(("encoding", "stem"), [("gbk", "中誠"), ("cp1252", "Straße")])
def test_a_file_in_the_encoding_of_another_system(tmp_path, encoding, stem):
    path = write_scene(tmp_path, "transforms.json")
    (tmp_path / "train/r_0.png").rename(tmp_path / f"train/{stem}.png")
    path.write_bytes(path.read_text().replace("r_0", stem).encode(encoding))
    camera = read_transforms(tmp_path).train_cameras[0]
    assert camera.image_path == tmp_path / f"train/{stem}.png"
    assert camera.name == f"train/{stem}.png"


def test_masks_that_frames_name_and_that_are_missing_are_told(tmp_path):
    path = write_scene(tmp_path, "transforms.json")
    content = json.loads(path.read_text())
    for frame in content["frames"]:
        frame["mask_path"] = f"hidden/{frame['file_path'][-3:]}.png"
    path.write_text(json.dumps(content))
    said = []
    assert read_transforms(tmp_path, notify=said.append).train_cameras[0].mask_path is None
    assert any("3 of the 3 masks that frames name are not there" in line for line in said)


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
