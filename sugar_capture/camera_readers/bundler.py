# SPDX-License-Identifier: Apache-2.0
"""Reader of ``bundle.out`` of Bundler."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from sugar_capture.camera_readers.entries import (
    NO_IMAGE,
    NO_POSE,
    Entries,
    KnownCamera,
    SizeOf,
    SkippedCamera,
)
from sugar_capture.camera_readers.lenses import (
    TO_COLMAP_AXES,
    LensParameters,
    colmap_lens,
    require_rotation,
)
from sugar_capture.camera_readers.parsing import EXPORT_AGAIN, decoded_text, parse_numbers
from sugar_utils.errors import UserError

_LINES_PER_CAMERA = 5
_NUMBERS_PER_CAMERA = 15
# After a name, which may have spaces, there may be a zero and the focal length.
_AFTER_NAME = re.compile(r"\s+[-+\d.]+\s+[-+\d.eE]+\s*$")


def read_bundler(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """Read ``bundle.out``, and ``list.txt`` beside it or in the folder above."""
    path = files[0]
    lines = iter(decoded_text(path).splitlines()[1:])
    list_path = _list_path(path)
    names = _read_names(list_path)
    count = parse_numbers(next(lines, ""), 2, f"{path}, line 2")[0]
    if count != len(names):
        raise UserError(
            f"{path}: {count:g} cameras, but {list_path} has {len(names)}; {EXPORT_AGAIN}"
        )
    for name in names:
        context = f"{path}, camera of {name}"
        text = " ".join(itertools.islice(lines, _LINES_PER_CAMERA))
        numbers = parse_numbers(text, _NUMBERS_PER_CAMERA, context)
        focal = numbers[0]
        size = size_of(name)
        if size is None:
            yield SkippedCamera(name, NO_IMAGE)
            continue
        if focal == 0:
            yield SkippedCamera(name, NO_POSE)
            continue
        parameters = LensParameters(
            size=size,
            focal=(focal, focal),
            middle=(size[0] / 2, size[1] / 2),
            radial=numbers[1:3].tolist(),
        )
        lens = colmap_lens(parameters, context)
        rotation = require_rotation(numbers[3:12], f"{context}, R")
        translation = numbers[12:]
        yield KnownCamera(name, lens, TO_COLMAP_AXES @ rotation, -rotation.T @ translation)


def _list_path(path: Path) -> Path:
    candidates = [folder / "list.txt" for folder in (path.parent, path.parent.parent)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    return candidates[0]


def _read_names(path: Path) -> list[str]:
    names = []
    for line in decoded_text(path).splitlines():
        if line.strip():
            name = _AFTER_NAME.sub("", line)
            names.append(name.strip().strip('"'))
    return names
