# SPDX-License-Identifier: Apache-2.0
"""The result of a camera reader, and the description of a format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pycolmap

# Reasons for which cameras are skipped; each completes "cameras are ...".
NO_IMAGE = "of images that are not here"
NO_POSE = "without a position or rotation"
DISABLED = "disabled"

Size = tuple[int, int]  # width and height in pixels
SizeOf = Callable[[str], Size | None]  # size of the image that a name means; None: no such image


@dataclass(frozen=True, eq=False)
class KnownCamera:
    """A camera that another program computed, in COLMAP's axes and pixels."""

    name: str  # of the image, as the file has it: perhaps without folder or extension
    lens: pycolmap.Camera
    rotation: np.ndarray  # world to camera, (3, 3)
    center: np.ndarray  # (3,) world units


@dataclass(frozen=True)
class SkippedCamera:
    """A camera of a file that cannot be used; the user reads a count for each reason."""

    name: str  # of the image, as the file has it
    reason: str  # completes "cameras are ..."


Entries = Iterator[KnownCamera | SkippedCamera]


@dataclass(frozen=True)
class CameraFormat:
    """A file format of cameras: where its files are, how they are recognised, and their reader."""

    program: str
    patterns: tuple[str, ...]  # of files in a folder; the first pattern that matches files counts
    accepts: Callable[[Path], bool]  # whether a file is of this format
    read: Callable[[Sequence[Path], SizeOf], Entries]
    is_one_file_per_image: bool = False  # all files together are one set of cameras
