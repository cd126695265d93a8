# SPDX-License-Identifier: Apache-2.0
"""Photographs as cameras and phones leave them, and frames of a video as photographs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import av
import msgspec
import numpy as np
from PIL import ExifTags, Image

from gaussian_splatting.data.consistency import sharpness
from gaussian_splatting.data.images import colors_of, has_alpha, open_image
from gaussian_splatting.data.names import HEIF_SUFFIXES, IMAGE_SUFFIXES, natural_order
from sugar_utils.errors import Notify, UserError, explained, shortened
from sugar_utils.files import atomic_path, file_digest, require_regular_file, write_json_atomic
from sugar_utils.libraries import load_package
from sugar_utils.schemas import Count, read_checked

FILM_DIAGONAL = math.hypot(36, 24)  # mm, of "35 mm equivalent" focal lengths (CIPA DCG-001)
_TAGS = ExifTags.Base
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

CHOICE_FILE = "frames.json"  # which frames were chosen; written beside them
MIN_FRAMES = 3  # fewer make no reconstruction
_LOOKED_AT = 640
_THUMBNAIL = 48
_STILL = 1.0
"""Mean difference of two thumbnails, of 255, below which nothing has moved between them: noise of
sensor and codec is averaged out to less."""
_MAX_LOST = 0.05
_JPEG_QUALITY = 95
Advance = Callable[[int], None]  # told how many frames are done


@dataclass(frozen=True)
class Photograph:
    name: str
    path: Path
    width: int
    height: int
    focal: float | None  # focal length in pixels of the whole file; None where EXIF does not tell
    device: str
    turned: bool
    depth: str  # what is not 8-bit RGB or grey, in words; else empty
    transparent: bool
    # Turned by EXIF so that width and height stay: by half a turn, or mirrored.
    keeps_size: bool = False


def picture_files(folder: Path, recursive: bool = True) -> list[Path]:
    return files_named(folder, (*IMAGE_SUFFIXES, *HEIF_SUFFIXES), recursive)


def files_named(folder: Path, suffixes: Sequence[str], recursive: bool = False) -> list[Path]:
    """Files with these suffixes, in natural order, without hidden ones."""
    if not folder.is_dir():
        return []
    found = (
        path
        for path in (folder.rglob("*") if recursive else folder.iterdir())
        if path.suffix.lower() in suffixes
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    return sorted(found, key=lambda path: natural_order(path.relative_to(folder).as_posix()))


def described_photographs(folder: Path, recursive: bool) -> list[Photograph]:
    files = picture_files(folder, recursive)
    for path in files:
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            shown = str(path).encode(errors="backslashreplace").decode()
            raise UserError(
                f"{shown}: the name is not valid UTF-8, which COLMAP needs; rename it"
            ) from error
    heif = [path for path in files if path.suffix.lower() in HEIF_SUFFIXES]
    if heif:
        what = f"{heif[0]}: {len(heif)} of {len(files)} photographs are HEIC, which"
        (pillow_heif,) = load_package(
            what, "pillow-heif", "pillow_heif", instead="export them as JPEG"
        )
        pillow_heif.register_heif_opener()
    return [_described(path, folder) for path in files]


def _described(path: Path, folder: Path) -> Photograph:
    with open_image(path) as image:
        exif = image.getexif()
        orientation = exif.get(_TAGS.Orientation, 1)
        width, height = image.size
        details = exif.get_ifd(ExifTags.IFD.Exif)
        deep = "16-bit" if image.mode.startswith("I") or image.mode == "F" else ""
        depth = image.mode if image.mode in ("CMYK", "LAB", "YCbCr", "HSV") else deep
        transparent = has_alpha(image)
    if orientation in _ON_ITS_SIDE:
        width, height = height, width
    names = (str(exif.get(tag, "")) for tag in (_TAGS.Make, _TAGS.Model))
    device = " ".join(name.strip(" \0") for name in names).strip()
    equivalent = _number(details.get(_TAGS.FocalLengthIn35mmFilm))
    focal = equivalent / FILM_DIAGONAL * math.hypot(width, height)
    if not focal:
        unit = _UNIT_MM.get(details.get(_TAGS.FocalPlaneResolutionUnit, 2), 0.0)
        pitch = _number(details.get(_TAGS.FocalPlaneXResolution))
        focal = _number(details.get(_TAGS.FocalLength)) * pitch / unit if unit else 0.0
    # Outside of this are fisheyes, telescopes and wrong tags: better no start than a wrong one.
    return Photograph(
        name=path.relative_to(folder).as_posix(),
        path=path,
        width=width,
        height=height,
        focal=focal if 0.2 < focal / max(width, height) < 20 else None,
        device=device,
        turned=orientation in _TURNS,
        depth=depth,
        transparent=transparent,
        keeps_size=orientation in _TURNS and orientation not in _ON_ITS_SIDE,
    )


def _number(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, ZeroDivisionError):
        return 0.0
    return number if math.isfinite(number) and number > 0 else 0.0


def read_upright(path: Path, longest_side: int | None = None) -> Image.Image:
    """A photograph as it is meant to be seen, in 8 bits, made smaller where it is longer."""
    with open_image(path) as image:
        turn = _TURNS.get(image.getexif().get(_TAGS.Orientation, 1))
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
    """A photograph upright, in grey and not larger than asked for. (H, W) uint8"""
    return np.array(read_upright(path, longest_side).convert("L"))


def camera_groups(photographs: Sequence[Photograph]) -> list[list[int]]:
    """Photographs that one camera took with one lens setting, as far as their headers tell."""
    groups: dict[tuple, list[int]] = {}
    for index, photograph in enumerate(photographs):
        focal = round(photograph.focal, -1) if photograph.focal else None
        key = (photograph.width, photograph.height, photograph.device, focal)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def told_photographs(photographs: Sequence[Photograph], notify: Notify) -> None:
    n = len(photographs)
    turned = [p.name for p in photographs if p.turned]
    if turned:
        notify(f"note: {len(turned)} of {n} photographs are turned as their EXIF data say")
    for depth in sorted({p.depth for p in photographs} - {""}):
        names = [p.name for p in photographs if p.depth == depth]
        told = f"{len(names)} of {n} photographs are {depth}, converted to 8-bit RGB"
        notify(f"note: {told} ({shortened(names)})")
    groups = camera_groups(photographs)
    if len(groups) > 1:
        kinds = []
        for group in groups:
            first = photographs[group[0]]
            device = f"{first.device} " if first.device else ""
            kinds.append(f"{len(group)} of {device}{first.width} x {first.height}")
        notify(f"note: {len(groups)} cameras or lens settings ({shortened(kinds)})")


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


class FrameChoice(msgspec.Struct):
    """``frames.json``."""

    video: str  # digest of the file
    wanted: Count
    frames: list[Count]  # numbers of those that were chosen
    of: Count
    repeated: Count  # intervals in which nothing moved


@dataclass(frozen=True)
class _Look:
    number: int
    sharpness: float
    thumbnail: np.ndarray


def extract_frames(video: Path, folder: Path, n_wanted: int, progress: Any) -> FrameChoice:
    """Write the best frames of a video as ``frame_00012.jpg``; those that are there already stay.

    The video is read twice, so that no more than one frame is in memory.
    """
    choice = _choice_made(video, folder, n_wanted)
    if choice is None:
        with progress("looking at frames", _declared_frames(video)) as advance:
            choice = choose_frames(_looks(video, advance), n_wanted, file_digest(video))
        if len(choice.frames) < MIN_FRAMES:
            raise UserError(
                f"{video}: {choice.of} frames, of which only {len(choice.frames)} differ; "
                "the camera has to move around what it records"
            )
        others = picture_files(folder)
        if others and not (folder / CHOICE_FILE).is_file():
            raise UserError(
                f"{folder}: holds other photographs than frames of {video.name} "
                f"({others[0].name}); move them away, or name the folder with -s to use them"
            )
        for path in folder.glob("frame_*.jpg"):
            path.unlink()
        # Before its first frame is written; it replaces an earlier one and its frames.
        write_json_atomic(folder / CHOICE_FILE, msgspec.to_builtins(choice))
    missing = {n for n in choice.frames if not _frame_path(folder, n).is_file()}
    if missing:
        with progress("writing frames", max(missing) + 1) as advance:
            _write_frames(video, folder, missing, advance)
    return choice


def choose_frames(looks: Iterator[_Look], n_wanted: int, video: str) -> FrameChoice:
    """The sharpest frame of each of ``n_wanted`` equal intervals, if something has moved."""
    seen = list(looks)
    n = len(seen)
    n_intervals = min(n_wanted, len(seen))
    chosen: list[_Look] = []
    for k in range(n_intervals):
        interval = seen[k * n // n_intervals : (k + 1) * n // n_intervals]
        best = max(interval, key=lambda look: look.sharpness)
        if chosen:
            difference = np.abs(chosen[-1].thumbnail.astype(np.int16) - best.thumbnail).mean()
            if difference < _STILL:
                continue
        chosen.append(best)
    numbers = [look.number for look in chosen]
    return FrameChoice(video, n_wanted, numbers, n, n_intervals - len(chosen))


def _looks(video: Path, advance: Advance) -> Iterator[_Look]:
    for number, frame in enumerate(_frames(video)):
        scale = min(1.0, _LOOKED_AT / max(frame.width, frame.height))
        width, height = (max(16, round(side * scale)) for side in (frame.width, frame.height))
        grey = frame.reformat(width, height, format="gray").to_ndarray()
        small = Image.fromarray(grey).resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)
        advance(number + 1)
        yield _Look(number, sharpness(grey), np.asarray(small))


def _write_frames(video: Path, folder: Path, wanted: set[int], advance: Advance) -> None:
    for number, frame in enumerate(_frames(video)):
        if number in wanted:
            picture = frame.to_image()
            if frame.rotation:
                picture = picture.rotate(frame.rotation, expand=True)
            with atomic_path(_frame_path(folder, number)) as temporary:
                picture.save(temporary, quality=_JPEG_QUALITY, subsampling=0)
        advance(number + 1)
        if number >= max(wanted):
            return


def _frame_path(folder: Path, number: int) -> Path:
    return folder / f"frame_{number:05}.jpg"


def _choice_made(video: Path, folder: Path, n_wanted: int) -> FrameChoice | None:
    with contextlib.suppress(UserError):
        found = msgspec.convert(read_checked(folder / CHOICE_FILE, FrameChoice), FrameChoice)
        if (found.video, found.wanted) == (file_digest(video), n_wanted):
            return found
    return None


def _frames(video: Path) -> Iterator[Any]:
    lost = decoded = 0
    with _opened(video) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
                if packet is None:
                    break
                for frame in packet.decode():
                    decoded += 1
                    yield frame
            except av.error.EOFError:
                break
            except av.error.FFmpegError:
                lost += 1
                if lost > 10 and lost > _MAX_LOST * decoded:
                    break
        told = stream.frames
        rate = float(stream.average_rate or 0)
    if decoded == 0 or lost > _MAX_LOST * decoded or decoded < (1 - _MAX_LOST) * told:
        place = f" after {decoded / rate:.1f} s" if rate and decoded else ""
        raise UserError(
            f"{video}: the video is damaged{place} ({decoded} of {told or 'its'} frames can be "
            "read); copy it from the camera again, or cut off the damaged part"
        )


def _declared_frames(video: Path) -> int:
    with _opened(video) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or 30)
        return stream.frames or round((container.duration or 0) / av.time_base * rate) or 1


@contextlib.contextmanager
def _opened(video: Path) -> Iterator[Any]:
    require_regular_file(video)
    advice = "copy it from the camera again, or convert it to MP4"
    with explained(f"{video}: cannot be read as a video", advice, av.error.FFmpegError, ValueError):
        container = av.open(str(video))
    with container:
        if not container.streams.video:
            raise UserError(f"{video}: there is no picture in it, only sound; choose another file")
        yield container
