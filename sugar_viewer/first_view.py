# SPDX-License-Identifier: Apache-2.0
"""The camera from which a browser looks when it opens the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.subsets import box_of_most, finite_points
from gaussian_splatting.data.cameras import (
    Camera,
    centers_of,
    looked_at,
    upright_axes,
    view_directions,
)
from gaussian_splatting.scenes.scene import Scene
from sugar_viewer.camera_paths import looking
from sugar_viewer.view_page import Layer

AXES_WITHOUT_CAMERAS = np.diag([1.0, -1.0, -1.0])
"""Directions to the right, up and towards the viewer, as rows, in the axes of a capture."""
_VIEW_SIDE = (640, 480)  # pixels of the first view; the browser takes its height alone
_VIEW_FOCAL = 520.0
_FILLED = 0.8  # of the first view
_LOWEST_VIEW = math.radians(0)
_HIGHEST_VIEW = math.radians(35)
_USUAL_VIEW = math.radians(15)
_LEAST_DISTANCE = 1e-3
_BEHIND = 1.25  # how much farther than the cameras Gaussians are looked at
_STRAYS = 0.005  # of the vertices of a mesh on each side, which the first view may leave out


class FirstView(NamedTuple):
    """Where browsers look from when they open the page."""

    camera: Camera
    up: np.ndarray  # direction in the world, (3,)
    distance: float  # from the camera to the point that it turns around, in world units


def first_view(
    layers: Sequence[Layer], scene: Scene | None, axes: np.ndarray = AXES_WITHOUT_CAMERAS
) -> FirstView:
    """Return a view of all of the last result, from the front.

    Args:
        axes: Directions to the right, up and to the front without cameras. (3, 3)
    """
    cameras = [] if scene is None else scene.calibrated_cameras
    elevation = _USUAL_VIEW
    if scene is not None and cameras:
        axes = upright_axes(cameras, scene.points)
        directions = view_directions(cameras)
        sines = np.clip(-directions @ axes[1], -1, 1)
        mean = float(np.arcsin(sines).mean())
        elevation = float(np.clip(mean, _LOWEST_VIEW, _HIGHEST_VIEW))
    up = axes[1]
    backwards = np.cos(elevation) * axes[2] + np.sin(elevation) * up
    rotation = looking(backwards, np.zeros(3), up)
    if cameras and isinstance(layers[-1].result, GaussianCloud):
        # Gaussians reach far beyond what the photographs are about.
        target = looked_at(cameras)
        centers = centers_of(cameras)
        distances = np.linalg.norm(centers - target, axis=1)
        distance = _BEHIND * float(np.median(distances))
    else:
        target, distance = _fitting_distance(layers[-1].points, rotation)
    distance = max(distance, _LEAST_DISTANCE)
    if cameras and _looks_around(cameras, target):
        # From outside of a room one sees the backs of its walls.
        return FirstView(cameras[0], up, distance)
    place = target + distance * backwards
    width, height = _VIEW_SIDE
    camera = Camera(
        name="first",
        width=width,
        height=height,
        fx=_VIEW_FOCAL,
        fy=_VIEW_FOCAL,
        cx=width / 2,
        cy=height / 2,
        rotation=rotation,
        translation=-rotation @ place,
    )
    return FirstView(camera, up, distance)


def _fitting_distance(points: np.ndarray, rotation: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the middle of points, (P, 3), and the distance from which a camera sees all."""
    finite = finite_points(points)
    if not len(finite):
        finite = np.array([-np.ones(3), np.ones(3)])
    turned = finite @ rotation.T
    low, high = box_of_most(turned, _STRAYS)
    middle = rotation.T @ ((low + high) / 2)
    half = (high - low) / 2
    width, height = _VIEW_SIDE
    half_per_pixel = max(half[0] / width, half[1] / height)
    distance = half_per_pixel * 2 * _VIEW_FOCAL / _FILLED
    return middle, float(half[2] + distance)


def _looks_around(cameras: Sequence[Camera], target: np.ndarray) -> bool:
    """Return whether most cameras look away from a point, as in the middle of a room."""
    towards = [(target - camera.center) @ camera.rotation[2] for camera in cameras]
    return float(np.median(towards)) < 0
