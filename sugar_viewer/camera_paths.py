# SPDX-License-Identifier: Apache-2.0
"""Paths of cameras around a scene and through its views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.spatial.transform import Rotation, RotationSpline

from gaussian_splatting.data import cameras as poses
from gaussian_splatting.data.cameras import Camera, centers_of, looked_at
from sugar_utils.errors import UserError


def turntable(cameras: Sequence[Camera], points: np.ndarray, n: int) -> list[Camera]:
    """Return cameras on a circle around the point that the given ones look at, front first.

    The circle is upright, at their median height and distance.

    Args:
        points: Of the reconstruction, which may show the ground. (P, 3) world units
        n: Number of cameras.
    """
    target = looked_at(cameras)
    centers = centers_of(cameras)
    axes = poses.upright_axes(cameras, points)
    up = axes[1]
    offsets = (centers - target) @ axes.T
    height = float(np.median(offsets[:, 1]))
    radius = float(np.median(np.hypot(offsets[:, 0], offsets[:, 2])))
    angles = 2 * np.pi * np.arange(n) / n
    circle = np.stack([np.sin(angles), np.zeros(n), np.cos(angles)], axis=1)
    places = target + (radius * circle + [0.0, height, 0.0]) @ axes
    path = []
    for number, place in enumerate(places):
        rotation = looking(place, target, up)
        path.append(_placed(cameras[0], number, rotation, place))
    return path


def looking(place: np.ndarray, target: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return the world-to-camera rotation that looks at a target without roll. (3, 3)

    Axes of the camera: x to the right, y down.
    """
    ahead = (target - place) / np.linalg.norm(target - place)
    right = np.cross(ahead, up)
    if np.linalg.norm(right) < 1e-9:
        # Straight up or down: any level direction will do.
        level_axis = np.abs(up).argmin()
        right = np.cross(ahead, np.eye(3)[level_axis])
    right = right / np.linalg.norm(right)
    return np.stack([right, np.cross(ahead, right), ahead])


def between(cameras: Sequence[Camera], n: int) -> list[Camera]:
    """Return ``n`` cameras on a path through the given ones, in their order.

    Places follow a cubic spline, and rotations another one.

    Raises:
        UserError: There are fewer than two cameras.
    """
    if len(cameras) < 2:
        raise UserError(f"a path needs at least 2 cameras to pass through, not {len(cameras)}")
    key_times = np.arange(len(cameras), dtype=float)
    key_centers = centers_of(cameras)
    key_rotations = Rotation.from_matrix(np.stack([camera.rotation for camera in cameras]))
    times = np.linspace(0, len(cameras) - 1, n)
    places = CubicSpline(key_times, key_centers)(times)
    rotations = RotationSpline(key_times, key_rotations)(times).as_matrix()
    return [_placed(cameras[0], number, rotations[number], places[number]) for number in range(n)]


def _placed(camera: Camera, number: int, rotation: np.ndarray, place: np.ndarray) -> Camera:
    """Return a frame of a path: a camera's size and lens, and no image."""
    return replace(
        camera,
        name=f"{number:05d}",
        rotation=rotation,
        translation=-rotation @ place,
        image_path=None,
        source_path=None,
        mask_path=None,
        mask=None,
    )
