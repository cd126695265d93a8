# SPDX-License-Identifier: Apache-2.0
"""Paths for -s: refused at once where they are no scenes, unpacked where they are ZIP files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gaussian_splatting.scenes import scene_path
from gaussian_splatting.scenes.scene_path import NOTE, check_scene_path, unpacked
from sugar_pipeline.command_line import PROGRAMS, check_early, with_scene_folders
from sugar_pipeline.commands import _run_each
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from tests.support.captures import PINHOLE, make_scene
from tests.support.repository import ROOT

FILES = {"images/a 1.jpg": b"one", "images/b.jpg": b"two", "sparse/0/cameras.bin": b"3"}


def write_zip(path: Path, files: dict[str, bytes], **how) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content, **how)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != NOTE]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("top", ["", "scan/", "a/b/", "scan\\"])
def test_a_zip_file_is_unpacked_once_beside_it(tmp_path, top):
    files = {top + name: content for name, content in FILES.items()}
    if top != "scan\\":
        files |= {"__MACOSX/scan/._a 1.jpg": b"x", f"{top}.DS_Store": b"y"}
    archive = write_zip(tmp_path / "My scan.zip", files)
    said = []
    folder = unpacked(archive, [], said.append)
    assert folder == tmp_path / "My scan"
    assert contents(folder) == FILES
    assert "unpacking 3 files" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["My scan", "My scan.zip"]
    # The second time it stays, with what was made in it.
    (folder / "distorted").mkdir()
    assert unpacked(archive, [], said.append) == folder
    assert (folder / "distorted").is_dir()
    assert said[1:] == [f"{archive}: unpacked before, in {folder}"]


def test_an_r3d_of_record3d_is_a_zip_file(tmp_path):
    files = {"metadata": b"{}", "rgbd/0.jpg": b"1", "rgbd/0.depth": b"2"}
    archive = write_zip(tmp_path / "scan.r3d", files)
    check_scene_path(archive)
    assert contents(scene_path.scene_folder(archive, [], print)) == files


def test_folders_of_a_scene_stay(tmp_path):
    archive = write_zip(tmp_path / "scan.zip", {"images/a.jpg": b"1", "images/b.jpg": b"2"})
    assert sorted(contents(unpacked(archive, [], print))) == ["images/a.jpg", "images/b.jpg"]


def test_a_folder_that_is_there_is_never_touched(tmp_path):
    archive = write_zip(tmp_path / "scan.zip", FILES)
    (tmp_path / "scan").mkdir()
    (tmp_path / "scan" / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="scan: is there already; name it with -s"):
        unpacked(archive, [], print)
    assert contents(tmp_path / "scan") == {"mine.txt": b"x"}


def test_another_zip_file_of_the_name_is_told(tmp_path):
    unpacked(write_zip(tmp_path / "scan.zip", FILES), [], print)
    archive = write_zip(tmp_path / "scan.zip", {"images/c.jpg": b"4"})
    with pytest.raises(UserError, match="unpacked from another scan.zip"):
        unpacked(archive, [], print)


def test_the_output_folder_serves_where_the_zip_file_lies_in_a_folder_of_others(
    tmp_path, monkeypatch
):
    (tmp_path / "others").mkdir()
    archive = write_zip(tmp_path / "others" / "scan.zip", FILES)
    check = scene_path.check_writable

    def refuse(place):
        if place == tmp_path / "others":
            raise UserError("read-only")
        return check(place)

    monkeypatch.setattr(scene_path, "check_writable", refuse)
    folder = unpacked(archive, [tmp_path / "out"], print)
    assert folder == tmp_path / "out" / "scan"
    assert unpacked(archive, [tmp_path / "out"], print) == folder


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../outside.jpg", "leads out of its folder"),
        ("images/../../outside.jpg", "leads out of its folder"),
        ("/etc/outside.jpg", "leads out of its folder"),
        ("C:\\outside.jpg", "leads out of its folder"),
        ("..\\outside.jpg", "leads out of its folder"),
        (link("images/link.jpg"), "is a link"),
    ],
)
def test_files_that_lead_elsewhere_are_refused_before_anything_is_written(tmp_path, name, message):
    (tmp_path / "in").mkdir()
    with zipfile.ZipFile(tmp_path / "in/scan.zip", "w") as file:
        file.writestr("images/a.jpg", b"1")
        file.writestr(name, b"/etc/passwd")
    with pytest.raises(UserError, match=message):
        unpacked(tmp_path / "in/scan.zip", [], print)
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "scan.zip"]


def test_limits(tmp_path, monkeypatch):
    archive = write_zip(tmp_path / "scan.zip", {"images/a.bmp": bytes(1 << 20)})
    monkeypatch.setattr(scene_path, "LARGE", 1 << 10)
    with pytest.raises(UserError, match="times as large"):
        unpacked(archive, [], print)
    monkeypatch.undo()
    monkeypatch.setattr(scene_path, "SPARE_BYTES", 1 << 62)
    with pytest.raises(UserError, match="GiB free; free some space"):
        unpacked(archive, [], print)
    monkeypatch.undo()
    monkeypatch.setattr(scene_path, "MAX_FILES", 2)
    with pytest.raises(UserError, match="more than 2 files"):
        unpacked(write_zip(tmp_path / "scan.zip", FILES), [], print)
    assert [path.name for path in tmp_path.iterdir()] == ["scan.zip"]


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "content", "no files"])
def test_damaged_zip_files_are_one_line_and_leave_nothing(tmp_path, damage):
    archive = write_zip(tmp_path / "scan.zip", {name: os.urandom(5000) for name in FILES})
    whole = archive.read_bytes()
    broken = {
        "empty": b"",
        "text": b"no archive",
        "cut": whole[:-200],
        "content": whole[:100] + b"????" + whole[104:],
        "no files": b"PK\5\6" + bytes(18),
    }
    archive.write_bytes(broken[damage])
    with pytest.raises(UserError, match=r"scan\.zip"):
        unpacked(archive, [], print)
    assert [path.name for path in tmp_path.iterdir()] == ["scan.zip"]


def test_names_in_utf8_without_the_mark_are_read_as_such(tmp_path):
    archive = write_zip(tmp_path / "scan.zip", {"images/\u00e9.jpg": b"1"})
    content = archive.read_bytes()
    # The bit is in the local and in the central header.
    local, central = content.index(b"PK\3\4") + 7, content.index(b"PK\1\2") + 9
    unmarked = bytearray(content)
    unmarked[local] &= ~8
    unmarked[central] &= ~8
    archive.write_bytes(unmarked)
    assert list(contents(unpacked(archive, [], print))) == ["images/\u00e9.jpg"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.mp4", r"gone\.mp4: no such video; check -s"),
        ("gone", "gone: no such scene folder; check -s"),
        ("scann", r"no such scene folder \(nearest: .*scan\); check -s"),
        ("gone.zip", r"gone\.zip: no such ZIP file; check -s"),
        ("scan/images/a.png", "a single photograph; name the folder of all photographs, -s .*imag"),
        ("scan/sparse/0/images.bin", "a file, but -s takes a folder.*, such as -s .*scan$"),
        ("pack.7z", "a packed file; unpack it"),
    ],
)
def test_what_is_no_scene_is_said_as_it_is(tmp_path, name, message):
    make_scene(tmp_path / "scan", {"a.png": PINHOLE})
    (tmp_path / "pack.7z").touch()
    with pytest.raises(UserError, match=message):
        check_scene_path(tmp_path / name)


def test_scenes_videos_and_their_folders_are_taken(tmp_path):
    (tmp_path / "walk").mkdir()
    (tmp_path / "walk2.MP4").touch()
    for name in ("walk", "walk2.MP4", "walk.mp4"):
        check_scene_path(tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "convert", "vanilla", "train", "doctor"])
def test_a_scene_that_is_not_there_is_refused_before_torch_is_loaded(verb, tmp_path):
    words = [sys.executable, "-X", "importtime", "-m", "sugar_pipeline", verb]
    for scene in (["-s", tmp_path / "gone.mp4"], [tmp_path / "gone.mp4"]):
        ended = subprocess.run([*words, *scene], capture_output=True, text=True, cwd=ROOT)
        assert ended.returncode == 2
        assert ended.stderr.splitlines()[-1].endswith("gone.mp4: no such video; check -s")
        assert "torch" not in ended.stderr.replace("torchrun", "")


def test_words_before_the_first_flag_are_scenes(tmp_path):
    parser = PROGRAMS["train_full_pipeline.py"].make_parser(None)
    args = parser.parse_args(["a", "b c", "--low_poly", "True"])
    assert args.all_scene_path == [Path("a"), Path("b c")]
    vanilla = PROGRAMS["gaussian_splatting/train.py"].make_parser(None)
    assert vanilla.parse_args(["a", "-m", "out"]).source_path == Path("a")
    with pytest.raises(SystemExit):
        vanilla.parse_args(["a", "b", "-m", "out"])
    # Results have no flag in other programs.
    view = PROGRAMS["view"].make_parser(None)
    assert view.parse_args(["a.ply"]).scene_path is None
    check_early(["a.ply"], PROGRAMS["view"])


def test_programs_get_the_folder_of_a_zip_file(tmp_path):
    archive = write_zip(tmp_path / "scan.zip", FILES)
    words = ["-s", str(archive), "-m", str(tmp_path / "out")]
    flags = PROGRAMS["gaussian_splatting/train.py"].make_parser(None).parse_flags(words)
    assert with_scene_folders(flags)["source_path"] == tmp_path / "scan"
    flags = PROGRAMS["train_full_pipeline.py"].make_parser(None).parse_flags(["-s", str(archive)])
    found = with_scene_folders(flags)
    assert found["scene_path"] == tmp_path / "scan"
    assert found["all_scene_path"] == [tmp_path / "scan"]


def test_of_several_scenes_each_zip_file_is_unpacked_in_its_turn(tmp_path, monkeypatch):
    paths = [write_zip(tmp_path / f"{name}.zip", FILES) for name in ("cup", "jar")]
    paths.insert(1, tmp_path / "broken.zip")
    paths[1].write_bytes(b"nothing")
    parser = PROGRAMS["train_full_pipeline.py"].make_parser(None)
    flags = with_scene_folders(parser.parse_flags([str(path) for path in paths]))
    assert flags["all_scene_path"] == paths
    scenes = []

    def run_scene(flags, console):
        scenes.append(flags["scene_path"])
        raise UserError("far enough")

    monkeypatch.setattr("sugar_pipeline.commands.run_scene", run_scene)
    with pytest.raises(UserError, match="3 of 3 scenes failed"):
        _run_each(flags, paths, Console.silent())
    assert scenes == [tmp_path / "cup", tmp_path / "jar"]
