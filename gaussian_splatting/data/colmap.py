# SPDX-License-Identifier: Apache-2.0
"""COLMAP models, read through ``pycolmap``, and written again with other poses.

Images with lens distortion are undistorted once, into a cache beside the originals.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from gaussian_splatting.core.subsets import at_most
from gaussian_splatting.data import images as pictures
from gaussian_splatting.data import observations as tracks
from gaussian_splatting.data.cameras import Camera, nearest_rotation
from gaussian_splatting.data.colmap_files import (
    PARTS,
    check_binary,
    format_of,
    image_names,
    is_utf8,
    n_images_of,
)
from gaussian_splatting.data.names import (
    ImageFolder,
    ImagePlaces,
    missing_images,
    readable_name,
)
from gaussian_splatting.data.observations import CaptureModel, Observations, ViewFit
from gaussian_splatting.data.world_offset import describe_offset, world_offset
from sugar_utils import files as storage
from sugar_utils.errors import Notify, UserError, explained, reason_of
from sugar_utils.libraries import load_pycolmap
from sugar_utils.schemas import FAR

if TYPE_CHECKING:
    import pycolmap

_MODEL_FOLDERS = ("sparse/0", "sparse", "colmap/sparse/0", "colmap/sparse")
_CACHE_FOLDER = "undistorted_cache"
_FIT_POINTS = 300  # observed points of an image whose reprojection is looked at
_MAX_SIDE = 1 << 20  # pixels
_CACHE_VERSION = 3
"""Number of the way in which copies are made; those of an earlier way are made again."""


def find_model(root: Path) -> Path | None:
    """Return the folder of the COLMAP model of a scene; None if there is none.

    Of numbered models without a ``0`` it is the lowest one. A larger model beside it is not used,
    because checkpoints of other programs are in the world of this one; :func:`larger_model`
    describes it.
    """
    for name in _MODEL_FOLDERS:
        if format_of(root / name):
            return root / name
    for sparse in (root / "sparse", root / "colmap" / "sparse"):
        numbered = [p for p in sparse.glob("*") if p.name.isdigit() and format_of(p)]
        if numbered:
            return min(numbered, key=lambda p: int(p.name))
    return None


def larger_model(model: Path) -> str | None:
    """Describe the numbered model beside ``model`` that has most images, if it has more of them."""
    if not model.name.isdigit():
        return None
    models = [path for path in model.parent.glob("*") if path.name.isdigit() and format_of(path)]
    counts = {path: n_images_of(path) for path in models}
    largest = max(counts, key=counts.__getitem__, default=model)
    n_images = counts.get(model, 0)
    if counts.get(largest, 0) <= n_images:
        return None
    return (
        f"{largest} has {counts[largest]} images, {model} only {n_images}, which is used as in the "
        f"original; to use the larger one, rename {model.name} and then {largest.name} to "
        f"{model.name}"
    )


def _repair_names(
    reconstruction: pycolmap.Reconstruction, folder: Path, exists: Callable[[str], bool] | None
) -> None:
    """Correct the names that pycolmap does not read right."""
    is_text = format_of(folder) == "txt"
    for number, raw in image_names(folder).items():
        if number in reconstruction.images and (is_text or not is_utf8(raw)):
            reconstruction.images[number].name = readable_name(raw, exists)


def read_colmap(
    folder: Path,
    images: ImageFolder,
    *,
    cache_root: Path | None = None,
    missing_ok: bool = False,
    repair: bool = False,
    notify: Notify = print,
) -> CaptureModel:
    """Read a COLMAP model and find its images.

    Args:
        cache_root: Scene folder that keeps undistorted images; None: that of the image folder.
        missing_ok: Leave ``image_path`` empty where an image is missing.
        repair: Estimate poses and points again that do not fit the keypoints.

    Raises:
        UserError: The model is damaged, or images are missing.
    """
    reconstruction = read_reconstruction(folder, images.has)
    offset = model_offset(reconstruction, folder)
    if offset.any():
        notify(describe_offset(offset))
        move_model(reconstruction, -offset)
    if repair:
        tracks.repair_reconstruction(reconstruction, notify)
    registered = _registered_images(reconstruction, folder)
    paths = _find_images(registered, images, folder, missing_ok)
    cameras = []
    distorted_lenses = {}  # by index of the camera
    for index, image in enumerate(registered):
        is_pinhole = image.lens.is_perspective_pinhole() and image.lens.is_undistorted()
        pinhole = image.lens
        if not is_pinhole:
            pinhole = _undistorted_lens(image.lens, folder)
            distorted_lenses[index] = image.lens
        camera = Camera(
            name=image.name,
            **_pinhole_numbers(pinhole),
            rotation=image.rotation,
            translation=image.translation,
            image_path=paths[image.name],
        )
        cameras.append(camera)
    if distorted_lenses:
        cache = cache_folder(cache_root or images.root.parent)
        models = sorted({lens.model_name for lens in distorted_lenses.values()})
        notify(
            f"{len(distorted_lenses)} images have a lens distortion ({', '.join(models)}): "
            f"training on undistorted copies in {cache}; the originals stay as they are"
        )
        _undistort_views(cameras, distorted_lenses, cache)
    points, points_rgb = _points(reconstruction, folder)
    return CaptureModel(
        train_cameras=cameras,
        test_cameras=None,
        points=points,
        points_rgb=points_rgb,
        description=f"COLMAP model {folder}: {len(cameras)} images, {len(points)} points",
        observations=_observations(reconstruction),
        offset=offset,
    )


def _find_images(
    registered: Sequence[_RegisteredImage], images: ImageFolder, folder: Path, missing_ok: bool
) -> dict[str, Path | None]:
    """Return the file of each image by name.

    Args:
        folder: Of the model.
        missing_ok: Return None for missing files.

    Raises:
        UserError: Files are missing.
    """
    names = [image.name for image in registered]
    places = ImagePlaces(images)
    paths = places.find_all(names)
    missing = [name for name in names if paths[name] is None]
    if missing and not missing_ok:
        if all(is_utf8(name) for name in image_names(folder).values()):
            raise missing_images(missing, len(names), places)
        advice = "the model's names are not UTF-8: rename the photographs, and export it again"
        raise missing_images(missing, len(names), places, advice)
    return paths


def model_offset(reconstruction: pycolmap.Reconstruction, folder: Path) -> np.ndarray:
    """Return the offset to subtract from all positions of a model; zeros near the origin. (3,)"""
    registered = _registered_images(reconstruction, folder)
    return world_offset(np.stack([-image.rotation.T @ image.translation for image in registered]))


def move_model(reconstruction: pycolmap.Reconstruction, shift: np.ndarray) -> None:
    """Shift a ``pycolmap.Reconstruction``, changed in place, by (3,) world units."""
    pycolmap = load_pycolmap()
    reconstruction.transform(pycolmap.Sim3d(1.0, pycolmap.Rotation3d(), shift))


def read_reconstruction(
    folder: Path, exists: Callable[[str], bool] | None = None
) -> pycolmap.Reconstruction:
    """Read a COLMAP model as a ``pycolmap.Reconstruction``.

    Args:
        exists: Whether there is an image of a name; names that are not UTF-8 are read in an
            encoding in which there is one.

    Raises:
        UserError: There is no model, or it is damaged.
    """
    pycolmap = load_pycolmap()
    kind = format_of(folder)
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
    # Raises for poses and lenses that cannot be used.
    _registered_images(reconstruction, folder)
    return reconstruction


def _forget_points(reconstruction: pycolmap.Reconstruction) -> None:
    """Detach keypoints from points that are not there."""
    for image in reconstruction.images.values():
        for index in image.get_observation_point2D_idxs():
            image.reset_point3D_for_point2D(index)


class _RegisteredImage(NamedTuple):
    """An image with its pose."""

    name: str
    lens: pycolmap.Camera
    rotation: np.ndarray  # world to camera, (3, 3) float64
    translation: np.ndarray  # (3,) float64 world units


def _registered_images(
    reconstruction: pycolmap.Reconstruction, folder: Path
) -> list[_RegisteredImage]:
    """Return all registered images, sorted by name.

    Raises:
        UserError: There are none, or a pose or lens cannot be used.
    """
    # Frames may name images that are not there.
    what = f"{folder}: frames and images of the COLMAP model do not belong together"
    with explained(what, "export it again", Exception):
        image_ids = reconstruction.reg_image_ids()
    registered = []
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
        registered.append(_RegisteredImage(name, lens, rotation, translation))
    if not registered:
        raise UserError(
            f"{folder}: the COLMAP model has no registered images; run the mapper again"
        )
    return sorted(registered, key=lambda image: image.name)


def _check_lens(lens: pycolmap.Camera, name: str, folder: Path) -> None:
    has_size = 0 < lens.width < _MAX_SIDE and 0 < lens.height < _MAX_SIDE
    is_valid = np.isfinite(lens.params).all() and lens.verify_params() and has_size
    focal = 1.0
    if lens.is_perspective():
        focal = min(lens.focal_length_x, lens.focal_length_y)
    if not is_valid or focal <= 0:
        raise UserError(
            f"{folder}: camera {lens.camera_id} ({lens.model_name}, image {name}) has an "
            "impossible size, focal length or distortion; export the model again"
        )


def _pinhole_numbers(lens: pycolmap.Camera) -> dict[str, Any]:
    """Return the size and intrinsics of a pinhole pycolmap.Camera, as fields of ``Camera``."""
    matrix = lens.calibration_matrix()
    return {
        "width": int(lens.width),
        "height": int(lens.height),
        "fx": float(matrix[0, 0]),
        "fy": float(matrix[1, 1]),
        "cx": float(matrix[0, 2]),
        "cy": float(matrix[1, 2]),
    }


def _undistorted_lens(lens: pycolmap.Camera, folder: Path) -> pycolmap.Camera:
    what = f"{folder}: camera {lens.camera_id} ({lens.model_name}) cannot be undistorted"
    with explained(what, "convert the images to a perspective camera model first", Exception):
        return pictures.undistorted_camera(lens)


def _points(reconstruction: pycolmap.Reconstruction, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    points = reconstruction.points3D
    positions, rgb = tracks.positions_and_colors([points[number] for number in sorted(points)])
    xyz = positions.astype(np.float32)
    if not np.isfinite(xyz).all():
        raise UserError(f"{folder}: points3D has points that are no numbers; export it again")
    return xyz, rgb


def _observations(reconstruction: pycolmap.Reconstruction) -> Observations | None:
    points = reconstruction.points3D
    images = reconstruction.images
    ids = at_most(sorted(points), tracks.MAX_POINTS)
    names = {image_id: images[image_id].name for image_id in images}
    row_lists: dict[str, list[int]] = {}
    for row, number in enumerate(ids):
        for element in points[number].track.elements:
            if element.image_id in names:
                row_lists.setdefault(names[element.image_id], []).append(row)
    # Images without a name are no views.
    row_lists.pop("", None)
    if not row_lists:
        return None
    rows = {name: np.unique(np.array(row, dtype=np.int32)) for name, row in row_lists.items()}
    fits = {}
    for image_id in reconstruction.reg_image_ids():
        fits[images[image_id].name] = _fit(reconstruction, image_id)
    sampled = [points[number] for number in ids]
    errors = np.array([point.error for point in sampled], dtype=np.float32)
    has_error = np.isfinite(errors) & (errors >= 0)
    positions, colors = tracks.positions_and_colors(sampled)
    return Observations(
        points=positions.astype(np.float32),
        errors=np.where(has_error, errors, np.float32(1.0)),
        lengths=np.array([point.track.length() for point in sampled], dtype=np.int32),
        rows=rows,
        fits=fits,
        rgb=colors,
    )


def _fit(reconstruction: pycolmap.Reconstruction, image_id: int) -> ViewFit:
    """Measure how well an image fits the points that it observes."""
    points3d = reconstruction.points3D
    keypoints = reconstruction.images[image_id].get_observation_points2D()
    # Points of a damaged model may be missing.
    observed = [keypoint for keypoint in keypoints if keypoint.point3D_id in points3d]
    sample = at_most(observed, _FIT_POINTS)
    if not sample:
        return ViewFit(0, math.nan)
    points = np.array([points3d[keypoint.point3D_id].xyz for keypoint in sample])
    pixels = np.array([keypoint.xy for keypoint in sample])
    errors = tracks.reprojection_errors(reconstruction, image_id, pixels, points)
    return ViewFit(len(observed), float(np.median(errors)))


def cache_folder(scene_root: Path) -> Path:
    """Return a folder for undistorted copies and predicted masks: in the scene, else temporary."""
    try:
        return storage.check_writable(scene_root / _CACHE_FOLDER)
    except UserError:
        key = hashlib.blake2b(os.fsencode(scene_root.resolve()), digest_size=8).hexdigest()
        return storage.check_writable(storage.temporary_cache(_CACHE_FOLDER) / key)


def _undistort_views(cameras: list[Camera], lenses: Mapping[int, Any], cache: Path) -> None:
    """Replace cameras with distorted lenses by those of undistorted copies of their images.

    Copies that are not there yet are made; cameras without an image stay.

    Args:
        cameras: Changed in place.
        lenses: pycolmap.Camera by index of the camera.
    """

    def undistort(index: int) -> None:
        cameras[index] = _undistort_view(cameras[index], lenses[index], cache)

    storage.in_parallel(undistort, [index for index in lenses if cameras[index].image_path])


def _undistort_view(camera: Camera, lens: pycolmap.Camera, cache: Path) -> Camera:
    """Make an undistorted copy of an image if it is not there yet, and return its camera."""
    lens_text = pictures.lens_text(lens)
    source = camera.image_file
    lens_key = hashlib.blake2b(lens_text.encode(), digest_size=8).hexdigest()
    file_text = f"{_CACHE_VERSION} {camera.name} {storage.file_digest(source)}"
    file_key = hashlib.blake2b(os.fsencode(file_text), digest_size=8).hexdigest()
    target = cache / f"{lens_key}/{source.stem}-{file_key}.png"
    try:
        file_lens = _lens_of_file(source, lens, camera.name)
        if not target.is_file():
            _undistort_file(source, file_lens, target)
    except pictures.UnreadableImage:
        # It has no copy, and is left out where the views are checked.
        return camera
    # The copy of an image that was reduced has rounded sides of its own.
    numbers = _pinhole_numbers(pictures.undistorted_camera(file_lens))
    return replace(camera, **numbers, image_path=target, source_path=source, lens=lens_text)


def _lens_of_file(source: Path, lens: pycolmap.Camera, name: str) -> pycolmap.Camera:
    """Return the lens of a camera at the size of its image, which may have been reduced."""
    width, height = pictures.image_size(source)
    scaled = pictures.lens_at(lens, width, height)
    if scaled is None:
        raise UserError(
            f"camera {name} is {lens.width} x {lens.height} px, but its image {source} is "
            f"{width} x {height} px, another aspect ratio; use the images that the cameras were "
            "computed from"
        )
    return scaled


def _undistort_file(source: Path, lens: pycolmap.Camera, target: Path) -> None:
    """Write an undistorted copy of an image; the lens is that of its size."""
    with pictures.open_image(source) as image:
        colors = np.asarray(pictures.colors_of(image))
        undistorted = pictures.undistorted(colors, lens)
    with storage.atomic_path(target) as temporary:
        Image.fromarray(undistorted).save(temporary, compress_level=1)


def write_poses(model: Path, target: Path, cameras: Sequence[Camera]) -> Path:
    """Copy a COLMAP model with the poses of cameras in place of its own, matched by name.

    The copy has the coordinates of the model, whatever was subtracted for the cameras. Of cameras
    that are mounted together the first one of each mount decides.

    Args:
        model: Folder of the model.
        target: Folder in which the copy becomes ``0``.

    Returns:
        Folder of the copy.
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


def write_model(model: pycolmap.Reconstruction, folder: Path) -> None:
    """Write a ``pycolmap.Reconstruction`` in binary form, complete or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model.write_binary(str(folder))
        for part in PARTS:
            check_binary(folder / f"{part}.bin", part)
    # pycolmap raises what its C++ threw, and does not report a full disk at all.
    except (OSError, RuntimeError, ValueError, UserError) as error:
        cause = reason_of(error)
        if isinstance(error, UserError):
            cause = "a file was cut off"
        raise UserError(
            f"cannot write {folder}: {cause}; free some space or fix the permissions"
        ) from error
