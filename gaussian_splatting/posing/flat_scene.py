# SPDX-License-Identifier: Apache-2.0
"""Photographs, masks and model freed of the lens's distortion, as 3DGS programs read them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.images import decode_mask, undistort_plane
from gaussian_splatting.posing.photographs import Photograph, output_names, read_upright
from sugar_utils.files import atomic_path
from sugar_utils.libraries import load_pycolmap

DIVISORS = (2, 4, 8)
"""Of the smaller copies that ``--resize`` makes."""

_JPEG = {"quality": 95, "subsampling": 0}


@dataclass(frozen=True)
class Original:
    """A photograph that has a place, and what belongs to it.

    Attributes:
        photograph: As it was taken.
        mask: Its mask, if it has one.
        flat_name: Name of its flat copy.
    """

    photograph: Photograph
    mask: ViewMask | None
    flat_name: str


def originals(
    photographs: Sequence[Photograph], masks: Sequence[ViewMask | None]
) -> dict[str, Original]:
    """Photographs and masks by the photographs' names."""
    flat = output_names(photographs)
    return {
        photograph.name: Original(photograph, mask, name)
        for photograph, mask, name in zip(photographs, masks, flat, strict=True)
    }


def write_flat_pictures(
    model: Any,
    by_name: Mapping[str, Original],
    folder: Path,
    resize: bool,
    advance: Callable[[int], None],
) -> None:
    """Write flat copies of all photographs that the model places; those that are there stay.

    Args:
        model: pycolmap's reconstruction.
        by_name: All that it may place.
        folder: Gets ``images``, ``masks`` and, to resize, ``images_2`` and so on.
        resize: Whether to make the smaller copies as well.
        advance: Told how many are done.
    """
    images = sorted((model.images[i] for i in model.reg_image_ids()), key=lambda i: i.name)
    for done, image in enumerate(images, start=1):
        original = by_name[image.name]
        _write_flat(original, model.cameras[image.camera_id], folder)
        if resize:
            _write_smaller(folder, original.flat_name)
        if original.mask is not None and not original.mask.alpha:
            _write_flat_mask(original, model.cameras[image.camera_id], folder)
        advance(done)


def _write_flat(original: Original, lens: Any, folder: Path) -> None:
    photograph = original.photograph
    target = folder / "images" / original.flat_name
    if target.is_file():
        return
    kept = original.flat_name == photograph.name
    with atomic_path(target) as temporary:
        if lens.is_undistorted() and kept and not photograph.turned and not photograph.depth:
            shutil.copyfile(photograph.path, temporary)
            return
        picture = read_upright(photograph.path)
        if target.suffix.lower() != ".png":
            picture = picture.convert("RGB")
        pixels = np.asarray(picture)
        if not lens.is_undistorted():
            # Four channels are no picture to COLMAP, so transparency goes by itself.
            planes = [pixels[..., :3], *([pixels[..., 3]] if pixels.shape[2] == 4 else [])]
            pixels = np.dstack([undistort_plane(plane, lens) for plane in planes])
        _save(Image.fromarray(pixels), temporary)


def _write_flat_mask(original: Original, lens: Any, folder: Path) -> None:
    target = folder / "masks" / f"{original.flat_name}.png"
    if target.is_file():
        return
    photograph = original.photograph
    values = decode_mask(original.mask, photograph.width, photograph.height, upright=True)
    if not lens.is_undistorted():
        values = undistort_plane(values, lens)
    with atomic_path(target) as temporary:
        _save(Image.fromarray(values), temporary)


def _write_smaller(folder: Path, name: str) -> None:
    targets = {divisor: folder / f"images_{divisor}" / name for divisor in DIVISORS}
    missing = {divisor: path for divisor, path in targets.items() if not path.is_file()}
    if not missing:
        return
    with Image.open(folder / "images" / name) as picture:
        picture.load()
        for divisor, path in missing.items():
            size = tuple(max(1, round(side / divisor)) for side in picture.size)
            with atomic_path(path) as temporary:
                _save(picture.resize(size, Image.Resampling.LANCZOS), temporary)


def _save(picture: Image.Image, path: Path) -> None:
    is_png = path.suffix.lower() == ".png"
    picture.save(path, **({"compress_level": 1} if is_png else _JPEG))


def write_flat_model(source: Path, by_name: Mapping[str, Original], folder: Path) -> None:
    """Write the model of the flat photographs, coloured by them.

    Args:
        source: Folder of the model with its lenses.
        by_name: As for :func:`write_flat_pictures`.
        folder: Has the flat photographs in ``images``; gets ``sparse/0``, complete or not at all.
    """
    pycolmap = load_pycolmap()
    model = pycolmap.Reconstruction(str(source))
    for image in model.images.values():
        lens = model.cameras[image.camera_id]
        if image.num_points2D() and not lens.is_undistorted():
            _flatten_points(image.points2D, lens)
        image.name = by_name[image.name].flat_name
    for camera_id in list(model.cameras):
        lens = model.cameras[camera_id]
        if not lens.is_undistorted():
            flat = pycolmap.undistort_camera(pycolmap.UndistortCameraOptions(), lens)
            lens.mergedict(flat.todict())
    model.extract_colors_for_all_images(str(folder / "images"))
    target, fresh = folder / "sparse", folder / ".sparse.new"
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "0").mkdir(parents=True)
    model.write_binary(str(fresh / "0"))
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def _flatten_points(points: Any, lens: Any) -> None:
    """Move observed points to where the flat photograph shows them."""
    pycolmap = load_pycolmap()
    flat = pycolmap.undistort_camera(pycolmap.UndistortCameraOptions(), lens)
    rays = lens.cam_from_img(points)
    moved = flat.img_from_cam(np.concatenate([rays, np.ones((len(rays), 1))], axis=1))
    for point, xy in zip(points, moved, strict=True):
        point.xy = xy
