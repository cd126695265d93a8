# SPDX-License-Identifier: Apache-2.0
"""Captures far from the origin, as in UTM or ECEF coordinates: an offset is subtracted from them.

float32 has seven digits. Where coordinates are a million times larger than the scene, none are left
for the scene itself, so a capture is moved to the origin where it is read, in float64. Results stay
there; ``world_offset.json`` beside them has the offset to add for the original coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from gaussian_splatting.core.subsets import finite_points, longest_side
from gaussian_splatting.data.cameras import Camera, centers_of
from sugar_utils.errors import Notify
from sugar_utils.files import read_json, write_json_atomic
from sugar_utils.schemas import Coordinate, conform

OFFSET_FILE = "world_offset.json"
FAR_AWAY = 1e4  # distance of the cameras from the origin in world units
FAR_RATIO = 1e3  # the same in extents of the cameras
MEANING = "coordinates of the original = coordinates of the results + offset"


class _OffsetFile(msgspec.Struct):
    """``world_offset.json``."""

    offset: tuple[Coordinate, Coordinate, Coordinate]


def world_offset(centers: np.ndarray) -> np.ndarray:
    """Return the offset to subtract from positions around camera centres. (N, 3) -> (3,) float64

    Zeros where the cameras are near the origin; else a number with few digits, so that it can be
    copied by hand and two subsets of the cameras mostly have the same one.
    """
    mean = centers.mean(axis=0)
    extent = longest_side(centers)
    largest_distance = FAR_AWAY
    if extent:
        largest_distance = min(FAR_AWAY, FAR_RATIO * extent)
    if np.linalg.norm(mean) <= largest_distance:
        return np.zeros(3)
    n_decimals = -math.floor(math.log10(extent)) if extent else 0
    return np.round(mean, n_decimals)


def offset_of(cameras: Sequence[Camera]) -> np.ndarray:
    """Return the :func:`world_offset` of cameras; zeros without cameras. (3,)"""
    if not cameras:
        return np.zeros(3)
    return world_offset(centers_of(cameras))


def moved_back(cameras: Sequence[Camera], offset: np.ndarray) -> list[Camera]:
    """Return cameras in a world from which an offset, (3,), is subtracted."""
    if not offset.any():
        return list(cameras)
    return [
        replace(camera, translation=camera.translation + camera.rotation @ offset)
        for camera in cameras
    ]


def offset_for(points: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return the offset to subtract from points in original or moved coordinates. (3,)

    They are the original ones where the median point lies nearer to the offset than to the origin.

    Args:
        points: (P, 3), may be none.
        offset: Of the capture. (3,)
    """
    finite = finite_points(points)
    if not offset.any() or not len(finite):
        return np.zeros(3)
    middle = np.median(finite, axis=0)
    is_original = np.linalg.norm(middle - offset) < np.linalg.norm(middle)
    return offset if is_original else np.zeros(3)


def near_offset(
    points: np.ndarray, offset: np.ndarray | None, path: Path, notify: Notify
) -> np.ndarray:
    """Return the offset that a reader subtracts from coordinates before rounding. (3,)

    Args:
        points: Coordinates of the file, (P, 3) float64; may be none.
        offset: That they may have, by a record or by the capture, (3,); None: unknown.
        path: The file.
        notify: Called with a line where the points are far from the origin all the same: their
            middle is left out then, because float32 has too few digits for it.
    """
    known_offset = np.zeros(3) if offset is None else offset_for(points, offset)
    finite = finite_points(points) - known_offset
    if not len(finite) or np.linalg.norm(finite.mean(axis=0)) <= FAR_AWAY:
        return known_offset
    rest = world_offset(finite)
    numbers = ", ".join(f"{value:.10g}" for value in rest)
    notify(
        f"note: {path} lies far from the origin and nothing says where that is: ({numbers}) is "
        "left out, float32 has too few digits for it"
    )
    return known_offset + rest


def describe_offset(offset: np.ndarray) -> str:
    """Describe an offset in one line for the user."""
    numbers = ", ".join(f"{value:.10g}" for value in offset)
    return (
        f"the capture lies far from the origin: ({numbers}) is subtracted from all coordinates, "
        f"and kept as {OFFSET_FILE} beside the results"
    )


def write_offset(folder: Path, offset: np.ndarray) -> None:
    """Write ``world_offset.json`` into a folder; remove it where there is no offset."""
    path = folder / OFFSET_FILE
    if offset.any():
        write_json_atomic(path, {"offset": offset.tolist(), "meaning": MEANING})
    else:
        path.unlink(missing_ok=True)


def read_offset(folder: Path) -> np.ndarray | None:
    """Read the offset in a folder's file, (3,); None where it has none."""
    path = folder / OFFSET_FILE
    if not path.is_file():
        return None
    return np.array(conform(read_json(path), _OffsetFile, path).offset)
