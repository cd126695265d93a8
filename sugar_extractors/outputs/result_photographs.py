# SPDX-License-Identifier: Apache-2.0
"""Cameras of the photographs in the folder of results, in the world of its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from gaussian_splatting.core.moved import scale_of_matrix
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.scenes.reference_layout import camera_entry, read_cameras_json
from sugar_utils.files import read_json, relative_path, write_json_atomic
from sugar_utils.schemas import FileName, conform

PHOTOGRAPHS = "photographs.json"


def write_photographs(folder: Path, cameras: Sequence[Camera], matrix: np.ndarray) -> Path:
    """Write cameras as ``cameras.json`` of 3DGS has them, each with the path of its photograph.

    Args:
        folder: The folder of results; paths of photographs are relative to it.
        cameras: In the world of the scene.
        matrix: From the scene to the results, a similarity. (4, 4)

    Returns:
        The file.
    """
    entries = []
    for number, camera in enumerate(cameras):
        entry = camera_entry(number, placed_camera(camera, matrix))
        # An undistorted copy is what the pinhole camera sees.
        path = camera.image_path
        entry["image"] = None if path is None else relative_path(path, folder)
        entries.append(entry)
    target = folder / PHOTOGRAPHS
    write_json_atomic(target, entries)
    return target


class _ImageEntry(msgspec.Struct):
    """Fields of an entry besides its camera; paths are relative to the folder of results."""

    image: FileName | None = None


def read_photographs(folder: Path) -> list[Camera]:
    """Read the cameras of a folder of results, with the images that are still there.

    Raises:
        UserError: An entry is malformed.
    """
    path = folder / PHOTOGRAPHS
    entries = conform(read_json(path), list[_ImageEntry], path)
    cameras = []
    for stored, entry in zip(read_cameras_json(path), entries, strict=True):
        image_path = None if entry.image is None else folder / entry.image
        if image_path is not None and not image_path.is_file():
            image_path = None
        cameras.append(replace(stored.camera, image_path=image_path))
    return cameras


def placed_camera(camera: Camera, matrix: np.ndarray) -> Camera:
    """Return a camera transformed with the scene by a similarity. (4, 4)"""
    linear = matrix[:3, :3]
    scale = scale_of_matrix(matrix)
    rotation = camera.rotation @ (linear / scale).T
    center = linear @ camera.center + matrix[:3, 3]
    return replace(
        camera,
        near=camera.near * scale,
        rotation=rotation,
        translation=-rotation @ center,
    )
