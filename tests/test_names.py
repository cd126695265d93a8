# SPDX-License-Identifier: Apache-2.0
"""Names that other programs give to photographs lead to the right files, or to none."""

import os
import sys
import unicodedata
from types import SimpleNamespace

import pytest

from gaussian_splatting.data.names import (
    CamerasByName,
    ImageFolder,
    ImagePlaces,
    NameIndex,
    missing_images,
    paired_by_number,
    readable_name,
)

COMPOSED = unicodedata.normalize("NFC", "Ärzte é.jpg")
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)


def folder_with(root, *paths: str) -> ImageFolder:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return ImageFolder(root)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("C:\\Users\\me\\cup\\0001.jpg", "0001.jpg"),
        ("/home/me/cup/0001.png", "0001.jpg"),
        ("../input/0001.JPG", "0001.jpg"),
        ("scan/cam0/0002.jpg", "cam0/0002.jpg"),
        ("D:/x/cam1/0002.jpg", "cam1/0002.jpg"),
        ("images\\cam1\\0002", "cam1/0002.jpg"),
        # Two folders have it, and the name says neither.
        ("C:/x/0002.jpg", None),
        # Another folder's photograph is another photograph.
        ("cam2/0003.jpg", None),
        ("deep/cam0/0003.jpg", "cam0/0003.jpg"),
    ],
)
def test_folders_that_a_name_begins_with_may_be_those_of_another_machine(tmp_path, name, path):
    images = folder_with(tmp_path, "0001.jpg", "cam0/0002.jpg", "cam1/0002.jpg", "cam0/0003.jpg")
    match = images.find(name)
    assert (match and match.relative_to(tmp_path).as_posix()) == path


@pytest.mark.parametrize(("name", "file"), [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)])
def test_another_unicode_form_is_the_same_name(tmp_path, name, file):
    images = folder_with(tmp_path, f"left/{file}")
    assert images.find(f"left/{name}").name in (name, file)
    assert images.find(name.upper()).name == file
    camera = SimpleNamespace(name=file)
    assert CamerasByName([camera])(name) is camera


@pytest.mark.parametrize(
    ("name", "file"),
    [
        # UTF-8 that was read as Western Windows; names of a ZIP file; bytes that are no UTF-8.
        ("中01.jpg".encode().decode("cp1252"), "中01.jpg"),
        ("Stra\u00c3\u0178e.jpg", "Straße.jpg"),
        ("中01.jpg", "中01.jpg".encode("gbk").decode("cp437")),
        (os.fsdecode("中01.jpg".encode("gbk")), "中01.jpg"),
    ],
)
def test_names_in_another_encoding(name, file):
    index = NameIndex([file, "01.jpg"])
    assert index.find(name) == file


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text there")
def test_files_whose_names_are_no_text_are_found(tmp_path):
    raw = "中01.jpg".encode("gbk")
    (tmp_path / os.fsdecode(raw)).touch()
    assert os.fsencode(ImageFolder(tmp_path).find("中01.jpg").name) == raw


@pytest.mark.parametrize(
    "name",
    [
        "view[1] #2, 100%&;='.png",
        f"{'x' * 200}.png",
        "scan\u00a01\u3000a.png",
        "صورة 1.png",
        "view.1.v2.png",
        "my scan  1 (copy).png",
    ],
)
def test_names_of_any_characters_are_found(tmp_path, name):
    assert folder_with(tmp_path, name).find(name) == tmp_path / name


def test_two_names_are_not_given_one_file(tmp_path):
    images = folder_with(tmp_path, "a.jpg", "b.jpg")
    paths = ImagePlaces(images).find_all(["a.jpg", "a.png", "x/b.jpg", "y/b.jpg"])
    assert paths == {"a.jpg": tmp_path / "a.jpg", "a.png": None, "x/b.jpg": None, "y/b.jpg": None}


def test_the_nearest_file_is_named(tmp_path):
    images = ImagePlaces(folder_with(tmp_path, "IMG_0012.jpg", "other.jpg"))
    text = str(missing_images(["IMG_012.jpg", "q.jpg"], 9, images))
    assert "2 of 9 images are missing" in text
    assert "nearest to IMG_012.jpg is IMG_0012.jpg" in text
    assert "no file is called like zzz" in str(missing_images(["zzz"], 1, images))


def test_bytes_are_read_in_the_encoding_that_exists():
    raw = "写真ぱ".encode("cp932")
    assert readable_name(raw, lambda name: name == "写真ぱ") == "写真ぱ"
    assert readable_name("写真".encode()) == "写真"
    assert readable_name(raw).isprintable()


@pytest.mark.parametrize(
    ("masks", "photographs", "first_and_last"),
    [
        # Numbers are numbers, whatever their zeros.
        (range(12), [f"{i:02}.jpg" for i in range(1, 13)], ("0.png", "11.png")),
        (range(1, 13), [f"{i:02}.jpg" for i in range(1, 13)], ("1.png", "12.png")),
        (range(12), [f"IMG_{i}.jpg" for i in range(12)], ("0.png", "11.png")),
        (range(20), [f"{i:03}.jpg" for i in range(5, 17)], ("5.png", "16.png")),
        (range(2, 4), [f"{i:03}.jpg" for i in (2, 5, 3)], ("2.png", "3.png")),
        # Places, as DTU counts them.
        (range(3), [f"rect_{i}_3_r5000.png" for i in ("001", "002", "007")], ("0.png", "2.png")),
        (range(4), ["01.jpg", "02.jpg", "05.jpg", "06.jpg"], ("0.png", "3.png")),
        # By number or by text, the photographs stand in different orders.
        (range(12), [f"{i}.jpg" for i in range(1, 13)], None),
        ((1, 2, 3, 5), ["01.jpg", "02.jpg", "04.jpg", "05.jpg"], None),
        (range(11), [f"{i:02}.jpg" for i in range(1, 13)], None),
    ],
)
def test_files_named_by_numbers_are_paired_as_numbers(masks, photographs, first_and_last):
    pairs = paired_by_number([f"{number}.png" for number in masks], photographs)
    ends = pairs and (pairs[photographs[0]], pairs[photographs[-1]])
    assert ends == first_and_last


def test_one_number_twice_is_ambiguous():
    assert paired_by_number(["1.png", "01.png"], ["a.jpg", "b.jpg"]) is None
