# SPDX-License-Identifier: Apache-2.0
"""Reading COLMAP models: made-up ones of every kind, damaged ones, and the real test scenes."""

import os
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pycolmap
import pytest
from PIL import Image

from gaussian_splatting.data.colmap import find_model, larger_model, read_colmap
from gaussian_splatting.data.images import decode_image, fit_to_file
from gaussian_splatting.data.names import ImageFolder
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.scenes.scene import load_scene
from sugar_trainers.capture import SugarSize
from sugar_utils.errors import UserError
from sugar_utils.files import temporary_cache
from tests.support.captures import PINHOLE, make_scene
from tests.support.tracks import make_observed_scene


def ignore(_message: str) -> None:
    """Takes messages that a test does not look at."""


def read(root: Path, **options):
    return read_colmap(find_model(root), ImageFolder(root / "images"), **options)


@pytest.mark.parametrize("binary", [True, False])
def test_cameras_come_back_as_they_were_written(tmp_path, binary):
    images = {
        "b.JPG": PINHOLE,
        "left/a.0001.png": ("SIMPLE_PINHOLE", 64, 20, [50.0, 31.0, 9.0]),
        "zero.png": ("OPENCV", 32, 24, [30.0, 31.0, 15.0, 13.0, 0, 0, 0, 0]),
    }
    poses = make_scene(tmp_path, images, binary=binary)
    model = read(tmp_path, notify=pytest.fail)
    assert [camera.name for camera in model.cameras] == ["b.JPG", "left/a.0001.png", "zero.png"]
    sizes = [(c.width, c.height, c.fx, c.fy, c.cx, c.cy) for c in model.cameras]
    assert sizes == [
        (40, 30, 35.0, 36.0, 18.0, 16.5),
        (64, 20, 50.0, 50.0, 31.0, 9.0),
        (32, 24, 30.0, 31.0, 15.0, 13.0),
    ]
    for camera, pose in zip(model.cameras, poses, strict=True):
        np.testing.assert_allclose(camera.rotation, pose[:, :3], atol=1e-12)
        np.testing.assert_allclose(camera.translation, pose[:, 3], atol=1e-12)
        assert camera.image_path == tmp_path / "images" / camera.name
    np.testing.assert_array_equal(model.points[:, 0], np.arange(5, dtype=np.float32) + 0.25)
    np.testing.assert_array_equal(model.points_rgb[:, 2], np.arange(5))
    assert model.points.dtype == np.float32
    assert model.points_rgb.dtype == np.uint8


@pytest.mark.parametrize("sparse", ["sparse", "colmap/sparse/0", "sparse/3"])
def test_the_model_is_found_in_its_usual_places(tmp_path, sparse):
    make_scene(tmp_path, {"a.png": PINHOLE}, sparse=sparse)
    assert find_model(tmp_path) == tmp_path / sparse


def test_a_model_from_before_rigs_is_read(tmp_path):
    make_scene(tmp_path, {"a.png": PINHOLE})
    for part in ("rigs", "frames"):
        (tmp_path / f"sparse/0/{part}.bin").unlink()
    assert len(read(tmp_path).cameras) == 1


@pytest.mark.parametrize("binary", [True, False])
def test_missing_points_leave_an_empty_cloud(tmp_path, binary):
    make_scene(tmp_path, {"a.png": PINHOLE}, binary=binary)
    next((tmp_path / "sparse/0").glob("points3D.*")).unlink()
    model = read(tmp_path)
    assert model.points.shape == (0, 3)
    assert model.points_rgb.shape == (0, 3)
    assert len(model.cameras) == 1


@pytest.mark.parametrize(
    "lens",
    [
        ("SIMPLE_RADIAL", 64, 48, [60.0, 30.0, 25.0, 0.2]),
        ("OPENCV", 64, 48, [60.0, 61.0, 30.0, 25.0, -0.1, 0.02, 1e-3, 1e-3]),
        ("OPENCV_FISHEYE", 64, 48, [60.0, 61.0, 30.0, 25.0, 0, 0, 0, 0]),
    ],
)
def test_a_distorted_lens_is_undistorted_into_the_cache(tmp_path, lens):
    make_scene(tmp_path, {"sub/a.png": lens, "b.png": PINHOLE})
    original = (tmp_path / "images/sub/a.png").read_bytes()
    messages = []
    model = read(tmp_path, notify=messages.append)
    plain, bent = model.cameras
    assert plain.image_path == tmp_path / "images/b.png"
    assert len(messages) == 1
    assert lens[0] in messages[0]
    assert bent.name == "sub/a.png"
    assert bent.image_path.is_relative_to(tmp_path / "undistorted_cache")
    with Image.open(bent.image_path) as image:
        assert image.size == (bent.width, bent.height)
    assert (tmp_path / "images/sub/a.png").read_bytes() == original

    written = bent.image_path.stat().st_mtime_ns
    again = read(tmp_path, notify=messages.append).cameras[1]
    assert again.image_path == bent.image_path
    assert again.image_path.stat().st_mtime_ns == written
    assert again.source_path == tmp_path / "images/sub/a.png"
    assert not list(tmp_path.rglob("*.tmp-*"))


def test_a_photograph_that_was_replaced_is_undistorted_again(tmp_path):
    make_scene(tmp_path, {"a.png": ("SIMPLE_RADIAL", 64, 48, [60.0, 30.0, 25.0, 0.2])})
    (tmp_path / "images/a.png").unlink()
    # Without compression, so that another picture is as long; copies may keep times as well.
    photograph, colors = tmp_path / "images/a.bmp", []
    for color in (40, 200):
        Image.new("RGB", (64, 48), (color, color, color)).save(photograph)
        os.utime(photograph, ns=(10**18, 10**18))
        (camera,) = read(tmp_path).cameras
        with Image.open(camera.image_path) as image:
            colors.append(image.getpixel((32, 24))[0])
    assert colors == [40, 200]


def test_undistortion_puts_a_scene_point_where_the_pinhole_expects_it(tmp_path):
    width, height = 200, 150
    lens = ("SIMPLE_RADIAL", width, height, [180.0, 96.0, 80.0, 0.3])
    make_scene(tmp_path, {"a.png": lens})
    distorted = pycolmap.Camera(model=lens[0], width=width, height=height, params=lens[3])
    ray = np.array([0.25, -0.2, 1.0])
    u, v = distorted.img_from_cam(ray)
    ys, xs = np.mgrid[:height, :width] + 0.5
    blob = 255 * np.exp(-((xs - u) ** 2 + (ys - v) ** 2) / 8)
    Image.fromarray(blob.astype(np.uint8)).convert("RGB").save(tmp_path / "images/a.png")

    camera = read(tmp_path, notify=ignore).cameras[0]
    with Image.open(camera.image_path) as image:
        flat = np.asarray(image.convert("L"), float)
    ys, xs = np.mgrid[: camera.height, : camera.width] + 0.5
    seen = np.array([(flat * xs).sum(), (flat * ys).sum()]) / flat.sum()
    expected = [camera.fx * ray[0] + camera.cx, camera.fy * ray[1] + camera.cy]
    np.testing.assert_allclose(seen, expected, atol=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1013, 757), (127, 95), (101, 76)])
@pytest.mark.parametrize("model", ["SIMPLE_RADIAL", "OPENCV"])
def test_a_reduced_photograph_is_undistorted_where_its_camera_expects_it(tmp_path, model, size):
    """Sides of the photograph and of its copy are rounded, each on its own."""
    width, height = 1013, 757
    focal = [900.0] if model == "SIMPLE_RADIAL" else [900.0, 930.0]
    params = [*focal, 500.0, 380.0, 0.25, *([0.0] * 3 if model == "OPENCV" else [])]
    make_scene(tmp_path, {"a.png": (model, width, height, params)})
    distorted = pycolmap.Camera(model=model, width=width, height=height, params=params)
    # Near three corners, where sizes that are wrong show most.
    rays = np.array([[0.36, 0.28, 1.0], [-0.38, 0.28, 1.0], [0.36, -0.3, 1.0]])
    places = distorted.img_from_cam(rays) * (size[0] / width, size[1] / height)
    ys, xs = np.mgrid[: size[1], : size[0]] + 0.5
    pixels = np.zeros((*size[::-1], 3), np.uint8)
    for channel, (u, v) in enumerate(places):
        pixels[..., channel] = 255 * np.exp(-((xs - u) ** 2 + (ys - v) ** 2) / 8)
    Image.fromarray(pixels).save(tmp_path / "images/a.png")

    camera = fit_to_file(read(tmp_path, notify=ignore).cameras[0])
    with Image.open(camera.image_path) as image:
        flat = np.asarray(image, float)
    ys, xs = np.mgrid[: camera.height, : camera.width] + 0.5
    for channel, ray in enumerate(rays):
        weights = flat[..., channel] / flat[..., channel].sum()
        seen = [(weights * xs).sum(), (weights * ys).sum()]
        expected = [camera.fx * ray[0] + camera.cx, camera.fy * ray[1] + camera.cy]
        np.testing.assert_allclose(seen, expected, atol=0.1)


def test_alpha_survives_undistortion(tmp_path):
    make_scene(tmp_path, {"a.png": ("SIMPLE_RADIAL", 64, 48, [60.0, 32.0, 24.0, 0.1])})
    pixels = np.full((48, 64, 4), 200, np.uint8)
    pixels[:, :32, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "images/a.png")
    camera = read(tmp_path, notify=ignore).cameras[0]
    with Image.open(camera.image_path) as image:
        alpha = np.asarray(image)[..., 3]
    assert alpha[:, 5].max() == 0
    assert alpha[20, -5] == 200


def test_a_distorted_image_that_was_shrunk_is_undistorted_at_its_own_size(tmp_path):
    make_scene(tmp_path, {"a.png": ("SIMPLE_RADIAL", 64, 48, [60.0, 32.0, 24.0, 0.1])})
    full = read(tmp_path, notify=ignore).cameras[0]
    with Image.open(tmp_path / "images/a.png") as image:
        small = image.resize((32, 24))
    small.save(tmp_path / "images/a.png")
    camera = read(tmp_path, notify=ignore).cameras[0]
    assert camera.image_path != full.image_path
    with Image.open(camera.image_path) as image:
        assert abs(image.width * 2 - full.width) <= 2


def test_missing_images_are_counted_in_one_error(tmp_path):
    make_scene(tmp_path, {f"{i}.png": PINHOLE for i in range(6)})
    for i in range(5):
        (tmp_path / f"images/{i}.png").unlink()
    with pytest.raises(UserError, match=r"5 of 6 images are missing.*0\.png, 1\.png, 2\.png, \.\."):
        read(tmp_path)
    cameras = read(tmp_path, missing_ok=True).cameras
    assert [camera.image_path is None for camera in cameras] == [True] * 5 + [False]


@pytest.mark.parametrize("part", ["cameras", "images", "points3D", "rigs", "frames"])
@pytest.mark.parametrize("damage", ["empty", "short", "tail", "count", "long"])
def test_damaged_binary_files_are_named_and_never_hang(tmp_path, part, damage):
    make_scene(tmp_path, {"a.png": PINHOLE, "b.png": PINHOLE})
    path = tmp_path / f"sparse/0/{part}.bin"
    good = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "short": good[: len(good) // 2],
            "tail": good[:-1],
            "count": struct.pack("<Q", 2**63) + good[8:],
            "long": good + b"\0",
        }[damage]
    )
    with pytest.raises(UserError, match=f"{part}.bin"):
        read(tmp_path)


def test_damaged_text_and_impossible_numbers_are_errors(tmp_path):
    make_scene(tmp_path, {"a.png": PINHOLE}, binary=False)
    path = tmp_path / "sparse/0/cameras.txt"
    good = path.read_text()
    for bad in (good.replace("35", "-35"), good.replace("PINHOLE", "NOLENS"), good[:-12]):
        path.write_text(bad)
        with pytest.raises(UserError, match="sparse"):
            read(tmp_path)


@pytest.mark.parametrize("number", ["1e308", "-1e16", "nan"])
def test_a_camera_farther_away_than_numbers_reach_is_an_error(tmp_path, number):
    make_scene(tmp_path, {"a.png": PINHOLE}, binary=False)
    path = tmp_path / "sparse/0/frames.txt"
    *head, last = path.read_text().splitlines()
    words = last.split()
    # FRAME_ID, RIG_ID, four of the rotation, three of the translation.
    words[6] = number
    path.write_text("\n".join([*head, " ".join(words)]) + "\n")
    with pytest.raises(UserError, match="sparse"):
        read(tmp_path)


def test_an_unknown_camera_model_is_an_error(tmp_path):
    make_scene(tmp_path, {"a.png": PINHOLE})
    path = tmp_path / "sparse/0/cameras.bin"
    data = bytearray(path.read_bytes())
    data[12:16] = struct.pack("<i", 99)
    path.write_bytes(data)
    with pytest.raises(UserError, match="unknown camera model 99"):
        read(tmp_path)


@pytest.mark.parametrize("binary", [True, False])
def test_a_frame_whose_image_is_missing_is_an_error(tmp_path, binary):
    make_scene(tmp_path, {"a.png": PINHOLE, "b.png": PINHOLE}, binary=binary)
    if binary:
        path = tmp_path / "sparse/0/images.bin"
        data = path.read_bytes()
        # The two records have the same length, because their names have.
        path.write_bytes(struct.pack("<Q", 1) + data[8 : 8 + (len(data) - 8) // 2])
    else:
        path = tmp_path / "sparse/0/images.txt"
        lines = [x for x in path.read_text().splitlines() if not x.startswith("#")]
        path.write_text("\n".join(lines[:2]) + "\n")
    with pytest.raises(UserError, match="frames and images .* do not belong together") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", [8, 16])
def test_grey_photographs_of_any_depth_keep_their_brightness(tmp_path, depth):
    lens = ("SIMPLE_RADIAL", 64, 48, [60.0, 32.0, 24.0, 0.01])
    make_scene(tmp_path, {"a.png": lens, "b.png": PINHOLE})
    levels = np.linspace(20, 105, 64 * 48).reshape(48, 64)
    deep = (levels * 257).astype(np.uint16) if depth == 16 else levels.astype(np.uint8)
    for name in ("a.png", "b.png"):
        Image.fromarray(deep).save(tmp_path / "images" / name)
    pictures = [decode_image(c.image_path, c.width, c.height) for c in read(tmp_path).cameras]
    distorted, plain = (float(picture.mean()) for picture in pictures)
    assert plain == pytest.approx(62.5, abs=1)
    assert distorted == pytest.approx(plain, abs=1)


@pytest.mark.skipif(sys.platform == "win32", reason="plants a link")
def test_a_planted_link_does_not_lead_undistorted_photographs_elsewhere(tmp_path, monkeypatch):
    make_scene(tmp_path, {"a.png": ("SIMPLE_RADIAL", 64, 48, [60.0, 32.0, 24.0, 0.1])})
    (tmp_path / "undistorted_cache").write_text("in the way")
    for name in ("shared", "target"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "shared"))
    expected = temporary_cache("undistorted_cache")
    expected.rmdir()
    expected.symlink_to(tmp_path / "target")
    camera = read(tmp_path, notify=ignore).cameras[0]
    assert camera.image_path.is_file()
    assert not any((tmp_path / "target").iterdir())


@pytest.mark.slow
def test_fox_keeps_its_principal_point_and_its_colours(scenes_dir):
    root = scenes_dir / "fox"
    model = read(root, notify=pytest.fail)
    assert len(model.cameras) == 50
    for camera in model.cameras:
        assert camera.cx == pytest.approx(276.77, abs=0.01)
        assert camera.cy == pytest.approx(482.63, abs=0.01)
    assert color_difference(model, every=10) < 12


def test_bunny_colours_fall_on_the_right_pixels(scenes_dir):
    model = read(scenes_dir / "bunny", notify=pytest.fail)
    assert len(model.cameras) == 60
    assert color_difference(model, every=20) < 12
    assert model.points.shape == (5000, 3)


def color_difference(model, every: int) -> float:
    """Median difference of point colours and pixels, over the points that tracks say are seen."""
    folder = model.cameras[0].image_path.parent.parent / "sparse/0"
    observed = pycolmap.Reconstruction(str(folder))
    ids = sorted(observed.points3D)
    row_of = {point_id: row for row, point_id in enumerate(ids)}
    seen = {image.name: image for image in observed.images.values()}
    differences = []
    for camera in model.cameras[::every]:
        tracked = [p.point3D_id for p in seen[camera.name].points2D if p.has_point3D()]
        rows = np.array([row_of[point_id] for point_id in tracked])
        view = model.points[rows] @ camera.rotation.T + camera.translation
        u = (camera.fx * view[:, 0] / view[:, 2] + camera.cx).astype(int)
        v = (camera.fy * view[:, 1] / view[:, 2] + camera.cy).astype(int)
        inside = (u >= 0) & (u < camera.width) & (v >= 0) & (v < camera.height)
        with Image.open(camera.image_path) as image:
            pixels = np.asarray(image).astype(int)
        expected = model.points_rgb[rows[inside]].astype(int)
        differences.append(np.abs(pixels[v[inside], u[inside]] - expected))
    return float(np.median(np.concatenate(differences)))


def test_a_scene_that_cannot_be_written_uses_a_temporary_folder(tmp_path, monkeypatch):
    make_scene(tmp_path, {"a.png": ("SIMPLE_RADIAL", 64, 48, [60.0, 32.0, 24.0, 0.1])})
    (tmp_path / "undistorted_cache").write_text("in the way")
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    camera = read(tmp_path, notify=ignore).cameras[0]
    assert camera.image_path.is_relative_to(elsewhere)
    shutil.rmtree(elsewhere)


def write_names(root: Path, names: dict[str, bytes], binary: bool) -> None:
    """Write other names into images.bin or images.txt, as bytes of any encoding."""
    path = root / "sparse/0" / ("images.bin" if binary else "images.txt")
    end = b"\0" if binary else b"\n"
    content = path.read_bytes()
    for name, raw in names.items():
        assert name.encode() + end in content
        content = content.replace(name.encode() + end, raw + end)
    path.write_bytes(content)


@pytest.mark.parametrize("binary", [True, False])
def test_a_name_is_the_rest_of_its_line(tmp_path, binary):
    names = ["scan 1 (0001), north #2.jpg", "a  b.png", "left side/c d.png"]
    make_scene(tmp_path, dict.fromkeys(names, PINHOLE), binary=binary)
    cameras = read(tmp_path, notify=pytest.fail).cameras
    assert sorted(camera.name for camera in cameras) == sorted(names)
    assert all(camera.image_path == tmp_path / "images" / camera.name for camera in cameras)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    ("encoding", "name"), [("gbk", "中1.png"), ("cp1252", "Straße é.png"), ("cp932", "写真ぱ.png")]
)
def test_names_in_other_encodings_are_read_as_the_files_are_called(
    tmp_path, encoding, name, binary
):
    make_scene(tmp_path, {"one.png": PINHOLE, "two.png": PINHOLE}, binary=binary)
    write_names(tmp_path, {"one.png": name.encode(encoding)}, binary)
    (tmp_path / "images/one.png").rename(tmp_path / "images" / name)
    cameras = read(tmp_path, notify=pytest.fail).cameras
    assert {camera.name: camera.image_path.name for camera in cameras} == {
        name: name,
        "two.png": "two.png",
    }


def test_names_in_an_encoding_that_fits_no_file_are_told(tmp_path):
    make_scene(tmp_path, {"one.png": PINHOLE, "two.png": PINHOLE})
    write_names(tmp_path, {"one.png": "中1.png".encode("gbk")}, True)
    with pytest.raises(UserError, match="1 of 2 images are missing.*not UTF-8: rename"):
        read(tmp_path)


@pytest.mark.parametrize("binary", [True, False])
def test_keypoints_of_points_that_are_not_there_count_for_nothing(tmp_path, binary):
    scene = make_observed_scene(tmp_path / "scene", n_views=4)
    model = pycolmap.Reconstruction(str(scene.root / "sparse/0"))
    write = model.write_binary if binary else model.write_text
    other = tmp_path / "other"
    other.mkdir()
    write(str(other))
    kind = "bin" if binary else "txt"
    (other / f"points3D.{kind}").unlink()
    found = read_colmap(other, ImageFolder(scene.root / "images"), repair=True, notify=pytest.fail)
    assert len(found.cameras) == 4
    assert len(found.points) == 0
    assert found.observations is None


def test_a_larger_model_beside_the_one_that_is_read_is_told(tmp_path):
    names = [f"{i}.png" for i in range(5)]
    make_scene(tmp_path, dict.fromkeys(names[:2], PINHOLE))
    make_scene(tmp_path, dict.fromkeys(names[:1], PINHOLE), sparse="sparse/1")
    assert larger_model(find_model(tmp_path)) is None
    make_scene(tmp_path, dict.fromkeys(names, PINHOLE), sparse="sparse/2", binary=False)
    said = []
    scene = load_scene(tmp_path, size_rule=SugarSize(), eval_split=False, notify=said.append)
    assert len(scene.train_cameras) == 2
    assert any("sparse/2 has 5 images" in line and "only 2" in line for line in said)


def test_numbers_of_points_have_64_bits(tmp_path):
    scene = make_observed_scene(tmp_path / "scene", n_views=4)
    folder = scene.root / "sparse" / "0"
    model = pycolmap.Reconstruction()
    model.read_binary(str(folder))
    for path in folder.iterdir():
        path.unlink()
    model.write_text(str(folder))
    with (folder / "points3D.txt").open("a") as file:
        file.write(f"{2**63 + 1} 0.1 0.2 0.3 9 9 9 1\n")
    loaded = load_scene(
        scene.root, size_rule=SugarSize(), view_options=ViewOptions(), notify=ignore
    )
    assert len(loaded.train_cameras) + len(loaded.test_cameras) == 4
