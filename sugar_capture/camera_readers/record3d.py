# SPDX-License-Identifier: Apache-2.0
"""Reader of ``metadata.json`` of Record3D, which is called ``metadata`` in its .r3d files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from gaussian_splatting.data.names import ENCODINGS
from sugar_capture.camera_readers.entries import Entries, KnownCamera, SizeOf
from sugar_capture.camera_readers.lenses import (
    TO_COLMAP_AXES,
    LensParameters,
    colmap_lens,
    require_rotation,
)
from sugar_capture.camera_readers.parsing import EXPORT_AGAIN
from sugar_utils.files import read_json
from sugar_utils.libraries import load_pycolmap
from sugar_utils.schemas import Coordinate, PixelCount, conform


class _Metadata(msgspec.Struct):
    """``metadata.json``."""

    w: PixelCount
    h: PixelCount
    # Intrinsic matrix of all frames, column by column.
    K: Annotated[list[Coordinate], Meta(min_length=9, max_length=9)]
    # Camera to world of each frame: quaternion x, y, z, w, and centre.
    poses: list[Annotated[list[Coordinate], Meta(min_length=7, max_length=7)]]
    # fx, fy, cx, cy of each frame; frames beyond the list have those of ``K``.
    perFrameIntrinsicCoeffs: list[  # noqa: N815  the name in the file
        Annotated[list[Coordinate], Meta(min_length=4, max_length=4)]
    ] = []


def read_record3d(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """Read ``metadata.json``; cameras are named by the number of their frame."""
    path = files[0]
    content = conform(read_json(path, ENCODINGS), _Metadata, path, EXPORT_AGAIN)
    shared_intrinsics = [content.K[0], content.K[4], content.K[6], content.K[7]]
    rotation_of = load_pycolmap().Rotation3d
    for number, pose in enumerate(content.poses):
        intrinsics = shared_intrinsics
        if number < len(content.perFrameIntrinsicCoeffs):
            intrinsics = content.perFrameIntrinsicCoeffs[number]
        fx, fy, cx, cy = intrinsics
        context = f"{path}, pose {number}"
        parameters = LensParameters(size=(content.w, content.h), focal=(fx, fy), middle=(cx, cy))
        lens = colmap_lens(parameters, context)
        quaternion = np.array(pose[:4])
        squared_length = quaternion @ quaternion
        # A quaternion that is not of length 1 becomes a matrix that is no rotation.
        matrix = rotation_of(quaternion).matrix() * squared_length
        rotation = require_rotation(matrix, f"{context}, quaternion")
        center = np.array(pose[4:])
        yield KnownCamera(str(number), lens, TO_COLMAP_AXES @ rotation.T, center)
