# SPDX-License-Identifier: Apache-2.0
"""Equirectangular panoramas as rigs of six square pinhole views, the faces of a cube.

A panorama shows longitude from left to right and latitude from top to bottom. Its axes are those of
a camera that looks at its middle: x right, y down, z forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.images import decode_mask, open_image
from sugar_capture.matching import Rig
from sugar_capture.photographs import Photograph, output_names, read_grey, read_upright
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.files import atomic_path
from sugar_utils.libraries import load_pycolmap

FACES = {
    "front": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "right": [[0, 0, -1], [0, 1, 0], [1, 0, 0]],
    "back": [[-1, 0, 0], [0, 1, 0], [0, 0, -1]],
    "left": [[0, 0, 1], [0, 1, 0], [-1, 0, 0]],
    "up": [[1, 0, 0], [0, 0, 1], [0, -1, 0]],
    "down": [[1, 0, 0], [0, 0, -1], [0, 1, 0]],
}
"""Right, down and forward of each view in the axes of the panorama."""

_LOOKED_AT = 512  # pixels, at which the borders of a picture are compared
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
    asked: bool | str,
    notify: Notify = lambda line: None,
) -> bool:
    """Whether photographs are equirectangular panoramas; asked: the flag ``--panoramas``.

    Files say so in XMP (GPano); else all must be twice as wide as high and meet at their borders,
    and in half of them at least the same texture must be on both sides: plain backgrounds meet too.
    """
    if asked is False:
        return False
    said = [p for p in photographs if asked is True or _says_so(p.path)]
    wrong = [p for p in said if p.width != 2 * p.height]
    if wrong:
        size = f"{wrong[0].width} x {wrong[0].height} px"
        raise UserError(
            f"{wrong[0].path}: {size} is no whole panorama, which is twice as wide as high; export "
            "it uncropped, or pass --panoramas False for ordinary photographs"
        )
    if said and len(said) < len(photographs):
        raise UserError(
            f"{len(said)} of {len(photographs)} photographs are panoramas "
            f"({shortened([p.name for p in said])}); put them into a folder of their own"
        )
    if said:
        return True
    if any(p.width != 2 * p.height for p in photographs):
        return False
    textured = 0
    for photograph in photographs:
        grey = read_grey(photograph.path, _LOOKED_AT).astype(float)
        if not _closes(grey):
            return False
        textured += _has_texture_at_seam(grey)
    if textured >= _TEXTURED_PANORAMAS * len(photographs):
        return True
    notify(
        "note: the photographs are twice as wide as high and plain at their borders; taken for "
        "ordinary ones; pass --panoramas True if they show all directions"
    )
    return False


def _says_so(path: Path) -> bool:
    with open_image(path) as image:
        text = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp") or b""
    text = text.encode() if isinstance(text, str) else text
    return b"GPano" in text and b"equirectangular" in text


def _closes(grey: np.ndarray) -> bool:
    """Whether the first and the last row of a picture, (H, W), show one place each, and its left
    and right border meet."""
    along = np.abs(np.diff(grey, axis=1)).mean(axis=1)
    beside, seam = (np.abs(grey[:, 0] - grey[:, k]).mean() for k in (1, -1))
    # One step of 8 bits is nothing.
    poles = max(along[0], along[-1]) <= _POLE * np.median(along) + 0.5
    return bool(poles and seam <= _SEAM * beside + 1)


def _has_texture_at_seam(grey: np.ndarray) -> bool:
    """Whether the left and the right border of a picture, (H, W), show the same texture."""
    first = np.diff(grey[:, 0])
    last = np.diff(grey[:, -1])
    textured = np.minimum(np.abs(first), np.abs(last)) >= _STEP
    if textured.mean() < _TEXTURED_SHARE:
        return False
    # A horizon on both sides is a large step, which alone would be a correlation.
    sides = np.clip([first, last], -3 * _STEP, 3 * _STEP)
    return bool(np.corrcoef(sides)[0, 1] >= _SEAM_CORRELATION)


def write_views(
    panoramas: Sequence[Photograph],
    masks: Sequence[ViewMask | None],
    folder: Path,
    photographer: float | None,
    advance: Callable[[int], None],
) -> tuple[list[Photograph], list[ViewMask | None]]:
    """Write the views of panoramas, six of each in the order of ``FACES``, and their masks.

    Args:
        photographer: Degrees around straight down that do not count; None hides nothing.
    """
    views = []
    hidden = []
    names = [PurePosixPath(name) for name in output_names(panoramas)]
    for done, (panorama, name, mask) in enumerate(zip(panoramas, names, masks, strict=True), 1):
        size = round(panorama.width / math.pi)
        own = [name.with_name(f"{name.stem}_{face}{name.suffix}").as_posix() for face in FACES]
        paths = [folder / "images" / view for view in own]
        mask_paths = [folder / "masks" / f"{view}.png" for view in own]
        if not all(path.is_file() for path in paths):
            _write_views(panorama, mask, photographer, paths, mask_paths)
        for view, path, mask_path in zip(own, paths, mask_paths, strict=True):
            same = {"path": path, "width": size, "height": size, "focal": size / 2}
            plain = {"turned": False, "depth": "", "transparent": False}
            views.append(replace(panorama, name=view, **same, **plain))
            mode = "ignore" if mask is None else mask.mode
            hidden.append(ViewMask(mask_path, mode) if mask_path.is_file() else None)
        advance(done)
    return views, hidden


def _write_views(
    panorama: Photograph,
    mask: ViewMask | None,
    photographer: float | None,
    paths: Sequence[Path],
    mask_paths: Sequence[Path],
) -> None:
    width = panorama.width
    height = panorama.height
    pixels = np.asarray(read_upright(panorama.path).convert("RGB"))
    counts = np.full((height, width), 255, np.uint8)
    if mask is not None:
        counts = decode_mask(mask, width, height, upright=True)
    if photographer is not None:
        counts[round((1 - photographer / 180) * height) :] = 0
    for rotation, path, mask_path in zip(FACES.values(), paths, mask_paths, strict=True):
        at = _places(rotation, round(width / math.pi), width)
        if mask is not None or photographer is not None:
            _write(_resampled(counts, at), mask_path)
        # After its mask, which is looked for where the view is there.
        _write(_resampled(pixels, at), path)


def _places(rotation: Sequence[Sequence[int]], size: int, width: int) -> np.ndarray:
    """Row and column in a panorama, of a pixel's middle at integers, of each pixel of a view.
    (2, size, size)"""
    at = (np.arange(size) + 0.5) * 2 / size - 1
    x, y = np.meshgrid(at, at)
    rays = np.stack([x, y, np.ones_like(x)], axis=-1) @ np.array(rotation)
    longitudes = np.arctan2(rays[..., 0], rays[..., 2])
    latitudes = np.arcsin(rays[..., 1] / np.linalg.norm(rays, axis=-1))
    rows = latitudes / np.pi + 0.5
    columns = longitudes / (2 * np.pi) + 0.5
    return np.stack([rows * (width / 2), columns * width]) - 0.5


def _resampled(panorama: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Values of a panorama at rows and columns, between its pixels. (H, W[, 3]) to (h, w[, 3])"""
    from scipy.ndimage import map_coordinates

    # Left of the first column is the last one.
    channels = np.atleast_3d(panorama).transpose(2, 0, 1)
    channels = np.pad(channels, ((0, 0), (0, 0), (1, 1)), mode="wrap")
    at = at + np.array([0, 1])[:, None, None]
    found = [map_coordinates(c, at, np.float32, order=1, mode="nearest") for c in channels]
    return np.stack(found, -1).round().astype(np.uint8).reshape(*at.shape[1:], *panorama.shape[2:])


def _write(pixels: np.ndarray, path: Path) -> None:
    with atomic_path(path) as temporary:
        Image.fromarray(pixels).save(temporary, quality=95, subsampling=0, compress_level=1)


def grouped(views: Sequence[Any]) -> list[Sequence[Any]]:
    """Views, or what belongs to them, by panorama."""
    return [views[k : k + len(FACES)] for k in range(0, len(views), len(FACES))]


def rigs_of(views: Sequence[Photograph]) -> list[Rig]:
    """A rig of six cameras for each size of views."""
    pycolmap = load_pycolmap()
    moments = {}
    for places in grouped(range(len(views))):
        moments.setdefault(views[places[0]].width, []).append(places)

    def camera(size: int) -> Any:
        made = pycolmap.Camera(model="PINHOLE", width=size, height=size, params=[size / 2] * 4)
        made.has_prior_focal_length = True
        return made

    turns = np.array(list(FACES.values()), float)
    return [([(camera(size), turn) for turn in turns], own) for size, own in moments.items()]
