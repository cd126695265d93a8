# SPDX-License-Identifier: Apache-2.0
"""Photographs as cameras and phones leave them: found, described, and read upright in 8 bits."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from gaussian_splatting.data.images import IMAGE_SUFFIXES, colors_of, has_alpha, open_image
from sugar_utils.errors import UserError

HEIF_SUFFIXES = (".heic", ".heif", ".hif")
RAW_SUFFIXES = (".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".pef")
VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".mkv", ".avi", ".webm", ".mts", ".m2ts", ".3gp")

FILM_DIAGONAL = math.hypot(36, 24)
"""Diagonal of 35 mm film, which focal lengths "in 35 mm" refer to (CIPA DCG-001), in mm."""

_EXIF_BLOCK = 0x8769
_MAKE, _MODEL, _ORIENTATION, _FOCAL_IN_FILM = 0x010F, 0x0110, 0x0112, 0xA405
_FOCAL, _PLANE_RESOLUTION, _PLANE_UNIT = 0x920A, 0xA20E, 0xA210
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes a picture upright, by its orientation in EXIF."""

_ON_ITS_SIDE = (5, 6, 7, 8)
_UNIT_MM = {2: 25.4, 3: 10.0, 4: 1.0, 5: 0.001}
_NAMED = 3


@dataclass(frozen=True)
class Photograph:
    """One photograph, from its header.

    Attributes:
        name: Path below the folder of the photographs, with slashes.
        path: The file.
        width: Upright, in pixels.
        height: Upright, in pixels.
        focal: Focal length in pixels of the whole file; None where EXIF does not tell.
        device: Make and model of the camera; empty where EXIF does not tell.
        turned: Whether EXIF says that the picture has to be turned or mirrored.
        depth: What is not 8-bit RGB or grey, in words; else empty.
        transparent: Whether it has an alpha channel or a transparent colour.
    """

    name: str
    path: Path
    width: int
    height: int
    focal: float | None
    device: str
    turned: bool
    depth: str
    transparent: bool


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sorting key by which ``IMG_9`` comes before ``IMG_10``."""
    parts = re.split(r"(\d+)", name.lower())
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


def picture_files(folder: Path, recursive: bool = True) -> list[Path]:
    """Files of a folder that are photographs by their names, in their natural order.

    Hidden ones are left out: archives from macOS carry a ``._NAME`` for every photograph.
    """
    return _files(folder, (*IMAGE_SUFFIXES, *HEIF_SUFFIXES), recursive)


def video_files(folder: Path) -> list[Path]:
    """Files of a folder that are videos by their names."""
    return _files(folder, VIDEO_SUFFIXES, False)


def raw_files(folder: Path) -> list[Path]:
    """Files of a folder that are raw photographs by their names, which are not read."""
    return _files(folder, RAW_SUFFIXES, False)


def _files(folder: Path, suffixes: Sequence[str], recursive: bool) -> list[Path]:
    if not folder.is_dir():
        return []
    found = (
        path
        for path in (folder.rglob("*") if recursive else folder.iterdir())
        if path.suffix.lower() in suffixes and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )  # fmt: skip
    return sorted(found, key=lambda path: natural_order(path.relative_to(folder).as_posix()))


def described_photographs(folder: Path, recursive: bool) -> list[Photograph]:
    """All photographs of a folder, from their headers alone.

    Raises:
        UserError: One is no image, its name is no valid UTF-8, or it is HEIC and nothing is
            installed that reads it.
    """
    files = picture_files(folder, recursive)
    for path in files:
        _require_utf8(path)
    _prepare_heif(files)
    return [_described(path, folder) for path in files]


def _require_utf8(path: Path) -> None:
    """Check that COLMAP, whose texts are UTF-8, can name a file."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = str(path).encode(errors="backslashreplace").decode()
        raise UserError(
            f"{shown}: the name is not valid UTF-8, which COLMAP needs; rename it"
        ) from error


def _prepare_heif(files: Sequence[Path]) -> None:
    """Let Pillow read HEIC photographs, if there are any."""
    heif = [path for path in files if path.suffix.lower() in HEIF_SUFFIXES]
    if not heif:
        return
    try:
        importlib.import_module("pillow_heif").register_heif_opener()
    except ImportError as error:
        raise UserError(
            f"{heif[0]}: {len(heif)} of {len(files)} photographs are HEIC, which needs one more "
            "package: pip install pillow-heif (or export them as JPEG)"
        ) from error


def _described(path: Path, folder: Path) -> Photograph:
    with open_image(path) as image:
        exif = image.getexif()
        orientation = exif.get(_ORIENTATION, 1)
        width, height = image.size
        details = exif.get_ifd(_EXIF_BLOCK)
        depth, transparent = _unusual_depth(image), has_alpha(image)
    if orientation in _ON_ITS_SIDE:
        width, height = height, width
    device = " ".join(str(exif.get(tag, "")).strip(" \0") for tag in (_MAKE, _MODEL)).strip()
    return Photograph(
        name=path.relative_to(folder).as_posix(),
        path=path,
        width=width,
        height=height,
        focal=_focal_pixels(details, width, height),
        device=device,
        turned=orientation in _TURNS,
        depth=depth,
        transparent=transparent,
    )


def _unusual_depth(image: Image.Image) -> str:
    if image.mode.startswith("I") or image.mode == "F":
        return "16-bit"
    return image.mode if image.mode in ("CMYK", "LAB", "YCbCr", "HSV") else ""


def _focal_pixels(details: dict, width: int, height: int) -> float | None:
    """Focal length in pixels, by the tag for 35 mm film or by the pitch of the sensor."""
    film = _number(details.get(_FOCAL_IN_FILM))
    focal = film / FILM_DIAGONAL * math.hypot(width, height)
    if not focal:
        unit = _UNIT_MM.get(details.get(_PLANE_UNIT, 2), 0.0)
        pitch = _number(details.get(_PLANE_RESOLUTION))
        focal = _number(details.get(_FOCAL)) * pitch / unit if unit else 0.0
    # Outside of this are fisheyes, telescopes and wrong tags: better no start than a wrong one.
    return focal if 0.2 < focal / max(width, height) < 20 else None


def _number(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, ZeroDivisionError):
        return 0.0
    return number if math.isfinite(number) and number > 0 else 0.0


def read_upright(path: Path, longest_side: int | None = None) -> Image.Image:
    """A photograph as it is meant to be seen, in 8 bits.

    Args:
        path: The file.
        longest_side: Make larger ones smaller, pixels; None keeps the size of the file.

    Returns:
        RGB, or RGBA where something may be transparent.

    Raises:
        UserError: The file is damaged.
    """
    with open_image(path) as image:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
        scale = min(1.0, (longest_side or max(image.size)) / max(image.size))
        size = tuple(max(1, round(side * scale)) for side in image.size)
        if scale < 1:
            # JPEG decodes at half or a quarter of the size for a fraction of the time.
            image.draft(None, size)
        colors = colors_of(image)
        if colors.size != size:
            colors = colors.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
        return colors if turn is None else colors.transpose(turn)


def read_grey(path: Path, longest_side: int) -> np.ndarray:
    """A photograph upright, in grey and not larger than asked for. (H, W) uint8

    Raises:
        UserError: The file is damaged.
    """
    return np.array(read_upright(path, longest_side).convert("L"))


def camera_groups(photographs: Sequence[Photograph]) -> list[list[int]]:
    """Photographs that one camera took with one lens setting, as far as their headers tell.

    Returns:
        Indices, by group; groups and indices in the order of the photographs.
    """
    groups: dict[tuple, list[int]] = {}
    for index, photograph in enumerate(photographs):
        focal = round(photograph.focal, -1) if photograph.focal else None
        key = (photograph.width, photograph.height, photograph.device, focal)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def told_photographs(photographs: Sequence[Photograph], notify: Callable[[str], None]) -> None:
    """Say what was converted on the way, so that nobody is surprised."""
    n = len(photographs)
    turned = [p.name for p in photographs if p.turned]
    if turned:
        notify(f"note: {len(turned)} of {n} photographs are turned as their EXIF data say")
    for depth in sorted({p.depth for p in photographs} - {""}):
        names = [p.name for p in photographs if p.depth == depth]
        notify(f"note: {len(names)} of {n} photographs are {depth}, converted to 8-bit RGB "
               f"({shortened(names)})")  # fmt: skip
    groups = camera_groups(photographs)
    if len(groups) > 1:
        sizes = ", ".join(_group_text(photographs, group) for group in groups[:_NAMED])
        more = ", ..." if len(groups) > _NAMED else ""
        notify(f"note: {len(groups)} cameras or lens settings ({sizes}{more})")


def _group_text(photographs: Sequence[Photograph], group: Sequence[int]) -> str:
    first = photographs[group[0]]
    device = f" {first.device}" if first.device else ""
    return f"{len(group)} of{device} {first.width} x {first.height}"


def shortened(names: Sequence[str], limit: int = _NAMED) -> str:
    """The first of some names, and whether there are more."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more"
                                       if len(names) > limit else "")  # fmt: skip


def output_names(photographs: Sequence[Photograph]) -> Iterator[str]:
    """A name for the flat copy of each photograph: its own where its format is kept.

    Formats other than JPEG and PNG become PNG where something may be transparent, else JPEG:
    ``IMG_1.HEIC`` ``IMG_1.jpg``; with a photograph ``IMG_1.jpg`` beside it ``IMG_1.HEIC.jpg``.
    """
    taken = {p.name.lower() for p in photographs}
    for photograph in photographs:
        pure = PurePosixPath(photograph.name)
        if pure.suffix.lower() in (".jpg", ".jpeg", ".png"):
            yield photograph.name
            continue
        suffix = ".png" if photograph.transparent else ".jpg"
        name = pure.with_suffix(suffix).as_posix()
        name = f"{photograph.name}{suffix}" if name.lower() in taken else name
        taken.add(name.lower())
        yield name
