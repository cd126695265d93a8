# SPDX-License-Identifier: Apache-2.0
"""Scenes described by ``transforms*.json``: NeRF-synthetic, instant-ngp and nerfstudio.

Their cameras look along -z with y up (OpenGL); they are turned to COLMAP's axes here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch

from gaussian_splatting.core.random import generator
from gaussian_splatting.data.cameras import Camera, nearest_rotation
from gaussian_splatting.data.images import image_size
from gaussian_splatting.data.maps.map_files import FILES as DEPTH_SUFFIXES
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
from gaussian_splatting.data.world_offset import describe_offset, moved_back, offset_of
from gaussian_splatting.formats.ply import read_point_ply
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.files import read_json
from sugar_utils.schemas import Coordinate, FileName, PixelCount, conform

N_RANDOM_POINTS = 100_000
RANDOM_POINTS_HALF_SIDE = 1.3
_DISTORTION = ("k1", "k2", "k3", "k4", "p1", "p2")
_PERSPECTIVE_MODELS = ("", "PINHOLE", "SIMPLE_PINHOLE", "OPENCV", "PERSPECTIVE")
_UNUSED = {
    "aabb_scale",
    "applied_scale",
    "applied_transform",
    "auto_scale_poses_override",
    "bg_color",
    "black_transparent",
    "depth_unit_scale_factor",
    "enable_depth_loading",
    "envmap",
    "fisheye_crop_radius",
    "fix_premult",
    "from_na",
    "importance_sampling",
    "integer_depth_scale",
    "is_hdr",
    "k5",
    "k6",
    "light_dir",
    "motion_mask_path",
    "n_frames",
    "normal_file_path",
    "offset",
    "orientation",
    "orientation_override",
    "panoptic_file_path",
    "render_aabb",
    "rolling_shutter",
    "scale",
    "semantic_path",
    "time",
    "timestamp",
    "up",
    "white_transparent",
}
"""Keys that nerfstudio and instant-ngp know and that change nothing here."""

_Row = tuple[Coordinate, Coordinate, Coordinate, Coordinate]
_EXTRA_FILES = (
    ("mask_path", "masks", IMAGE_SUFFIXES),
    ("depth_file_path", "depth maps", DEPTH_SUFFIXES),
)
"""Keys of files that belong to a frame, with their name for messages and their extensions."""


class _Lens(msgspec.Struct):
    """Intrinsics, which a file has for each frame or once for all."""

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
    """One image; some programs leave the last row of its pose out."""

    file_path: FileName
    mask_path: FileName | None = None
    depth_file_path: FileName | None = None
    transform_matrix: Annotated[list[_Row], msgspec.Meta(min_length=3, max_length=4)]


class _Transforms(_Lens, kw_only=True):
    """``transforms*.json``."""

    frames: Annotated[list[_Frame], msgspec.Meta(min_length=1)]
    ply_file_path: FileName | None = None
    train_filenames: list[FileName] | None = None
    val_filenames: list[FileName] | None = None
    test_filenames: list[FileName] | None = None


def find_transforms(root: Path) -> list[Path]:
    """Return the JSON files of a scene: train and perhaps test, or the single one, or none."""
    train = root / "transforms_train.json"
    if train.is_file():
        return [p for p in (train, root / "transforms_test.json") if p.is_file()]
    single = root / "transforms.json"
    return [single] if single.is_file() else []


def random_points(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw points to start from where a capture has none: uniform in a cube, in random colours.

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
    """Read the cameras of ``transforms*.json`` and find their images, masks and depth maps.

    Args:
        seed: Of random points, where the scene has none.
        images_dir: Folder in the scene folder in which images are looked for that are not where
            the file says.
        missing_ok: Leave out cameras whose image is missing.

    Raises:
        UserError: A file is malformed, or images are missing.
    """
    paths = find_transforms(root)
    contents = _read_files(paths, notify)
    places = ImagePlaces(
        ImageFolder(root, recursive=False),
        ImageFolder(root / images_dir, recursive=False),
        ImageFolder(root / "images", recursive=False),
    )
    files = _find_images(places, contents, missing_ok)
    contents = [_with_existing_maps(content, root, files, notify) for content in contents]
    split = None
    if len(contents) == 1:
        split = _declared_split(contents[0], paths[0], notify)
    train = []
    test = []
    for number, (path, content) in enumerate(zip(paths, contents, strict=True)):
        for frame in content.frames:
            name = frame.file_path
            is_train = number == 0 if split is None else name in split.train
            is_test = number == 1 if split is None else name in split.held_out
            file = files[name]
            if file is None or not (is_train or is_test):
                continue
            camera = _camera(root, path, content, frame, file)
            if is_train:
                train.append(camera)
            else:
                test.append(camera)
    offset = offset_of([*train, *test])
    if offset.any():
        notify(describe_offset(offset))
        train = moved_back(train, offset)
        test = moved_back(test, offset)
    points, points_rgb = _read_points(root, contents[0], seed, offset, notify)
    names = " and ".join(path.name for path in paths)
    has_split = len(paths) > 1 or split is not None
    return CaptureModel(
        train_cameras=train,
        test_cameras=test if has_split else None,
        points=points,
        points_rgb=points_rgb,
        description=f"{root / names}: {len(train) + len(test)} images",
        offset=offset,
    )


def _read_files(paths: Sequence[Path], notify: Notify) -> list[_Transforms]:
    values = [read_json(path, ENCODINGS) for path in paths]
    contents = []
    for value, path in zip(values, paths, strict=True):
        contents.append(conform(value, _Transforms, path))
    for value, path in zip(values, paths, strict=True):
        _tell_unused(value, path, notify)
    return contents


def _read_points(
    root: Path, content: _Transforms, seed: int, offset: np.ndarray, notify: Notify
) -> tuple[np.ndarray, np.ndarray]:
    """Return points, (P, 3) float32, and colours, (P, 3) uint8; random ones without a file."""
    points_path = root / (content.ply_file_path or "")
    if not points_path.is_file():
        return random_points(seed)
    points, points_rgb = read_point_ply(points_path, notify, offset)
    notify(f"starting from the {len(points)} points of {points_path}")
    return points, points_rgb


def _tell_unused(
    value: Mapping[str, Sequence[Mapping[str, object]]], path: Path, notify: Notify
) -> None:
    """Name the keys of a file, and of its frames, that other programs would follow."""
    keys = set(value).union(*value["frames"])
    unused = sorted(keys & _UNUSED)
    if unused:
        notify(f"note: {path}: not used: {', '.join(unused)}")


def _find_images(
    places: ImagePlaces, contents: list[_Transforms], missing_ok: bool
) -> dict[str, Path | None]:
    """Return the file of each frame by its ``file_path``."""
    paths = [frame.file_path for content in contents for frame in content.frames]
    files = places.find_all(paths)
    missing = [path for path in paths if files[path] is None]
    if missing and not missing_ok:
        advice = "put them there or into images/, or fix file_path"
        raise missing_images(missing, len(paths), places, advice)
    return files


def _with_existing_maps(
    content: _Transforms, root: Path, files: Mapping[str, Path | None], notify: Notify
) -> _Transforms:
    """Replace the names of masks and depth maps by their paths; None for missing ones.

    Missing files are counted in one line for each kind.

    Args:
        files: Images of the frames, which are no masks or depth maps.
    """
    image_files = set(files.values())
    frames = content.frames
    for key, what, suffixes in _EXTRA_FILES:
        places = ImagePlaces(ImageFolder(root, recursive=False, suffixes=suffixes))
        names = [getattr(frame, key) for frame in frames]
        names = [name for name in names if name is not None]
        paths = {}
        for name in names:
            path = places.find(name)
            if path is not None and path not in image_files:
                paths[name] = str(path)
        missing = [name for name in names if name not in paths]
        if missing:
            nearest = places.nearest(missing[0])
            hint = f"; nearest to {missing[0]} is {nearest}" if nearest else ""
            count = f"{len(missing)} of the {len(names)} {what}"
            notify(f"note: {count} that frames name are not there ({shortened(missing)}{hint})")
        frames = [
            msgspec.structs.replace(frame, **{key: paths.get(getattr(frame, key))})
            for frame in frames
        ]
    return msgspec.structs.replace(content, frames=frames)


class _Split(NamedTuple):
    """Frames to train on and to hold out, by ``file_path``; others are not used."""

    train: set[str]
    held_out: set[str]


def _declared_split(content: _Transforms, path: Path, notify: Notify) -> _Split | None:
    """Read which frames the lists of nerfstudio train on and hold out; None without lists.

    Frames of ``test_filenames`` and ``val_filenames`` are held out, and without these lists those
    that ``train_filenames`` leaves out.
    """
    names = [frame.file_path for frame in content.frames]
    index = NameIndex(names, suffixes=None)
    listed_train = _listed_frames(content.train_filenames, names, index, f"{path}, train_filenames")
    listed_test = _listed_frames(content.test_filenames, names, index, f"{path}, test_filenames")
    listed_val = _listed_frames(content.val_filenames, names, index, f"{path}, val_filenames")
    held_out = listed_test | listed_val
    if not listed_train and not held_out:
        return None
    train = listed_train - held_out
    if content.train_filenames is None:
        train = set(names) - held_out
    if not held_out:
        held_out = set(names) - train
    neither = [name for name in names if name not in train | held_out]
    notify(f"{path}: its lists hold {len(held_out)} of {len(names)} views out")
    if neither:
        notify(f"note: {len(neither)} views are in no list and not used ({shortened(neither)})")
    return _Split(train, held_out)


def _listed_frames(
    listed: list[str] | None, names: list[str], index: NameIndex, place: str
) -> set[str]:
    """Return the frames that a list names; none where there is no list.

    Args:
        names: ``file_path`` of all frames.
        index: The same, to look them up.
        place: File and key, for the message of an error.
    """
    if listed is None:
        return set()
    frames = set()
    unknown = []
    for name in dict.fromkeys(listed):
        match = name if name in names else index.find(name)
        if match is None:
            unknown.append(name)
        else:
            frames.add(match)
    if unknown:
        raise unknown_names(unknown, names, place, "fix the list, or remove it")
    return frames


def _camera(root: Path, path: Path, content: _Transforms, frame: _Frame, file: Path) -> Camera:
    """Build the camera of a frame.

    Args:
        path: The JSON file, for messages of errors.
        file: The image.
    """
    place = f"{path}, {frame.file_path}"
    lens = _lens_of(frame, content)
    matrix = np.array(frame.transform_matrix)
    # Decimal files are orthonormal to a few digits only.
    axes = nearest_rotation(matrix[:3, :3])
    if axes is None:
        raise UserError(f"{place}: transform_matrix is no camera pose; fix the file")
    rotation = (axes * (1, -1, -1)).T
    _require_pinhole(place, lens)
    if lens.w and lens.h:
        # A file that cannot be read is left out later.
        width = round(lens.w)
        height = round(lens.h)
    else:
        file_width, file_height = image_size(file)
        width = round(lens.w or file_width)
        height = round(lens.h or file_height)
    fx = lens.fl_x or _focal(lens.camera_angle_x, width)
    fy = lens.fl_y or _focal(lens.camera_angle_y, height)
    # One focal length alone means square pixels.
    if not fx:
        fx = fy
    elif not fy:
        fy = fx
    if not (width > 0 and height > 0 and fx and fy and fx > 0 and fy > 0):
        raise UserError(f"{place}: no usable focal length or size; it needs camera_angle_x or fl_x")
    return Camera(
        name=file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name,
        width=width,
        height=height,
        fx=fx,
        fy=fy,
        cx=width / 2 if lens.cx is None else lens.cx,
        cy=height / 2 if lens.cy is None else lens.cy,
        rotation=rotation,
        translation=-rotation @ matrix[:3, 3],
        image_path=file,
        mask_path=Path(frame.mask_path) if frame.mask_path else None,
        depth_path=Path(frame.depth_file_path) if frame.depth_file_path else None,
    )


def _lens_of(frame: _Frame, content: _Transforms) -> _Lens:
    """Return the intrinsics of a frame; where it has none, those of the whole file count."""
    values = {}
    for key in _Lens.__struct_fields__:
        value = getattr(frame, key)
        values[key] = getattr(content, key) if value is None else value
    return _Lens(**values)


def _require_pinhole(place: str, lens: _Lens) -> None:
    """Raise a ``UserError`` if a lens is distorted."""
    distortions = [key for key in _DISTORTION if getattr(lens, key)]
    model = lens.camera_model or ""
    if model.upper() not in _PERSPECTIVE_MODELS or lens.is_fisheye:
        distortions.insert(0, f"camera model {model or 'fisheye'}")
    if distortions:
        raise UserError(
            f"{place}: the lens is distorted "
            f"({', '.join(distortions)}); undistort the images first (colmap image_undistorter), "
            "or put the COLMAP model into sparse/0, which is undistorted on load"
        )


def _focal(angle: float | None, size: int) -> float | None:
    """Return the focal length in pixels of a field of view in radians; None if it is impossible."""
    if angle is None or not 0 < angle < math.pi:
        return None
    return size / (2 * math.tan(angle / 2))
