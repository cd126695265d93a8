# SPDX-License-Identifier: Apache-2.0
"""Scenes as the trainers see them, with and without a checkpoint."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gaussian_splatting.data.cameras import camera_extent
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.scenes.reference_layout import (
    ReferenceCheckpoint,
    load_reference_checkpoint,
    read_cameras_json,
    write_cameras_json,
)
from gaussian_splatting.scenes.scene import VanillaSize, load_scene, load_scene_for_checkpoint
from sugar_trainers.capture import SugarSize
from sugar_utils.errors import UserError
from tests.support.captures import PINHOLE, make_scene, write_scene
from tests.support.golden import GOLDEN_DIR, load_golden

FULL = SugarSize()
NAMES = [f"{i:02d}.png" for i in range(17)]


def checkpoint_of(root: Path, cameras=None) -> ReferenceCheckpoint:
    """A checkpoint of which only cameras.json matters."""
    if cameras is not None:
        write_cameras_json(root, cameras, [])
    path = root / "cameras.json"
    stored = read_cameras_json(path) if path.is_file() else None
    return ReferenceCheckpoint(root, root / "none.ply", 7000, stored)


def without_principal_points(checkpoint: ReferenceCheckpoint, rename=lambda name: name):
    """Write the file of another 3DGS program for the same cameras."""
    path = checkpoint.root / "cameras.json"
    entries = json.loads(path.read_text())
    for entry in entries:
        del entry["cx"], entry["cy"]
        entry["img_name"] = rename(entry["img_name"])
    path.write_text(json.dumps(entries))
    return checkpoint_of(checkpoint.root)


def names_of(cameras) -> list[str]:
    return [camera.name for camera in cameras]


@pytest.fixture
def scene_root(tmp_path):
    root = tmp_path / "scene"
    make_scene(root, {name: PINHOLE for name in reversed(NAMES)})
    return root


def test_every_eighth_name_is_held_out(scene_root):
    scene = load_scene(scene_root, size_rule=FULL, notify=pytest.fail)
    assert names_of(scene.test_cameras) == ["00.png", "08.png", "16.png"]
    assert names_of(scene.train_cameras) == [n for i, n in enumerate(NAMES) if i % 8]
    assert scene.extent == pytest.approx(camera_extent(scene.train_cameras))
    assert scene.points.shape == (5, 3)
    assert "17 images, 5 points; 14 to train on, 3 held out" in scene.description
    everything = load_scene(scene_root, size_rule=FULL, eval_split=False)
    assert names_of(everything.train_cameras) == NAMES
    assert everything.test_cameras == []


def test_cameras_come_at_their_training_size(tmp_path):
    images = {
        "a.png": PINHOLE,
        "b.png": ("PINHOLE", 100, 80, [90.0, 91.0, 52.0, 39.0]),
        "c.png": ("SIMPLE_RADIAL", 60, 80, [90.0, 30.0, 40.0, 0.05]),
    }
    make_scene(tmp_path, images)
    scene = load_scene(
        tmp_path, size_rule=VanillaSize(2), eval_split=False, notify=lambda message: None
    )
    a, b, c = scene.train_cameras
    assert (a.width, a.height, a.cx, a.cy) == (20, 15, 9.0, 8.25)
    assert (b.width, b.height, b.fx, b.cx) == (50, 40, 45.0, 26.0)
    assert scene.original_train_cameras[1].width == 100
    assert abs(c.width - scene.original_train_cameras[2].width / 2) <= 0.5
    with ImageStore() as store:
        for camera in scene.train_cameras:
            assert store.get(camera).shape == (camera.height, camera.width, 3)


def test_images_shrunk_after_calibration_scale_the_intrinsics(tmp_path):
    make_scene(tmp_path, {"a.png": PINHOLE})
    half = tmp_path / "images_2"
    half.mkdir()
    Image.new("RGB", (20, 15)).save(half / "a.png")
    scene = load_scene(
        tmp_path, size_rule=FULL, images_dir="images_2", eval_split=False, notify=str
    )
    camera = scene.train_cameras[0]
    assert (camera.width, camera.fx, camera.cy) == (20, 17.5, 8.25)
    assert scene.original_train_cameras[0].width == 40


def test_images_of_another_shape_are_an_error(scene_root):
    Image.new("RGB", (30, 40)).save(scene_root / "images/03.png")
    with pytest.raises(UserError, match=r"camera 03\.png is 40 x 30 px.*30 x 40 px"):
        load_scene(scene_root, size_rule=FULL)


def test_missing_images_and_folders_are_reported_before_training(scene_root, tmp_path):
    for name in NAMES[:4]:
        (scene_root / "images" / name).unlink()
    with pytest.raises(UserError, match=r"4 of 17 images are missing.*00\.png, 01\.png, 02\.png"):
        load_scene(scene_root, size_rule=FULL)
    with pytest.raises(UserError, match="no such image folder"):
        load_scene(scene_root, size_rule=FULL, images_dir="photos")
    with pytest.raises(UserError, match="no such scene folder"):
        load_scene(tmp_path / "absent", size_rule=FULL)
    (tmp_path / "empty").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "empty" / "a.png")
    with pytest.raises(UserError, match=r"looked for .*sparse/0.*transforms_train\.json"):
        load_scene(tmp_path / "empty", size_rule=FULL)


def test_synthetic_scenes_bring_their_own_split(tmp_path):
    write_scene(tmp_path)
    write_scene(tmp_path, "transforms_test.json")
    scene = load_scene(tmp_path, size_rule=FULL)
    assert names_of(scene.test_cameras) == [f"test/r_{i}.png" for i in range(3)]
    assert names_of(scene.train_cameras) == [f"train/r_{i}.png" for i in range(3)]
    assert len(scene.points) == 100_000
    merged = load_scene(tmp_path, size_rule=FULL, eval_split=False)
    assert len(merged.train_cameras) == 6
    own = checkpoint_of(tmp_path, [*scene.test_cameras, *scene.train_cameras])
    again = load_scene_for_checkpoint(tmp_path, own, size_rule=FULL, notify=pytest.fail)
    assert names_of(again.test_cameras) == names_of(scene.test_cameras)
    assert names_of(again.train_cameras) == names_of(scene.train_cameras)


def test_our_own_checkpoint_gives_the_scene_back(scene_root, tmp_path):
    scene = load_scene(scene_root, size_rule=FULL)
    checkpoint = checkpoint_of(tmp_path, [*scene.test_cameras, *scene.train_cameras])
    again = load_scene_for_checkpoint(scene_root, checkpoint, size_rule=FULL, notify=pytest.fail)
    assert names_of(again.train_cameras) == names_of(scene.train_cameras)
    assert again.extent == pytest.approx(scene.extent)
    for a, b in zip(again.train_cameras, scene.train_cameras, strict=True):
        assert (a.fx, a.fy, a.cx, a.cy, a.image_path) == (b.fx, b.fy, b.cx, b.cy, b.image_path)
        np.testing.assert_array_equal(a.rotation, b.rotation)


@pytest.mark.parametrize("rename", [lambda name: name, lambda name: name.split(".")[0]])
def test_principal_points_are_taken_from_the_scene_where_poses_agree(scene_root, tmp_path, rename):
    scene = load_scene(scene_root, size_rule=FULL, eval_split=False)
    foreign = without_principal_points(checkpoint_of(tmp_path, scene.train_cameras), rename)
    again = load_scene_for_checkpoint(
        scene_root, foreign, size_rule=FULL, eval_split=False, notify=pytest.fail
    )
    assert names_of(again.train_cameras) == NAMES
    assert {(camera.cx, camera.cy) for camera in again.train_cameras} == {(18.0, 16.5)}


def test_the_checkpoint_wins_where_poses_disagree(scene_root, tmp_path):
    scene = load_scene(scene_root, size_rule=FULL, eval_split=False)
    moved = list(scene.train_cameras)
    shift = np.array([0, 0, 0.01 * scene.extent])
    for i in (3, 5):
        moved[i] = replace(moved[i], translation=moved[i].translation + shift)
    foreign = without_principal_points(checkpoint_of(tmp_path, moved))
    messages = []
    again = load_scene_for_checkpoint(
        scene_root, foreign, size_rule=FULL, eval_split=False, notify=messages.append
    )
    assert any("2 of 17 cameras (first: 03.png) are posed differently" in m for m in messages)
    camera = again.train_cameras[3]
    assert (camera.cx, camera.cy) == (20.0, 15.0)
    np.testing.assert_allclose(camera.center, moved[3].center, atol=1e-12)
    assert again.train_cameras[4].cx == 18.0


def test_a_checkpoint_and_photographs_are_enough(tmp_path):
    case = load_golden("case01_cameras_A")
    checkpoint = load_reference_checkpoint(GOLDEN_DIR / "case10_checkpoint_A")
    shutil.copytree(GOLDEN_DIR / "case10_checkpoint_A/images", tmp_path / "images")
    scene = load_scene_for_checkpoint(
        tmp_path, checkpoint, size_rule=FULL, eval_split=False, notify=pytest.fail
    )
    assert names_of(scene.train_cameras) == [f"view_{i:03d}" for i in range(4)]
    assert scene.train_cameras[2].image_path.name == "view_002.png"
    assert scene.extent == pytest.approx(float(case["out_E_scene"]), rel=1e-5)
    assert scene.points.shape == (0, 3)
    split = load_scene_for_checkpoint(tmp_path, checkpoint, size_rule=FULL)
    assert names_of(split.test_cameras) == ["view_000"]


def test_photographs_can_be_done_without_for_meshing(tmp_path):
    checkpoint = load_reference_checkpoint(GOLDEN_DIR / "case10_checkpoint_A")
    with pytest.raises(UserError, match="4 of 4 images are missing"):
        load_scene_for_checkpoint(tmp_path, checkpoint, size_rule=FULL)
    scene = load_scene_for_checkpoint(
        tmp_path, checkpoint, size_rule=SugarSize(img_resolution=2), require_images=False
    )
    assert scene.train_cameras[0].image_path is None
    assert (scene.train_cameras[0].width, scene.train_cameras[0].height) == (34, 25)


def test_without_cameras_json_the_scene_is_its_own(scene_root, tmp_path):
    messages = []
    scene = load_scene_for_checkpoint(
        scene_root, checkpoint_of(tmp_path), size_rule=FULL, notify=messages.append
    )
    assert len(scene.train_cameras) == 14
    assert "no cameras.json" in messages[0]


def test_a_damaged_model_does_not_stop_a_checkpoint_with_cameras(scene_root, tmp_path):
    scene = load_scene(scene_root, size_rule=FULL)
    checkpoint = checkpoint_of(tmp_path, [*scene.test_cameras, *scene.train_cameras])
    (scene_root / "sparse/0/points3D.bin").write_bytes(b"")
    messages = []
    again = load_scene_for_checkpoint(
        scene_root, checkpoint, size_rule=FULL, notify=messages.append
    )
    assert names_of(again.train_cameras) == names_of(scene.train_cameras)
    assert "points3D.bin" in messages[0]


def test_an_empty_folder_is_told_to_have_no_photographs(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"no photographs in it; put them, .*input") as caught:
        load_scene(tmp_path, size_rule=FULL)
    assert "sparse" not in str(caught.value)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"looked for a COLMAP model in sparse/0"):
        load_scene(tmp_path, size_rule=FULL)


DISTORTED = ("OPENCV", 40, 30, [35.0, 36.0, 18.0, 16.5, -0.1, 0.02, 1e-3, 1e-3])


@pytest.mark.parametrize("lens", [PINHOLE, DISTORTED], ids=["pinhole", "distorted"])
@pytest.mark.parametrize("keep", [(), ("all",)], ids=["checked", "kept"])
def test_damaged_images_are_left_out_and_named(tmp_path, lens, keep):
    make_scene(tmp_path, dict.fromkeys(NAMES, lens))
    content = (tmp_path / "images" / NAMES[1]).read_bytes()
    (tmp_path / "images" / NAMES[1]).write_bytes(content[: len(content) // 2])
    (tmp_path / "images" / NAMES[2]).write_bytes(b"")
    messages = []
    scene = load_scene(
        tmp_path, size_rule=FULL, view_options=ViewOptions(keep_views=keep), notify=messages.append
    )
    assert scene.dropped_views.keys() >= {NAMES[1], NAMES[2]}
    remaining = {*names_of(scene.train_cameras), *names_of(scene.test_cameras)}
    assert remaining.isdisjoint(NAMES[1:3])
    (line,) = [message for message in messages if "cannot be read" in message]
    assert f"left out 2 of {len(NAMES)} photographs" in line
    assert NAMES[1] in line
    assert NAMES[2] in line


def test_of_equal_names_the_last_counts(scene_root, tmp_path):
    scene = load_scene(scene_root, size_rule=FULL, eval_split=False)
    twice = [replace(scene.train_cameras[0], fx=1.0), *scene.train_cameras]
    messages = []
    again = load_scene_for_checkpoint(
        scene_root,
        checkpoint_of(tmp_path, twice),
        size_rule=FULL,
        eval_split=False,
        notify=messages.append,
    )
    assert again.train_cameras[0].fx == scene.train_cameras[0].fx
    assert "1 images more than once" in messages[0]


def test_test_views_of_a_foreign_synthetic_run_are_left_out(tmp_path):
    root = tmp_path / "lego"
    write_scene(root)
    write_scene(root, "transforms_test.json")
    scene = load_scene(root, size_rule=FULL)
    test = [replace(scene.test_cameras[i % 3], name=f"r_{i}") for i in range(200)]
    train = [replace(camera, name=f"r_{i}") for i, camera in enumerate(scene.train_cameras)]
    checkpoint = checkpoint_of(tmp_path, [*test, *train])
    foreign = without_principal_points(checkpoint)
    messages = []
    again = load_scene_for_checkpoint(root, foreign, size_rule=FULL, notify=messages.append)
    assert "200 test cameras" in messages[0]
    cameras = [*again.test_cameras, *again.train_cameras]
    assert names_of(cameras) == [f"train/r_{i}.png" for i in range(3)]
    assert len(again.test_cameras) == 1
    for camera, own in zip(cameras, scene.train_cameras, strict=True):
        np.testing.assert_allclose(camera.center, own.center, atol=1e-9)


def test_an_undistorted_scene_stays_undistorted_with_its_checkpoint(tmp_path):
    root = tmp_path / "scene"
    lens = ("SIMPLE_RADIAL", 60, 80, [90.0, 30.0, 40.0, 0.05])
    make_scene(root, {"a.png": lens, "b.png": lens})
    quiet = {"size_rule": FULL, "eval_split": False, "notify": lambda message: None}
    scene = load_scene(root, **quiet)
    checkpoint = checkpoint_of(tmp_path, scene.original_train_cameras)
    again = load_scene_for_checkpoint(root, checkpoint, **quiet)
    for a, b in zip(again.train_cameras, scene.train_cameras, strict=True):
        assert a.image_path == b.image_path
        assert (a.width, a.height, a.fx, a.cx) == (b.width, b.height, b.fx, b.cx)


@pytest.mark.slow
def test_fox_loads_whole(scenes_dir):
    scene = load_scene(scenes_dir / "fox", size_rule=SugarSize(img_resolution=2))
    assert (len(scene.train_cameras), len(scene.test_cameras)) == (43, 7)
    camera = scene.train_cameras[0]
    assert (camera.width, camera.height) == (270, 480)
    assert camera.cx == pytest.approx(276.77 * 270 / 539, abs=0.01)
    assert scene.points.shape == (14630, 3)
    with ImageStore() as store:
        assert store.get(camera).shape == (480, 270, 3)
