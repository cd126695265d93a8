# SPDX-License-Identifier: Apache-2.0
"""Frames of a video as photographs: the sharpest of each interval, without those that repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
from PIL import Image

from gaussian_splatting.data.consistency.image_content import sharpness
from gaussian_splatting.posing.photographs import picture_files
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, file_digest, require_regular_file, write_json_atomic
from sugar_utils.schemas import Count, read_checked

CHOICE_FILE = "frames.json"
"""Which frames were chosen, beside them. Pictures without it are somebody else's."""

MIN_FRAMES = 3
"""Fewer make no reconstruction."""

_LOOKED_AT = 640
_THUMBNAIL = 48
_STILL = 1.0
"""Mean difference of two thumbnails, of 255, below which nothing has moved between them: noise of
sensor and codec is averaged out to less."""

_MAX_LOST = 0.05
_JPEG_QUALITY = 95


class ChoiceNote(msgspec.Struct):
    """``frames.json``."""

    video: str
    wanted: Count
    frames: list[Count]
    of: Count
    repeated: Count


@dataclass(frozen=True)
class FrameChoice:
    """Which frames of a video are taken.

    Attributes:
        chosen: Numbers of the frames, ascending.
        n_frames: Frames of the video.
        n_repeated: Intervals left out, because nothing had moved since the one before.
    """

    chosen: list[int]
    n_frames: int
    n_repeated: int


@dataclass(frozen=True)
class _Look:
    """What is remembered of a frame."""

    number: int
    sharpness: float
    thumbnail: np.ndarray


Advance = Callable[[int], None]
"""Told how many frames are done."""


def extract_frames(video: Path, folder: Path, n_wanted: int, progress: Any) -> FrameChoice:
    """Write the best frames of a video as JPEG files; those that are there already stay.

    The video is read twice, so that no more than one frame is in memory.

    Args:
        video: The file.
        folder: Gets ``frames.json``, and ``frame_00012.jpg`` for frame 12.
        n_wanted: Frames to take at most.
        progress: Context manager that takes a title and the number of frames and gives a function
            to call after each one.

    Raises:
        UserError: No video, a damaged one, or one in which nothing moves; or the folder holds
            pictures of somebody else.
    """
    choice = _choice_made(video, folder, n_wanted)
    if choice is None:
        with progress("looking at frames", _declared_frames(video)) as advance:
            choice = choose_frames(_looks(video, advance), n_wanted)
        if len(choice.chosen) < MIN_FRAMES:
            raise UserError(
                f"{video}: {choice.n_frames} frames, of which only {len(choice.chosen)} differ; "
                "the camera has to move around what it films"
            )
        _begin(video, folder, n_wanted, choice)
    missing = {n for n in choice.chosen if not _frame_path(folder, n).is_file()}
    if missing:
        with progress("writing frames", max(missing) + 1) as advance:
            _write_frames(video, folder, missing, advance)
    return choice


def _begin(video: Path, folder: Path, n_wanted: int, choice: FrameChoice) -> None:
    """Note a choice before its first frame is written, in place of an earlier one and its frames.

    Raises:
        UserError: The folder holds pictures that are no frames of ours.
    """
    others = picture_files(folder)
    if others and not (folder / CHOICE_FILE).is_file():
        raise UserError(
            f"{folder}: holds other photographs than frames of {video.name} ({others[0].name}); "
            "move them away, or name the folder with -s to use them"
        )
    for path in folder.glob("frame_*.jpg"):
        path.unlink()
    note = {"video": file_digest(video), "wanted": n_wanted, "frames": choice.chosen,
            "of": choice.n_frames, "repeated": choice.n_repeated}  # fmt: skip
    write_json_atomic(folder / CHOICE_FILE, note)


def choose_frames(looks: Iterator[_Look], n_wanted: int) -> FrameChoice:
    """The sharpest frame of each of ``n_wanted`` equal intervals, if something has moved.

    Args:
        looks: All frames in order.
        n_wanted: Intervals; with fewer frames each is an interval of its own.
    """
    seen = list(looks)
    n = len(seen)
    chosen: list[_Look] = []
    repeated = 0
    n_intervals = min(n_wanted, n)
    for k in range(n_intervals):
        interval = seen[k * n // n_intervals : (k + 1) * n // n_intervals]
        best = max(interval, key=lambda look: look.sharpness)
        if chosen and _difference(chosen[-1], best) < _STILL:
            repeated += 1
            continue
        chosen.append(best)
    return FrameChoice([look.number for look in chosen], n, repeated)


def _difference(a: _Look, b: _Look) -> float:
    return float(np.abs(a.thumbnail.astype(np.int16) - b.thumbnail).mean())


def _looks(video: Path, advance: Advance) -> Iterator[_Look]:
    for number, frame in enumerate(_frames(video)):
        scale = min(1.0, _LOOKED_AT / max(frame.width, frame.height))
        size = {"width": max(16, round(frame.width * scale)),
                "height": max(16, round(frame.height * scale))}  # fmt: skip
        grey = frame.reformat(**size, format="gray").to_ndarray()
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
    """The choice of an earlier call, if it was of this video and as many frames."""
    with contextlib.suppress(UserError):
        note = read_checked(folder / CHOICE_FILE, ChoiceNote)
        if note["video"] == file_digest(video) and note["wanted"] == n_wanted:
            return FrameChoice(note["frames"], note["of"], note["repeated"])
    return None


def _frames(video: Path) -> Iterator[Any]:
    """Decode all frames of a video.

    Raises:
        UserError: It cannot be opened, ends early, or too much of it cannot be decoded.
    """
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
        told, rate = stream.frames, float(stream.average_rate or 0)
    if decoded == 0 or lost > _MAX_LOST * decoded or decoded < (1 - _MAX_LOST) * told:
        place = f" after {decoded / rate:.1f} s" if rate and decoded else ""
        raise UserError(
            f"{video}: the video is damaged{place} ({decoded} of {told or 'its'} frames can be "
            "read); copy it from the camera again, or cut off the damaged part"
        )


def _declared_frames(video: Path) -> int:
    """Number of frames by the header, for the progress; a guess where it is not told."""
    with _opened(video) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or 30)
        return stream.frames or round((container.duration or 0) / av.time_base * rate) or 1


@contextlib.contextmanager
def _opened(video: Path) -> Iterator[Any]:
    require_regular_file(video)
    try:
        container = av.open(str(video))
    except (av.error.FFmpegError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{video}: cannot be read as a video ({reason}); copy it from the camera again, or "
            "convert it to MP4"
        ) from error
    with container:
        if not container.streams.video:
            raise UserError(f"{video}: there is no picture in it, only sound; choose another file")
        yield container
