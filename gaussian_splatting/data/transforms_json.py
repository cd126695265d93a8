# SPDX-License-Identifier: Apache-2.0
"""Scenes described by ``transforms*.json``: NeRF-synthetic, instant-ngp and nerfstudio.

Their cameras look along -z with y up (OpenGL); they are turned to COLMAP's axes here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from gaussian_splatting.data.cameras import Camera, nearest_rotation
from gaussian_splatting.data.images import image_size
from gaussian_splatting.data.names import ImageFolder, missing_images
from gaussian_splatting.data.observations import CaptureModel
from gaussian_splatting.data.ply import read_point_ply
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import read_json
from sugar_utils.random import generator
from sugar_utils.schemas import Coordinate, FileName, PixelCount, conform

N_RANDOM_POINTS = 100_000
RANDOM_POINTS_HALF_SIDE = 1.3
_DISTORTION = ("k1", "k2", "k3", "k4", "p1", "p2")
_PERSPECTIVE_MODELS = ("", "PINHOLE", "SIMPLE_PINHOLE", "OPENCV", "PERSPECTIVE")
_Row = tuple[Coordinate, Coordinate, Coordinate, Coordinate]


class _Lens(msgspec.Struct):
    """What may be said for one frame or for all."""

    w: PixelCount | None = None
    h: PixelCount | None = None
    fl_x: Coordinate | None = None
    fl_y: Coordinate | None = None
    cx: Coordinate | None = None
    cy: Coordinate | None = None
    camera_angle_x: Coordinate | None = None
    camera_angle_y: Coordinate | None = None
    k1: Coordinate | None = None
    k2: Coordinate | None = None
    k3: Coordinate | None = None
    k4: Coordinate | None = None
    p1: Coordinate | None = None
    p2: Coordinate | None = None
    camera_model: str | None = None
    is_fisheye: bool | int | None = None


class _Frame(_Lens, kw_only=True):
    """One photograph; some programs leave the last row of its pose out."""

    file_path: FileName
    mask_path: FileName | None = None
    depth_file_path: FileName | None = None
    transform_matrix: Annotated[list[_Row], msgspec.Meta(min_length=3, max_length=4)]


class _Transforms(_Lens, kw_only=True):
    frames: Annotated[list[_Frame], msgspec.Meta(min_length=1)]
    ply_file_path: FileName | None = None


def find_transforms(root: Path) -> list[Path]:
    """The JSON files of a scene: train and perhaps test, or the single one, or none."""
    train = root / "transforms_train.json"
    if train.is_file():
        return [p for p in (train, root / "transforms_test.json") if p.is_file()]
    single = root / "transforms.json"
    return [single] if single.is_file() else []


def random_points(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points to start from where a capture has none: uniform in a cube, in random colours.

    (100000, 3) float32 in [-1.3, 1.3] world units, and (100000, 3) uint8
    """
    draw = generator(seed, "init points")
    shape = (N_RANDOM_POINTS, 3)
    cube = torch.rand(shape, generator=draw, device="cpu") * 2 - 1
    colors = torch.randint(256, shape, generator=draw, dtype=torch.uint8, device="cpu")
    return (cube * RANDOM_POINTS_HALF_SIDE).numpy(), colors.numpy()


def read_transforms(
    root: Path, *, seed: int = 0, missing_ok: bool = False, notify: Notify = print
) -> CaptureModel:
    paths = find_transforms(root)
    contents = [conform(read_json(path), _Transforms, path) for path in paths]
    files = _resolve(root, contents, missing_ok)
    sets: list[list[Camera]] = [[], []]
    for own, path, content in zip(sets, paths, contents, strict=False):
        pairs = ((frame, files[frame.file_path]) for frame in content.frames)
        own += [_camera(root, path, content, frame, file) for frame, file in pairs if file]
    points_path = root / (contents[0].ply_file_path or "")
    if points_path.is_file():
        points, points_rgb = read_point_ply(points_path, notify)
        notify(f"starting from the {len(points)} points of {points_path}")
    else:
        points, points_rgb = random_points(seed)
    names = " and ".join(path.name for path in paths)
    text = f"{root / names}: {sum(map(len, sets))} images"
    test = sets[1] if len(paths) > 1 else None
    return CaptureModel(sets[0], test, points, points_rgb, text)


def _resolve(root: Path, contents: list[_Transforms], missing_ok: bool) -> dict[str, Path | None]:
    folders: dict[Path, ImageFolder] = {}

    def find(file_path: str) -> Path | None:
        target = root / file_path.replace("\\", "/")
        folder = folders.setdefault(target.parent, ImageFolder(target.parent, recursive=False))
        return folder.find(target.name)

    paths = [frame.file_path for content in contents for frame in content.frames]
    files = {path: find(path) for path in paths}
    missing = [path for path in paths if files[path] is None]
    if missing and not missing_ok:
        raise missing_images(missing, len(paths), root)
    return files


def _camera(root: Path, path: Path, content: _Transforms, frame: _Frame, file: Path) -> Camera:
    place = f"{path}, {frame.file_path}"

    def value(key: str) -> Any:
        """What the frame says, or the whole file where the frame says nothing."""
        own = getattr(frame, key)
        return getattr(content, key) if own is None else own

    matrix = np.array(frame.transform_matrix)
    # Decimal files are orthonormal to a few digits only.
    axes = nearest_rotation(matrix[:3, :3])
    if axes is None:
        raise UserError(f"{place}: transform_matrix is no camera pose; fix the file")
    rotation = (axes * (1, -1, -1)).T
    _check_lens(place, value)
    file_width, file_height = image_size(file)
    width, height = round(value("w") or file_width), round(value("h") or file_height)
    fx = value("fl_x") or _focal(value("camera_angle_x"), width)
    fy = value("fl_y") or _focal(value("camera_angle_y"), height)
    # One focal length alone means square pixels.
    fx, fy = fx or fy, fy or fx
    if not (width > 0 and height > 0 and fx and fy and fx > 0 and fy > 0):
        raise UserError(f"{place}: no usable focal length or size; it needs camera_angle_x or fl_x")
    cx, cy = value("cx"), value("cy")
    middle = width / 2 if cx is None else cx, height / 2 if cy is None else cy
    name = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
    pose = rotation, -rotation @ matrix[:3, 3]
    # Masks and depth maps that nerfstudio's frames may name; one that is not there is none.
    beside = {"mask_path": frame.mask_path, "depth_path": frame.depth_file_path}
    paths = {key: root / text.replace("\\", "/") for key, text in beside.items() if text}
    paths = {key: path for key, path in paths.items() if path.is_file()}
    return Camera(name, width, height, fx, fy, *middle, *pose, file, **paths)


def _check_lens(place: str, value: Callable[[str], Any]) -> None:
    distorted = [key for key in _DISTORTION if (value(key) or 0) != 0]
    model = value("camera_model") or ""
    if model.upper() not in _PERSPECTIVE_MODELS or value("is_fisheye"):
        distorted.insert(0, f"camera model {model or 'fisheye'}")
    if distorted:
        raise UserError(
            f"{place}: the lens is distorted "
            f"({', '.join(distorted)}); undistort the images first (colmap image_undistorter), or "
            "put the COLMAP model into sparse/0, which is undistorted on load"
        )


def _focal(angle: float | None, size: int) -> float | None:
    if angle is None or not 0 < angle < math.pi:
        return None
    return size / (2 * math.tan(angle / 2))
