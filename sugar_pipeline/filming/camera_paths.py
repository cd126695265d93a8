# SPDX-License-Identifier: Apache-2.0
"""Paths of a camera through a capture: once around it, and from photograph to photograph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.spatial.transform import Rotation, RotationSpline

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.upright import up_direction, upright_rotation
from sugar_utils.errors import UserError


def turntable(cameras: Sequence[Camera], points: np.ndarray, n: int) -> list[Camera]:
    """A circle around what the cameras look at, upright, at their middle height and distance.

    Args:
        cameras: Of the capture; the path has the size and lens of the first.
        points: Of its reconstruction; they help to find what is up. (P, 3)
        n: Frames of the full turn; the frame after the last would be the first.
    """
    target = looked_at(cameras)
    centers = np.stack([camera.center for camera in cameras])
    up = up_direction(np.stack([camera.rotation for camera in cameras]), points)
    # Rows: to the right, up, and towards the first camera.
    axes = upright_rotation(up, cameras[0].center - target)
    offsets = (centers - target) @ axes.T
    height = float(np.median(offsets[:, 1]))
    radius = float(np.median(np.hypot(offsets[:, 0], offsets[:, 2])))
    angles = 2 * np.pi * np.arange(n) / n
    level = np.stack([np.sin(angles), np.zeros(n), np.cos(angles)], axis=1)
    places = target + (radius * level + [0.0, height, 0.0]) @ axes
    return [
        _placed(cameras[0], k, looking(place, target, up), place) for k, place in enumerate(places)
    ]


def looked_at(cameras: Sequence[Camera]) -> np.ndarray:
    """The point that is nearest to all lines of sight, in the sense of least squares. (3,)

    Where all look the same way there is no such point; it is then one distance of the outermost
    cameras ahead of their middle.
    """
    centers = np.stack([camera.center for camera in cameras])
    ahead = np.stack([camera.rotation[2] for camera in cameras])
    across = np.eye(3) - ahead[:, :, None] * ahead[:, None, :]
    total = across.sum(axis=0)
    if np.linalg.eigvalsh(total)[0] > 1e-3 * len(cameras):
        return np.linalg.solve(total, np.einsum("nij,nj->i", across, centers))
    middle, mean = centers.mean(axis=0), ahead.mean(axis=0)
    reach = np.linalg.norm(centers - middle, axis=1).max()
    return middle + reach * mean / np.linalg.norm(mean)


def looking(place: np.ndarray, target: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Rotation of a camera that looks from a place at a target and is not rolled.

    Returns:
        World to camera, x right, y down. (3, 3) float64
    """
    ahead = (target - place) / np.linalg.norm(target - place)
    right = np.cross(ahead, up)
    if np.linalg.norm(right) < 1e-9:
        # Straight up or down: any level direction will do.
        right = np.cross(ahead, np.eye(3)[np.abs(up).argmin()])
    right = right / np.linalg.norm(right)
    return np.stack([right, np.cross(ahead, right), ahead])


def between(cameras: Sequence[Camera], n: int) -> list[Camera]:
    """A smooth path through cameras, in their order, as long in time between each two.

    Places lie on a cubic spline, orientations on a spline of rotations.

    Args:
        cameras: To pass through; the path has the size and lens of the first.
    """
    if len(cameras) < 2:
        raise UserError(f"a path needs at least 2 cameras to pass through, not {len(cameras)}")
    times = np.arange(len(cameras), dtype=float)
    at = np.linspace(0, len(cameras) - 1, n)
    places = CubicSpline(times, np.stack([camera.center for camera in cameras]))(at)
    turns = Rotation.from_matrix(np.stack([camera.rotation for camera in cameras]))
    rotations = RotationSpline(times, turns)(at).as_matrix()
    both = zip(rotations, places, strict=True)
    return [_placed(cameras[0], k, turn, place) for k, (turn, place) in enumerate(both)]


def _placed(camera: Camera, number: int, rotation: np.ndarray, place: np.ndarray) -> Camera:
    """A frame of a path: a camera's size and lens, and no photograph."""
    return replace(
        camera, name=f"{number:05d}", rotation=rotation, translation=-rotation @ place,
        image_path=None, source_path=None, mask_path=None, mask=None,
    )  # fmt: skip
