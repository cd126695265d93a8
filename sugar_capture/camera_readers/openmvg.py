# SPDX-License-Identifier: Apache-2.0
"""Reader of ``sfm_data.json`` of OpenMVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from gaussian_splatting.data.names import ENCODINGS
from sugar_capture.camera_readers.entries import (
    NO_POSE,
    Entries,
    KnownCamera,
    SizeOf,
    SkippedCamera,
)
from sugar_capture.camera_readers.lenses import LensParameters, colmap_lens, require_rotation
from sugar_capture.camera_readers.parsing import EXPORT_AGAIN, Vector
from sugar_utils.errors import UserError
from sugar_utils.files import read_json
from sugar_utils.schemas import Coordinate, FileName, PixelCount, conform

if TYPE_CHECKING:
    import pycolmap

_Pair = Annotated[list[Coordinate], Meta(min_length=2, max_length=2)]
_OneNumber = Annotated[list[Coordinate], Meta(min_length=1, max_length=1)]
_FourNumbers = Annotated[list[Coordinate], Meta(min_length=4, max_length=4)]
_FiveNumbers = Annotated[list[Coordinate], Meta(min_length=5, max_length=5)]


class _Intrinsic(msgspec.Struct):
    """A lens; at most one of the distortions is there."""

    width: PixelCount
    height: PixelCount
    focal_length: Coordinate
    principal_point: _Pair  # pixels have their middles at whole numbers
    disto_k1: _OneNumber | None = None
    disto_k3: Vector | None = None
    disto_t2: _FiveNumbers | None = None  # k1, k2, k3, p1, p2
    fisheye: _FourNumbers | None = None


class _Pose(msgspec.Struct):
    """The pose of an image: world to camera, and camera centre in world units."""

    rotation: Annotated[list[Vector], Meta(min_length=3, max_length=3)]
    center: Vector


class _PoseEntry(msgspec.Struct):
    """A pose with its key."""

    key: int
    value: _Pose


class _View(msgspec.Struct):
    """An image, with the keys of its lens and its pose."""

    filename: FileName
    id_intrinsic: int
    id_pose: int
    local_path: str = ""


class _ViewPointer(msgspec.Struct):
    """Wrapper of a view."""

    data: _View


class _ViewValue(msgspec.Struct):
    """Wrapper of a view."""

    ptr_wrapper: _ViewPointer


class _ViewEntry(msgspec.Struct):
    """An image with its key."""

    key: int
    value: _ViewValue


class _IntrinsicPointer(msgspec.Struct):
    """Wrapper of a lens."""

    data: dict[str, Any]  # fields of ``_Intrinsic``, some perhaps inside of ``value0``


class _IntrinsicValue(msgspec.Struct):
    """Wrapper of a lens."""

    ptr_wrapper: _IntrinsicPointer


class _IntrinsicEntry(msgspec.Struct):
    """A lens with its key."""

    key: int
    value: _IntrinsicValue


class _SfmData(msgspec.Struct):
    """``sfm_data.json``."""

    extrinsics: list[_PoseEntry]
    views: list[_ViewEntry]
    intrinsics: list[_IntrinsicEntry]


def read_openmvg(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """Read ``sfm_data.json``; images that were not registered are skipped."""
    path = files[0]
    content = conform(read_json(path, ENCODINGS), _SfmData, path, EXPORT_AGAIN)
    poses = {entry.key: entry.value for entry in content.extrinsics}
    lenses = {entry.key: _lens(entry, path) for entry in content.intrinsics}
    for entry in content.views:
        view = entry.value.ptr_wrapper.data
        pose = poses.get(view.id_pose)
        if pose is None:
            yield SkippedCamera(view.filename, NO_POSE)
            continue
        context = f"{path}, view of {view.filename}"
        if view.id_intrinsic not in lenses:
            raise UserError(
                f"{context}: id_intrinsic {view.id_intrinsic} is missing; {EXPORT_AGAIN}"
            )
        rotation = require_rotation(pose.rotation, f"{context}, rotation")
        name = f"{view.local_path}/{view.filename}".lstrip("/")
        yield KnownCamera(name, lenses[view.id_intrinsic], rotation, np.array(pose.center))


def _lens(entry: _IntrinsicEntry, path: Path) -> pycolmap.Camera:
    """Build the pycolmap.Camera of a lens."""
    data = entry.value.ptr_wrapper.data
    context = f"{path}, intrinsic {entry.key}"
    # Newer versions nest one object in another.
    nested = conform(data.get("value0", {}), dict[str, Any], context, EXPORT_AGAIN)
    fields = {**nested, **data}
    intrinsic = conform(fields, _Intrinsic, context, "spherical cameras are not supported")
    tangential: Sequence[float] = (0, 0)
    if intrinsic.fisheye:
        radial = intrinsic.fisheye
    elif intrinsic.disto_k1:
        radial = intrinsic.disto_k1
    elif intrinsic.disto_k3:
        radial = intrinsic.disto_k3
    elif intrinsic.disto_t2:
        radial = intrinsic.disto_t2[:3]
        tangential = intrinsic.disto_t2[3:]
    else:
        radial = []
    x, y = intrinsic.principal_point
    lens = LensParameters(
        size=(intrinsic.width, intrinsic.height),
        focal=(intrinsic.focal_length, intrinsic.focal_length),
        middle=(x + 0.5, y + 0.5),
        radial=radial,
        tangential=tangential,
        is_fisheye=intrinsic.fisheye is not None,
    )
    return colmap_lens(lens, context)
