# SPDX-License-Identifier: Apache-2.0
"""Reader of tables of cameras of RealityScan (RealityCapture)."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sugar_capture.camera_readers.entries import (
    NO_IMAGE,
    NO_POSE,
    Entries,
    KnownCamera,
    SizeOf,
    SkippedCamera,
)
from sugar_capture.camera_readers.lenses import TO_COLMAP_AXES, RealityLens, reality_colmap_lens
from sugar_capture.camera_readers.parsing import (
    EXPORT_AGAIN,
    decoded_text,
    parse_number,
    with_decimal_point,
)
from sugar_utils.errors import explained
from sugar_utils.libraries import load_pycolmap

_HEADER_BYTES = 4096
_POSE_COLUMNS = ("x", "y", "alt", "heading", "pitch", "roll")
_REQUIRED_COLUMNS = ("name", *_POSE_COLUMNS, "f")
_SYNONYMS = {
    "name": ("image", "image_name", "imagename", "label", "file", "filename", "file_name"),
    "x": ("easting", "east", "pos_x", "position_x", "x_m"),
    "y": ("northing", "north", "pos_y", "position_y", "y_m"),
    "alt": ("z", "altitude", "height", "elevation", "pos_z", "position_z", "z_m"),
    "heading": ("yaw", "azimuth"),
    "f": ("focal", "focal_length", "focallength", "focal35mm", "focallength35mm", "f35"),
    "px": ("ppx", "principal_point_u", "principalpointu"),
    "py": ("ppy", "principal_point_v", "principalpointv"),
}
"""Names of columns by RealityScan's name for them."""


class _CameraRow(NamedTuple):
    """The numbers of one row; the table must have the columns without a default."""

    x: float  # position in world units
    y: float
    alt: float
    heading: float  # degrees
    pitch: float
    roll: float
    f: float  # focal length for a width of 36 mm
    px: float = 0.0  # principal point from the middle of the image, in longer sides
    py: float = 0.0
    k1: float = 0.0
    k2: float = 0.0
    k3: float = 0.0
    k4: float = 0.0
    t1: float = 0.0
    t2: float = 0.0


def is_reality_csv(path: Path) -> bool:
    """Whether a file is a table with all columns that the reader needs."""
    return not lacking_columns(path)


def lacking_columns(path: Path) -> list[str]:
    """Return the columns that the reader needs and that a file does not have."""
    table = _table(decoded_text(path, _HEADER_BYTES))
    names = table.fieldnames or ()
    return [name for name in _REQUIRED_COLUMNS if name not in names]


def read_reality_csv(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """Read the list of "Internal/External camera parameters".

    Rows without a position or a rotation, of images that were not aligned, are skipped.
    """
    path = files[0]
    with explained(f"{path}:", EXPORT_AGAIN, csv.Error):
        table = _table(decoded_text(path))
        rows = list(table)
    columns = table.fieldnames or ()
    for line, row in enumerate(rows, start=2):
        name = (row["name"] or "").strip()
        size = size_of(name)
        if not any(row.get(column) for column in columns):
            continue
        if size is None:
            yield SkippedCamera(name, NO_IMAGE)
            continue
        if not all((row[column] or "").strip() for column in _POSE_COLUMNS):
            yield SkippedCamera(name, NO_POSE)
            continue
        context = f"{path}, line {line}"
        camera = _parse_row(row, context)
        lens = RealityLens(
            focal=camera.f,
            u=camera.px,
            v=camera.py,
            radial=(camera.k1, camera.k2, camera.k3, camera.k4),
            t1=camera.t1,
            t2=camera.t2,
        )
        colmap_lens = reality_colmap_lens(lens, size, context)
        center = np.array([camera.x, camera.y, camera.alt])
        yield KnownCamera(name, colmap_lens, _rotation(camera), center)


def _parse_row(row: Mapping[str, Any], context: str) -> _CameraRow:
    texts = _texts(row)
    numbers = []
    for column in _CameraRow._fields:
        unset = "0" if column in _CameraRow._field_defaults else None
        text = texts.get(column, unset)
        if text is not None:
            text = with_decimal_point(text)
        numbers.append(parse_number(text, f"{context}, {column}"))
    return _CameraRow(*numbers)


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of a row that are not empty."""
    return {name: text for name, text in row.items() if isinstance(text, str) and text.strip()}


def _rotation(camera: _CameraRow) -> np.ndarray:
    """World to camera, (3, 3), from heading, pitch and roll."""
    rotation_of = load_pycolmap().Rotation3d
    about_z = rotation_of(np.radians((0, 0, -camera.heading))).matrix()
    about_x = rotation_of(np.radians((camera.pitch, 0, 0))).matrix()
    about_y = rotation_of(np.radians((0, camera.roll, 0))).matrix()
    return TO_COLMAP_AXES @ (about_z @ about_x @ about_y).T


def _table(text: str) -> csv.DictReader:
    """Read a table; columns that mean the same as RealityScan's get its names."""
    lines = text.splitlines()
    header = lines[0] if lines else ""
    delimiter = max(",;\t", key=header.count)
    names = [_column_name(name) for name in header.split(delimiter)]
    return csv.DictReader(lines[1:], names, delimiter=delimiter, skipinitialspace=True)


def _column_name(text: str) -> str:
    """Return RealityScan's name of a column: in lower case, without units in brackets."""
    bare = text.strip().strip('"').lstrip("#")
    name = re.sub(r"[\[(].*?[\])]", "", bare).strip().lower()
    name = re.sub(r"[\s-]+", "_", name)
    for column, synonyms in _SYNONYMS.items():
        if name in synonyms:
            return column
    return name
