# SPDX-License-Identifier: Apache-2.0
"""The folder that a plain 3DGS trainer leaves behind, read and written, ``exposure.json`` too.

::

    cfg_args                                      one line: Namespace(...)
    cameras.json                                  test cameras first, then training cameras
    input.ply                                     the points training started from
    point_cloud/iteration_N/point_cloud.ply       the Gaussians
    exposure.json                                 a 3 x 4 matrix for each photograph: gains, offsets
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera, nearest_rotation
from gaussian_splatting.data.world_offset import moved_back, offset_of, read_offset
from sugar_utils import schemas
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import decoded, read_json, write_json_atomic, write_text_atomic

CHECKPOINT_FOLDER = "checkpoints"  # of the vanilla stage, to resume from
RUN_FILE = "run.json"  # the record of a run
OBJECT_MASKS = "object_masks"  # folder of estimated masks in a checkpoint folder
_CLOUD_NAME = "point_cloud.ply"
_CLOUD_FILES = (".ply", ".spz", ".sog", ".splat")  # that may stand for a folder
_ITERATION = re.compile(r"iteration_(\d{1,18})")
_Entry = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Row = tuple[_Entry, _Entry, _Entry]

EXPOSURE_FILE = "exposure.json"
_ExposureFileEntry = Annotated[float, msgspec.Meta(ge=-1e3, le=1e3)]
_Gain = Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)]
_Matrix = tuple[
    tuple[_Gain, _ExposureFileEntry, _ExposureFileEntry, _ExposureFileEntry],
    tuple[_ExposureFileEntry, _Gain, _ExposureFileEntry, _ExposureFileEntry],
    tuple[_ExposureFileEntry, _ExposureFileEntry, _Gain, _ExposureFileEntry],
]


@dataclass(frozen=True)
class StoredCamera:
    camera: Camera
    # Whether ``cx`` and ``cy`` were stored. Other programs leave them out; the principal point is
    # then assumed at the image centre.
    has_principal_point: bool


@dataclass(frozen=True)
class ReferenceCheckpoint:
    root: Path
    ply_path: Path
    iteration: int | None
    # Entries of ``cameras.json`` in file order; None without that file.
    cameras: tuple[StoredCamera, ...] | None
    settings: dict[str, Any] = field(default_factory=dict)
    # Names of the views that its training held out; None if it kept no record.
    held_out_views: frozenset[str] | None = None
    dropped_views: dict[str, str] | None = None
    # Folder of the masks that its training estimated; None if it did not.
    object_masks: Path | None = None
    # What its world lacks for the coordinates of the original; None where it does not say. (3,)
    recorded_offset: np.ndarray | None = None
    # What was subtracted from its cameras, and will be from its Gaussians, when it was read. (3,)
    subtracted: np.ndarray = field(default_factory=partial(np.zeros, 3))

    @property
    def images_dir(self) -> str:
        """Folder of the photographs it was trained on, inside the scene folder."""
        return self.settings.get("images", "images")

    def read_cloud(self, notify: Notify = print) -> GaussianCloud:
        """Read the Gaussians, in the axes of the capture."""
        # Here and not above: what turns Gaussians is part of the engine, which imports this module.
        from gaussian_splatting.formats.readers import read_gaussians

        return read_gaussians(self.ply_path, notify, self.subtracted)


def point_cloud_path(root: Path, iteration: int) -> Path:
    return root / "point_cloud" / f"iteration_{iteration}" / _CLOUD_NAME


def write_cfg_args(
    root: Path,
    *,
    source_path: Path | str,
    sh_degree: int = 3,
    images: str = "images",
    resolution: float = -1,
    white_background: bool = False,
    eval_split: bool = False,
) -> None:
    """Write ``cfg_args``, the settings that viewers of other programs read back."""
    values = {
        "sh_degree": sh_degree,
        "source_path": str(source_path),
        "model_path": str(root),
        "images": images,
        "resolution": int(resolution) if resolution == int(resolution) else resolution,
        "white_background": white_background,
        "data_device": "cuda",
        "eval": eval_split,
    }
    text = ", ".join(f"{key}={value!r}" for key, value in values.items())
    write_text_atomic(root / "cfg_args", f"Namespace({text})")


def write_cameras_json(
    root: Path, train_cameras: Sequence[Camera], test_cameras: Sequence[Camera]
) -> None:
    """Write ``cameras.json``: test cameras first, as all readers of the format expect."""
    write_camera_list(root / "cameras.json", [*test_cameras, *train_cameras])


def write_camera_list(path: Path, cameras: Sequence[Camera]) -> None:
    entries = [
        {
            "id": number,
            "img_name": camera.name,
            "width": camera.width,
            "height": camera.height,
            "position": camera.center.tolist(),
            "rotation": camera.rotation.T.tolist(),
            "fy": camera.fy,
            "fx": camera.fx,
            "cx": camera.cx,
            "cy": camera.cy,
        }
        for number, camera in enumerate(cameras)
    ]
    write_json_atomic(path, entries)


def load_reference_checkpoint(
    path: Path | str, iteration: int | None = 7000, notify: Notify = print
) -> ReferenceCheckpoint:
    """Find out what a 3DGS checkpoint holds; the Gaussians are read later.

    Args:
        iteration: Which iteration to take; None takes the last. Unused for a file of Gaussians.
    """
    path = Path(path)
    if (path / _CLOUD_NAME).is_file():
        path = path / _CLOUD_NAME
    if path.is_file() or path.suffix.lower() in _CLOUD_FILES:
        root, ply_path, found = _locate_ply(path)
    else:
        root = path
        found = _choose_iteration(path, iteration)
        ply_path = point_cloud_path(path, found)
    cameras_path = root / "cameras.json"
    cameras = read_cameras_json(cameras_path) if cameras_path.is_file() else None
    subtracted = np.zeros(3)
    if cameras:
        subtracted = offset_of([stored.camera for stored in cameras])
    if subtracted.any():
        moved = moved_back([stored.camera for stored in cameras], subtracted)
        cameras = tuple(
            replace(stored, camera=camera) for stored, camera in zip(cameras, moved, strict=True)
        )
    return ReferenceCheckpoint(
        root,
        ply_path,
        found,
        cameras,
        _read_settings(root / "cfg_args", notify),
        **_recorded_views(root),
        recorded_offset=read_offset(root),
        subtracted=subtracted,
    )


def _recorded_views(root: Path) -> dict[str, Any]:
    path = root / CHECKPOINT_FOLDER / RUN_FILE
    record = schemas.read_checked(path, schemas.RunRecord) if path.is_file() else {}
    held_out = record.get("held_out_views")
    dropped = record.get("dropped_views")
    if held_out is None or dropped is None:
        return {}
    masks = record.get("object_masks")
    return {
        "held_out_views": frozenset(held_out),
        "dropped_views": dropped,
        "object_masks": None if masks is None else root / OBJECT_MASKS / masks,
    }


def _locate_ply(path: Path) -> tuple[Path, Path, int | None]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; check --checkpoint_path")
    match = _ITERATION.fullmatch(path.parent.name)
    if match and path.parent.parent.name == "point_cloud":
        return path.parent.parent.parent, path, int(match.group(1))
    return path.parent, path, None


def _choose_iteration(root: Path, iteration: int | None) -> int:
    if not root.is_dir():
        raise UserError(f"{root}: no such checkpoint folder; check --checkpoint_path")
    folders = (root / "point_cloud").glob("iteration_*")
    numbers = sorted(
        int(match.group(1))
        for folder in folders
        if (match := _ITERATION.fullmatch(folder.name)) and (folder / _CLOUD_NAME).is_file()
    )
    if not numbers:
        raise UserError(
            f"{root}: no point_cloud/iteration_N/{_CLOUD_NAME}; --checkpoint_path must name the "
            "output folder of a 3DGS training, or a .ply, .spz, .sog or .splat"
        )
    if iteration is None:
        return numbers[-1]
    if iteration not in numbers:
        nearest = min(numbers, key=lambda number: abs(number - iteration))
        raise UserError(
            f"{root}: has no iteration {iteration}, only {', '.join(map(str, numbers))}; "
            f"use -i {nearest}"
        )
    return iteration


class _CameraEntry(msgspec.Struct):
    """One entry of ``cameras.json``; sizes may be written as floats, names as numbers."""

    img_name: str | int
    width: schemas.PixelCount
    height: schemas.PixelCount
    position: tuple[schemas.Coordinate, schemas.Coordinate, schemas.Coordinate]
    rotation: tuple[_Row, _Row, _Row]
    fx: schemas.Positive
    fy: schemas.Positive
    cx: schemas.Coordinate | None = None
    cy: schemas.Coordinate | None = None


def read_cameras_json(path: Path) -> tuple[StoredCamera, ...]:
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: holds no list of cameras; write it again")
    return tuple(_stored_camera(path, number, entry) for number, entry in enumerate(entries))


def _stored_camera(path: Path, number: int, value: Any) -> StoredCamera:
    place = f"{path}, entry {number}"
    entry = schemas.conform(value, _CameraEntry, place)
    name = schemas.conform(str(entry.img_name), schemas.FileName, place)
    rotation = np.array(entry.rotation).T.copy()
    width = int(entry.width)
    height = int(entry.height)
    if nearest_rotation(rotation) is None:
        raise UserError(f"{place} ({name}): rotation is no rotation; {schemas.WRITE_AGAIN}")
    has_principal_point = entry.cx is not None and entry.cy is not None
    middle = (entry.cx, entry.cy) if has_principal_point else (width / 2, height / 2)
    pose = rotation, -rotation @ np.array(entry.position)
    camera = Camera(name, width, height, entry.fx, entry.fy, *middle, *pose)
    return StoredCamera(camera, has_principal_point)


class _Settings(msgspec.Struct):
    """What is read of ``cfg_args``; None where it says nothing."""

    images: schemas.FileName | None = None
    eval: bool | None = None
    white_background: bool | None = None


def _read_settings(path: Path, notify: Notify) -> dict[str, Any]:
    """Literal values of ``cfg_args``. Nothing is executed; the file may come from anywhere."""
    if not path.is_file():
        return {}
    try:
        with warnings.catch_warnings():
            # Folders of Windows hold what looks like unknown escapes.
            warnings.simplefilter("ignore")
            call = ast.parse(decoded(path.read_bytes()).strip(), mode="eval").body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        notify(f"{path}: not understood and not used")
        return {}
    settings = {}
    for keyword in call.keywords:
        if keyword.arg is not None:
            with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError):
                settings[keyword.arg] = ast.literal_eval(keyword.value)
    for name in _Settings.__struct_fields__:
        try:
            schemas.conform({name: settings.get(name)}, _Settings, path, "it is not used")
        except UserError as error:
            notify(str(error))
            del settings[name]
    return {name: value for name, value in settings.items() if value is not None}


def write_exposures(path: Path, exposures: Mapping[str, Tensor]) -> None:
    """Write exposures by name: logarithms of gains, then offsets, (2, 3) each."""

    def matrix(log_gains: list[float], offsets: list[float]) -> list[list[float]]:
        rows = [[0.0, 0.0, 0.0, offset] for offset in offsets]
        for channel, value in enumerate(log_gains):
            rows[channel][channel] = math.exp(value)
        return rows

    write_json_atomic(path, {name: matrix(*e.tolist()) for name, e in exposures.items()})


def read_exposures(path: Path, notify: Notify) -> dict[str, Tensor]:
    """Read what :func:`write_exposures` wrote; empty where there is no such file."""
    if not path.is_file():
        return {}
    matrices = schemas.conform(read_json(path), dict[schemas.FileName, _Matrix], path)
    if any(m[i][j] for m in matrices.values() for i in range(3) for j in range(3) if i != j):
        notify(f"{path}: its matrices mix channels; only gains and offsets are taken over")
    return {
        name: torch.tensor(
            [[math.log(m[c][c]) for c in range(3)], [m[c][3] for c in range(3)]], device="cpu"
        )
        for name, m in matrices.items()
    }
