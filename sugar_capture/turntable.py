# SPDX-License-Identifier: Apache-2.0
"""Masks of an object that turns in front of a camera that stands still.

Features of the background say that the camera did not move, so poses come from the object alone.
Photographs of one round have the same border, up to the exposure of each. It has to show something:
the black around a fisheye's circle, or a frame around a picture, is the same wherever the camera
stands. The background of a round is made of the colours that half of its photographs have. A pixel
belongs to it if it has that colour, and is connected with the border through such pixels. Pixels of
the object that have the colour by chance are not connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from gaussian_splatting.core.subsets import about
from gaussian_splatting.data.masks import object_mask_path
from gaussian_splatting.losses.exposure import median_gain
from sugar_capture.features.photographs import Photograph, read_upright
from sugar_utils.files import atomic_path, in_parallel, replaced_folder

SIDE = 640  # longest side in pixels of the images that are compared
MIN_ROUND_PHOTOGRAPHS = 8  # in one round
BORDER = 0.05  # width of the border of an image, of its longest side
STILL_SHARE = 0.8  # of the textured border that has to be equal
TEXTURED_SHARE = 0.02  # of the border that has to have texture
TEXTURE = 12.0  # of 255: range of the colours around a pixel that has texture
_TEXTURE_SIDE = 15  # pixels
VISIBLE_SHARE = 0.5  # of the photographs that have to show the background of a pixel
MOVING_SHARE = 0.02  # of the image that has to change
TOLERANCE = 6.0  # of 255: smallest difference that counts as one
NOISE_FACTOR = 5.0  # the same in standard deviations of the noise
SMALLEST_PART = 0.05  # of the largest part of a mask
_CANDIDATES = 12  # photographs whose colours are tried as the background's
_COMPARED = 4_000  # pixels of the border that are compared between photographs


def border_of(height: int, width: int) -> np.ndarray:
    """Return the pixels of the border of an image. (H, W) bool"""
    border = np.ones((height, width), dtype=bool)
    edge = max(2, round(BORDER * max(height, width)))
    border[edge:-edge, edge:-edge] = False
    return border


def textured_border(image: np.ndarray) -> np.ndarray:
    """Return the pixels of the border around which it is not of one colour. (H, W) bool

    Args:
        image: (H, W, 3) uint8
    """
    # Here and not above: most commands start without it.
    from scipy.ndimage import maximum_filter, minimum_filter, uniform_filter

    border = border_of(*image.shape[:2])
    # SciPy's types know one size for all axes only.
    smooth = uniform_filter(image.astype(np.float32), (3, 3, 1)).mean(axis=2)  # pyright: ignore[reportArgumentType]
    # Pixels inside of the border do not count.
    highest = maximum_filter(np.where(border, smooth, -np.inf), _TEXTURE_SIDE)
    lowest = minimum_filter(np.where(border, smooth, np.inf), _TEXTURE_SIDE)
    return border & (highest - lowest >= TEXTURE)


@dataclass
class _Round:
    """Images with the same border."""

    border: np.ndarray  # sampled colours of the border of the first image, (P, 3) float32
    textured: np.ndarray  # which of these have texture, (P,) bool
    members: list[int] = field(default_factory=list)  # indices of the images

    def matches(self, border: np.ndarray) -> bool:
        """Whether another border, (P, 3), is the same up to exposure where it has texture."""
        exposed = border * median_gain(border, self.border)
        difference = np.abs(exposed - self.border).max(axis=1)
        is_equal = difference[self.textured] <= 2 * TOLERANCE
        return bool(is_equal.mean() >= STILL_SHARE)


def rounds_of(images: Iterable[np.ndarray], n: int) -> list[list[int]]:
    """Return the indices of images with the same border; none if rounds are too short on average.

    No more images are read than it takes to know that, and only the border of each is kept.

    Args:
        images: (H, W, 3) uint8 each.
        n: Number of images.
    """
    rounds: list[_Round] = []
    for index, image in enumerate(images):
        border_pixels = border_of(*image.shape[:2])
        border = about(image[border_pixels], _COMPARED).astype(np.float32)
        match = next((candidate for candidate in rounds if candidate.matches(border)), None)
        if match is not None:
            match.members.append(index)
            continue
        textured = about(textured_border(image)[border_pixels], _COMPARED)
        if textured.mean() < TEXTURED_SHARE:
            # Too little texture to detect a camera that stood still.
            return []
        rounds.append(_Round(border, textured, [index]))
        if len(rounds) * MIN_ROUND_PHOTOGRAPHS > n:
            return []
    return [one_round.members for one_round in rounds]


class _Background(NamedTuple):
    """The background of a round."""

    colors: np.ndarray  # (H, W, 3) float32
    shares: np.ndarray  # of the images that show it at each pixel, (H, W)


def moving_masks(images: np.ndarray) -> np.ndarray | None:
    """Find an object that turns in front of the background of a round; None if nothing moves.

    Args:
        images: (N, H, W, 3) uint8

    Returns:
        True on the object. (N, H, W) bool
    """
    n, height, width = images.shape[:3]
    border = border_of(height, width)
    borders = images[:, border].astype(np.float32)
    median_border = np.median(borders, axis=0)
    gains = np.stack([median_gain(colors, median_border) for colors in borders])
    difference = np.abs(borders * gains[:, None] - median_border).max(axis=2)
    tolerance = max(TOLERANCE, NOISE_FACTOR * 1.48 * float(np.median(difference)))
    background = _find_background(images, gains, tolerance)
    is_visible = background.shares >= VISIBLE_SHARE
    masks = np.empty((n, height, width), dtype=bool)
    for image, gain, mask in zip(images, gains, masks, strict=True):
        difference = np.abs(image * gain - background.colors).max(axis=2)
        mask[:] = _object_mask((difference <= tolerance) & is_visible, border)
    return masks if masks.any(axis=0).mean() >= MOVING_SHARE else None


def _labels(mask: np.ndarray) -> tuple[np.ndarray, int]:
    """Number the connected parts of a mask from 1 on; their map and how many there are."""
    from scipy.ndimage import label

    parts = np.empty(mask.shape, dtype=np.int32)
    n_parts = label(mask, output=parts)
    return parts, int(n_parts)  # pyright: ignore[reportArgumentType]  an int with ``output``


def _object_mask(is_background_color: np.ndarray, border: np.ndarray) -> np.ndarray:
    """Return the pixels that are not connected with the border by the background's colours.

    Small parts are left out. (H, W), (H, W) -> (H, W) bool
    """
    # Here and not above: most commands start without it.
    from scipy.ndimage import binary_closing, binary_opening

    parts, _ = _labels(is_background_color | binary_closing(is_background_color))
    border_parts = np.setdiff1d(parts[border], [0])
    is_outside = np.isin(parts, border_parts)
    parts, n_parts = _labels(binary_opening(~is_outside))
    sizes = np.bincount(parts.ravel(), minlength=n_parts + 1)
    sizes[0] = 0
    is_large = sizes >= max(1, SMALLEST_PART * sizes.max())
    return is_large[parts] & (parts > 0)


def _find_background(images: np.ndarray, gains: np.ndarray, tolerance: float) -> _Background:
    """Find the most frequent colour of each pixel."""
    best = np.zeros(images.shape[1:], dtype=np.float32)
    best_counts = np.zeros(images.shape[1:3])
    for candidate in np.linspace(0, len(images) - 1, _CANDIDATES).astype(int):
        color = images[candidate] * gains[candidate]
        total = np.zeros_like(best)
        counts = np.zeros_like(best_counts)
        for image, gain in zip(images, gains, strict=True):
            other = image * gain
            is_equal = np.abs(other - color).max(axis=2) <= tolerance
            total += other * is_equal[..., None]
            counts += is_equal
        is_better = counts > best_counts
        mean = total / counts[..., None]
        best[is_better] = mean[is_better]
        best_counts = np.maximum(best_counts, counts)
    return _Background(best, best_counts / len(images))


def write_turntable_masks(photographs: Sequence[Photograph], folder: Path) -> int:
    """Write masks, ``folder/NAME.EXT.png``, of photographs on a turntable.

    Returns:
        Number of rounds, each with a camera that stood still; 0 if the camera moved.
    """
    sizes = {(photograph.width, photograph.height) for photograph in photographs}
    if len(sizes) > 1 or len(photographs) < MIN_ROUND_PHOTOGRAPHS:
        return 0
    images = (_read_small(photograph) for photograph in photographs)
    rounds = rounds_of(images, len(photographs))
    if not rounds or min(len(members) for members in rounds) < MIN_ROUND_PHOTOGRAPHS:
        return 0
    masks: dict[int, np.ndarray] = {}
    for members in rounds:
        small = in_parallel(_read_small, [photographs[index] for index in members])
        round_masks = moving_masks(np.stack(small))
        if round_masks is None:
            return 0
        masks.update(zip(members, round_masks, strict=True))
    with replaced_folder(folder) as fresh:
        for index, mask in masks.items():
            _write_mask(photographs[index], mask, fresh)
    return len(rounds)


def _write_mask(photograph: Photograph, mask: np.ndarray, folder: Path) -> None:
    """Write a mask, (H, W) bool, at the size of its photograph."""
    picture = Image.fromarray(mask.astype(np.uint8) * 255)
    size = (photograph.width, photograph.height)
    picture = picture.resize(size, Image.Resampling.BILINEAR)
    # New values of the 256 brightnesses.
    picture = picture.point([0] * 128 + [255] * 128)
    with atomic_path(object_mask_path(folder, photograph.name)) as temporary:
        picture.save(temporary, format="PNG")


def _read_small(photograph: Photograph) -> np.ndarray:
    return np.array(read_upright(photograph.path, SIDE).convert("RGB"))
