# SPDX-License-Identifier: Apache-2.0
"""Equirectangular panoramas as rigs of six square pinhole views, the faces of a cube.

A panorama shows longitude from left to right and latitude from top to bottom. Its axes are those of
a camera that looks at its middle: x right, y down, z forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from gaussian_splatting.core.subsets import values_by_key
from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.images import decode_mask, open_image
from sugar_capture.features.feature_database import Rig
from sugar_capture.features.photographs import Photograph, output_names, read_grey, read_upright
from sugar_utils.errors import Advance, Notify, UserError, shortened
from sugar_utils.files import atomic_path
from sugar_utils.libraries import load_pycolmap

if TYPE_CHECKING:
    import pycolmap

FACES = {
    "front": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "right": [[0, 0, -1], [0, 1, 0], [1, 0, 0]],
    "back": [[-1, 0, 0], [0, 1, 0], [0, 0, -1]],
    "left": [[0, 0, 1], [0, 1, 0], [-1, 0, 0]],
    "up": [[1, 0, 0], [0, 0, 1], [0, -1, 0]],
    "down": [[1, 0, 0], [0, 0, -1], [0, 1, 0]],
}
"""Right, down and forward of each view in the axes of the panorama."""

_COMPARED_SIDE = 512  # pixels, at which the borders of an image are compared
_POLE = 0.3
_SEAM = 2.0
"""Most differences of neighbouring pixels: in the first and the last row, of those in the middle
row; across the seam, of those beside it. Photographs measured 0.8 and 9; panoramas 0.05 and 1.2."""

_STEP = 3.0  # of 255: differences of neighbours along the seam above it are texture, not noise
_TEXTURED_SHARE = 0.1  # of the seam: a plain background has none, a level horizon is one step
_SEAM_CORRELATION = 0.4  # least, of those differences on both sides; larger ones count as 3 steps
_TEXTURED_PANORAMAS = 0.5  # share of the pictures that must have texture there; a wall has none


def are_panoramas(
    photographs: Sequence[Photograph],
    setting: bool | str,
    notify: Notify = lambda line: None,
) -> bool:
    """Whether images are equirectangular panoramas.

    Files say so in XMP (GPano); else all must be twice as wide as high and meet at their borders,
    and in half of them at least the same texture must be on both sides: plain backgrounds meet too.

    Args:
        setting: The flag ``--panoramas``: True, False or ``auto``.

    Raises:
        UserError: Some files say so and others do not, or one is not twice as wide as high.
    """
    if setting is False:
        return False
    declared = [p for p in photographs if setting is True or _is_declared(p.path)]
    if declared:
        _require_panoramas(declared, len(photographs))
        return True
    if any(photograph.width != 2 * photograph.height for photograph in photographs):
        return False
    n_textured = 0
    for photograph in photographs:
        grey = read_grey(photograph.path, _COMPARED_SIDE).astype(float)
        if not _closes(grey):
            return False
        n_textured += _has_texture_at_seam(grey)
    if n_textured >= _TEXTURED_PANORAMAS * len(photographs):
        return True
    notify(
        "note: the photographs are twice as wide as high and plain at their borders; taken for "
        "ordinary ones; pass --panoramas True if they show all directions"
    )
    return False


def _require_panoramas(declared: Sequence[Photograph], n_photographs: int) -> None:
    """Check that all images are declared as panoramas, and are twice as wide as high."""
    for photograph in declared:
        if photograph.width != 2 * photograph.height:
            raise UserError(
                f"{photograph.path}: {photograph.width} x {photograph.height} px is no whole "
                "panorama, which is twice as wide as high; export it uncropped, or pass "
                "--panoramas False for ordinary photographs"
            )
    if len(declared) < n_photographs:
        names = shortened([photograph.name for photograph in declared])
        raise UserError(
            f"{len(declared)} of {n_photographs} photographs are panoramas ({names}); put them "
            "into a folder of their own"
        )


def _is_declared(path: Path) -> bool:
    """Whether the XMP of a file says that it is an equirectangular panorama."""
    with open_image(path) as image:
        xmp = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp") or b""
    content = xmp.encode() if isinstance(xmp, str) else xmp
    return b"GPano" in content and b"equirectangular" in content


def _closes(grey: np.ndarray) -> bool:
    """Whether an image, (H, W), closes to a sphere.

    Its first and last row show one point each, and its left and right border meet.
    """
    row_differences = np.abs(np.diff(grey, axis=1)).mean(axis=1)
    pole_difference = max(row_differences[0], row_differences[-1])
    neighbour_difference = np.abs(grey[:, 0] - grey[:, 1]).mean()
    seam_difference = np.abs(grey[:, 0] - grey[:, -1]).mean()
    # One step of 8 bits is nothing.
    has_poles = pole_difference <= _POLE * np.median(row_differences) + 0.5
    return bool(has_poles and seam_difference <= _SEAM * neighbour_difference + 1)


def _has_texture_at_seam(grey: np.ndarray) -> bool:
    """Whether the left and the right border of an image, (H, W), show the same texture."""
    first = np.diff(grey[:, 0])
    last = np.diff(grey[:, -1])
    is_textured = np.minimum(np.abs(first), np.abs(last)) >= _STEP
    if is_textured.mean() < _TEXTURED_SHARE:
        return False
    # A horizon on both sides is a large step, which alone would be a correlation.
    sides = np.clip([first, last], -3 * _STEP, 3 * _STEP)
    return bool(np.corrcoef(sides)[0, 1] >= _SEAM_CORRELATION)


def write_views(
    panoramas: Sequence[Photograph],
    masks: Sequence[ViewMask | None],
    folder: Path,
    photographer: float | None,
    advance: Advance,
) -> tuple[list[Photograph], list[ViewMask | None]]:
    """Write the views of panoramas, six of each in the order of ``FACES``, and their masks.

    Views that are there already stay.

    Args:
        photographer: Degrees around straight down that do not count; None hides nothing.
    """
    views = []
    view_masks = []
    names = output_names(panoramas)
    for n_done, (panorama, name, mask) in enumerate(zip(panoramas, names, masks, strict=True), 1):
        files = _view_files(PurePosixPath(name), folder)
        if not all(file.path.is_file() for file in files):
            _write_views(panorama, mask, photographer, files)
        size = round(panorama.width / math.pi)
        mode = "ignore" if mask is None else mask.mode
        for file in files:
            view = replace(
                panorama,
                name=file.name,
                path=file.path,
                width=size,
                height=size,
                focal=size / 2,
                turned=False,
                depth="",
                transparent=False,
            )
            views.append(view)
            has_mask = file.mask_path.is_file()
            view_masks.append(ViewMask(file.mask_path, mode) if has_mask else None)
        advance(n_done)
    return views, view_masks


class _ViewFile(NamedTuple):
    """A view of a panorama on disk."""

    name: str
    path: Path
    mask_path: Path  # of a mask, which may not be there


def _view_files(name: PurePosixPath, folder: Path) -> list[_ViewFile]:
    """Return the files of the views of a panorama, in the order of ``FACES``."""
    files = []
    for face in FACES:
        view = name.with_name(f"{name.stem}_{face}{name.suffix}").as_posix()
        files.append(_ViewFile(view, folder / "images" / view, folder / "masks" / f"{view}.png"))
    return files


def _write_views(
    panorama: Photograph,
    mask: ViewMask | None,
    photographer: float | None,
    files: Sequence[_ViewFile],
) -> None:
    width = panorama.width
    height = panorama.height
    pixels = np.asarray(read_upright(panorama.path).convert("RGB"))
    counts = np.full((height, width), 255, np.uint8)
    if mask is not None:
        counts = decode_mask(mask, width, height, upright=True)
    if photographer is not None:
        first_hidden_row = round((1 - photographer / 180) * height)
        counts[first_hidden_row:] = 0
    size = round(width / math.pi)
    for rotation, file in zip(FACES.values(), files, strict=True):
        coordinates = _panorama_coordinates(rotation, size, width)
        if mask is not None or photographer is not None:
            _write(_resample(counts, coordinates), file.mask_path)
        # The view comes after its mask: where it is there, its mask is complete.
        _write(_resample(pixels, coordinates), file.path)


def _panorama_coordinates(rotation: Sequence[Sequence[int]], size: int, width: int) -> np.ndarray:
    """Row and column in a panorama of each pixel of a view. (2, size, size)

    Middles of pixels are at integers.
    """
    axis = (np.arange(size) + 0.5) * 2 / size - 1
    x, y = np.meshgrid(axis, axis)
    rays = np.stack([x, y, np.ones_like(x)], axis=-1) @ np.array(rotation)
    longitudes = np.arctan2(rays[..., 0], rays[..., 2])
    latitudes = np.arcsin(rays[..., 1] / np.linalg.norm(rays, axis=-1))
    rows = latitudes / np.pi + 0.5
    columns = longitudes / (2 * np.pi) + 0.5
    return np.stack([rows * (width / 2), columns * width]) - 0.5


def _resample(panorama: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
    """Interpolate a panorama at rows and columns. (H, W[, 3]), (2, h, w) -> (h, w[, 3]) uint8"""
    from scipy.ndimage import map_coordinates

    # Left of the first column is the last one.
    channels = np.atleast_3d(panorama).transpose(2, 0, 1)
    padded = np.pad(channels, ((0, 0), (0, 0), (1, 1)), mode="wrap")
    padded_coordinates = coordinates + np.array([0, 1])[:, None, None]
    resampled = [
        map_coordinates(channel, padded_coordinates, np.float32, order=1, mode="nearest")
        for channel in padded
    ]
    values = np.stack(resampled, -1).round().astype(np.uint8)
    return values.reshape(*coordinates.shape[1:], *panorama.shape[2:])


def _write(pixels: np.ndarray, path: Path) -> None:
    with atomic_path(path) as temporary:
        Image.fromarray(pixels).save(temporary, quality=95, subsampling=0, compress_level=1)


def grouped(views: Sequence[Any]) -> list[Sequence[Any]]:
    """Return views, or values of views, grouped by panorama."""
    n_faces = len(FACES)
    return [views[start : start + n_faces] for start in range(0, len(views), n_faces)]


def rigs_of(views: Sequence[Photograph]) -> list[Rig]:
    """Return a rig of six cameras for each size of views."""
    panoramas = grouped(range(len(views)))
    moments = values_by_key((views[indices[0]].width, indices) for indices in panoramas)
    rotations = np.array(list(FACES.values()), float)
    rigs = []
    for size, size_moments in moments.items():
        lenses = [(_view_lens(size), rotation) for rotation in rotations]
        rigs.append(Rig(lenses, size_moments))
    return rigs


def _view_lens(size: int) -> pycolmap.Camera:
    """Return the pycolmap.Camera of a view: a square that shows 90 degrees."""
    lens = load_pycolmap().Camera(model="PINHOLE", width=size, height=size, params=[size / 2] * 4)
    lens.has_prior_focal_length = True
    return lens
