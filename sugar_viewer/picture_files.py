# SPDX-License-Identifier: Apache-2.0
"""Write pictures as a video, or as PNG files with names of their views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import av
import av.error
import numpy as np
from av.container import OutputContainer
from PIL import Image, ImageOps

from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path

_QUALITY = "18"  # constant rate factor of H.264: visually lossless
_BITS_PER_PIXEL = 4
_SIDES = (2, 16_384)  # least and most pixels a side that libx264 takes


def write_video(path: Path, pictures: Iterable[np.ndarray], frames_per_second: int) -> None:
    """Write an MP4, complete or not at all; H.264 where this build of PyAV has it.

    Args:
        pictures: (H, W, 3) uint8 each. The first one's size is that of the video, less a row or
            column where a side is odd; others are fitted into it.

    Raises:
        UserError: There are no pictures, or the codec does not take them.
    """
    try:
        _encode(path, pictures, frames_per_second)
    except av.error.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        raise UserError(
            f"{path}: the codec failed ({error}); name a folder as --output for PNG files"
        ) from error


def _encode(path: Path, pictures: Iterable[np.ndarray], frames_per_second: int) -> None:
    stream = None
    with atomic_path(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        for picture in pictures:
            if stream is None:
                height, width = picture.shape[:2]
                _check_size(path, width, height)
                stream = _video_stream(container, width, height, frames_per_second)
            pixels = _fitted(picture, stream.width, stream.height)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame))
        if stream is None:
            raise UserError(f"{path}: no pictures to make a video of")
        container.mux(stream.encode())


def _check_size(path: Path, width: int, height: int) -> None:
    least, most = _SIDES
    if not least <= min(height, width) <= max(height, width) <= most:
        raise UserError(
            f"{path}: a video has {least} to {most:,} pixels a side, not "
            f"{width:,} x {height:,}; show fewer results and maps side by side, set "
            "the size by --resolution_factor, or name a folder as --output for PNG "
            "files"
        )


def _video_stream(
    container: OutputContainer, width: int, height: int, frames_per_second: int
) -> av.VideoStream:
    """Add the stream of a video to a container, with even sides."""
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    stream = container.add_stream(codec, rate=frames_per_second)
    stream.height = height // 2 * 2
    stream.width = width // 2 * 2
    stream.pix_fmt = "yuv420p"
    if codec == "libx264":
        stream.options = {"crf": _QUALITY}
    else:
        size = stream.width * stream.height
        stream.bit_rate = _BITS_PER_PIXEL * size * frames_per_second
    return stream


def _fitted(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """Cut a picture by at most a pixel a side, or else make it fit and put it on black."""
    excess_rows = picture.shape[0] - height
    excess_columns = picture.shape[1] - width
    if 0 <= excess_rows <= 1 and 0 <= excess_columns <= 1:
        return np.ascontiguousarray(picture[:height, :width])
    image = ImageOps.pad(Image.fromarray(picture), (width, height))
    return np.asarray(image)


def write_pictures(folder: Path, names: Iterable[str], pictures: Iterable[np.ndarray]) -> None:
    """Write ``NAME.png`` files, each complete or not at all.

    Args:
        names: One for each picture.
        pictures: (H, W, 3) uint8 each.
    """
    for name, picture in zip(names, pictures, strict=True):
        with atomic_path(folder / f"{name}.png") as temporary:
            Image.fromarray(picture).save(temporary, format="PNG")


def _flat(name: str) -> str:
    return name.replace("/", "_").replace("\\", "_")


def picture_names(views: Sequence[str]) -> list[str]:
    """Return a file name without extension for each view, no two alike on any file system.

    It is that of the image, with its folders: ``a/1.jpg`` makes ``a_1``. Where two views would have
    the same name both keep their extension, and those still alike are numbered in their order.
    """
    flat = [_flat(view) for view in views]
    short = [_flat(Path(view).with_suffix("").as_posix()) for view in views]
    counts = Counter(name.lower() for name in short)
    used_names = {name for name, count in counts.items() if count == 1}
    names = []
    for full_name, name in zip(flat, short, strict=True):
        if counts[name.lower()] > 1:
            name = full_name
            number = 1
            while name.lower() in used_names:
                number += 1
                name = f"{full_name}_{number}"
            used_names.add(name.lower())
        names.append(name)
    return names
