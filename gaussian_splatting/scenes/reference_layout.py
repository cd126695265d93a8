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
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera, nearest_rotation
from gaussian_splatting.data.world_offset import moved_back, offset_of, read_offset
from gaussian_splatting.formats.file_kinds import CLOUD_SUFFIXES, refuse_other_kinds
from gaussian_splatting.formats.readers import read_gaussians
from sugar_utils import schemas
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import decoded, read_json, without_none, write_json_atomic, write_text_atomic

CHECKPOINT_FOLDER = "checkpoints"  # of the vanilla stage, to resume from
RUN_FILE = "run.json"  # the record of a run
OBJECT_MASKS = "object_masks"  # folder of estimated masks in a checkpoint folder
_CLOUD_NAME = "point_cloud.ply"
_ITERATION = re.compile(r"iteration_(\d{1,18})")
_Entry = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Row = tuple[_Entry, _Entry, _Entry]

EXPOSURE_FILE = "exposure.json"
TRANSIENT_MASKS = "transient_masks"  # folder beside the Gaussians
_ExposureFileEntry = Annotated[float, msgspec.Meta(ge=-1e3, le=1e3)]
_Gain = Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)]
_Matrix = tuple[
    tuple[_Gain, _ExposureFileEntry, _ExposureFileEntry, _ExposureFileEntry],
    tuple[_ExposureFileEntry, _Gain, _ExposureFileEntry, _ExposureFileEntry],
    tuple[_ExposureFileEntry, _ExposureFileEntry, _Gain, _ExposureFileEntry],
]


@dataclass(frozen=True)
class StoredCamera:
    """An entry of ``cameras.json``."""

    camera: Camera
    # Whether ``cx`` and ``cy`` were stored. Other programs leave them out; the principal point is
    # then assumed at the image centre.
    has_principal_point: bool


@dataclass(frozen=True)
class ReferenceCheckpoint:
    """A folder of a 3DGS training, or a file of Gaussians, with the records beside it."""

    root: Path
    ply_path: Path  # file of the Gaussians
    iteration: int | None  # of the training; None for a file outside of ``point_cloud``
    # Entries of ``cameras.json`` in file order; None without that file.
    cameras: tuple[StoredCamera, ...] | None
    settings: dict[str, Any] = field(default_factory=dict)  # of ``cfg_args``
    # Names of the views that its training held out; None if it kept no record.
    held_out_views: frozenset[str] | None = None
    dropped_views: dict[str, str] | None = None  # reasons by name; None if it kept no record
    # Folder of the masks that its training estimated; None if it did not.
    object_masks: Path | None = None
    # Folder of the masks of what its training found to be transient; None if it found nothing.
    transient_masks: Path | None = None
    # Offset from its world to the coordinates of the original; None where there is no record. (3,)
    recorded_offset: np.ndarray | None = None
    # Offset that was subtracted from its cameras, and is subtracted from its Gaussians. (3,)
    subtracted: np.ndarray = field(default_factory=partial(np.zeros, 3))

    @property
    def images_dir(self) -> str:
        """Folder of the images it was trained on, inside the scene folder."""
        return self.settings.get("images", "images")

    def read_cloud(
        self, notify: Notify = print, world_offset: np.ndarray | None = None
    ) -> GaussianCloud:
        """Read the Gaussians into the scene.

        Args:
            notify: Called with lines about what is changed or left out.
            world_offset: Of the scene, for a file of Gaussians without cameras of its own. (3,)
        """
        if self.cameras is not None:
            world_offset = self.subtracted
        return read_gaussians(self.ply_path, notify, world_offset)


def point_cloud_path(root: Path, iteration: int) -> Path:
    """Return the file of the Gaussians of an iteration."""
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
    """Write cameras in the format of ``cameras.json``, in their order."""
    write_json_atomic(path, [camera_entry(*numbered) for numbered in enumerate(cameras)])


def camera_entry(number: int, camera: Camera) -> dict[str, Any]:
    """Return the entry of a camera in ``cameras.json``."""
    return {
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


def load_reference_checkpoint(
    path: Path | str, iteration: int | None = 7000, notify: Notify = print
) -> ReferenceCheckpoint:
    """Read the records of a 3DGS checkpoint; the Gaussians are read later.

    Args:
        path: Output folder of a training, or a file of Gaussians.
        iteration: Which iteration to take; None takes the last. Unused for a file of Gaussians.

    Raises:
        UserError: There is no checkpoint, or not this iteration.
    """
    location = _locate(Path(path), iteration)
    root = location.root
    cameras_path = root / "cameras.json"
    cameras = read_cameras_json(cameras_path) if cameras_path.is_file() else None
    subtracted = np.zeros(3)
    if cameras:
        subtracted = offset_of([stored.camera for stored in cameras])
        cameras = _move_back(cameras, subtracted)
    views = _read_recorded_views(root)
    transient_masks = location.ply_path.with_name(TRANSIENT_MASKS)
    return ReferenceCheckpoint(
        root=root,
        ply_path=location.ply_path,
        iteration=location.iteration,
        cameras=cameras,
        settings=_read_settings(root / "cfg_args", notify),
        held_out_views=views.held_out,
        dropped_views=views.dropped,
        object_masks=views.object_masks,
        transient_masks=transient_masks if transient_masks.is_dir() else None,
        recorded_offset=read_offset(root),
        subtracted=subtracted,
    )


def _move_back(cameras: Sequence[StoredCamera], offset: np.ndarray) -> tuple[StoredCamera, ...]:
    """Return stored cameras in a world from which an offset, (3,), is subtracted."""
    moved = moved_back([stored.camera for stored in cameras], offset)
    return tuple(
        replace(stored, camera=camera) for stored, camera in zip(cameras, moved, strict=True)
    )


class _RecordedViews(NamedTuple):
    """The views in the record of a run; None where there is no record."""

    held_out: frozenset[str] | None = None
    dropped: dict[str, str] | None = None
    object_masks: Path | None = None


def _read_recorded_views(root: Path) -> _RecordedViews:
    path = root / CHECKPOINT_FOLDER / RUN_FILE
    record = schemas.read_checked(path, schemas.RunRecord) if path.is_file() else {}
    held_out = record.get("held_out_views")
    dropped = record.get("dropped_views")
    if held_out is None or dropped is None:
        return _RecordedViews()
    masks = record.get("object_masks")
    mask_folder = None if masks is None else root / OBJECT_MASKS / masks
    return _RecordedViews(frozenset(held_out), dropped, mask_folder)


class _Location(NamedTuple):
    """Where the Gaussians of a checkpoint are."""

    root: Path
    ply_path: Path
    iteration: int | None


def _locate(path: Path, iteration: int | None) -> _Location:
    if (path / _CLOUD_NAME).is_file():
        path = path / _CLOUD_NAME
    if not path.is_file() and path.suffix.lower() not in CLOUD_SUFFIXES:
        iteration = _choose_iteration(path, iteration)
        return _Location(path, point_cloud_path(path, iteration), iteration)
    if not path.is_file():
        raise UserError(f"{path}: no such file; check --checkpoint_path")
    refuse_other_kinds(path)
    match = _ITERATION.fullmatch(path.parent.name)
    if match and path.parent.parent.name == "point_cloud":
        return _Location(path.parent.parent.parent, path, int(match.group(1)))
    return _Location(path.parent, path, None)


def _choose_iteration(root: Path, iteration: int | None) -> int:
    if not root.is_dir():
        raise UserError(f"{root}: no such checkpoint folder; check --checkpoint_path")
    numbers = []
    for folder in (root / "point_cloud").glob("iteration_*"):
        match = _ITERATION.fullmatch(folder.name)
        if match and (folder / _CLOUD_NAME).is_file():
            numbers.append(int(match.group(1)))
    numbers.sort()
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
    """Read ``cameras.json`` in file order.

    Raises:
        UserError: An entry is malformed.
    """
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: holds no list of cameras; write it again")
    return tuple(_stored_camera(path, number, entry) for number, entry in enumerate(entries))


def _stored_camera(path: Path, number: int, value: object) -> StoredCamera:
    place = f"{path}, entry {number}"
    entry = schemas.conform(value, _CameraEntry, place)
    # ``Annotated`` is a type to msgspec, not to type checkers.
    name: str = schemas.conform(str(entry.img_name), schemas.FileName, place)  # pyright: ignore[reportArgumentType]
    rotation = np.array(entry.rotation).T.copy()
    width = int(entry.width)
    height = int(entry.height)
    if nearest_rotation(rotation) is None:
        raise UserError(f"{place} ({name}): rotation is no rotation; {schemas.WRITE_AGAIN}")
    cx = width / 2
    cy = height / 2
    has_principal_point = False
    if entry.cx is not None and entry.cy is not None:
        cx = entry.cx
        cy = entry.cy
        has_principal_point = True
    camera = Camera(
        name=name,
        width=width,
        height=height,
        fx=entry.fx,
        fy=entry.fy,
        cx=cx,
        cy=cy,
        rotation=rotation,
        translation=-rotation @ np.array(entry.position),
    )
    return StoredCamera(camera, has_principal_point)


class _Settings(msgspec.Struct):
    """The settings of ``cfg_args`` that are used; None for those that are missing."""

    images: schemas.FileName | None = None
    eval: bool | None = None
    white_background: bool | None = None


def _read_settings(path: Path, notify: Notify) -> dict[str, Any]:
    """Read literal values of ``cfg_args``; nothing is executed, the file may be from anywhere."""
    if not path.is_file():
        return {}
    try:
        with warnings.catch_warnings():
            # Folders of Windows look like unknown escapes.
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
    return without_none(settings)


def write_exposures(path: Path, exposures: Mapping[str, Tensor]) -> None:
    """Write exposures by name: logarithms of gains, then offsets, (2, 3) each."""
    matrices = {}
    for name, exposure in exposures.items():
        log_gains, offsets = exposure.tolist()
        rows = [[0.0, 0.0, 0.0, offset] for offset in offsets]
        for channel, log_gain in enumerate(log_gains):
            rows[channel][channel] = math.exp(log_gain)
        matrices[name] = rows
    write_json_atomic(path, matrices)


def read_exposures(path: Path, notify: Notify) -> dict[str, Tensor]:
    """Read what :func:`write_exposures` wrote; empty where there is no such file."""
    if not path.is_file():
        return {}
    matrices = schemas.conform(read_json(path), dict[schemas.FileName, _Matrix], path)
    exposures = {}
    mixes_channels = False
    for name, matrix in matrices.items():
        gains = [matrix[channel][channel] for channel in range(3)]
        offsets = [row[3] for row in matrix]
        mixes_channels = mixes_channels or bool(_off_diagonal(matrix))
        log_gains = [math.log(gain) for gain in gains]
        exposures[name] = torch.tensor([log_gains, offsets], device="cpu")
    if mixes_channels:
        notify(f"{path}: its matrices mix channels; only gains and offsets are taken over")
    return exposures


def _off_diagonal(matrix: _Matrix) -> list[float]:
    """Return the numbers that mix channels and are not 0."""
    numbers = []
    for row in range(3):
        numbers += [matrix[row][column] for column in range(3) if column != row]
    return [number for number in numbers if number != 0]
