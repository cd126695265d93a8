# SPDX-License-Identifier: Apache-2.0
"""The meaning of the numbers of mask files: brightness, or labels.

A pixel counts where a mask is at least half as bright as white. White is 255, except where

- a file has two values, 0 and another one: that one is white;
- no mask of a capture is brighter than 127, or they have colours, and each has few values: these
  are labels, of which all but 0 count;
- no mask of a capture is brighter than 127, and they have many values: their brightest is white.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

WHITE = 255
COUNTS = 128  # from this value of the mask's byte on, a pixel counts where it must count or not
LABELS = 1  # what is white where all but 0 counts
MAX_LABELS = 64  # different values above 0 of a mask that holds labels
_DARKEST_WHITE = 16  # below, values are the noise of compression
_GREY = ("1", "L", "LA")
_LOSSY = ("JPEG", "MPO", "WEBP")


@dataclass(frozen=True)
class MaskLevels:
    """The values above 0 of a mask file."""

    values: tuple[int, ...]  # the first ``MAX_LABELS`` + 1 of them, ascending; 1 to 255
    brightest: int  # 0 for a black mask
    is_lossy: bool  # a file format that does not keep values as they were
    is_coloured: bool

    @property
    def is_two_valued(self) -> bool:
        """Whether all that is not 0 has one value."""
        return len(self.values) == 1

    @property
    def may_be_labels(self) -> bool:
        """Whether there are few values, as of labels, and they are exact."""
        return not self.is_lossy and len(self.values) <= MAX_LABELS


def brightness_of(image: Image.Image) -> np.ndarray:
    """Return the brightest channel of a mask file. (H, W) uint8, 0 only where all channels are"""
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.nan_to_num(np.asarray(image).astype(np.float64)).clip(0)
        most = values.max(initial=0.0)
        if image.mode == "F" and most <= 1:
            values = values * WHITE
        elif most > WHITE:
            # Of 16 bits.
            values = values / 257
        return np.ceil(values).clip(0, WHITE).astype(np.uint8)
    if image.mode in _GREY:
        return np.asarray(image.convert("L"))
    return np.asarray(image.convert("RGB")).max(axis=2)


def levels_of(image: Image.Image, brightness: np.ndarray) -> MaskLevels:
    """Return the values of an opened mask file.

    Args:
        brightness: As of :func:`brightness_of`. (H, W) uint8
    """
    counts = np.bincount(brightness.ravel(), minlength=WHITE + 1)
    values = [value for value in np.flatnonzero(counts).tolist() if value > 0]
    is_coloured = False
    if image.mode not in (*_GREY, "F") and not image.mode.startswith("I"):
        darkest = np.asarray(image.convert("RGB")).min(axis=2)
        is_coloured = bool((darkest != brightness).any())
    return MaskLevels(
        values=tuple(values[: MAX_LABELS + 1]),
        brightest=max(values, default=0),
        is_lossy=image.format in _LOSSY,
        is_coloured=is_coloured,
    )


def white_of(levels: Sequence[MaskLevels]) -> int:
    """Return the brightness that is white in the masks of a capture; ``LABELS`` for labels."""
    several = [level for level in levels if len(level.values) > 1]
    if not several:
        return WHITE
    brightest = max(level.brightest for level in levels)
    is_coloured = any(level.is_coloured for level in several)
    if all(level.may_be_labels for level in several) and (brightest < COUNTS or is_coloured):
        return LABELS
    if _DARKEST_WHITE <= brightest < COUNTS:
        return brightest
    return WHITE


def counted(brightness: np.ndarray, levels: MaskLevels, white: int) -> np.ndarray:
    """Return the weight of each pixel, which counts from ``COUNTS`` on. (H, W) uint8

    Args:
        brightness: (H, W) uint8
        white: As of :func:`white_of`.
    """
    if levels.is_two_valued or white == LABELS:
        return np.where(brightness > 0, WHITE, 0).astype(np.uint8)
    if white == WHITE:
        return brightness
    scaled = brightness.astype(np.uint16) * WHITE // white
    return scaled.clip(0, WHITE).astype(np.uint8)


def description(levels: Sequence[tuple[str, MaskLevels]], white: int) -> str | None:
    """Describe unusual values in the masks of a capture; None if there are none.

    Args:
        levels: Of each mask, with its name.
        white: As of :func:`white_of`.
    """
    if white not in (WHITE, LABELS):
        return (
            f"masks are dim: the brightest value, {white}, is white; from half of it on they count"
        )
    unusual = []
    for name, level in levels:
        holds_labels = white == LABELS or level.is_two_valued
        if holds_labels and level.brightest not in (0, WHITE):
            unusual.append((name, level))
    if not unusual:
        return None
    name, level = max(unusual, key=lambda pair: len(pair[1].values))
    values = ", ".join(map(str, (0, *level.values[:3])))
    more = ", ..." if len(level.values) > 3 else ""
    return f"masks hold labels ({name}: {values}{more}): all but 0 counts"
