# SPDX-License-Identifier: Apache-2.0
"""Binary COLMAP files: whether they are complete, which ``pycolmap`` does not tell."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

from sugar_utils.errors import UserError
from sugar_utils.libraries import load_pycolmap

PARTS = ("cameras", "images", "points3D", "rigs", "frames")
"""Files of a model, without the suffix."""


def write_model(model: Any, folder: Path) -> None:
    """Write a ``pycolmap.Reconstruction`` in binary form, complete or not at all.

    Args:
        folder: New or empty folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model.write_binary(str(folder))
        for part in PARTS:
            check_binary(folder / f"{part}.bin", part)
    # pycolmap raises what its C++ threw, and does not notice a full disk at all.
    except (OSError, RuntimeError, ValueError, UserError) as error:
        cut = isinstance(error, UserError)
        cause = "a file was cut off" if cut else " ".join(str(error).split())
        raise UserError(
            f"cannot write {folder}: {cause}; free some space or fix the permissions"
        ) from error


def check_binary(path: Path, part: str) -> None:
    """Check that the counts in a binary COLMAP file agree with its length.

    pycolmap does not notice the end of a file: it makes cameras of what was in memory before, or
    never comes back. So the records are walked here first, which reads only their lengths.

    Args:
        path: The file; a missing one is left to the caller.
        part: ``cameras``, ``images``, ``points3D``, ``rigs`` or ``frames``.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise UserError(f"{path}: truncated ({size} bytes); export the model again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            (count,) = struct.unpack_from("<Q", data, 0)
            skip = {
                "cameras": _skip_camera,
                "images": _skip_image,
                "points3D": _skip_point,
                "rigs": _skip_rig,
                "frames": _skip_frame,
            }[part]
            end = 8
            record = 0
            try:
                while record < count and end <= size:
                    end = skip(data, end)
                    record += 1
            except struct.error:
                end = size + 1
            except ValueError as error:
                raise UserError(
                    f"{path}: damaged at record {record + 1} of {count} ({error}); "
                    "export the model again"
                ) from error
    if end != size:
        what = "truncated" if end > size else f"{size - end} bytes too long"
        raise UserError(
            f"{path}: {what} (record {record} of {count}, {size} bytes); export the model again"
        )


def _skip_camera(data: mmap.mmap, at: int) -> int:
    pycolmap = load_pycolmap()

    (model,) = struct.unpack_from("<i", data, at + 4)
    known = {int(m): m for m in pycolmap.CameraModelId.__members__.values()}
    if model < 0 or model not in known:
        raise ValueError(f"unknown camera model {model}")
    n_params = len(pycolmap.Camera.create_from_model_id(1, known[model], 1.0, 2, 2).params)
    return at + 24 + 8 * n_params


def _skip_image(data: mmap.mmap, at: int) -> int:
    name_end = data.find(b"\0", at + 64)
    if name_end < 0:
        raise ValueError("image name without an end")
    (n_points,) = struct.unpack_from("<Q", data, name_end + 1)
    return name_end + 9 + 24 * n_points


def _skip_point(data: mmap.mmap, at: int) -> int:
    (track_length,) = struct.unpack_from("<Q", data, at + 43)
    return at + 51 + 8 * track_length


def _skip_rig(data: mmap.mmap, at: int) -> int:
    (n_sensors,) = struct.unpack_from("<I", data, at + 4)
    at += 8 + (8 if n_sensors else 0)
    for _ in range(n_sensors - 1):
        has_pose = struct.unpack_from("<B", data, at + 8)[0]
        at += 9 + (56 if has_pose else 0)
    return at


def _skip_frame(data: mmap.mmap, at: int) -> int:
    (n_data,) = struct.unpack_from("<I", data, at + 64)
    return at + 68 + 16 * n_data
