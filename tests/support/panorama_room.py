# SPDX-License-Identifier: Apache-2.0
"""Equirectangular panoramas of a closed room with patterned walls, taken from known places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.glossy_sphere import looked_up, pattern

ROOM = np.array([4.0, 3.0, 2.5])  # metres, from the corner at 0
TRIPOD = 25.0  # degrees around straight down that show a tripod, which goes along


def poses(n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """World-to-camera rotations, upright and turned differently, and places on an ellipse."""
    found = []
    for k in range(n):
        angle, turn = 2 * np.pi * k / n, 0.9 * k
        place = ROOM / 2 + (0.9 * np.cos(angle), 0.6 * np.sin(angle), 0.15 * np.sin(3 * angle))
        forward = np.array([np.cos(turn), np.sin(turn), 0.0])
        down = np.array([0.0, 0.0, -1.0])
        found.append((np.stack([np.cross(down, forward), down, forward]), place))
    return found


def panorama(rotation: np.ndarray, center: np.ndarray, width: int, tripod: bool) -> np.ndarray:
    """Render the room from a place inside of it. (width / 2, width, 3) uint8"""
    longitudes = ((np.arange(width) + 0.5) / width * 2 - 1) * np.pi
    latitudes = ((np.arange(width // 2) + 0.5) / (width // 2) - 0.5) * np.pi
    longitude, latitude = np.meshgrid(longitudes, latitudes)
    flat = np.cos(latitude)
    rays = np.stack([flat * np.sin(longitude), np.sin(latitude), flat * np.cos(longitude)], -1)
    rays = rays @ rotation
    with np.errstate(divide="ignore"):
        depths = np.where(rays > 0, ROOM - center, -center) / rays
    wall, depth = depths.argmin(axis=-1), depths.min(axis=-1)
    places = (center + depth[..., None] * rays) / ROOM.max()
    picture = np.zeros((*wall.shape, 3))
    for axis in range(3):
        for side in (False, True):
            on = (wall == axis) & ((rays[..., axis] > 0) == side)
            image = pattern(2 * axis + side, 768, (8, 24, 60, 120))
            picture[on] = looked_up(image, np.delete(places[on], axis, -1).clip(0, 1))
    if tripod:
        hidden = np.degrees(latitude) > 90 - TRIPOD
        own = pattern(9, 256, (8, 20, 40))
        level = flat[..., None] * np.stack([np.sin(longitude), np.cos(longitude)], -1)
        picture[hidden] = looked_up(own, level[hidden] + 0.5)
    return picture.round().astype(np.uint8)


def write_panoramas(folder: Path, n: int, width: int = 1000, tripod: bool = False) -> None:
    folder.mkdir(parents=True)
    for k, pose in enumerate(poses(n)):
        Image.fromarray(panorama(*pose, width, tripod)).save(folder / f"pano_{k}.jpg", quality=95)
