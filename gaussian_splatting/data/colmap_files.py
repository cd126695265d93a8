# SPDX-License-Identifier: Apache-2.0
"""The files of COLMAP models: their format, the names in them, and a check before pycolmap reads.

pycolmap trusts files: truncated ones make it return garbage or never return.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from sugar_utils.errors import UserError, explained
from sugar_utils.libraries import load_pycolmap

PARTS = ("cameras", "images", "points3D", "rigs", "frames")  # files of a model, without the suffix
_NAME_OFFSET = 64  # bytes of an image's record before its name


def format_of(folder: Path) -> str | None:
    """Return ``bin`` or ``txt``, whichever has the cameras and the images; binary first."""
    for suffix in ("bin", "txt"):
        if all((folder / f"{part}.{suffix}").is_file() for part in ("cameras", "images")):
            return suffix
    return None


def n_images_of(folder: Path) -> int:
    """Return the number of registered images of a model; 0 where the file is damaged."""
    kind = format_of(folder)
    path = folder / f"images.{kind}"
    if kind == "txt":
        return len(image_names(folder))
    with explained(f"cannot read {path}:", "check the path"), path.open("rb") as file:
        head = file.read(8)
    return struct.unpack("<Q", head)[0] if len(head) == 8 else 0


def image_names(folder: Path) -> dict[int, bytes]:
    """Return the names of the images of a model as its file has them, by the number of the image.

    pycolmap cuts names in text files at their first space, and raises for those that are not UTF-8.
    """
    kind = format_of(folder)
    with explained(f"{folder}: cannot read images.{kind}", "export the model again"):
        content = (folder / f"images.{kind}").read_bytes()
    return _binary_names(content) if kind == "bin" else _text_names(content)


def _binary_names(content: bytes) -> dict[int, bytes]:
    """Return the names in ``images.bin`` by the number of the image."""
    names: dict[int, bytes] = {}
    offset = 8
    while offset + _NAME_OFFSET < len(content):
        (number,) = struct.unpack_from("<I", content, offset)
        start = offset + _NAME_OFFSET
        names[number] = content[start : content.index(b"\0", start)]
        offset = _skip_image(content, offset)
    return names


def _text_names(content: bytes) -> dict[int, bytes]:
    """Return the names in ``images.txt`` by the number of the image."""
    names: dict[int, bytes] = {}
    lines = iter(content.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        # Number, quaternion, translation, number of the camera, and the name to the end.
        fields = line.split(maxsplit=9)
        if len(fields) == 10 and fields[0].isdigit():
            names[int(fields[0])] = fields[9].strip()
        # The line of keypoints, which may be empty.
        next(lines, b"")
    return names


def is_utf8(raw: bytes) -> bool:
    """Whether a name is UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def check_binary(path: Path, part: str) -> None:
    """Check that the counts in a binary COLMAP file agree with its length.

    pycolmap does not detect the end of a file: it makes cameras of old memory, or never returns. So
    the records are walked here first, which reads only their lengths.

    Args:
        part: One of ``PARTS``.

    Raises:
        UserError: The file is damaged.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise UserError(f"{path}: truncated ({size} bytes); export the model again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            (count,) = struct.unpack_from("<Q", data, 0)
            skip = _SKIPS[part]
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


def _skip_camera(data: mmap.mmap, start: int) -> int:
    pycolmap = load_pycolmap()
    (number,) = struct.unpack_from("<i", data, start + 4)
    models = {int(model): model for model in pycolmap.CameraModelId.__members__.values()}
    if number < 0 or number not in models:
        raise ValueError(f"unknown camera model {number}")
    camera = pycolmap.Camera.create_from_model_id(1, models[number], 1.0, 2, 2)
    return start + 24 + 8 * len(camera.params)


def _skip_image(data: mmap.mmap | bytes, start: int) -> int:
    name_end = data.find(b"\0", start + _NAME_OFFSET)
    if name_end < 0:
        raise ValueError("image name without an end")
    (n_points,) = struct.unpack_from("<Q", data, name_end + 1)
    return name_end + 9 + 24 * n_points


def _skip_rig(data: mmap.mmap, start: int) -> int:
    (n_sensors,) = struct.unpack_from("<I", data, start + 4)
    end = start + 8
    if n_sensors:
        end += 8
    for _ in range(n_sensors - 1):
        (has_pose,) = struct.unpack_from("<B", data, end + 8)
        end += 9
        if has_pose:
            end += 56
    return end


def _skip_point(data: mmap.mmap, start: int) -> int:
    (track_length,) = struct.unpack_from("<Q", data, start + 43)
    return start + 51 + 8 * track_length


def _skip_frame(data: mmap.mmap, start: int) -> int:
    (n_data,) = struct.unpack_from("<I", data, start + 64)
    return start + 68 + 16 * n_data


_SKIPS = {
    "cameras": _skip_camera,
    "images": _skip_image,
    "points3D": _skip_point,
    "rigs": _skip_rig,
    "frames": _skip_frame,
}
"""Functions that return the end of a record that begins at a place, by part of a model."""
