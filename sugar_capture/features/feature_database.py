# SPDX-License-Identifier: Apache-2.0
"""COLMAP's database of a capture: cameras and images, and features added later."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sugar_capture.features.photographs import Photograph, camera_groups
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path
from sugar_utils.libraries import load_pycolmap

if TYPE_CHECKING:
    import pycolmap

SMALL_GROUP = 10  # cameras with fewer images get one parameter of distortion
FALLBACK_FOCAL = 1.2  # in longer sides, without EXIF: 45 degrees, as in COLMAP
_CHECK_OF_COLMAP = re.compile(r"\[\w+\.(cc|h):\d+\]")  # beginning of messages of COLMAP's checks

Lenses = Sequence[tuple[Any, Sequence[int]]]
"""Each pycolmap.Camera with the indices of the images that it took."""


class Rig(NamedTuple):
    """Cameras that are mounted together and take images at the same moments."""

    # Each pycolmap.Camera with the rotation from the first camera's axes to its own, (3, 3).
    lenses: Sequence[tuple[Any, np.ndarray]]
    moments: Sequence[Sequence[int]]  # indices of the images of each moment, one per camera


def database_name(index: int) -> str:
    """Return the name of an image in the database; lists of pairs end names at spaces."""
    return f"{index + 1:06}"


def open_database(path: Path) -> pycolmap.Database:
    """Open a database, for a ``with`` statement."""
    return load_pycolmap().Database.open(str(path))


@contextlib.contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Convert exceptions of COLMAP about a database into a ``UserError``."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # pycolmap raises what its C++ threw
        if isinstance(error, ValueError) and not _CHECK_OF_COLMAP.match(str(error)):
            raise
        cause = str(error).rstrip(".")
        raise UserError(
            f"cannot go on with {path}: {cause}; free some space, and remove the file if that does "
            "not help"
        ) from error


def is_whole(path: Path, n_photographs: int) -> bool:
    """Whether a file is an undamaged database with this number of images."""
    if not path.is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            check = database.execute("PRAGMA quick_check(1)").fetchone()
            count = database.execute("SELECT COUNT(*) FROM images").fetchone()
    except sqlite3.Error:
        return False
    return check == ("ok",) and count == (n_photographs,)


def remove_database(path: Path) -> None:
    """Remove a database with the files that SQLite writes beside it."""
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def create_database(
    path: Path,
    photographs: Sequence[Photograph],
    camera_model: str | None,
    lenses: Lenses | None = None,
    rigs: Sequence[Rig] | None = None,
) -> None:
    """Write a database of cameras and images without features, complete or not at all.

    Images have the numbers 1, 2, ... in their order, and share lenses as their headers say.

    Args:
        camera_model: COLMAP's name of the lens model; None for OPENCV, and SIMPLE_RADIAL where a
            camera took fewer than ``SMALL_GROUP``.
        lenses: Those that are known.
        rigs: Where several images were taken at once.

    Raises:
        UserError: The lens model is unknown.
    """
    pycolmap = load_pycolmap()
    models = pycolmap.CameraModelId.__members__
    if camera_model is not None and camera_model not in models:
        names = ", ".join(sorted(models))
        raise UserError(f"--camera {camera_model} is unknown; choose one of {names}")
    with atomic_path(path) as temporary, open_database(temporary) as database:
        if not rigs:
            rigs = _single_rigs(lenses or _assumed_lenses(photographs, camera_model))
        sensors_of = {}
        rig_id_of = {}
        for rig in rigs:
            sensors = [_write_sensor(database, lens) for lens, _ in rig.lenses]
            rig_id = _write_rig(database, rig, sensors)
            for moment in rig.moments:
                sensors_of[tuple(moment)] = sensors
                rig_id_of[tuple(moment)] = rig_id
        for moment in sorted(sensors_of):
            frame = pycolmap.Frame()
            frame.rig_id = rig_id_of[moment]
            for index, sensor in zip(moment, sensors_of[moment], strict=True):
                image = pycolmap.Image(name=database_name(index), camera_id=sensor.id)
                frame.add_data_id(pycolmap.data_t(sensor, database.write_image(image)))
            database.write_frame(frame)


def _single_rigs(lenses: Lenses) -> list[Rig]:
    """Return a rig of one camera for each lens."""
    return [Rig([(lens, np.eye(3))], [[index] for index in indices]) for lens, indices in lenses]


def _write_sensor(database: pycolmap.Database, lens: pycolmap.Camera) -> pycolmap.sensor_t:
    pycolmap = load_pycolmap()
    return pycolmap.sensor_t(pycolmap.SensorType.CAMERA, database.write_camera(lens))


def _write_rig(database: pycolmap.Database, rig: Rig, sensors: Sequence[Any]) -> int:
    """Write a rig and return its number; its first sensor is the reference."""
    pycolmap = load_pycolmap()
    record = pycolmap.Rig()
    record.add_ref_sensor(sensors[0])
    for sensor, (_, rotation) in zip(sensors[1:], rig.lenses[1:], strict=True):
        pose = pycolmap.Rigid3d(pycolmap.Rotation3d(rotation), np.zeros(3))
        record.add_sensor(sensor, pose)
    return database.write_rig(record)


def _assumed_lenses(photographs: Sequence[Photograph], camera_model: str | None) -> Lenses:
    """Return a lens without distortion for each group of images of one camera."""
    pycolmap = load_pycolmap()
    lenses = []
    for group in camera_groups(photographs):
        first = photographs[group[0]]
        model = camera_model
        if model is None:
            model = "OPENCV" if len(group) >= SMALL_GROUP else "SIMPLE_RADIAL"
        focal = first.focal or FALLBACK_FOCAL * max(first.width, first.height)
        lens = pycolmap.Camera.create_from_model_name(
            pycolmap.INVALID_CAMERA_ID, model, focal, first.width, first.height
        )
        lens.has_prior_focal_length = first.focal is not None
        lenses.append((lens, group))
    return lenses


def separate_lenses(database_path: Path, camera_ids: Collection[int]) -> dict[int, int]:
    """Give each image of some cameras a camera of its own, with the same lens to begin with.

    Numbers of new cameras follow from those of the images, so they are the same each time.

    Returns:
        The number of the camera that an image had, by that of its new one.
    """
    pycolmap = load_pycolmap()
    earlier = {}
    with open_database(database_path) as database:
        images = sorted(database.read_all_images(), key=lambda image: image.image_id)
        for image in images:
            if image.camera_id not in camera_ids:
                continue
            lens = database.read_camera(image.camera_id)
            sensor = _write_sensor(database, lens)
            earlier[sensor.id] = image.camera_id
            frame = pycolmap.Frame(frame_id=image.frame_id)
            frame.rig_id = _write_rig(database, Rig([(lens, np.eye(3))], []), [sensor])
            frame.add_data_id(pycolmap.data_t(sensor, image.image_id))
            database.update_frame(frame)
            image.camera_id = sensor.id
            database.update_image(image)
    return earlier
