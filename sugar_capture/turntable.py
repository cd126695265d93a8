# SPDX-License-Identifier: Apache-2.0
"""Masks of an object that turns in front of a camera that stands still.

Features of the background say that the camera did not move, so poses come from the object alone.
Photographs of one round have the same border, up to the exposure of each. It has to show something:
the black around a fisheye's circle, or a frame around a picture, is the same wherever the camera
stands. The background of a round
is what has the same colour in half of its photographs. A pixel of a photograph belongs to it if it
has that colour, and is connected with the border through pixels that have: those of the object that
happen to have it are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

from gaussian_splatting.data.masks import object_mask_path
from sugar_capture.photographs import Photograph, read_upright
from sugar_utils.files import atomic_path, in_parallel, replaced_folder

SIDE = 640  # longest side in pixels of the images that are compared
FEWEST = 8  # photographs of a round
BORDER = 0.05  # width of the border of an image, of its longest side
STILL_SHARE = 0.8  # of the textured border that has to be equal
TEXTURED_SHARE = 0.02  # of the border that has to have texture
TEXTURE = 12.0  # of 255: range of the colours around a pixel that has texture
_TEXTURE_SIDE = 15  # pixels
SEEN_SHARE = 0.5  # of the photographs, in which the background has to be seen to be known
MOVING_SHARE = 0.02  # of the image that has to change
TOLERANCE = 6.0  # of 255: smallest difference that counts as one
NOISE_FACTOR = 5.0  # the same in standard deviations of the noise
SMALLEST_PART = 0.05  # of the largest part of a mask
_CANDIDATES = 12  # photographs whose colours are tried as the background's
_COMPARED = 4_000  # pixels of the border that are compared between photographs
_MOST_GAIN = 1.5
_DARK = 12.0  # of 255: too dark to tell an exposure


def border_of(height: int, width: int) -> np.ndarray:
    """Pixels of the border of an image. (H, W) bool"""
    border = np.ones((height, width), dtype=bool)
    edge = max(2, round(BORDER * max(height, width)))
    border[edge:-edge, edge:-edge] = False
    return border


def textured_border(image: np.ndarray) -> np.ndarray:
    """Pixels of the border around which the border itself is not of one colour. (H, W) bool

    Args:
        image: (H, W, 3) uint8
    """
    # Here and not above: most commands start without it.
    from scipy.ndimage import maximum_filter, minimum_filter, uniform_filter

    border = border_of(*image.shape[:2])
    smooth = uniform_filter(image.astype(np.float32), (3, 3, 1)).mean(axis=2)
    # What lies inside of the border says nothing about it.
    highest = maximum_filter(np.where(border, smooth, -np.inf), _TEXTURE_SIDE)
    lowest = minimum_filter(np.where(border, smooth, np.inf), _TEXTURE_SIDE)
    return border & (highest - lowest >= TEXTURE)


def gain_between(colors: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Gain per channel that brings colours to others. (P, 3), (P, 3) -> (3,)"""
    bright = np.minimum(colors, target).min(axis=1) > _DARK
    if not bright.any():
        return np.ones(3, dtype=np.float32)
    gain = np.median(target[bright] / colors[bright], axis=0)
    return gain.clip(1 / _MOST_GAIN, _MOST_GAIN).astype(np.float32)


def rounds_of(images: Iterable[np.ndarray], n: int) -> list[list[int]]:
    """Places of images with the same border; none if rounds are too short on average.

    Of ``n`` images, (H, W, 3) uint8 each, no more are asked for than it takes to know that, and of
    each the border alone is kept.
    """
    rounds: list[tuple[np.ndarray, np.ndarray, list[int]]] = []
    for place, image in enumerate(images):
        where = border_of(*image.shape[:2])
        step = max(1, int(where.sum()) // _COMPARED)
        border = image[where][::step].astype(np.float32)
        for first, textured, members in rounds:
            difference = np.abs(border * gain_between(border, first) - first).max(axis=1)
            if (difference[textured] <= 2 * TOLERANCE).mean() >= STILL_SHARE:
                members.append(place)
                break
        else:
            textured = textured_border(image)[where][::step]
            if textured.mean() < TEXTURED_SHARE:
                # Nothing tells whether the camera stood still.
                return []
            rounds.append((border, textured, [place]))
            if len(rounds) * FEWEST > n:
                return []
    return [members for _, _, members in rounds]


def moving_masks(images: np.ndarray) -> np.ndarray | None:
    """Where an object turns in front of the background of a round; None if nothing moves.

    Args:
        images: (N, H, W, 3) uint8

    Returns:
        True on the object. (N, H, W) bool
    """
    # Here and not above: most commands start without it.
    from scipy.ndimage import binary_closing, binary_opening, label

    n, height, width = images.shape[:3]
    border = border_of(height, width)
    borders = images[:, border].astype(np.float32)
    usual = np.median(borders, axis=0)
    gains = np.stack([gain_between(colors, usual) for colors in borders])
    difference = np.abs(borders * gains[:, None] - usual).max(axis=2)
    tolerance = max(TOLERANCE, NOISE_FACTOR * 1.48 * float(np.median(difference)))
    background, share = _background(images, gains, tolerance)
    masks = np.empty((n, height, width), dtype=bool)
    for image, gain, mask in zip(images, gains, masks, strict=True):
        same = np.abs(image * gain - background).max(axis=2) <= tolerance
        same &= share >= SEEN_SHARE
        parts, _ = label(same | binary_closing(same))
        outside = np.isin(parts, np.setdiff1d(parts[border], [0]))
        parts, n_parts = label(binary_opening(~outside))
        sizes = np.bincount(parts.ravel(), minlength=n_parts + 1)
        sizes[0] = 0
        mask[:] = (sizes >= max(1, SMALLEST_PART * sizes.max()))[parts] & (parts > 0)
    return masks if masks.any(axis=0).mean() >= MOVING_SHARE else None


def _background(
    images: np.ndarray, gains: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """The commonest colour of each pixel, and the share of the photographs that have it.

    Returns:
        (H, W, 3) float32; (H, W)
    """
    best = np.zeros(images.shape[1:], dtype=np.float32)
    most = np.zeros(images.shape[1:3])
    for candidate in np.linspace(0, len(images) - 1, _CANDIDATES).astype(int):
        color = images[candidate] * gains[candidate]
        total = np.zeros_like(best)
        count = np.zeros_like(most)
        for image, gain in zip(images, gains, strict=True):
            other = image * gain
            same = np.abs(other - color).max(axis=2) <= tolerance
            total += other * same[..., None]
            count += same
        better = count > most
        best[better] = (total / count[..., None])[better]
        most = np.maximum(most, count)
    return best, most / len(images)


def write_turntable_masks(photographs: Sequence[Photograph], folder: Path) -> int:
    """Write masks, ``folder/NAME.EXT.png``, of photographs on a turntable.

    Returns:
        Number of rounds, each with a camera that stood still; 0 if the camera moved.
    """
    if len({(p.width, p.height) for p in photographs}) > 1 or len(photographs) < FEWEST:
        return 0
    rounds = rounds_of(map(_small, photographs), len(photographs))
    if min(map(len, rounds), default=0) < FEWEST:
        return 0
    taken = [[photographs[place] for place in members] for members in rounds]
    masks = [moving_masks(np.stack(in_parallel(_small, own))) for own in taken]
    if any(found is None for found in masks):
        return 0
    with replaced_folder(folder) as fresh:
        for photograph, mask in zip(chain(*taken), chain(*masks), strict=True):
            picture = Image.fromarray(mask.astype(np.uint8) * 255)
            size = photograph.width, photograph.height
            picture = picture.resize(size, Image.Resampling.BILINEAR)
            with atomic_path(object_mask_path(fresh, photograph.name)) as temporary:
                picture.point(lambda value: 255 * (value >= 128)).save(temporary, format="PNG")
    return len(rounds)


def _small(photograph: Photograph) -> np.ndarray:
    return np.array(read_upright(photograph.path, SIDE).convert("RGB"))
