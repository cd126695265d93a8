# SPDX-License-Identifier: Apache-2.0
"""Files that are taken for Gaussians: packed, misnamed and unread ones are named at every door."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest

from gaussian_splatting.formats.ply import holds_gaussians, write_gaussian_ply
from gaussian_splatting.formats.sog import write_sog
from gaussian_splatting.formats.splat_file import ROW, read_splat, write_splat
from gaussian_splatting.formats.spz import write_spz
from gaussian_splatting.scenes.reference_layout import load_reference_checkpoint
from sugar_extractors.export.reading import has_gaussians, read_gaussians_in_scene
from sugar_utils.errors import UserError
from sugar_viewer.result_search import find_results
from tests.support.tiny_scene import tiny_cloud

DOORS = {
    "export": has_gaussians,
    "reading": lambda path: read_gaussians_in_scene(path, pytest.fail),
    "-c": load_reference_checkpoint,
    "--init_ply": holds_gaussians,
    "view": lambda path: find_results([path], pytest.fail),
}
at_every_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)


def write_zip(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "ply")
    return path


@at_every_door
@pytest.mark.parametrize("name", ["scan.zip", "scan.ply", "scan.ksplat"])
def test_a_zip_file_with_gaussians_is_a_packed_file(tmp_path, door, name):
    path = write_zip(tmp_path / name, ["readme.txt", "scan/gs_capture.ply"])
    with pytest.raises(UserError, match=rf"{name}: a packed file with scan/gs_capture.ply in it"):
        door(path)


@at_every_door
@pytest.mark.parametrize("name", ["a.ksplat", "a.lcc", "a.SPLATV"])
def test_formats_that_are_not_read_are_named(tmp_path, door, name):
    (tmp_path / name).write_bytes(b"\0\1" * 500)
    with pytest.raises(UserError, match=r"is not read; convert it to one of .ply, .spz, .sog"):
        door(tmp_path / name)


@at_every_door
@pytest.mark.parametrize(
    ("write", "name", "right_name"),
    [
        (write_spz, "a.sog", "a.spz"),
        (write_sog, "a.spz", "a.sog"),
        (write_sog, "a.ply", "a.sog"),
        (write_gaussian_ply, "a.splat", "a.ply"),
        (write_spz, "a.zip", "a.spz"),
    ],
)
def test_a_wrong_suffix_is_named(tmp_path, door, write, name, right_name):
    write(tmp_path / name, tiny_cloud())
    with pytest.raises(UserError, match=rf"{name}: its content is that of .* name it {right_name}"):
        door(tmp_path / name)


def test_other_packed_files_are_named(tmp_path):
    path = tmp_path / "a.ply.gz"
    path.write_bytes(gzip.compress(b"ply"))
    with pytest.raises(UserError, match="a packed file; unpack it"):
        has_gaussians(path)


def test_rows_of_zeros_in_a_splat_file_are_dropped(tmp_path):
    path = tmp_path / "a.splat"
    write_splat(path, tiny_cloud())
    before = read_splat(path, pytest.fail)
    path.write_bytes(path.read_bytes() + bytes(5 * ROW.itemsize))
    lines: list[str] = []
    after = read_splat(path, lines.append)
    assert len(after) == len(before)
    assert [f"dropped 5 of {len(before) + 5} Gaussians without a rotation" in x for x in lines] == [
        True
    ]
