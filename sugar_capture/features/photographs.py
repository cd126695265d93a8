# SPDX-License-Identifier: Apache-2.0
"""Image files as cameras and phones write them: their headers, and their pixels upright."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from gaussian_splatting.data.cameras import reduced_size
from gaussian_splatting.data.color_spaces import declared_colors
from gaussian_splatting.data.images import (
    colors_of,
    describe_unreadable,
    exif_of,
    has_alpha,
    open_image,
    unreadable_images,
)
from gaussian_splatting.data.names import (
    HEIF_SUFFIXES,
    PHOTOGRAPH_SUFFIXES,
    NameIndex,
    natural_order,
)
from sugar_capture.gps.gps_tags import GpsPosition, gps_of_metadata
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.libraries import load_package

FILM_DIAGONAL = math.hypot(36, 24)  # mm, of "35 mm equivalent" focal lengths (CIPA DCG-001)
_TAGS = ExifTags.Base
_EXIF_TIME = "%Y:%m:%d %H:%M:%S"
_UPRIGHT_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The operation that makes an image upright, by its orientation in EXIF."""

_KEPT_SUFFIXES = (".jpg", ".jpeg", ".png")  # of flat copies, which others do not keep
_ON_ITS_SIDE = (5, 6, 7, 8)  # orientations that swap width and height
_UNIT_MM = {2: 25.4, 3: 10.0, 4: 1.0, 5: 0.001}  # by FocalPlaneResolutionUnit in EXIF
_CONVERTED_MODES = ("CMYK", "LAB", "YCbCr", "HSV")
# Focal lengths in longer sides; outside are fisheyes, telescopes and wrong tags, and no value is
# better than a wrong one.
_LEAST_FOCAL = 0.2
_MOST_FOCAL = 20


@dataclass(frozen=True)
class Photograph:
    """An image file, described by its headers."""

    name: str  # path in its folder, with ``/``
    path: Path
    width: int  # pixels, upright
    height: int
    focal: float | None  # focal length in pixels of the file; None without EXIF
    device: str  # maker and model of the camera; empty without EXIF
    turned: bool  # EXIF says that the pixels are to be turned or mirrored
    depth: str  # mode, bit depth or colours of files that are not 8-bit sRGB or grey; else empty
    transparent: bool  # it has an alpha channel
    # Turned by EXIF so that width and height stay: by half a turn, or mirrored.
    keeps_size: bool = False
    time: float | None = None  # when it was taken, in seconds; None without EXIF
    gps: GpsPosition | None = None  # where it was taken; None without EXIF


def picture_files(folder: Path, recursive: bool = True) -> list[Path]:
    """Return the image files of a folder, see :func:`files_named`."""
    return files_named(folder, PHOTOGRAPH_SUFFIXES, recursive)


def files_named(folder: Path, suffixes: Sequence[str], recursive: bool = False) -> list[Path]:
    """Return files with these suffixes, in natural order, without hidden ones."""
    if not folder.is_dir():
        return []
    candidates = folder.rglob("*") if recursive else folder.iterdir()
    files = []
    for path in candidates:
        if path.suffix.lower() not in suffixes or not path.is_file():
            continue
        parts = path.relative_to(folder).parts
        if not any(part.startswith(".") for part in parts):
            files.append(path)
    return sorted(files, key=lambda path: natural_order(path.relative_to(folder).as_posix()))


def described_photographs(
    folder: Path, recursive: bool, notify: Notify | None = None
) -> list[Photograph]:
    """Read the headers of all images of a folder, in natural order.

    Args:
        notify: Gets a line about images that cannot be decoded, which are left out. None: nothing
            is decoded, and the first header that cannot be read is an error.

    Raises:
        UserError: A name is not UTF-8, a file cannot be read, or HEIC has no reader.
    """
    files = picture_files(folder, recursive)
    for path in files:
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            printable_path = str(path).encode(errors="backslashreplace").decode()
            raise UserError(
                f"{printable_path}: the name is not valid UTF-8, which COLMAP needs; rename it"
            ) from error
    register_heif_reader(files)
    unreadable: dict[Path, str] = {}
    if notify is not None:
        unreadable = unreadable_images(files)
    if notify is not None and unreadable:
        names = {path.relative_to(folder).as_posix(): why for path, why in unreadable.items()}
        notify(describe_unreadable(names, len(files)))
    return [_describe(path, folder) for path in files if path not in unreadable]


def register_heif_reader(files: Sequence[Path]) -> None:
    """Let Pillow read HEIC, where there are such files.

    Raises:
        UserError: There are, and their reader is not installed.
    """
    heif = [path for path in files if path.suffix.lower() in HEIF_SUFFIXES]
    if not heif:
        return
    what = f"{heif[0]}: {len(heif)} of {len(files)} photographs are HEIC, which"
    modules = load_package(what, "pillow-heif", "pillow_heif", instead="export them as JPEG")
    modules[0].register_heif_opener()


def _describe(path: Path, folder: Path) -> Photograph:
    with open_image(path) as image:
        exif = exif_of(image)
        details = exif.get_ifd(ExifTags.IFD.Exif)
        location = exif.get_ifd(ExifTags.IFD.GPSInfo)
        stored_width, stored_height = image.size
        depth = _depth(image.mode) or declared_colors(image)
        transparent = has_alpha(image)
        gps = gps_of_metadata(location, image.info.get("xmp")).position
    orientation = exif.get(_TAGS.Orientation, 1)
    is_on_its_side = orientation in _ON_ITS_SIDE
    is_turned = orientation in _UPRIGHT_TURNS
    width = stored_height if is_on_its_side else stored_width
    height = stored_width if is_on_its_side else stored_height
    maker = str(exif.get(_TAGS.Make, "")).strip(" \0")
    model = str(exif.get(_TAGS.Model, "")).strip(" \0")
    return Photograph(
        name=path.relative_to(folder).as_posix(),
        path=path,
        width=width,
        height=height,
        focal=_focal_length(details, width, height),
        device=f"{maker} {model}".strip(),
        turned=is_turned,
        depth=depth,
        transparent=transparent,
        keeps_size=is_turned and not is_on_its_side,
        time=_time_taken(details),
        gps=gps,
    )


def _time_taken(details: Mapping[int, Any]) -> float | None:
    """Return the local time of EXIF in seconds; None if it is missing or invalid.

    Args:
        details: The EXIF directory with details of the exposure.
    """
    text = str(details.get(_TAGS.DateTimeOriginal, "")).strip(" \0")
    try:
        moment = datetime.strptime(text, _EXIF_TIME)
    except ValueError:
        return None
    # Any fixed zone will do: only differences count.
    seconds = moment.replace(tzinfo=timezone.utc).timestamp()
    fraction = str(details.get(_TAGS.SubsecTimeOriginal, "")).strip(" \0")
    if fraction.isascii() and fraction.isdigit():
        seconds += float(f"0.{fraction}")
    return seconds


def _depth(mode: str) -> str:
    """Describe a mode of Pillow that is not 8-bit RGB or grey; empty for the others."""
    if mode in _CONVERTED_MODES:
        return mode
    if mode.startswith("I") or mode == "F":
        return "16-bit"
    return ""


def _focal_length(details: Mapping[int, Any], width: int, height: int) -> float | None:
    """Return the focal length of EXIF in pixels; None if it is missing or implausible.

    Args:
        details: The EXIF directory with details of the exposure.
    """
    equivalent = _positive_number(details.get(_TAGS.FocalLengthIn35mmFilm))
    focal = equivalent / FILM_DIAGONAL * math.hypot(width, height)
    if not focal:
        unit = _UNIT_MM.get(details.get(_TAGS.FocalPlaneResolutionUnit, 2), 0.0)
        pixels_per_unit = _positive_number(details.get(_TAGS.FocalPlaneXResolution))
        focal_mm = _positive_number(details.get(_TAGS.FocalLength))
        focal = focal_mm * pixels_per_unit / unit if unit else 0.0
    if _LEAST_FOCAL < focal / max(width, height) < _MOST_FOCAL:
        return focal
    return None


def _positive_number(value: object) -> float:
    """Return a finite positive number as a float; 0 for anything else."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, ZeroDivisionError):
        return 0.0
    return number if math.isfinite(number) and number > 0 else 0.0


def read_upright(path: Path, longest_side: int | None = None) -> Image.Image:
    """Read an image upright, in 8 bits, reduced where it is larger than asked for."""
    with open_image(path) as image:
        turn = _UPRIGHT_TURNS.get(exif_of(image).get(_TAGS.Orientation, 1))
        size = reduced_size(*image.size, longest_side or max(image.size))
        if size != image.size:
            # JPEG decodes at half or a quarter of the size for a fraction of the time.
            image.draft(None, size)
        colors = colors_of(image)
        if colors.size != size:
            colors = colors.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
        return colors if turn is None else colors.transpose(turn)


def read_grey(path: Path, longest_side: int) -> np.ndarray:
    """Read an image upright, in grey and not larger than asked for. (H, W) uint8"""
    return np.array(read_upright(path, longest_side).convert("L"))


def camera_groups(photographs: Sequence[Photograph]) -> list[list[int]]:
    """Return the indices of images that one camera took with one lens setting.

    Headers tell: size, device and focal length must be equal.
    """
    groups: dict[tuple, list[int]] = {}
    for index, photograph in enumerate(photographs):
        focal = round(photograph.focal, -1) if photograph.focal else None
        key = (photograph.width, photograph.height, photograph.device, focal)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def describe_capture(photographs: Sequence[Photograph], notify: Notify) -> None:
    """Tell the user of turned images, of unusual modes, and of several cameras."""
    n = len(photographs)
    turned = [photograph.name for photograph in photographs if photograph.turned]
    if turned:
        notify(f"note: {len(turned)} of {n} photographs are turned as their EXIF data say")
    depths = {photograph.depth for photograph in photographs}
    for depth in sorted(depths - {""}):
        names = [photograph.name for photograph in photographs if photograph.depth == depth]
        notify(
            f"note: {len(names)} of {n} photographs are {depth}, converted to 8-bit sRGB "
            f"({shortened(names)})"
        )
    groups = camera_groups(photographs)
    if len(groups) > 1:
        kinds = []
        for group in groups:
            first = photographs[group[0]]
            device = f"{first.device} " if first.device else ""
            kinds.append(f"{len(group)} of {device}{first.width} x {first.height}")
        notify(f"note: {len(groups)} cameras or lens settings ({shortened(kinds)})")


def output_names(photographs: Sequence[Photograph]) -> Iterator[str]:
    """Yield a name for the flat copy of each image: its own where its format is kept.

    Formats other than JPEG and PNG become PNG where something may be transparent, else JPEG:
    ``IMG_1.HEIC`` ``IMG_1.jpg``; with an image ``IMG_1.jpg`` beside it ``IMG_1.HEIC.jpg``.
    """
    used_names = {photograph.name.lower() for photograph in photographs}
    for photograph in photographs:
        path = PurePosixPath(photograph.name)
        if path.suffix.lower() in _KEPT_SUFFIXES:
            yield photograph.name
            continue
        suffix = ".png" if photograph.transparent else ".jpg"
        name = path.with_suffix(suffix).as_posix()
        if name.lower() in used_names:
            name = f"{photograph.name}{suffix}"
        used_names.add(name.lower())
        yield name


class OriginalNames:
    """Names of photographs as they were taken, found by those of their flat copies.

    Owns an index of the names; readers of EXIF data and of lenses ask it.

    Args:
        names: Of the photographs, with ``/``.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        others = [name for name in self._names if not name.lower().endswith(_KEPT_SUFFIXES)]
        self._renamed = NameIndex(others, PHOTOGRAPH_SUFFIXES)
        self._all = NameIndex(self._names, PHOTOGRAPH_SUFFIXES)

    def find(self, flat_name: str) -> str | None:
        """Return the photograph that a copy is of, see :func:`output_names`; None without one."""
        if flat_name in self._names:
            return flat_name
        # Named IMG_1.HEIC.jpg where an IMG_1.jpg is beside it.
        full_name = PurePosixPath(flat_name).with_suffix("").as_posix()
        if full_name in self._names:
            return full_name
        return self._renamed.find(flat_name) or self._all.find(flat_name)
