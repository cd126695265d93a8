# SPDX-License-Identifier: Apache-2.0
"""Pictures as a video or as PNG files, one at a time as they are made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import av
import numpy as np
from PIL import Image

from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path

VIDEO_SUFFIX = ".mp4"
_QUALITY = "18"
"""Constant rate factor of H.264: what the eye does not tell from the original."""

_BITS_PER_PIXEL = 4
_SIDES = (2, 16_384)
"""Least and most pixels a side that libx264 takes."""


def write_video(path: Path, pictures: Iterable[np.ndarray], frames_per_second: int) -> None:
    """Write an MP4, complete or not at all: H.264 where this build of PyAV has it.

    Args:
        pictures: (H, W, 3) uint8 each. The first one's size is that of the video, less a row or
            column where a side is odd, which the format does not know; others are fitted into it.
    """
    try:
        _encode(path, pictures, frames_per_second)
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        raise UserError(
            f"{path}: the codec failed ({error}); name a folder as --output for PNG files"
        ) from error


def _encode(path: Path, pictures: Iterable[np.ndarray], frames_per_second: int) -> None:
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    stream = None
    with atomic_path(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        for picture in pictures:
            if stream is None:
                _check_size(path, *picture.shape[:2])
                stream = container.add_stream(codec, rate=frames_per_second)
                stream.height, stream.width = (side // 2 * 2 for side in picture.shape[:2])
                stream.pix_fmt = "yuv420p"
                if codec == "libx264":
                    stream.options = {"crf": _QUALITY}
                else:
                    size = stream.width * stream.height
                    stream.bit_rate = _BITS_PER_PIXEL * size * frames_per_second
            frame = _fitted(picture, stream.width, stream.height)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        if stream is None:
            raise UserError(f"{path}: no pictures to make a video of")
        container.mux(stream.encode())


def _check_size(path: Path, height: int, width: int) -> None:
    if not _SIDES[0] <= min(height, width) <= max(height, width) <= _SIDES[1]:
        raise UserError(
            f"{path}: a video has {_SIDES[0]} to {_SIDES[1]:,} pixels a side, not {width:,} x "
            f"{height:,}; show fewer results and maps side by side, set the size by "
            "--resolution_factor, or name a folder as --output for PNG files"
        )


def _fitted(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """A picture cut by at most a pixel a side, or else made to fit and put on black."""
    excess = picture.shape[0] - height, picture.shape[1] - width
    if all(0 <= more <= 1 for more in excess):
        return np.ascontiguousarray(picture[:height, :width])
    image = Image.fromarray(picture)
    scale = min(width / image.width, height / image.height)
    small = image.resize([max(1, round(side * scale)) for side in image.size])
    paper = Image.new("RGB", (width, height))
    paper.paste(small, ((width - small.width) // 2, (height - small.height) // 2))
    return np.asarray(paper)


def write_pictures(folder: Path, names: Iterable[str], pictures: Iterable[np.ndarray]) -> None:
    """Write PNG files, each complete or not at all.

    Args:
        pictures: (H, W, 3) uint8 each, as many.
    """
    for name, picture in zip(names, pictures, strict=True):
        file = name.replace("/", "_").replace("\\", "_")
        with atomic_path(folder / f"{file}.png") as temporary:
            Image.fromarray(picture).save(temporary, format="PNG")
