# SPDX-License-Identifier: Apache-2.0
"""Cameras of the photographs in the folder of results, in the world of its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gaussian_splatting.core.moved import scale_of_matrix
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.scenes.reference_layout import camera_entry
from sugar_utils.files import relative_path, write_json_atomic

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


def placed_camera(camera: Camera, matrix: np.ndarray) -> Camera:
    """Return a camera after a similarity: it sees what was moved along as it did. (4, 4)"""
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
