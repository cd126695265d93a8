# SPDX-License-Identifier: Apache-2.0
"""Photographs of a sphere with a pattern on patterned ground, which may mirror bright lamps."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT, FOCAL = 400, 300, 417.0


@cache
def pattern(seed: int, size: int, cells: tuple[int, ...]) -> np.ndarray:
    """Blotches of several sizes. (size, size, 3) float in [0, 255]"""
    rng = np.random.default_rng(seed)
    total = np.zeros((size, size, 3))
    for n in cells:
        coarse = Image.fromarray(rng.integers(0, 256, (n, n, 3), np.uint8))
        total += np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC))
    total -= total.min()
    return 255 * total / total.max()


def write_photographs(folder: Path, gloss: float, n: int = 24) -> None:
    """Two rounds of photographs, the second higher; gloss: weight of what the sphere mirrors."""
    folder.mkdir(parents=True)
    coat, ground = pattern(1, 512, (16, 60, 150)), pattern(2, 1024, (30, 120, 300))
    lamps = 400 * (pattern(3, 192, (6, 16, 48)) / 255) ** 3
    rng = np.random.default_rng(0)
    for k in range(n):
        angle, high = 4 * np.pi * k / n + 0.2 * (2 * k >= n), 2 * k >= n
        radius, height = (3.0, 3.6) if high else (4.2, 1.4)
        center = np.array([radius * np.cos(angle), radius * np.sin(angle), height])
        picture = _photograph(center, coat, ground, lamps, gloss)
        noisy = np.clip(picture + rng.normal(size=picture.shape) * 2, 0, 255)
        Image.fromarray(noisy.astype(np.uint8)).save(folder / f"{k:02}.png")


def _photograph(
    center: np.ndarray, coat: np.ndarray, ground: np.ndarray, lamps: np.ndarray, gloss: float
) -> np.ndarray:
    """The unit sphere that stands on z = 0, from a place that looks at it. (H, W, 3) float"""
    forward = np.array([0.0, 0.0, 0.8]) - center
    forward /= np.linalg.norm(forward)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    x, y = np.meshgrid(np.arange(WIDTH) - WIDTH / 2 + 0.5, np.arange(HEIGHT) - HEIGHT / 2 + 0.5)
    rays = np.stack([x / FOCAL, y / FOCAL, np.ones_like(x)], axis=-1)
    rays = rays @ np.stack([right, np.cross(forward, right), forward])
    rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
    picture = np.full((HEIGHT, WIDTH, 3), 90.0)
    with np.errstate(divide="ignore"):
        depth = -center[2] / rays[..., 2]
    places = (center + depth[..., None] * rays)[..., :2]
    on = (depth > 0) & (np.abs(places) < 4).all(axis=-1)
    picture[on] = looked_up(ground, (places[on] + 4) / 8)
    start = center - (0, 0, 1)
    along = (rays * start).sum(axis=-1)
    inner = along**2 - (start @ start - 1)
    hit = inner > 0
    rays = rays[hit]
    normals = start - (along + np.sqrt(np.maximum(inner, 0)))[hit][:, None] * rays
    mirrored = rays - 2 * (rays * normals).sum(axis=-1, keepdims=True) * normals
    own, lamp = looked_up(coat, _on_sphere(normals)), looked_up(lamps, _on_sphere(mirrored))
    picture[hit] = (1 - gloss / 2) * own + gloss * lamp
    return picture


def _on_sphere(directions: np.ndarray) -> np.ndarray:
    """Longitude and latitude of unit vectors as shares of their ranges. (..., 3) to (..., 2)"""
    x, y, z = np.moveaxis(directions, -1, 0)
    around, down = np.arctan2(y, x) / (2 * np.pi) + 0.5, np.arccos(np.clip(z, -1, 1)) / np.pi
    return np.stack([around, down], axis=-1)


def looked_up(image: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Colours between the pixels of a square image. places: (N, 2) in [0, 1]"""
    at = places * (len(image) - 1)
    low = np.minimum(at.astype(int), len(image) - 2)
    part = (at - low)[:, :, None]
    (i, j), (a, b) = low.T, part.transpose(1, 0, 2)
    near = image[i, j] * (1 - b) + image[i, j + 1] * b
    return near * (1 - a) + (image[i + 1, j] * (1 - b) + image[i + 1, j + 1] * b) * a
