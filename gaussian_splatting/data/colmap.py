# SPDX-License-Identifier: Apache-2.0
"""COLMAP models, read through ``pycolmap``, and written again with other poses.

Photographs with lens distortion are undistorted once, into a cache beside the originals.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gaussian_splatting.data import images as pictures
from gaussian_splatting.data import observations as tracks
from gaussian_splatting.data.cameras import Camera, nearest_rotation
from gaussian_splatting.data.names import (
    ImageFolder,
    ImagePlaces,
    missing_images,
    readable_name,
)
from gaussian_splatting.data.observations import CaptureModel, Observations, ViewFit
from gaussian_splatting.data.world_offset import describe_offset, world_offset
from sugar_utils import files as storage
from sugar_utils.errors import Notify, UserError, explained
from sugar_utils.libraries import load_pycolmap
from sugar_utils.schemas import FAR

_MODEL_FOLDERS = ("sparse/0", "sparse", "colmap/sparse/0", "colmap/sparse")
_CACHE_FOLDER = "undistorted_cache"
_FIT_POINTS = 300  # observed points of an image whose reprojection is looked at
_CACHE_VERSION = 3
"""Counts the ways in which copies were made; those of an earlier way are made again."""

PARTS = ("cameras", "images", "points3D", "rigs", "frames")  # files of a model, without the suffix


def find_model(root: Path) -> Path | None:
    """Folder of the COLMAP model of a scene; of numbered models without a ``0`` the lowest one.

    A larger model beside it is not taken, because checkpoints of other programs live in the world
    of this one; :func:`larger_model` tells of it.
    """
    for name in _MODEL_FOLDERS:
        if _format_of(root / name):
            return root / name
    for sparse in (root / "sparse", root / "colmap" / "sparse"):
        numbered = [p for p in sparse.glob("*") if p.name.isdigit() and _format_of(p)]
        if numbered:
            return min(numbered, key=lambda p: int(p.name))
    return None


def larger_model(model: Path) -> str | None:
    """Describe the numbered model beside ``model`` that has most images, if it has more of them."""
    if not model.name.isdigit():
        return None
    models = [path for path in model.parent.glob("*") if path.name.isdigit() and _format_of(path)]
    counts = {path: _n_images(path) for path in models}
    largest = max(counts, key=lambda path: counts[path], default=model)
    n_images = counts.get(model, 0)
    if counts.get(largest, 0) <= n_images:
        return None
    return (
        f"{largest} has {counts[largest]} images, {model} only {n_images}, which is used as in the "
        f"original; to use the larger one, rename {model.name} and then {largest.name} to "
        f"{model.name}"
    )


def _n_images(folder: Path) -> int:
    """Number of registered images of a model; 0 where the file is damaged."""
    kind = _format_of(folder)
    path = folder / f"images.{kind}"
    if kind == "txt":
        return len(_image_names(folder))
    with explained(f"cannot read {path}:", "check the path"), path.open("rb") as file:
        head = file.read(8)
    return struct.unpack("<Q", head)[0] if len(head) == 8 else 0


def _image_names(folder: Path) -> dict[int, bytes]:
    """Names of the images of a model as they stand in its file, by the number of the image.

    pycolmap cuts names in text files at their first space, and raises for those that are not UTF-8.
    """
    kind = _format_of(folder)
    names: dict[int, bytes] = {}
    with explained(f"{folder}: cannot read images.{kind}", "export the model again"):
        content = (folder / f"images.{kind}").read_bytes()
    if kind == "bin":
        at = 8
        while at + 64 < len(content):
            (number,) = struct.unpack_from("<I", content, at)
            end = content.index(b"\0", at + 64)
            names[number] = content[at + 64 : end]
            at = _skip_image(content, at)
        return names
    lines = iter(content.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        # Number, quaternion, translation, number of the camera, and the name to the end.
        fields = line.split(maxsplit=9)
        if len(fields) == 10 and fields[0].isdigit():
            names[int(fields[0])] = fields[9].strip()
        # The line of keypoints, which may be empty.
        next(lines, b"")
    return names


def _repair_names(reconstruction: Any, folder: Path, exists: Callable[[str], bool] | None) -> None:
    """Give images the names that pycolmap does not read right."""
    kind = _format_of(folder)
    for number, raw in _image_names(folder).items():
        if number in reconstruction.images and (kind == "txt" or not _is_utf8(raw)):
            reconstruction.images[number].name = readable_name(raw, exists)


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _format_of(folder: Path) -> str | None:
    """``bin`` or ``txt``, whichever has the cameras and the images; binary first."""
    for suffix in ("bin", "txt"):
        if all((folder / f"{part}.{suffix}").is_file() for part in ("cameras", "images")):
            return suffix
    return None


def read_colmap(
    folder: Path,
    images: ImageFolder,
    *,
    cache_root: Path | None = None,
    missing_ok: bool = False,
    repair: bool = False,
    notify: Notify = print,
) -> CaptureModel:
    """Read a COLMAP model and find its photographs.

    Args:
        cache_root: Scene folder that keeps undistorted photographs; None: that of the image folder.
        missing_ok: Leave ``image_path`` empty where a photograph is missing.
    """
    reconstruction = read_reconstruction(folder, images.has)
    offset = model_offset(reconstruction, folder)
    if offset.any():
        notify(describe_offset(offset))
        move_model(reconstruction, -offset)
    if repair:
        tracks.repair_reconstruction(reconstruction, notify)
    poses = _poses(reconstruction, folder)
    names = [name for name, *_ in poses]
    places = ImagePlaces(images)
    by_name = places.find_all(names)
    missing = [name for name in names if by_name[name] is None]
    if missing and not missing_ok:
        if all(map(_is_utf8, _image_names(folder).values())):
            raise missing_images(missing, len(poses), places)
        advice = "the model's names are not UTF-8: rename the photographs, and export it again"
        raise missing_images(missing, len(poses), places, advice)
    paths = [by_name[name] for name in names]

    cameras = []
    distorted = []
    for (name, lens, rotation, translation), path in zip(poses, paths, strict=True):
        pinhole = lens.is_perspective_pinhole() and lens.is_undistorted()
        plain = lens if pinhole else _undistorted(lens, folder)
        numbers = _pinhole_numbers(plain)
        pose = {"rotation": rotation, "translation": translation}
        cameras.append(Camera(name, **numbers, **pose, image_path=path))
        if plain is not lens:
            distorted.append((len(cameras) - 1, lens))
    if distorted:
        jobs = [(index, lens) for index, lens in distorted if cameras[index].image_path]
        cache = cache_folder(cache_root or images.root.parent)
        models = sorted({lens.model_name for _, lens in distorted})
        notify(
            f"{len(distorted)} images have a lens distortion ({', '.join(models)}): training on "
            f"undistorted copies in {cache}; the originals stay as they are"
        )
        _undistort_views(cameras, jobs, cache)
    points, points_rgb = _points(reconstruction, folder)
    text = f"COLMAP model {folder}: {len(cameras)} images, {len(points)} points"
    observed = _observations(reconstruction)
    return CaptureModel(cameras, None, points, points_rgb, text, observed, offset)


def model_offset(reconstruction: Any, folder: Path) -> np.ndarray:
    """Offset to subtract from all places of a model; zeros near the origin. (3,)"""
    poses = _poses(reconstruction, folder)
    return world_offset(np.stack([-rotation.T @ shift for _, _, rotation, shift in poses]))


def move_model(reconstruction: Any, shift: np.ndarray) -> None:
    """Shift a ``pycolmap.Reconstruction``, changed in place, by (3,) world units."""
    pycolmap = load_pycolmap()
    reconstruction.transform(pycolmap.Sim3d(1.0, pycolmap.Rotation3d(), shift))


def read_reconstruction(folder: Path, exists: Callable[[str], bool] | None = None) -> Any:
    """Read a COLMAP model as a ``pycolmap.Reconstruction``.

    Args:
        exists: Whether there is a photograph of a name; names that are not UTF-8 are read in an
            encoding in which there is one.
    """
    pycolmap = load_pycolmap()
    kind = _format_of(folder)
    if kind is None:
        raise UserError(
            f"{folder}: no COLMAP model; it needs cameras.bin and images.bin, or the same as .txt"
        )
    for part in PARTS:
        storage.require_regular_file(folder / f"{part}.{kind}", missing_ok=True)
    if kind == "bin":
        for part in PARTS:
            check_binary(folder / f"{part}.bin", part)
    reconstruction = pycolmap.Reconstruction()
    read = reconstruction.read_binary if kind == "bin" else reconstruction.read_text
    # pycolmap raises whatever the C++ library does.
    what = f"{folder}: the COLMAP model (.{kind}) is damaged or incomplete"
    with explained(what, "export it again", Exception):
        if (folder / f"points3D.{kind}").is_file():
            read(str(folder))
        else:
            with tempfile.TemporaryDirectory() as copy:
                for part in PARTS:
                    if (folder / f"{part}.{kind}").is_file():
                        shutil.copy(folder / f"{part}.{kind}", copy)
                empty = struct.pack("<Q", 0) if kind == "bin" else b""
                (Path(copy) / f"points3D.{kind}").write_bytes(empty)
                read(copy)
            _forget_points(reconstruction)
    _repair_names(reconstruction, folder, exists)
    _poses(reconstruction, folder)
    return reconstruction


def _forget_points(reconstruction: Any) -> None:
    """Detach keypoints from points that are not there."""
    for image in reconstruction.images.values():
        for index in image.get_observation_point2D_idxs():
            image.reset_point3D_for_point2D(index)


def _poses(reconstruction: Any, folder: Path) -> list[tuple[str, Any, np.ndarray, np.ndarray]]:
    """Name, lens, rotation and translation of every registered image, by name."""
    # Frames may name images that are not there.
    what = f"{folder}: frames and images of the COLMAP model do not belong together"
    with explained(what, "export it again", Exception):
        image_ids = reconstruction.reg_image_ids()
    poses = []
    for image_id in image_ids:
        # A bad number or a name that is no text.
        what = f"{folder}: image {image_id} of the COLMAP model cannot be used"
        with explained(what, "export the model again", Exception):
            image = reconstruction.images[image_id]
            name = image.name
            lens = reconstruction.cameras[image.camera_id]
            matrix = np.array(image.cam_from_world().matrix(), dtype=np.float64)
        rotation = matrix[:, :3]
        translation = matrix[:, 3]
        # A quaternion of zeros passes through pycolmap as a matrix that is no rotation.
        if nearest_rotation(rotation) is None or not np.abs(translation).max() <= FAR:
            raise UserError(f"{folder}: image {name} has no valid pose; export the model again")
        _check_lens(lens, name, folder)
        poses.append((name, lens, rotation, translation))
    if not poses:
        raise UserError(
            f"{folder}: the COLMAP model has no registered images; run the mapper again"
        )
    return sorted(poses, key=lambda pose: pose[0])


def _check_lens(lens: Any, name: str, folder: Path) -> None:
    valid = np.isfinite(lens.params).all() and lens.verify_params()
    valid = valid and 0 < lens.width < 1 << 20 and 0 < lens.height < 1 << 20
    focal = (lens.focal_length_x, lens.focal_length_y) if lens.is_perspective() else (1.0,)
    if not valid or min(focal) <= 0:
        raise UserError(
            f"{folder}: camera {lens.camera_id} ({lens.model_name}, image {name}) has an "
            "impossible size, focal length or distortion; export the model again"
        )


def _pinhole_numbers(lens: Any) -> dict[str, Any]:
    """Size and intrinsics of a pycolmap camera without distortion, as of a ``Camera``."""
    matrix = lens.calibration_matrix()
    return {
        "width": int(lens.width),
        "height": int(lens.height),
        "fx": float(matrix[0, 0]),
        "fy": float(matrix[1, 1]),
        "cx": float(matrix[0, 2]),
        "cy": float(matrix[1, 2]),
    }


def _undistorted(lens: Any, folder: Path) -> Any:
    what = f"{folder}: camera {lens.camera_id} ({lens.model_name}) cannot be undistorted"
    with explained(what, "convert the images to a perspective camera model first", Exception):
        return pictures.undistorted_camera(lens)


def _points(reconstruction: Any, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    points = reconstruction.points3D
    ids = sorted(points)
    xyz = np.array([points[i].xyz for i in ids], dtype=np.float32).reshape(-1, 3)
    rgb = np.array([points[i].color for i in ids], dtype=np.uint8).reshape(-1, 3)
    if not np.isfinite(xyz).all():
        raise UserError(f"{folder}: points3D has points that are no numbers; export it again")
    return xyz, rgb


def _observations(reconstruction: Any) -> Observations | None:
    points = reconstruction.points3D
    images = reconstruction.images
    ids = sorted(points)
    ids = ids[:: -(-len(ids) // tracks.MAX_POINTS) or 1]
    names = {image_id: images[image_id].name for image_id in images}
    rows: dict[str, list[int]] = {}
    for row, number in enumerate(ids):
        for element in points[number].track.elements:
            rows.setdefault(names.get(element.image_id, ""), []).append(row)
    rows.pop("", None)
    if not rows:
        return None
    errors = np.array([points[i].error for i in ids], dtype=np.float32)
    return Observations(
        points=np.array([points[i].xyz for i in ids], dtype=np.float32),
        errors=np.where(np.isfinite(errors) & (errors >= 0), errors, np.float32(1.0)),
        lengths=np.array([points[i].track.length() for i in ids], dtype=np.int32),
        rows={name: np.unique(np.array(own, dtype=np.int32)) for name, own in rows.items()},
        fits={images[i].name: _fit(reconstruction, i) for i in reconstruction.reg_image_ids()},
        rgb=np.array([points[i].color for i in ids], dtype=np.uint8).reshape(-1, 3),
    )


def _fit(reconstruction: Any, image_id: int) -> ViewFit:
    points3d = reconstruction.points3D
    observed = reconstruction.images[image_id].get_observation_points2D()
    # Points of a damaged model may be missing.
    seen = [p for p in observed if p.point3D_id in points3d]
    sample = seen[:: -(-len(seen) // _FIT_POINTS) or 1]
    if not sample:
        return ViewFit(0, math.nan)
    points = np.array([points3d[p.point3D_id].xyz for p in sample])
    keypoints = np.array([p.xy for p in sample])
    errors = tracks.reprojection_errors(reconstruction, image_id, keypoints, points)
    return ViewFit(len(seen), float(np.median(errors)))


def cache_folder(scene_root: Path) -> Path:
    """Folder for undistorted copies and predicted masks: in the scene, else a temporary one."""
    try:
        return storage.check_writable(scene_root / _CACHE_FOLDER)
    except UserError:
        key = hashlib.blake2b(os.fsencode(scene_root.resolve()), digest_size=8).hexdigest()
        return storage.check_writable(storage.temporary_cache(_CACHE_FOLDER) / key)


def _undistort_views(cameras: list[Camera], jobs: Sequence[tuple[int, Any]], cache: Path) -> None:
    """Point the cameras of ``jobs`` at undistorted copies, making those that are not there yet."""

    def work(job: tuple[int, Any]) -> None:
        index, lens = job
        camera = cameras[index]
        text = pictures.lens_text(lens)
        source = camera.image_path
        lens_key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        file_text = f"{_CACHE_VERSION} {camera.name} {storage.file_digest(source)}"
        file_key = hashlib.blake2b(os.fsencode(file_text), digest_size=8).hexdigest()
        target = cache / f"{lens_key}/{source.stem}-{file_key}.png"
        file_lens = _lens_of_file(source, lens, camera.name)
        if not target.is_file():
            _undistort_file(source, file_lens, target)
        # Of a photograph that was reduced, the copy has rounded sides of its own.
        numbers = _pinhole_numbers(pictures.undistorted_camera(file_lens))
        cameras[index] = replace(
            camera, **numbers, image_path=target, source_path=source, lens=text
        )

    storage.in_parallel(work, jobs)


def _lens_of_file(source: Path, lens: Any, name: str) -> Any:
    """The lens of a camera at the size of its photograph, which may have been reduced."""
    width, height = pictures.image_size(source)
    scaled = pictures.lens_at(lens, width, height)
    if scaled is None:
        raise UserError(
            f"camera {name} is {lens.width} x {lens.height} px, but its image {source} is "
            f"{width} x {height} px, another aspect ratio; use the images that the cameras were "
            "computed from"
        )
    return scaled


def _undistort_file(source: Path, lens: Any, target: Path) -> None:
    """Write an undistorted copy of a photograph; the lens is that of its size."""
    with pictures.open_image(source) as image:
        flat = pictures.undistorted(np.asarray(pictures.colors_of(image)), lens)
    with storage.atomic_path(target) as temporary:
        Image.fromarray(flat).save(temporary, compress_level=1)


def write_poses(model: Path, target: Path, cameras: Sequence[Camera]) -> Path:
    """Copy a COLMAP model with the poses of the images that the cameras are named after replaced.

    The copy has the coordinates of the model, whatever was subtracted for the cameras. Of cameras
    that are mounted together the first one of each mount decides.
    """
    pycolmap = load_pycolmap()
    by_name = {camera.name: camera for camera in cameras}
    reconstruction = read_reconstruction(model, by_name.__contains__)
    offset = model_offset(reconstruction, model)
    if offset.any():
        move_model(reconstruction, -offset)
    for image in reconstruction.images.values():
        camera = by_name.get(image.name)
        if camera is not None and image.has_pose and image.is_ref_in_frame():
            pose = pycolmap.Rigid3d(pycolmap.Rotation3d(camera.rotation), camera.translation)
            image.frame.set_cam_from_world(image.camera_id, pose)
    if offset.any():
        move_model(reconstruction, offset)
    storage.check_writable(target)
    with storage.replaced_folder(target / "0") as fresh:
        write_model(reconstruction, fresh)
    return target / "0"


def write_model(model: Any, folder: Path) -> None:
    """Write a ``pycolmap.Reconstruction`` in binary form, complete or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model.write_binary(str(folder))
        for part in PARTS:
            check_binary(folder / f"{part}.bin", part)
    # pycolmap raises what its C++ threw, and does not message a full disk at all.
    except (OSError, RuntimeError, ValueError, UserError) as error:
        cut = isinstance(error, UserError)
        cause = "a file was cut off" if cut else " ".join(str(error).split())
        raise UserError(
            f"cannot write {folder}: {cause}; free some space or fix the permissions"
        ) from error


def check_binary(path: Path, part: str) -> None:
    """Check that the counts in a binary COLMAP file agree with its length.

    pycolmap does not message the end of a file: it makes cameras of what was in memory before, or
    never comes back. So the records are walked here first, which reads only their lengths.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise UserError(f"{path}: truncated ({size} bytes); export the model again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            (count,) = struct.unpack_from("<Q", data, 0)
            skip = dict(zip(PARTS, _SKIPS, strict=True))[part]
            end = 8
            record = 0
            try:
                while record < count and end <= size:
                    end = skip(data, end)
                    record += 1
            except struct.error:
                end = size + 1
            except ValueError as error:
                raise UserError(
                    f"{path}: damaged at record {record + 1} of {count} ({error}); "
                    "export the model again"
                ) from error
    if end != size:
        what = "truncated" if end > size else f"{size - end} bytes too long"
        raise UserError(
            f"{path}: {what} (record {record} of {count}, {size} bytes); export the model again"
        )


def _skip_camera(data: mmap.mmap, at: int) -> int:
    pycolmap = load_pycolmap()
    (model,) = struct.unpack_from("<i", data, at + 4)
    known = {int(m): m for m in pycolmap.CameraModelId.__members__.values()}
    if model < 0 or model not in known:
        raise ValueError(f"unknown camera model {model}")
    n_params = len(pycolmap.Camera.create_from_model_id(1, known[model], 1.0, 2, 2).params)
    return at + 24 + 8 * n_params


def _skip_image(data: mmap.mmap | bytes, at: int) -> int:
    name_end = data.find(b"\0", at + 64)
    if name_end < 0:
        raise ValueError("image name without an end")
    (n_points,) = struct.unpack_from("<Q", data, name_end + 1)
    return name_end + 9 + 24 * n_points


def _skip_rig(data: mmap.mmap, at: int) -> int:
    (n_sensors,) = struct.unpack_from("<I", data, at + 4)
    at += 8 + (8 if n_sensors else 0)
    for _ in range(n_sensors - 1):
        has_pose = struct.unpack_from("<B", data, at + 8)[0]
        at += 9 + (56 if has_pose else 0)
    return at


def _skip_list(form: str, start: int, size: int) -> Callable[[mmap.mmap, int], int]:
    """Of a record that ends with a list; ``start`` is where the length of that stands."""
    head = start + struct.calcsize(form)
    return lambda data, at: at + head + size * struct.unpack_from(form, data, at + start)[0]


_SKIPS = (_skip_camera, _skip_image, _skip_list("<Q", 43, 8), _skip_rig, _skip_list("<I", 64, 16))
