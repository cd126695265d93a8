# SPDX-License-Identifier: Apache-2.0
"""Reader of ``keyframes`` of Polycam's raw data, one file per image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from gaussian_splatting.data.names import ENCODINGS
from sugar_capture.camera_readers.entries import Entries, KnownCamera, SizeOf
from sugar_capture.camera_readers.lenses import (
    TO_COLMAP_AXES,
    LensParameters,
    colmap_lens,
    require_rotation,
)
from sugar_capture.camera_readers.parsing import EXPORT_AGAIN
from sugar_utils.errors import UserError
from sugar_utils.files import read_json
from sugar_utils.schemas import Coordinate, PixelCount, conform

_UNCORRECTED = "cameras"  # folder beside that of the corrected cameras


class _FrameSize(msgspec.Struct):
    """Size of a keyframe, where its file has it."""

    width: PixelCount | None = None
    height: PixelCount | None = None


class _Keyframe(msgspec.Struct):
    """One image: intrinsics in pixels, and the rows of camera to world."""

    fx: Coordinate
    fy: Coordinate
    cx: Coordinate
    cy: Coordinate
    t_00: Coordinate
    t_01: Coordinate
    t_02: Coordinate
    t_03: Coordinate
    t_10: Coordinate
    t_11: Coordinate
    t_12: Coordinate
    t_13: Coordinate
    t_20: Coordinate
    t_21: Coordinate
    t_22: Coordinate
    t_23: Coordinate
    width: PixelCount | None = None
    height: PixelCount | None = None

    def pose(self) -> np.ndarray:
        """Camera to world. (3, 4)"""
        return np.array(
            [
                [self.t_00, self.t_01, self.t_02, self.t_03],
                [self.t_10, self.t_11, self.t_12, self.t_13],
                [self.t_20, self.t_21, self.t_22, self.t_23],
            ]
        )


def read_polycam(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """Read the keyframes, one from each file."""
    for path in files:
        frame = conform(read_json(path, ENCODINGS), _Keyframe, path, EXPORT_AGAIN)
        pose = frame.pose()
        rotation = TO_COLMAP_AXES @ require_rotation(pose[:, :3], f"{path}, t_00 to t_22").T
        parameters = LensParameters(
            size=_frame_size(frame, path, size_of),
            focal=(frame.fx, frame.fy),
            middle=(frame.cx, frame.cy),
        )
        lens = colmap_lens(parameters, str(path))
        yield KnownCamera(path.stem, lens, rotation, pose[:, 3])


def _frame_size(frame: _Keyframe, path: Path, size_of: SizeOf) -> tuple[float, float]:
    """Width and height of a keyframe: from its file, its image, or its uncorrected file.

    Of the last two the one counts whose middle is nearer to the principal point.
    """
    if frame.width is not None and frame.height is not None:
        return frame.width, frame.height
    sizes = []
    image_size = size_of(path.stem)
    if image_size is not None:
        sizes.append(image_size)
    uncorrected = path.parent.parent / _UNCORRECTED / path.name
    if uncorrected.is_file():
        other = conform(read_json(uncorrected, ENCODINGS), _FrameSize, uncorrected, EXPORT_AGAIN)
        if other.width is not None and other.height is not None:
            sizes.append((other.width, other.height))
    if not sizes:
        raise UserError(
            f"{path}: has no width and height, and there is no image of it; {EXPORT_AGAIN}"
        )

    def offset(size: tuple[float, float]) -> float:
        return abs(frame.cx / size[0] - 0.5) + abs(frame.cy / size[1] - 0.5)

    return min(sizes, key=offset)
