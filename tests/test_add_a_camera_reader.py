# SPDX-License-Identifier: Apache-2.0
"""A new format of cameras is one file with its reader and one entry of the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sugar_capture import known_cameras
from sugar_capture.camera_readers.entries import CameraFormat, Entries, KnownCamera, SizeOf
from sugar_capture.camera_readers.lenses import LensParameters, colmap_lens
from sugar_capture.camera_readers.parsing import has_words
from sugar_capture.known_cameras import find_cameras
from sugar_utils.errors import UserError
from tests.support.camera_files import NAMES, POSES, F, H, W, read, text_of

# What would be the file of the reader.


def read_lines(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """Read a line for each camera: name, focal length, rotation row by row, and centre."""
    for line in files[0].read_text(encoding="utf-8").splitlines()[1:]:
        name, *words = line.split()
        focal, *pose = map(float, words)
        size = size_of(name)
        assert size is not None
        middle = (size[0] / 2, size[1] / 2)
        lens = colmap_lens(LensParameters(size=size, focal=(focal, focal), middle=middle), name)
        yield KnownCamera(name, lens, np.reshape(pose[:9], (3, 3)), np.array(pose[9:]))


# What would be the entry of the table.

LINES = CameraFormat("Lines", ("*.lines",), has_words(b"# lines"), read_lines)


def test_its_files_are_found_recognised_and_matched_with_photographs(tmp_path, monkeypatch):
    monkeypatch.setattr(known_cameras, "FORMATS", (*known_cameras.FORMATS, LINES))
    lines = ["# lines"]
    for name, (rotation, center) in zip(NAMES, POSES, strict=True):
        lines.append(f"{name} {F} {text_of(rotation)} {text_of(center)}")
    (tmp_path / "scan.lines").write_text("\n".join(lines), encoding="utf-8")
    found = read(tmp_path)
    assert list(found) == NAMES
    for camera, (rotation, center) in zip(found.values(), POSES, strict=True):
        np.testing.assert_array_equal(camera.rotation, rotation)
        np.testing.assert_array_equal(camera.center, center)
        assert (camera.lens.width, camera.lens.height) == (W, H)
        assert (camera.lens.focal_length_x, camera.lens.focal_length_y) == (F, F)
    (source,) = find_cameras(str(tmp_path / "scan.lines"))
    assert source.name == f"Lines: {tmp_path / 'scan.lines'}"
    with pytest.raises(UserError, match="no cameras of .*, Lines; check the path"):
        find_cameras(str(tmp_path / "elsewhere"))
