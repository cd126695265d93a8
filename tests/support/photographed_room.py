# SPDX-License-Identifier: Apache-2.0
"""Photographs of the corner of a room with posters on its walls, taken from known places."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT, FOCAL = 240, 180, 220.0


@functools.cache
def poster(seed: int, size: int = 192) -> np.ndarray:
    """Blotches of many sizes, which features are found on. (size, size, 3) float in [0, 255]"""
    rng = np.random.default_rng(seed)
    total = np.zeros((size, size, 3))
    for cells, weight in ((6, 0.5), (16, 0.8), (48, 1.0)):
        coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), np.uint8))
        total += weight * np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC))
    total -= total.min()
    return 255 * total / total.max()


def camera_poses(n: int, reach: float = 0.9) -> list[tuple[np.ndarray, np.ndarray]]:
    """World-to-camera rotations and centres on an arc that looks into the corner."""
    poses = []
    for k in range(n):
        angle = np.pi / 4 + reach * (k / max(1, n - 1) - 0.5)
        center = np.array([3.2 * np.cos(angle), 3.2 * np.sin(angle), 1.3 + 0.5 * np.sin(2.0 * k)])
        forward = np.array([0.35, 0.35, 0.6]) - center
        forward /= np.linalg.norm(forward)
        right = np.cross(forward, [0.0, 0.0, 1.0])
        right /= np.linalg.norm(right)
        poses.append((np.stack([right, np.cross(forward, right), forward]), center))
    return poses


def photograph(
    rotation: np.ndarray,
    center: np.ndarray,
    seed: int = 0,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> np.ndarray:
    """Render the floor z = 0 and the walls x = 0 and y = 0. (H, W, 3) uint8"""
    focal = FOCAL * max(width, height) / WIDTH
    x, y = np.meshgrid(np.arange(width) + 0.5 - width / 2, np.arange(height) + 0.5 - height / 2)
    rays = np.stack([x / focal, y / focal, np.ones_like(x)], axis=-1) @ rotation
    picture = np.full((height, width, 3), 128.0)
    nearest = np.full((height, width), np.inf)
    for axis in range(3):
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = -center[axis] / rays[..., axis]
        places = center + depth[..., None] * rays
        across = np.delete(places, axis, axis=-1) / 2.6
        hit = (depth > 0) & (depth < nearest) & ((across >= 0) & (across < 1)).all(axis=-1)
        image = poster(3 * seed + axis)
        at = across[hit] * (len(image) - 1)
        low = at.astype(int).clip(0, len(image) - 2)
        part = (at - low)[:, :, None]
        rows = [image[low[:, 0] + i, low[:, 1] + j] for i in (0, 1) for j in (0, 1)]
        top = rows[0] * (1 - part[:, 1]) + rows[1] * part[:, 1]
        bottom = rows[2] * (1 - part[:, 1]) + rows[3] * part[:, 1]
        picture[hit] = top * (1 - part[:, 0]) + bottom * part[:, 0]
        nearest[hit] = depth[hit]
    return np.clip(picture, 0, 255).astype(np.uint8)


def photographs(n: int, seed: int = 0, **size: int) -> list[np.ndarray]:
    """Photographs along the arc."""
    return [photograph(*pose, seed=seed, **size) for pose in camera_poses(n)]


def write_photographs(folder: Path, n: int, seed: int = 0, name: str = "IMG {}.png") -> list[Path]:
    """Write them, numbered from 1."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, pixels in enumerate(photographs(n, seed), start=1):
        paths.append(folder / name.format(number))
        Image.fromarray(pixels).save(paths[-1])
    return paths


def model_bytes(root: Path) -> dict[str, bytes]:
    """Read the files of a scene's COLMAP model, by name."""
    return {path.name: path.read_bytes() for path in (root / "sparse" / "0").iterdir()}
