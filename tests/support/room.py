# SPDX-License-Identifier: Apache-2.0
"""A room of known geometry: ray traced, textured but for one white wall, with tracks of points."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pycolmap
from PIL import Image

from gaussian_splatting.data.cameras import Camera
from tests.support.random_scenes import look_at
from tests.support.tiny_scene import write_model

HALF = np.array([2.0, 2.0, 1.25])
"""Half the size of the room. The wall at the largest y is white."""

LOW, HIGH = np.array([-0.5, 0.6, -1.25]), np.array([0.3, 1.2, -0.4])
"""Corners of a box on the floor before the white wall."""

_WAVES = 40
_NOISE = 0.01


@dataclass(frozen=True)
class Room:
    root: Path
    cameras: list[Camera]
    depths: dict[str, np.ndarray]  # along the view axis, world units, (H, W) float64
    white: dict[str, np.ndarray]  # pixels that show the white wall, (H, W) bool


def make_room(root: Path, n_views: int = 24, width: int = 96, n_points: int = 600) -> Room:
    """Write photographs that look at the white wall, and a COLMAP model of textured surfaces."""
    rng = np.random.default_rng(0)
    texture = (
        rng.normal(size=(_WAVES, 3)) * rng.uniform(2, 14, size=(_WAVES, 1)),
        rng.uniform(0, 2 * np.pi, size=(_WAVES, 3)),
    )
    (root / "images").mkdir(parents=True)
    cameras, depths, white = [], {}, {}
    for k in range(n_views):
        x, z = 1.5 * np.sin(2.4 * k), 0.5 * np.cos(1.7 * k)
        center, target = (x, -1.4 + 0.6 * np.sin(k), z), (0.5 * np.sin(3.1 * k), 1.9, -0.3)
        camera = look_at(
            center,
            target=target,
            width=width,
            height=3 * width // 4,
            focal=0.8 * width,
            name=f"view_{k:02d}.png",
        )
        origin, rays = camera.center, _rays(camera)
        reach, is_white = _trace(origin, rays)
        points = origin + reach[..., None] * rays
        colors = np.where(is_white[..., None], 0.85, _color(points, texture))
        colors = np.clip(colors + rng.normal(size=colors.shape) * _NOISE, 0, 1)
        path = root / "images" / camera.name
        Image.fromarray((colors * 255).astype(np.uint8)).save(path)
        cameras.append(camera)
        # Rays have length 1 along the view axis.
        depths[camera.name], white[camera.name] = reach, is_white
    points = _textured_points(rng, n_points)
    write_model(root / "sparse" / "0", cameras, points, (_color(points, texture) * 255))
    _observe(root / "sparse" / "0", cameras)
    return Room(root, cameras, depths, white)


def _rays(camera: Camera) -> np.ndarray:
    x = (np.arange(camera.width) + 0.5 - camera.cx) / camera.fx
    y = (np.arange(camera.height) + 0.5 - camera.cy) / camera.fy
    grid = np.stack([*np.meshgrid(x, y), np.ones((camera.height, camera.width))], axis=-1)
    return grid @ camera.rotation


def _trace(origin: np.ndarray, rays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return distances to the first surface along rays, and whether it is the white wall. (...)"""
    with np.errstate(divide="ignore", invalid="ignore"):
        walls = np.where(rays != 0, (np.sign(rays) * HALF - origin) / rays, np.inf)
        sides = np.sort(np.stack([(LOW - origin) / rays, (HIGH - origin) / rays]), axis=0)
    near, far = sides[0].max(axis=-1), sides[1].min(axis=-1)
    on_box = (near < far) & (near > 0)
    is_white = (walls.argmin(axis=-1) == 1) & (rays[..., 1] > 0) & ~on_box
    return np.where(on_box, near, walls.min(axis=-1)), is_white


def _color(points: np.ndarray, texture: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    waves, phases = texture
    values = np.sin((points @ waves.T)[..., None] + phases)
    return np.clip(0.45 + 0.12 * values.sum(axis=-2) / np.sqrt(_WAVES / 8), 0.02, 0.98)


def _textured_points(rng: np.random.Generator, n: int) -> np.ndarray:
    """Points on the walls that are not white, the floor and the box. (n, 3)"""
    points = rng.uniform(-HALF, HALF, size=(n, 3))
    rows, axis = np.arange(n), rng.choice([0, 0, 1, 2, 2], size=n)
    points[rows, axis] = np.where(rng.random(n) < 0.5, -1, 1) * HALF[axis]
    points[axis == 1, 1] = -HALF[1]
    on_box = rng.uniform(LOW, HIGH, size=(n // 5, 3))
    side = rng.integers(0, 3, size=n // 5)
    # The sides that views see: left, front and top.
    on_box[np.arange(n // 5), side] = np.where(side == 2, HIGH[side], LOW[side])
    points[: n // 5] = on_box
    return points


def _observe(folder: Path, cameras: list[Camera]) -> None:
    """Add what each view sees of the points, half a pixel off at most."""
    model = pycolmap.Reconstruction(folder)
    by_name = {camera.name: camera for camera in cameras}
    for number, image in sorted(model.images.items()):
        camera = by_name[image.name]
        for point in sorted(model.points3D):
            ray = model.points3D[point].xyz - camera.center
            view = camera.rotation @ ray
            if view[2] < 0.1 or _trace(camera.center, ray)[0] < 0.999:
                continue
            pixel = view[:2] / view[2] * (camera.fx, camera.fy) + (camera.cx, camera.cy)
            if (pixel < 0).any() or (pixel >= (camera.width, camera.height)).any():
                continue
            image.points2D.append(pycolmap.Point2D(pixel))
            element = pycolmap.TrackElement(number, len(image.points2D) - 1)
            model.add_observation(point, element)
    model.write_binary(str(folder))
