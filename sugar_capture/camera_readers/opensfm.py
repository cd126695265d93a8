# SPDX-License-Identifier: Apache-2.0
"""Reader of ``reconstruction.json`` of OpenSfM and OpenDroneMap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from gaussian_splatting.data.names import ENCODINGS
from sugar_capture.camera_readers.entries import Entries, KnownCamera, SizeOf
from sugar_capture.camera_readers.lenses import LensParameters, colmap_lens
from sugar_capture.camera_readers.parsing import EXPORT_AGAIN, Vector
from sugar_utils.errors import UserError
from sugar_utils.files import read_json
from sugar_utils.libraries import load_pycolmap
from sugar_utils.schemas import Coordinate, FileName, PixelCount, Positive, conform

if TYPE_CHECKING:
    import pycolmap

_BROWN_MODELS = ("perspective", "simple_radial", "radial", "brown")
_FISHEYE_MODELS = ("fisheye", "fisheye_opencv")


class _Camera(msgspec.Struct):
    """A lens; lengths are in longer sides of the image, from its middle."""

    width: PixelCount
    height: PixelCount
    projection_type: str = "perspective"
    focal: Positive | None = None  # where focal_x and focal_y are not there
    focal_x: Positive | None = None
    focal_y: Positive | None = None
    c_x: Coordinate = 0.0
    c_y: Coordinate = 0.0
    k1: Coordinate = 0.0
    k2: Coordinate = 0.0
    k3: Coordinate = 0.0
    k4: Coordinate = 0.0
    p1: Coordinate = 0.0
    p2: Coordinate = 0.0


class _Shot(msgspec.Struct):
    """The pose of an image, world to camera."""

    camera: str
    rotation: Vector  # axis times angle
    translation: Vector


class _Part(msgspec.Struct):
    """A reconstruction of images that share points."""

    cameras: dict[str, _Camera]
    shots: dict[FileName, _Shot]


_Reconstruction = Annotated[list[_Part], Meta(min_length=1, max_length=1 << 30)]


def read_opensfm(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """Read ``reconstruction.json``; of several parts the largest."""
    path = files[0]
    content = read_json(path, ENCODINGS)
    # ``Annotated`` is a type to msgspec, not to type checkers.
    parts: list[_Part] = conform(content, _Reconstruction, path, EXPORT_AGAIN)  # pyright: ignore[reportArgumentType]
    part = max(parts, key=lambda part: len(part.shots))
    lenses = {}
    for name, camera in part.cameras.items():
        lenses[name] = _lens(camera, f"{path}, camera {name}")
    rotation_of = load_pycolmap().Rotation3d
    for name, shot in part.shots.items():
        if shot.camera not in lenses:
            raise UserError(f"{path}, shot {name}: camera {shot.camera} is missing; {EXPORT_AGAIN}")
        rotation = rotation_of(np.array(shot.rotation)).matrix()
        center = -rotation.T @ np.array(shot.translation)
        yield KnownCamera(name, lenses[shot.camera], rotation, center)


def _lens(camera: _Camera, context: str) -> pycolmap.Camera:
    """Build the pycolmap.Camera of a lens."""
    kind = camera.projection_type
    if kind not in (*_BROWN_MODELS, *_FISHEYE_MODELS):
        raise UserError(f"{context}: projection_type {kind} is not supported; choose brown")
    longer_side = max(camera.width, camera.height)
    focal_x = camera.focal_x or camera.focal or 0
    focal_y = camera.focal_y or camera.focal or 0
    center_x = camera.width / 2 + camera.c_x * longer_side
    center_y = camera.height / 2 + camera.c_y * longer_side
    lens = LensParameters(
        size=(camera.width, camera.height),
        focal=(focal_x * longer_side, focal_y * longer_side),
        middle=(center_x, center_y),
        radial=(camera.k1, camera.k2, camera.k3, camera.k4),
        tangential=(camera.p1, camera.p2),
        is_fisheye=kind in _FISHEYE_MODELS,
    )
    return colmap_lens(lens, context)
