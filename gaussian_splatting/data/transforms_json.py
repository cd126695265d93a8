# SPDX-License-Identifier: Apache-2.0
"""Scenes described by ``transforms*.json``: NeRF-synthetic, instant-ngp and nerfstudio.

Their cameras look along -z with y up (OpenGL); they are turned to COLMAP's axes here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch

from gaussian_splatting.data.cameras import Camera, nearest_rotation
from gaussian_splatting.data.depth_maps import FILES as DEPTH_SUFFIXES
from gaussian_splatting.data.images import image_size
from gaussian_splatting.data.names import (
    ENCODINGS,
    IMAGE_SUFFIXES,
    ImageFolder,
    ImagePlaces,
    NameIndex,
    missing_images,
    unknown_names,
)
from gaussian_splatting.data.observations import CaptureModel
from gaussian_splatting.data.ply import read_point_ply
from gaussian_splatting.data.world_offset import describe_offset, moved_back, offset_of
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.files import read_json
from sugar_utils.random import generator
from sugar_utils.schemas import Coordinate, FileName, PixelCount, conform

N_RANDOM_POINTS = 100_000
RANDOM_POINTS_HALF_SIDE = 1.3
_DISTORTION = ("k1", "k2", "k3", "k4", "p1", "p2")
_PERSPECTIVE_MODELS = ("", "PINHOLE", "SIMPLE_PINHOLE", "OPENCV", "PERSPECTIVE")
_UNUSED = (
    *("aabb_scale", "applied_scale", "applied_transform", "black_transparent", "bg_color"),
    *("depth_unit_scale_factor", "enable_depth_loading", "envmap", "fisheye_crop_radius"),
    *("fix_premult", "from_na", "importance_sampling", "integer_depth_scale", "is_hdr", "k5", "k6"),
    *("light_dir", "motion_mask_path", "n_frames", "normal_file_path", "offset", "orientation"),
    *("orientation_override", "panoptic_file_path", "render_aabb", "rolling_shutter", "scale"),
    *("auto_scale_poses_override", "semantic_path", "time", "timestamp", "up", "white_transparent"),
)
"""Keys that nerfstudio and instant-ngp know and that change nothing here."""

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
    train_filenames: list[FileName] | None = None
    val_filenames: list[FileName] | None = None
    test_filenames: list[FileName] | None = None


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
    root: Path,
    *,
    seed: int = 0,
    images_dir: str = "images",
    missing_ok: bool = False,
    notify: Notify = print,
) -> CaptureModel:
    """Read the cameras of ``transforms*.json`` and find their photographs, masks and depth maps.

    Args:
        images_dir: Folder in the scene folder in which photographs are looked for that are not
            where the file says.
        missing_ok: Leave out cameras whose photograph is missing.
    """
    paths = find_transforms(root)
    values = [read_json(path, ENCODINGS) for path in paths]
    contents = [
        conform(value, _Transforms, path) for value, path in zip(values, paths, strict=True)
    ]
    for value, path in zip(values, paths, strict=True):
        _tell_unused(value, path, notify)
    places = ImagePlaces(
        ImageFolder(root, recursive=False),
        ImageFolder(root / images_dir, recursive=False),
        ImageFolder(root / "images", recursive=False),
    )
    files = _resolve(places, contents, missing_ok)
    contents = [_with_found_maps(content, root, files, notify) for content in contents]
    split = _declared_split(contents[0], paths[0], notify) if len(paths) == 1 else None
    sets: list[list[Camera]] = [[], []]
    for number, (path, content) in enumerate(zip(paths, contents, strict=True)):
        for frame in content.frames:
            file = files[frame.file_path]
            target = number if split is None else split[frame.file_path]
            if file is not None and target is not None:
                sets[target].append(_camera(root, path, content, frame, file))
    offset = offset_of([*sets[0], *sets[1]])
    if offset.any():
        notify(describe_offset(offset))
        sets = [moved_back(cameras, offset) for cameras in sets]
    points_path = root / (contents[0].ply_file_path or "")
    if points_path.is_file():
        points, points_rgb = read_point_ply(points_path, notify, offset)
        notify(f"starting from the {len(points)} points of {points_path}")
    else:
        points, points_rgb = random_points(seed)
    names = " and ".join(path.name for path in paths)
    text = f"{root / names}: {sum(map(len, sets))} images"
    test = sets[1] if len(paths) > 1 or split is not None else None
    return CaptureModel(sets[0], test, points, points_rgb, text, offset=offset)


def _tell_unused(value: Any, path: Path, notify: Notify) -> None:
    """Name the keys of a file, and of its frames, that other programs would follow."""
    keys = set(value).union(*value["frames"])
    unused = [key for key in _UNUSED if key in keys]
    if unused:
        notify(f"note: {path}: not used: {', '.join(sorted(unused))}")


def _resolve(
    places: ImagePlaces, contents: list[_Transforms], missing_ok: bool
) -> dict[str, Path | None]:
    paths = [frame.file_path for content in contents for frame in content.frames]
    files = places.find_all(paths)
    missing = [path for path in paths if files[path] is None]
    if missing and not missing_ok:
        advice = "put them there or into images/, or fix file_path"
        raise missing_images(missing, len(paths), places, advice)
    return files


def _with_found_maps(
    content: _Transforms, root: Path, files: Mapping[str, Path | None], notify: Notify
) -> _Transforms:
    """Put the paths of masks and depth maps in place of the names that frames give them.

    One that is not there is none; how many there are of those is told in one line for each kind.
    """
    photographs = set(files.values())
    frames = content.frames
    for key, what, suffixes in (
        ("mask_path", "masks", IMAGE_SUFFIXES),
        ("depth_file_path", "depth maps", DEPTH_SUFFIXES),
    ):
        places = ImagePlaces(ImageFolder(root, recursive=False, suffixes=suffixes))
        names = [name for name in (getattr(frame, key) for frame in frames) if name is not None]
        paths = {name: places.find(name) for name in names}
        matches = {n: str(p) for n, p in paths.items() if p is not None and p not in photographs}
        missing = [name for name in names if name not in matches]
        if missing:
            nearest = places.nearest(missing[0])
            hint = f"; nearest to {missing[0]} is {nearest}" if nearest else ""
            count = f"{len(missing)} of the {len(names)} {what}"
            notify(f"note: {count} that frames name are not there ({shortened(missing)}{hint})")
        frames = [
            msgspec.structs.replace(frame, **{key: matches.get(getattr(frame, key))})
            for frame in frames
        ]
    return msgspec.structs.replace(content, frames=frames)


def _declared_split(
    content: _Transforms, path: Path, notify: Notify
) -> dict[str, Literal[0, 1] | None] | None:
    """Read which frames the lists of nerfstudio train on and hold out.

    Frames of ``test_filenames`` and ``val_filenames`` are held out, and without these lists those
    that ``train_filenames`` leaves out.

    Returns:
        By ``file_path`` 0 for training, 1 for held out, None for neither; None without lists.
    """
    names = [frame.file_path for frame in content.frames]
    index = NameIndex(names, suffixes=None)

    def frames_of(key: str) -> set[str] | None:
        listed = getattr(content, key)
        if listed is None:
            return None
        matches = {name: name if name in names else index.find(name) for name in listed}
        unknown = [name for name, match in matches.items() if match is None]
        if unknown:
            raise unknown_names(unknown, names, f"{path}, {key}", "fix the list, or remove it")
        return set(matches.values())

    train = frames_of("train_filenames")
    held_out = (frames_of("test_filenames") or set()) | (frames_of("val_filenames") or set())
    if not train and not held_out:
        return None
    train = set(names) - held_out if train is None else train - held_out
    if not held_out:
        held_out = set(names) - train
    neither = [name for name in names if name not in train | held_out]
    notify(f"{path}: its lists hold {len(held_out)} of {len(names)} views out")
    if neither:
        notify(f"note: {len(neither)} views are in no list and not used ({shortened(neither)})")
    return {name: 0 if name in train else 1 if name in held_out else None for name in names}


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
    width = round(value("w") or file_width)
    height = round(value("h") or file_height)
    fx = value("fl_x") or _focal(value("camera_angle_x"), width)
    fy = value("fl_y") or _focal(value("camera_angle_y"), height)
    # One focal length alone means square pixels.
    fx, fy = fx or fy, fy or fx
    if not (width > 0 and height > 0 and fx and fy and fx > 0 and fy > 0):
        raise UserError(f"{place}: no usable focal length or size; it needs camera_angle_x or fl_x")
    cx = value("cx")
    cy = value("cy")
    middle = width / 2 if cx is None else cx, height / 2 if cy is None else cy
    name = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
    pose = rotation, -rotation @ matrix[:3, 3]
    return Camera(
        name,
        width,
        height,
        fx,
        fy,
        *middle,
        *pose,
        file,
        mask_path=Path(frame.mask_path) if frame.mask_path else None,
        depth_path=Path(frame.depth_file_path) if frame.depth_file_path else None,
    )


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
