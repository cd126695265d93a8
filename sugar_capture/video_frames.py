# SPDX-License-Identifier: Apache-2.0
"""The frames of a video that are used as images: sharp ones between which something moved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import av.error
import msgspec
import numpy as np
from PIL import Image

from gaussian_splatting.data.color_spaces import ColorCodes, ColorSpace, color_space
from gaussian_splatting.data.image_checks import sharpness
from sugar_capture.features.photographs import picture_files
from sugar_capture.gps.video_positions import VideoTrack, exif_with_position, video_track
from sugar_utils.errors import Advance, UserError, explained
from sugar_utils.files import atomic_path, file_digest, require_regular_file, write_json_atomic
from sugar_utils.schemas import Count, read_checked

CHOICE_FILE = "frames.json"  # which frames were chosen; written beside them
MIN_FRAMES = 3  # fewer make no reconstruction
_MEASURED_SIDE = 640  # pixels of the longest side, at which frames are compared
_SMALLEST_SIDE = 16
_THUMBNAIL = 48
_STILL = 1.0
"""Mean difference of two thumbnails, of 255, below which nothing has moved between them: noise of
sensor and codec is averaged out to less."""

_MAX_LOST_SHARE = 0.05  # of the frames, above which a video is damaged
_FEW_ERRORS = 10  # that are never too many while a video is decoded
_JPEG_QUALITY = 95
_DEFAULT_RATE = 30  # frames per second, where a video has no rate
Progress = Callable[[str, int], contextlib.AbstractContextManager[Advance]]
"""Opened with a title and a total of frames."""


class FrameChoice(msgspec.Struct):
    """``frames.json``: the frames that were chosen."""

    video: str  # digest of the file
    wanted: Count  # number of frames that was asked for
    frames: list[Count]  # numbers of those that were chosen
    of: Count  # frames of the video
    repeated: Count  # intervals in which nothing moved
    colors: str  # name of the colours that were converted to sRGB; empty: they are sRGB


@dataclass(frozen=True)
class FrameLook:
    """A frame, measured."""

    number: int
    sharpness: float
    thumbnail: np.ndarray  # (48, 48) uint8


def extract_frames(video: Path, folder: Path, n_wanted: int, progress: Progress) -> FrameChoice:
    """Write the best frames of a video as ``frame_00012.jpg``; those that are there already stay.

    The video is read twice, so that no more than one frame is in memory. Frames of HDR video and of
    wide gamuts are converted to sRGB. Frames of a video with a GPS track have their positions in
    their EXIF data, as photographs do.

    Args:
        progress: Called with a title and a total; a context that gives an ``Advance``.

    Raises:
        UserError: Too few frames differ, or the folder has other images.
    """
    choice = _read_choice(video, folder, n_wanted)
    if choice is None:
        with progress("looking at frames", _declared_frames(video)) as advance:
            space = _colors_of(next(_decode_frames(video)), video)
            choice = choose_frames(
                _measure_frames(video, advance),
                n_wanted,
                file_digest(video),
                "" if space is None else space.name,
            )
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
        # Before the first frame is written; it replaces an earlier choice and its frames.
        write_json_atomic(folder / CHOICE_FILE, msgspec.to_builtins(choice))
    missing = {number for number in choice.frames if not _frame_path(folder, number).is_file()}
    if missing:
        with progress("writing frames", max(missing) + 1) as advance:
            _write_frames(video, folder, missing, video_track(video), advance)
    return choice


def choose_frames(
    looks: Iterator[FrameLook], n_wanted: int, video: str, colors: str = ""
) -> FrameChoice:
    """Choose the sharpest frame of each of ``n_wanted`` equal intervals, if something has moved.

    Args:
        looks: All frames of the video.
        video: Digest of the file.
        colors: Name of its colours; empty for sRGB.
    """
    frames = list(looks)
    n = len(frames)
    n_intervals = min(n_wanted, n)
    chosen: list[FrameLook] = []
    for k in range(n_intervals):
        first = k * n // n_intervals
        end = (k + 1) * n // n_intervals
        best = max(frames[first:end], key=lambda frame: frame.sharpness)
        if chosen:
            difference = chosen[-1].thumbnail.astype(np.int16) - best.thumbnail
            if np.abs(difference).mean() < _STILL:
                continue
        chosen.append(best)
    return FrameChoice(
        video=video,
        wanted=n_wanted,
        frames=[frame.number for frame in chosen],
        of=n,
        repeated=n_intervals - len(chosen),
        colors=colors,
    )


def _measure_frames(video: Path, advance: Advance) -> Iterator[FrameLook]:
    for number, frame in enumerate(_decode_frames(video)):
        scale = min(1.0, _MEASURED_SIDE / max(frame.width, frame.height))
        width = max(_SMALLEST_SIDE, round(frame.width * scale))
        height = max(_SMALLEST_SIDE, round(frame.height * scale))
        grey = frame.reformat(width, height, format="gray").to_ndarray()
        thumbnail = Image.fromarray(grey).resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)
        advance(number + 1)
        yield FrameLook(number, sharpness(grey), np.asarray(thumbnail))


def _write_frames(
    video: Path, folder: Path, numbers: set[int], track: VideoTrack | None, advance: Advance
) -> None:
    last = max(numbers)
    for number, frame in enumerate(_decode_frames(video)):
        if number in numbers:
            picture = _picture_of(frame, video)
            if frame.rotation:
                picture = picture.rotate(frame.rotation, expand=True)
            position = None
            if track is not None and frame.time is not None:
                position = track.at(frame.time)
            tags: dict[str, Any] = (
                {} if position is None else {"exif": exif_with_position(position)}
            )
            with atomic_path(_frame_path(folder, number)) as temporary:
                picture.save(temporary, quality=_JPEG_QUALITY, subsampling=0, **tags)
        advance(number + 1)
        if number >= last:
            return


def _picture_of(frame: Any, video: Path) -> Image.Image:
    """Return a frame in sRGB, as it is stored: not turned."""
    space = _colors_of(frame, video)
    if space is None:
        return frame.to_image()
    # 16 bits, as eight of HLG or PQ are too few for the dark colours of sRGB.
    return Image.fromarray(space.to_srgb(frame.to_ndarray(format="rgb48le")))


def _colors_of(frame: Any, video: Path) -> ColorSpace | None:
    """Return the colour space that a frame declares; None for sRGB and BT.709."""
    codes = ColorCodes(int(frame.color_primaries), int(frame.color_trc))
    return color_space(codes, video)


def _frame_path(folder: Path, number: int) -> Path:
    return folder / f"frame_{number:05}.jpg"


def _read_choice(video: Path, folder: Path, n_wanted: int) -> FrameChoice | None:
    """Read the choice of an earlier call; None if it is of another video or number of frames."""
    with contextlib.suppress(UserError):
        content = read_checked(folder / CHOICE_FILE, FrameChoice)
        choice = msgspec.convert(content, FrameChoice)
        if choice.video == file_digest(video) and choice.wanted == n_wanted:
            return choice
    return None


def _decode_frames(video: Path) -> Iterator[Any]:
    """Yield the frames of a video; single damaged packets are passed over.

    Raises:
        UserError: Too many frames are damaged or missing.
    """
    n_lost = 0
    n_decoded = 0
    with _open_video(video) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
                if packet is None:
                    break
                for frame in packet.decode():
                    n_decoded += 1
                    yield frame
            except av.error.EOFError:
                break
            except av.error.FFmpegError:
                n_lost += 1
                if n_lost > _FEW_ERRORS and n_lost > _MAX_LOST_SHARE * n_decoded:
                    break
        n_declared = _frames_to_show(container) if stream.frames else 0
        rate = float(stream.average_rate or 0)
    is_complete = n_decoded >= (1 - _MAX_LOST_SHARE) * n_declared
    if n_decoded == 0 or n_lost > _MAX_LOST_SHARE * n_decoded or not is_complete:
        place = f" after {n_decoded / rate:.1f} s" if rate and n_decoded else ""
        raise UserError(
            f"{video}: the video is damaged{place} ({n_decoded} of {n_declared or 'its'} frames "
            "can be read); copy it from the camera again, or cut off the damaged part"
        )


def _declared_frames(video: Path) -> int:
    """Number of frames that a video declares or that follows from its duration; at least 1."""
    with _open_video(video) as container:
        return _frames_to_show(container) or 1


def _frames_to_show(container: Any) -> int:
    """Number of frames that a container declares, or that are left after trimming.

    Phones trim a video by a list of edits, and leave all frames in the file.
    """
    stream = container.streams.video[0]
    rate = float(stream.average_rate or _DEFAULT_RATE)
    n_of_duration = round((container.duration or 0) / av.time_base * rate)
    if not stream.frames:
        return n_of_duration
    return min(stream.frames, n_of_duration) or stream.frames


@contextlib.contextmanager
def _open_video(video: Path) -> Iterator[Any]:
    require_regular_file(video)
    advice = "copy it from the camera again, or convert it to MP4"
    with explained(f"{video}: cannot be read as a video", advice, av.error.FFmpegError, ValueError):
        container = av.open(str(video))
    with container:
        if not container.streams.video:
            raise UserError(f"{video}: there is no picture in it, only sound; choose another file")
        yield container
