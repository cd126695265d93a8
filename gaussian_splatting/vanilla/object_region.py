# SPDX-License-Identifier: Apache-2.0
"""Which Gaussians are the object that all photographs look at, without masks.

The optical axes of the cameras cross in the object. The plane that it stands on, or hangs at, has
all cameras on one side and next to nothing on the other. What hangs together around the crossing
after the plane is removed is the object. Lengths are in the radius of the sphere around the
crossing that the median view shows whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gaussian_splatting.core.cloud import Gaussians, rotation_matrices
from gaussian_splatting.core.subsets import is_among
from gaussian_splatting.data.cameras import (
    Camera,
    centers_of,
    looked_at,
    planes_of_triples,
    view_directions,
)
from sugar_utils.errors import UserError

REACH = 1.5  # what is farther from the crossing belongs to the surroundings
PLANE_WIDTH = 0.01  # half the thickness of a support
PLANE_SHARE = 0.08  # least share of a support of all surfaces
LIFT = 0.015  # what is lower than this above the support belongs to it
MOST_BEHIND = 0.1  # share of the surfaces that may lie behind the support
VOXEL = 1 / 30  # of the grid in which parts are connected
MAX_OFF_AXIS = 15.0  # median angle in degrees between an optical axis and the crossing
MOST_AT_BORDER = 0.02  # share of the object that may lie in the outer tenth of the reach
_MIN_OPACITY = 0.2
_MAX_SCALE = 0.3
_REACHED = 1.5  # ends of a Gaussian, in standard deviations
_REFITS = 3  # of a plane to all that lies in it
_CENTRAL = 0.5  # radii: standard deviation of the weight by which the object is chosen


class Crossing(NamedTuple):
    """The region that the cameras look at."""

    center: np.ndarray  # point nearest to all optical axes. (3,) world units
    radius: float  # that views show of it, world units


class Plane(NamedTuple):
    """The points x with ``normal . x = offset``."""

    normal: np.ndarray  # towards the cameras. (3,)
    offset: float  # world units


def object_rows(gaussians: Gaussians, cameras: Sequence[Camera]) -> np.ndarray:
    """Find the Gaussians that are the object. (N,) bool

    Raises:
        UserError: The cameras do not look at one place, or what is there is not separate from its
            surroundings.
    """
    means = gaussians.means.cpu().numpy().astype(np.float64)
    opacities = gaussians.opacities.reshape(-1).cpu().numpy()
    scales = np.sort(gaussians.scales.cpu().numpy(), axis=1)
    center, radius = crossing_of(cameras)
    in_reach = np.linalg.norm(means - center, axis=1) < REACH * radius
    in_reach &= (opacities > _MIN_OPACITY) & (scales[:, 2] < _MAX_SCALE * radius)
    areas = opacities * scales[:, 1] * scales[:, 2]
    candidates = in_reach.copy()
    plane = support_plane(means[in_reach], areas[in_reach], cameras, radius)
    if plane is not None:
        candidates &= means @ plane.normal - plane.offset > LIFT * radius
    if not candidates.any():
        raise no_object("nothing is where they look at")
    parts = _connected_parts(gaussians, means, candidates, Crossing(center, radius))
    distances = np.linalg.norm(means[candidates] - center, axis=1) / radius
    central_areas = areas[candidates] * np.exp(-0.5 * (distances / _CENTRAL) ** 2)
    is_object = parts == np.bincount(parts, weights=central_areas).argmax()
    at_border = is_object & (distances > 0.9 * REACH)
    border_area = areas[candidates][at_border].sum()
    if border_area > MOST_AT_BORDER * areas[candidates][is_object].sum():
        raise no_object("what they look at is not separate from its surroundings")
    return is_among(len(means), np.flatnonzero(candidates)[is_object])


def crossing_of(cameras: Sequence[Camera]) -> Crossing:
    """Find the object that all cameras look at.

    Raises:
        UserError: They do not look at one place.
    """
    centers = centers_of(cameras)
    axes = view_directions(cameras)
    center = looked_at(cameras)
    distances = np.linalg.norm(center - centers, axis=1)
    cosines = ((center - centers) * axes).sum(axis=1) / np.maximum(distances, 1e-12)
    off_axis = np.degrees(np.arccos(np.clip(np.median(cosines), -1, 1)))
    if off_axis > MAX_OFF_AXIS:
        raise no_object("they do not look at one place")
    half_views = np.array([min(camera.tan_half_fov) for camera in cameras])
    return Crossing(center, float(np.median(distances * half_views)))


def support_plane(
    points: np.ndarray, areas: np.ndarray, cameras: Sequence[Camera], radius: float
) -> Plane | None:
    """Find the plane that the object stands on; None where there is none.

    Args:
        points: (P, 3) world units
        areas: Surface that each stands for. (P,)
    """
    if len(points) < 3:
        return None
    centers = centers_of(cameras)
    total = areas.sum()
    best: Plane | None = None
    largest_area = PLANE_SHARE * total
    for point, normal in planes_of_triples(points):
        if ((centers - point) @ normal).mean() < 0:
            normal = -normal
        heights = (points - point) @ normal
        area = areas[np.abs(heights) < PLANE_WIDTH * radius].sum()
        area_behind = areas[heights < -3 * PLANE_WIDTH * radius].sum()
        cameras_in_front = ((centers - point) @ normal).min() > 0
        if area > largest_area and area_behind < MOST_BEHIND * total and cameras_in_front:
            best = Plane(normal, float(normal @ point))
            largest_area = area
    if best is None:
        return None
    for _ in range(_REFITS):
        best = _refitted(best, points, areas, radius)
    return best


def no_object(reason: str) -> UserError:
    """The error of photographs that show no object by itself."""
    return UserError(
        f"--masks auto: the photographs show no object by itself ({reason}); draw masks, or leave "
        "the flag out"
    )


def _refitted(plane: Plane, points: np.ndarray, areas: np.ndarray, radius: float) -> Plane:
    """The plane through all points that lie in one, by least squares."""
    distances = np.abs(points @ plane.normal - plane.offset)
    rows = distances < 1.5 * PLANE_WIDTH * radius
    middle = np.average(points[rows], axis=0, weights=areas[rows])
    weighted = (points[rows] - middle) * np.sqrt(areas[rows])[:, None]
    axis = np.linalg.svd(weighted, full_matrices=False)[2][2]
    if axis @ plane.normal < 0:
        axis = -axis
    return Plane(axis, float(axis @ middle))


def _connected_parts(
    gaussians: Gaussians, means: np.ndarray, candidates: np.ndarray, crossing: Crossing
) -> np.ndarray:
    """Number of the part that each candidate belongs to: parts hang together in voxels. (M,)"""
    # Here and not above: most commands start without it.
    from scipy.ndimage import label

    # A Gaussian fills the voxels of its centre and of the ends of its axes.
    axes = rotation_matrices(gaussians.quats) * gaussians.scales[:, None]
    axes = axes.cpu().numpy()[candidates]
    ends = np.concatenate([axes, -axes, 0 * axes[..., :1]], axis=2).swapaxes(1, 2)
    points = means[candidates, None] + _REACHED * ends - crossing.center
    cells = np.floor(points / (VOXEL * crossing.radius)).astype(np.int64)
    cells -= cells.min(axis=(0, 1))
    grid = np.zeros(cells.max(axis=(0, 1)) + 1, dtype=bool)
    grid[tuple(cells.reshape(-1, 3).T)] = True
    labels = np.empty(grid.shape, dtype=np.int32)
    label(grid, np.ones((3, 3, 3)), output=labels)
    centers = tuple(cells[:, -1].T)
    return labels[centers]
