# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders of plain 3DGS."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.formats.ply import (
    read_gaussian_ply,
    read_point_ply,
    write_gaussian_ply,
    write_point_ply,
)
from gaussian_splatting.scenes.reference_layout import (
    load_reference_checkpoint,
    point_cloud_path,
    read_cameras_json,
    write_cameras_json,
    write_cfg_args,
)
from sugar_utils.errors import UserError
from tests.support.golden import GOLDEN_DIR, golden_cameras, load_golden

GOLDEN = GOLDEN_DIR / "case10_checkpoint_A"


def make_cameras() -> list[Camera]:
    rng = np.random.default_rng(0)
    cameras = []
    for i in range(3):
        rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        rotation *= np.linalg.det(rotation)
        size = (40 + i, 30)
        cameras.append(
            Camera(f"a/{i}.b.JPG", *size, 33.3, 34.4, 19.1, 16.2, rotation, rng.normal(size=3))
        )
    return cameras


def make_checkpoint(root: Path, *iterations: int) -> Path:
    for iteration in iterations:
        cloud = read_gaussian_ply(point_cloud_path(GOLDEN, 7000))
        write_gaussian_ply(point_cloud_path(root, iteration), cloud)
    return root


def test_the_recorded_checkpoint_is_understood():
    checkpoint = load_reference_checkpoint(GOLDEN)
    assert checkpoint.iteration == 7000
    assert checkpoint.settings["sh_degree"] == 3
    assert checkpoint.settings["white_background"] is False
    assert not any(stored.has_principal_point for stored in checkpoint.cameras)
    assert len(checkpoint.read_cloud()) == 570
    by_name = {stored.camera.name: stored.camera for stored in checkpoint.cameras}
    for expected in golden_cameras(load_golden("case02_raster_A")):
        camera = by_name[expected.name]
        np.testing.assert_allclose(camera.rotation, expected.rotation, atol=1e-6)
        np.testing.assert_allclose(camera.translation, expected.translation, atol=1e-5)
        for key in ("width", "height", "fx", "fy", "cx", "cy"):
            assert getattr(camera, key) == getattr(expected, key)


def test_cameras_survive_the_round_trip_with_test_cameras_first(tmp_path):
    cameras = make_cameras()
    write_cameras_json(tmp_path, cameras[1:], cameras[:1])
    entries = json.loads((tmp_path / "cameras.json").read_text())
    assert [entry["id"] for entry in entries] == [0, 1, 2]
    assert list(entries[0]) == [
        *("id", "img_name", "width", "height", "position", "rotation", "fy", "fx", "cx", "cy")
    ]
    np.testing.assert_allclose(entries[0]["position"], cameras[0].center)
    np.testing.assert_array_equal(entries[0]["rotation"], cameras[0].rotation.T)
    for stored, camera in zip(read_cameras_json(tmp_path / "cameras.json"), cameras, strict=True):
        assert stored.has_principal_point
        assert stored.camera.name == camera.name
        np.testing.assert_array_equal(stored.camera.rotation, camera.rotation)
        np.testing.assert_allclose(stored.camera.translation, camera.translation, atol=1e-14)
        for key in ("width", "height", "fx", "fy", "cx", "cy"):
            assert getattr(stored.camera, key) == getattr(camera, key)


def test_cfg_args_has_the_text_of_3dgs_and_reads_back(tmp_path):
    root = make_checkpoint(tmp_path / "it's", 5)
    write_cfg_args(root, source_path="some scene", eval_split=True)
    assert (root / "cfg_args").read_text() == (
        f"Namespace(sh_degree=3, source_path='some scene', model_path={str(root)!r}, "
        "images='images', resolution=-1, white_background=False, data_device='cuda', eval=True)"
    )
    settings = load_reference_checkpoint(root, 5).settings
    assert settings["model_path"] == str(root)
    assert settings["eval"] is True


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_cfg_args_may_begin_with_the_mark_of_an_encoding(tmp_path, encoding):
    make_checkpoint(tmp_path, 5)
    (tmp_path / "cfg_args").write_text("Namespace(images='images_4')", encoding=encoding)
    assert load_reference_checkpoint(tmp_path, 5, pytest.fail).images_dir == "images_4"


@pytest.mark.parametrize(
    "text", ["__import__('os').system('true')", "Namespace(", "", "Namespace(a=print(1), b=2)"]
)
def test_cfg_args_is_never_executed(tmp_path, text, capsys):
    make_checkpoint(tmp_path, 5)
    (tmp_path / "cfg_args").write_text(text)
    settings = load_reference_checkpoint(tmp_path, 5, lambda message: None).settings
    assert settings == ({"b": 2} if "b=2" in text else {})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_bare_checkpoint_is_enough(tmp_path, slash):
    make_checkpoint(tmp_path, 7000)
    checkpoint = load_reference_checkpoint(f"{tmp_path}{slash}", notify=pytest.fail)
    assert checkpoint.root == tmp_path
    assert checkpoint.cameras is None
    assert checkpoint.settings == {}


def test_a_ply_names_its_checkpoint_if_it_lies_in_one(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "model")
    inside = point_cloud_path(tmp_path / "model", 7000)
    for path in (inside, inside.parent):
        checkpoint = load_reference_checkpoint(path, 30000)
        assert checkpoint.root == tmp_path / "model"
        assert checkpoint.iteration == 7000
        assert len(checkpoint.cameras) == 4
    shutil.copy(inside, tmp_path / "splat.ply")
    alone = load_reference_checkpoint(tmp_path / "splat.ply")
    assert (alone.ply_path, alone.iteration) == (tmp_path / "splat.ply", None)
    assert alone.cameras is None


def test_a_wrong_iteration_lists_the_right_ones(tmp_path):
    make_checkpoint(tmp_path, 7000, 30000)
    (tmp_path / "point_cloud/iteration_25000").mkdir()
    with pytest.raises(UserError, match="no iteration 29000, only 7000, 30000; use -i 30000"):
        load_reference_checkpoint(tmp_path, 29000)
    assert load_reference_checkpoint(tmp_path, None).iteration == 30000


def test_folders_that_are_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(UserError, match="no point_cloud/iteration_N"):
        load_reference_checkpoint(tmp_path)
    with pytest.raises(UserError, match="no such checkpoint folder"):
        load_reference_checkpoint(tmp_path / "absent")
    with pytest.raises(UserError, match="absent.ply: no such file; check --checkpoint_path"):
        load_reference_checkpoint(tmp_path / "absent.ply")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fx": None}, "entry 1"),
        ({"fx": -1.0}, "entry 1.*fx"),
        ({"width": 0}, "entry 1.*width"),
        ({"rotation": [[1, 0, 0], [0, 1, 0]]}, "entry 1"),
        ({"rotation": [[2, 0, 0], [0, 2, 0], [0, 0, 2]]}, "entry 1.*rotation"),
        ({"rotation": [[1, 0, 0], [0, 1, 0], [0, 0, -1]]}, "entry 1.*rotation"),
        ({"position": [0, 0, float("nan")]}, "entry 1.*position"),
        ({"position": [0, 0, 1e300]}, "entry 1.*position"),
        ({"width": 10**300}, "entry 1.*width"),
        ({"img_name": ["a"]}, "entry 1.*img_name"),
        ({"img_name": "a\0.png"}, "entry 1"),
    ],
)
def test_a_camera_that_makes_no_sense_is_named(tmp_path, change, message):
    write_cameras_json(tmp_path, make_cameras(), [])
    path = tmp_path / "cameras.json"
    entries = json.loads(path.read_text())
    entries[1] |= change
    path.write_text(json.dumps(entries))
    with pytest.raises(UserError, match=message):
        read_cameras_json(path)


def test_a_lacking_key_is_named(tmp_path):
    write_cameras_json(tmp_path, make_cameras(), [])
    path = tmp_path / "cameras.json"
    entries = json.loads(path.read_text())
    del entries[2]["img_name"]
    path.write_text(json.dumps(entries))
    with pytest.raises(UserError, match="entry 2: .*field img_name"):
        read_cameras_json(path)


@pytest.mark.parametrize("text", ["{}", "[]", "[1]", "[", "\x00"])
def test_a_damaged_cameras_json_is_named(tmp_path, text):
    (tmp_path / "cameras.json").write_text(text)
    with pytest.raises(UserError, match=r"cameras\.json"):
        read_cameras_json(tmp_path / "cameras.json")


def test_the_initial_points_are_written(tmp_path):
    points = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_point_ply(tmp_path / "input.ply", points, np.full((2, 3), 7, np.uint8))
    read, colors = read_point_ply(tmp_path / "input.ply")
    np.testing.assert_array_equal(read, points)
    assert (colors == 7).all()
