# SPDX-License-Identifier: Apache-2.0
"""Normal maps of a capture, in camera axes: x to the right, y down, z into the scene.

They lie in ``normals/`` as ``STEM.*`` or ``NAME.EXT.*``: PNG or TIFF whose colours 0 to 255 (or
65535) stand for -1 to 1, NPY or EXR with the numbers themselves, or in the range 0 to 1. Of any
size with the aspect ratio of the image. Vectors far from unit length are unknown.

Some programs let y and z point up and to the viewer (OpenGL's axes). A surface that is seen faces
the camera, which tells such maps apart. A map whose surfaces face away in both is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data import images
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.data.maps.map_files import (
    NONE,
    find_folder,
    find_maps,
    nearest_values,
    read_numbers,
    reduced,
    undistorted,
)
from gaussian_splatting.data.masks import overview
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.files import in_parallel
from sugar_utils.flags import non_negative_float
from sugar_utils.settings import flag

FOLDER = "normals"
MIN_FACING = 0.9  # share of known pixels whose surface has to face the camera
LENGTHS = (0.7, 1.3)  # of vectors that are known
OPENGL = np.array([1.0, -1.0, -1.0])
_BYTE = 127  # one, in the numbers that are kept
_ADVICE = "replace the file, or pass --normals none"
_flag = partial(flag, group="depth maps")


@dataclass(frozen=True)
class NormalOptions:
    """Flags for normal maps."""

    normals: str | None = _flag(
        None,
        "folder of normal maps of the photographs, in the scene folder or anywhere; none: no "
        "normal maps; unset: normals/ of the scene folder, if it is there",
        metavar="{DIR,none}",
    )
    normal_weight: float = _flag(
        0.05,
        "weight of the difference of normals where photographs have no texture",
        parse=non_negative_float,
        no_effect_when="without normal maps",
    )


NO_NORMALS = NormalOptions(normals=NONE)


@dataclass(frozen=True)
class NormalMap:
    """The normal map of one view."""

    path: Path
    values: Tensor  # 127 times the unit normals, zeros where unknown; (h, w, 3) int8


@dataclass(frozen=True)
class KnownNormals:
    """Normal maps of a scene by the name of the view."""

    maps: Mapping[str, NormalMap] = field(default_factory=dict)
    weight: float = 0.0  # of their loss term

    def of(self, camera: Camera, device: torch.device) -> Tensor | None:
        """Return the normals of a view in camera axes, zeros where unknown or masked out.

        (H, W, 3) float32; None without a map
        """
        normal_map = self.maps.get(camera.name)
        if normal_map is None:
            return None
        values = nearest_values(normal_map.values, camera).to(device).float() / _BYTE
        if camera.shows_object:
            is_object = torch.from_numpy(overview(camera) >= images.COUNTS)
            values = values * nearest_values(is_object, camera).to(device)[..., None]
        return values


NO_NORMALS_KNOWN = KnownNormals()


def known_normals(
    cameras: Sequence[Camera], root: Path, options: NormalOptions, notify: Notify
) -> KnownNormals:
    """Find and read the normal maps of the cameras, at their calibrated size."""
    if options.normals == NONE or options.normal_weight == 0:
        return NO_NORMALS_KNOWN
    folder = find_folder(root, options.normals, FOLDER, "--normals")
    if folder is None:
        return NO_NORMALS_KNOWN
    files = find_maps(cameras, folder)
    if not files:
        if options.normals is None:
            return NO_NORMALS_KNOWN
        raise UserError(
            f"{folder}: no normal map belongs to a photograph; name them as {cameras[0].name}.png"
        )
    with_files = [camera for camera in cameras if camera.name in files]
    read = in_parallel(lambda camera: _read(camera, files[camera.name]), with_files)
    maps = {}
    for camera, values in zip(with_files, read, strict=True):
        if values is not None:
            maps[camera.name] = NormalMap(files[camera.name], torch.from_numpy(values))
    left_out = [camera.name for camera in with_files if camera.name not in maps]
    notify(f"normal maps of {len(maps)} of {len(cameras)} photographs")
    if left_out:
        notify(
            f"left out {len(left_out)} normal maps whose surfaces face away from the camera: "
            f"{shortened(left_out, 5)}"
        )
    return KnownNormals(maps, options.normal_weight)


def _read(camera: Camera, path: Path) -> np.ndarray | None:
    """Read a map; None if its surfaces face away. (h, w, 3) int8"""
    numbers = read_numbers(path, "normal map", _ADVICE)
    if numbers.ndim != 3 or numbers.shape[2] < 3 or numbers.dtype.kind not in "uif":
        raise UserError(
            f"cannot read the normal map {path}: it holds {numbers.dtype} of shape "
            f"{numbers.shape}, not three channels; {_ADVICE}"
        )
    normals = reduced(decoded_normals(numbers[..., :3]))
    height, width = normals.shape[:2]
    images.require_aspect(path, "normal map", (width, height), camera, _ADVICE)
    facing = in_camera_axes(normals, camera.resized(width, height))
    if facing is None:
        return None
    if camera.lens:
        facing = undistorted(facing, camera)
    return np.rint(facing * _BYTE).astype(np.int8)


def decoded_normals(numbers: np.ndarray) -> np.ndarray:
    """Return unit vectors, zeros where unknown. (h, w, 3) of any type -> float64"""
    values = np.nan_to_num(numbers.astype(np.float64), posinf=0.0, neginf=0.0)
    if numbers.dtype.kind == "u":
        values = 2 * values / np.iinfo(numbers.dtype).max - 1
    elif values.min(initial=0) >= 0:
        # A capture has surfaces that look left or up: these are colours.
        values = 2 * values - 1
    lengths = np.linalg.norm(values, axis=-1, keepdims=True)
    is_known = (lengths > LENGTHS[0]) & (lengths < LENGTHS[1])
    return np.where(is_known, values / np.where(is_known, lengths, 1.0), 0.0)


def in_camera_axes(normals: np.ndarray, camera: Camera) -> np.ndarray | None:
    """Turn normals so that surfaces face the camera; None if neither kind of axes does.

    Args:
        normals: Unit vectors, zeros where unknown. (H, W, 3), the size of the camera
    """
    rays = pixel_rays(camera, dtype=torch.float64, device="cpu").numpy()
    is_known = np.abs(normals).sum(axis=-1) > 0
    for axes in (np.ones(3), OPENGL):
        turned = normals * axes
        is_facing = (turned * rays.reshape(normals.shape)).sum(axis=-1) < 0
        if (is_facing | ~is_known).mean() >= MIN_FACING:
            return turned
    return None
