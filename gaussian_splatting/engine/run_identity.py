# SPDX-License-Identifier: Apache-2.0
"""Digests of the inputs of a run: cameras, photographs, masks, maps, point tracks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.scenes.scene import Scene
from sugar_utils import files as storage
from sugar_utils.flags import AUTO

_DIGITS = 8
"""Decimals that count in a camera: enough for any pose, and no other processor's rounding."""


def scene_inputs(
    scene: Scene, *, photographs: bool = True, tracks: bool = False
) -> dict[str, dict[str, str] | str]:
    """Digests of a scene's cameras, which of them are held out, their photographs and masks.

    Args:
        photographs: Whether the contents of the photographs count.
        tracks: Whether it counts which points photographs observe.
    """
    cameras = scene.cameras
    inputs: dict[str, dict[str, str] | str] = {}
    digests = {camera.name: _camera_digest(camera, "train") for camera in scene.train_cameras}
    digests |= {camera.name: _camera_digest(camera, "test") for camera in scene.test_cameras}
    inputs["cameras"] = digests
    if photographs:
        paths = {c.name: c.source_path or c.image_path for c in cameras if c.image_path}
        inputs["photographs"] = _file_digests(paths)
    masks = {camera.name: camera.mask for camera in cameras if camera.mask is not None}
    if masks:
        digests = _file_digests({name: mask.path for name, mask in masks.items()})
        modes = {name: mask.mode + " alpha" * mask.alpha for name, mask in masks.items()}
        inputs["masks"] = {name: f"{modes[name]} {digest}" for name, digest in digests.items()}
    depths = scene.depths
    if depths.maps:
        digests = _file_digests({name: depth_map.path for name, depth_map in depths.maps.items()})
        unit = "" if depths.unit == AUTO else f"{depths.unit} "
        prefix = f"weight {depths.weight:g} {unit}"
        inputs["depth maps"] = {name: prefix + digest for name, digest in digests.items()}
    normals = scene.normals
    if normals.maps:
        digests = _file_digests(
            {name: normal_map.path for name, normal_map in normals.maps.items()}
        )
        prefix = f"weight {normals.weight:g} "
        inputs["normal maps"] = {name: prefix + digest for name, digest in digests.items()}
    if tracks and scene.observations is not None:
        observations = scene.observations
        digest = hashlib.sha256(observations.points.tobytes() + observations.lengths.tobytes())
        for name, rows in sorted(observations.rows.items()):
            head = f"{name} {len(rows)} ".encode("utf-8", "surrogatepass")
            digest.update(head + rows.tobytes())
        inputs["point tracks"] = digest.hexdigest()[:16]
    return inputs


def points_digest(scene: Scene) -> str:
    """Short text that changes with the points of a scene or their colours."""
    return hashlib.sha256(scene.points.tobytes() + scene.points_rgb.tobytes()).hexdigest()[:16]


def _file_digests(paths: Mapping[str, Path]) -> dict[str, str]:
    """Digests of files by name; several files at once."""
    digests = storage.in_parallel(storage.file_digest, paths.values())
    return dict(zip(paths, digests, strict=True))


def _camera_digest(camera: Camera, role: str) -> str:
    """Short text that changes with anything that a render of the camera depends on."""
    offset = camera.translation
    # A power of two scales without rounding; half of the next one is never out of range.
    unit = math.ldexp(0.5, math.frexp(float(np.abs(offset).max()))[1])
    intrinsics = (camera.fx, camera.fy, camera.cx, camera.cy)
    numbers = [
        *(value / camera.width for value in intrinsics),
        *camera.rotation.flatten(),
        unit,
        *(offset / unit),
    ]
    # Adding zero turns a negative zero into a positive one.
    rounded = [round(float(value), _DIGITS) + 0.0 for value in numbers]
    text = f"{role} {camera.width} {camera.height} {rounded} {camera.lens}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
