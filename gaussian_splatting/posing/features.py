# SPDX-License-Identifier: Apache-2.0
"""Features of photographs: found at a bounded size, none where masks are black."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.images import decode_mask
from gaussian_splatting.posing.photographs import Photograph, camera_groups, read_grey
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path
from sugar_utils.libraries import load_pycolmap
from sugar_utils.memory import available_bytes

SMALL_GROUP = 10
"""Cameras with fewer photographs get one parameter of distortion: more would fit the noise."""

FALLBACK_FOCAL = 1.2
"""Focal length in longer sides, where EXIF tells none: 45 degrees, as COLMAP assumes."""

_BYTES_PER_PIXEL = 256
"""What a SIFT extractor holds at most per pixel, its first octave at twice the size included."""


def database_name(index: int) -> str:
    """Name in the database of the photograph at a place in the order.

    Lists of pairs take a name for ended where it has a space, as photographs' names often do.
    """
    return f"{index + 1:06}"


@contextlib.contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """A context in which COLMAP uses a database.

    Raises:
        UserError: It could not, as on a full disk.
    """
    try:
        yield
    except RuntimeError as error:  # pycolmap raises what its C++ threw
        cause = str(error).rstrip(".")
        raise UserError(
            f"cannot go on with {path}: {cause}; free some space, and remove the file if that does "
            "not help"
        ) from error


def is_whole(path: Path, n_photographs: int) -> bool:
    """Whether a file is an undamaged database of so many photographs."""
    if not path.is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            checked = database.execute("PRAGMA quick_check(1)").fetchone()
            found = database.execute("SELECT COUNT(*) FROM images").fetchone()
    except sqlite3.Error:
        return False
    return (checked, found) == (("ok",), (n_photographs,))


def create_database(
    path: Path, photographs: Sequence[Photograph], camera_model: str | None
) -> None:
    """Write a database of cameras and photographs without features, complete or not at all.

    Photographs have the numbers 1, 2, ... in their order. Those that their headers give to one
    camera share its lens.

    Args:
        path: The database; replaced.
        photographs: In their order.
        camera_model: COLMAP's name of the lens model; None for OPENCV, and SIMPLE_RADIAL where a
            camera took fewer than ``SMALL_GROUP``.

    Raises:
        UserError: The model is unknown, or the file cannot be written.
    """
    pycolmap = load_pycolmap()
    if camera_model is not None and camera_model not in pycolmap.CameraModelId.__members__:
        known = ", ".join(sorted(pycolmap.CameraModelId.__members__))
        raise UserError(f"--camera {camera_model} is unknown; choose one of {known}")
    with atomic_path(path) as temporary, pycolmap.Database.open(str(temporary)) as database:
        numbers = {}
        for group in camera_groups(photographs):
            first = photographs[group[0]]
            fallback = "OPENCV" if len(group) >= SMALL_GROUP else "SIMPLE_RADIAL"
            camera = pycolmap.Camera.create_from_model_name(
                pycolmap.INVALID_CAMERA_ID,
                camera_model or fallback,
                first.focal or FALLBACK_FOCAL * max(first.width, first.height),
                first.width,
                first.height,
            )
            camera.has_prior_focal_length = first.focal is not None
            camera_id = database.write_camera(camera)
            rig = pycolmap.Rig()
            rig.add_ref_sensor(pycolmap.sensor_t(pycolmap.SensorType.CAMERA, camera_id))
            rig_id = database.write_rig(rig)
            numbers |= {index: (camera_id, rig_id) for index in group}
        for index in range(len(photographs)):
            _write_photograph(database, database_name(index), *numbers[index])


def _write_photograph(database: Any, name: str, camera_id: int, rig_id: int) -> None:
    pycolmap = load_pycolmap()
    image_id = database.write_image(pycolmap.Image(name=name, camera_id=camera_id))
    frame = pycolmap.Frame()
    frame.rig_id = rig_id
    sensor = pycolmap.sensor_t(pycolmap.SensorType.CAMERA, camera_id)
    frame.add_data_id(pycolmap.data_t(sensor, image_id))
    database.write_frame(frame)


def extract_features(
    path: Path,
    photographs: Sequence[Photograph],
    masks: Sequence[ViewMask | None],
    longest_side: int,
    max_features: int,
    advance: Callable[[int], None],
) -> None:
    """Find the features of all photographs that have none in the database yet.

    Several photographs are worked on at a time, as many as there are cores and memory for. What is
    in the database is what one photograph after the other would have given.

    Args:
        path: Database by :func:`create_database`.
        photographs: As given there.
        masks: Of each photograph; black pixels give no features.
        longest_side: Size at which features are looked for, pixels; their places count in pixels
            of the whole photograph.
        max_features: Features per photograph, the largest first.
        advance: Told how many photographs are done.

    Raises:
        UserError: A photograph or mask is damaged.
    """
    pycolmap = load_pycolmap()
    options = pycolmap.FeatureExtractionOptions()
    options.use_gpu, options.num_threads = False, 1
    options.max_image_size = longest_side
    options.sift.max_num_features = max_features

    def find(index: int) -> tuple[int, np.ndarray, Any]:
        return index, *_features_of(photographs[index], masks[index], longest_side, options)

    with pycolmap.Database.open(str(path)) as database:
        waiting = [
            index for index in range(len(photographs)) if not database.exists_descriptors(index + 1)
        ]
        done = len(photographs) - len(waiting)
        advance(done)
        for index, keypoints, descriptors in _in_order(find, waiting, _workers(longest_side)):
            # Both or none, should the process be killed between them.
            transaction = pycolmap.DatabaseTransaction(database)
            # There are some if the disk was full when their descriptors should have followed.
            is_known = database.exists_keypoints(index + 1)
            write = database.update_keypoints if is_known else database.write_keypoints
            write(index + 1, keypoints)
            database.write_descriptors(index + 1, descriptors)
            del transaction
            done += 1
            advance(done)


def _features_of(
    photograph: Photograph, mask: ViewMask | None, longest_side: int, options: Any
) -> tuple[np.ndarray, Any]:
    """Keypoints (N, 4) float32: x, y, scale and orientation; and their descriptors."""
    pycolmap = load_pycolmap()
    grey = np.ascontiguousarray(read_grey(photograph.path, longest_side))
    height, width = grey.shape
    extractor = pycolmap.FeatureExtractor.create(options, pycolmap.Device.cpu)
    found, descriptors = extractor.extract_from_uint8_array(grey)
    keypoints = pycolmap.keypoints_to_matrix(found).reshape(-1, 4)
    if mask is not None:
        counts = decode_mask(mask, width, height, upright=True) >= 128
        x, y = keypoints[:, :2].astype(int).T
        kept = counts[y.clip(0, height - 1), x.clip(0, width - 1)]
        keypoints = keypoints[kept]
        descriptors = pycolmap.FeatureDescriptors(descriptors.type, descriptors.data[kept])
    scale = np.array([photograph.width / width, photograph.height / height])
    keypoints = keypoints * np.array([*scale, scale.mean(), 1.0])
    return keypoints.astype(np.float32), descriptors


def _workers(longest_side: int) -> int:
    """Photographs to work on at a time."""
    room = available_bytes() or 2 << 30
    each = _BYTES_PER_PIXEL * longest_side**2
    return max(1, min(os.cpu_count() or 1, room // 2 // each))


def _in_order(work: Callable[[int], Any], items: Iterable[int], n_workers: int) -> Iterator[Any]:
    """Results of ``work`` in the order of the items, few of them ahead of who takes them."""
    running: deque[Future] = deque()
    remaining = iter(items)
    with ThreadPoolExecutor(max_workers=n_workers) as pool:
        try:
            for item in itertools.islice(remaining, 2 * n_workers):
                running.append(pool.submit(work, item))
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(work, item) for item in itertools.islice(remaining, 1))
        finally:
            for future in running:
                future.cancel()
