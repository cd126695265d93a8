# SPDX-License-Identifier: Apache-2.0
"""Photographs are read as they are meant to be seen, whatever format and camera they come from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pycolmap
import pytest
from PIL import Image, ImageFilter, PngImagePlugin

from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.image_checks import sharpness
from gaussian_splatting.data.names import natural_order
from sugar_capture.conversion.convert_run import convert
from sugar_capture.convert_options import ConvertOptions
from sugar_capture.features.feature_database import create_database
from sugar_capture.features.matching import copy_masked_features, extract_features
from sugar_capture.features.photographs import (
    OriginalNames,
    camera_groups,
    described_photographs,
    output_names,
    read_upright,
)
from sugar_capture.registration.registration_report import BLURRED
from sugar_capture.scene_folder import originals, write_flat_pictures
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from tests.support.photographed_room import (
    WIDTH,
    camera_poses,
    photograph,
    write_photographs,
)


def test_order_counts_numbers():
    names = ["IMG_10.jpg", "IMG_9.jpg", "b/1.jpg", "IMG_1.jpg"]
    assert sorted(names, key=natural_order) == ["b/1.jpg", "IMG_1.jpg", "IMG_9.jpg", "IMG_10.jpg"]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_as_exif_says(tmp_path, orientation):
    upright = np.zeros((20, 30, 3), np.uint8)
    upright[:5, :5] = (255, 0, 0)
    upright[-5:, -5:] = (0, 0, 255)
    undo = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    image = Image.fromarray(upright)
    stored = image if undo is None else image.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    (found,) = described_photographs(tmp_path, True)
    assert (found.width, found.height) == (30, 20)
    np.testing.assert_array_equal(np.asarray(read_upright(found.path)), upright)


@pytest.mark.parametrize(("orientation", "undo"), [(1, None), (3, 3), (6, 2)])
def test_features_lie_where_an_upright_photograph_is_opaque(tmp_path, orientation, undo):
    pixels = photograph(*camera_poses(1)[0])
    alpha = np.full((*pixels.shape[:2], 1), 255, np.uint8)
    alpha[:, : WIDTH // 3] = 0
    image = Image.fromarray(np.concatenate([pixels, alpha], axis=2))
    image = image if undo is None else image.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "input").mkdir()
    image.save(tmp_path / "input" / "a.png", exif=exif)
    found = described_photographs(tmp_path / "input", True)
    create_database(tmp_path / "whole.db", found, None)
    create_database(tmp_path / "masked.db", found, None)
    masks = [ViewMask(found[0].path, "object", alpha=True)]
    extract_features(tmp_path / "whole.db", found, WIDTH, 500, lambda done: None)
    copy_masked_features(tmp_path / "whole.db", tmp_path / "masked.db", found, masks, WIDTH)
    with pycolmap.Database.open(str(tmp_path / "masked.db")) as database:
        keypoints = database.read_keypoints(1)
    assert len(keypoints) > 20
    assert keypoints[:, 0].min() >= WIDTH // 3


def test_focal_length_comes_from_exif_in_pixels_of_the_upright_picture(tmp_path):
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0xA405] = 26
    exif[0x0112] = 6
    exif[0x0110] = "Phone 7"
    Image.new("RGB", (400, 300)).save(tmp_path / "a.jpg", exif=exif)
    Image.new("RGB", (400, 300)).save(tmp_path / "b.jpg")
    with_focal, without = described_photographs(tmp_path, True)
    assert with_focal.focal == pytest.approx(26 / np.hypot(36, 24) * 500)
    assert with_focal.device == "Phone 7"
    assert without.focal is None
    assert camera_groups([with_focal, without]) == [[0], [1]]


def test_time_and_place_come_from_exif(tmp_path):
    exif = Image.Exif()
    details = exif.get_ifd(0x8769)
    details[0x9003] = "2026:05:01 10:00:59"
    details[0x9291] = "25"
    location = exif.get_ifd(0x8825)
    location.update({1: "S", 2: (52.0, 30.0, 36.0), 3: "E", 4: (13.0, 15.0, 0.0), 6: 40.5})
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=exif)
    details[0x9003] = "2026:05:01 10:01:01"
    location[2] = (92.0, 0.0, 0.0)
    Image.new("RGB", (40, 30)).save(tmp_path / "b.jpg", exif=exif)
    details[0x9003] = "0000:00:00 00:00:00"
    del location[4]
    Image.new("RGB", (40, 30)).save(tmp_path / "c.jpg", exif=exif)
    right, far_north, damaged = described_photographs(tmp_path, True)
    assert right.gps == pytest.approx((13.25, -52.51, 40.5))
    assert far_north.time - right.time == pytest.approx(2.0)
    assert (far_north.gps, damaged.gps, damaged.time) == (None, None, None)


def test_originals_are_found_by_the_names_of_their_flat_copies(tmp_path):
    for name in ("a.jpg", "a.tif", "b.png", "b.webp", "c.bmp"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    photographs = described_photographs(tmp_path, True)
    names = [one.name for one in photographs]
    index = OriginalNames(names)
    assert [index.find(flat) for flat in output_names(photographs)] == names
    assert OriginalNames(["folder/IMG_1.HEIC"]).find("folder/IMG_1.jpg") == "folder/IMG_1.HEIC"
    assert OriginalNames(["IMG_1.HEIC", "IMG_1.jpg"]).find("IMG_1.HEIC.jpg") == "IMG_1.HEIC"


def test_unusual_pixels_are_converted_and_named(tmp_path):
    Image.fromarray(np.full((8, 8), 257 * 200, np.uint16)).save(tmp_path / "deep.png")
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "print.jpg")
    deep, printed = described_photographs(tmp_path, True)
    assert (deep.depth, printed.depth) == ("16-bit", "CMYK")
    assert np.asarray(read_upright(deep.path)).max() == 200
    red = np.asarray(read_upright(printed.path))[4, 4]
    assert red[0] > 200
    assert red[1] < 60


def test_heic_is_read_or_the_package_is_named(tmp_path, monkeypatch):
    heif = pytest.importorskip("pillow_heif")
    pixels = photograph(*camera_poses(1)[0])
    heif.register_heif_opener()
    Image.fromarray(pixels).save(tmp_path / "IMG_1.HEIC", quality=95)
    (found,) = described_photographs(tmp_path, True)
    difference = np.asarray(read_upright(found.path)).astype(int) - pixels
    assert np.abs(difference).mean() < 12
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(UserError, match=r"pip install '\.\[heic\]' in a clone"):
        described_photographs(tmp_path, True)


@pytest.mark.skipif(sys.platform != "linux", reason="names are Unicode elsewhere")
@pytest.mark.parametrize("name", [b"IMG_\xff/a.png", b"IMG_\xff.png"])
def test_a_name_that_is_not_utf8_is_one_line_before_any_work(tmp_path, name):
    write_photographs(tmp_path / "input", 2)
    path = Path(os.fsdecode(os.fsencode(tmp_path / "input") + b"/" + name))
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)
    with pytest.raises(UserError, match=r"IMG_.udcff.*: the name is not valid UTF-8"):
        convert(ConvertOptions(tmp_path), Console.silent())
    assert not (tmp_path / "distorted" / "database.db").exists()


def test_sharpness_falls_with_blur_and_not_with_the_subject():
    for pose in camera_poses(3):
        picture = Image.fromarray(photograph(*pose)).convert("L")
        values = [
            sharpness(np.asarray(picture.filter(ImageFilter.GaussianBlur(r)))) for r in (0, 1, 3, 9)
        ]
        assert values == sorted(values, reverse=True)
        assert values[0] > BLURRED > values[2]
    assert sharpness(np.zeros((20, 20), np.uint8)) == 0
    assert sharpness(np.zeros((2, 2), np.uint8)) == 0


def test_flat_copies_have_names_of_their_own(tmp_path):
    names = ["a.heic.png", "b.bmp", "b.jpg", "c.bmp", "d.JPG"]
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    found = described_photographs(tmp_path, True)
    expected = ["a.heic.png", "b.bmp.jpg", "b.jpg", "c.jpg", "d.JPG"]
    assert list(output_names(found)) == expected


@pytest.mark.parametrize("suffix", [".webp", ".tif", ".heic"])
def test_flat_copies_keep_transparency(tmp_path, suffix):
    if suffix == ".heic":
        pytest.importorskip("pillow_heif").register_heif_opener()
    pixels = np.full((24, 32, 4), 200, np.uint8)
    pixels[:, :16, 3] = 0
    (tmp_path / "input").mkdir()
    Image.fromarray(pixels).save(tmp_path / "input" / f"a{suffix}")
    by_name = originals(described_photographs(tmp_path / "input", True), [None])
    for number, distortion in enumerate((0.0, 0.01)):
        lens = pycolmap.Camera(
            model="SIMPLE_RADIAL", width=32, height=24, params=[30, 16, 12, distortion]
        )
        image = SimpleNamespace(name=f"a{suffix}", camera_id=1)
        model = SimpleNamespace(images={1: image}, cameras={1: lens}, reg_image_ids=lambda: [1])
        folder = tmp_path / str(number)
        write_flat_pictures(model, by_name, folder, False, lambda done: None)
        with Image.open(folder / "images" / "a.png") as flat:
            alpha = np.asarray(flat)[..., 3]
        assert alpha[4:-4, 4:12].max() < 30
        assert alpha[4:-4, 20:-4].min() > 170


@pytest.mark.slow
def test_a_photograph_of_200_megapixels_is_read(tmp_path):
    path = tmp_path / "a.png"
    Image.new("1", (16384, 12288)).save(path)
    (found,) = described_photographs(tmp_path, True)
    assert (found.width, found.height) == (16384, 12288)


def test_a_photograph_with_long_texts_is_read(tmp_path):
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("history", "x" * (3 << 20), zip=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=texts)
    (found,) = described_photographs(tmp_path, True)
    assert read_upright(found.path).size == (8, 8)


def test_damaged_exif_data_leave_the_pixels(tmp_path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.jpg", exif=b"Exif\0\0no TIFF header")
    (found,) = described_photographs(tmp_path, True)
    assert (found.width, found.height, found.focal) == (8, 6, None)
    assert read_upright(found.path).size == (8, 6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0", "it is HEIC: name it .heic"),
        (b"<!DOCTYPE html>", "it is a web page: download the image again"),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "it is a pointer of Git LFS: run git lfs pull",
        ),
        (b"no image", "replace the file"),
    ],
)
def test_files_that_are_no_images_are_told_apart(tmp_path, content, message):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(UserError, match=f"cannot read the image .*a.jpg: .*; {message}"):
        read_upright(tmp_path / "a.jpg")


def test_too_little_memory_is_not_a_damaged_file(tmp_path, monkeypatch):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image.Image, "convert", Mock(side_effect=MemoryError))
    with pytest.raises(UserError, match="not enough memory; close other programs"):
        read_upright(tmp_path / "a.png")


def test_damaged_photographs_are_left_out_and_named_in_one_line(tmp_path):
    for number in range(4):
        Image.effect_noise((64, 48), 50).save(tmp_path / f"{number}.jpg")
    content = (tmp_path / "1.jpg").read_bytes()
    (tmp_path / "1.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "3.jpg").write_bytes(b"")
    lines: list[str] = []
    found = described_photographs(tmp_path, True, lines.append)
    assert [photograph.name for photograph in found] == ["0.jpg", "2.jpg"]
    (line,) = lines
    assert line.startswith("left out 2 of 4 photographs that cannot be read: 1.jpg (")
    assert "truncated" in line
    assert "3.jpg (" in line
