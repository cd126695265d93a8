# SPDX-License-Identifier: Apache-2.0
"""The object that all photographs look at: which Gaussians of a model of the whole scene are it.

The optical axes of the cameras cross in the object. The plane that it stands on, or hangs at, has
all cameras on one side and next to nothing on the other. What hangs together around the crossing
after the plane is removed is the object.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera, looked_at, planes_of_triples
from sugar_utils.errors import UserError
from sugar_utils.quaternions import rotation_matrices

# Lengths are in the radius of the sphere around the crossing that the median view shows whole.
REACH = 1.5  # what is farther from the crossing belongs to the surroundings
PLANE_WIDTH, PLANE_SHARE = 0.01, 0.08  # of a support: half its thickness, its share of all surfaces
LIFT = 0.015  # what is lower than this above the support belongs to it
MOST_BEHIND = 0.1  # share of the surfaces that may lie behind the support
VOXEL = 1 / 30  # of the grid in which parts are connected
MAX_OFF_AXIS = 15.0  # median angle in degrees between an optical axis and the crossing
MOST_AT_BORDER = 0.02  # share of the object that may lie in the outer tenth of the reach
_MIN_OPACITY, _MAX_SCALE = 0.2, 0.3
_REACHED = 1.5  # ends of a Gaussian, in standard deviations
_REFITS = 3  # of a plane to all that lies in it
_CENTRAL = 0.5  # radii: standard deviation of the weight by which the object is chosen


def object_rows(gaussians: Gaussians, cameras: Sequence[Camera]) -> np.ndarray:
    """Which Gaussians are the object. (N,) bool

    Raises:
        UserError: The cameras do not look at one place, or what is there is not separate from its
            surroundings.
    """
    # Here and not above: most commands start without it.
    from scipy.ndimage import label

    means = gaussians.means.cpu().numpy().astype(np.float64)
    opacities = gaussians.opacities.reshape(-1).cpu().numpy()
    scales = np.sort(gaussians.scales.cpu().numpy(), axis=1)
    center, radius = crossing_of(cameras)
    near = np.linalg.norm(means - center, axis=1) < REACH * radius
    near &= (opacities > _MIN_OPACITY) & (scales[:, 2] < _MAX_SCALE * radius)
    areas = opacities * scales[:, 1] * scales[:, 2]
    kept = near.copy()
    plane = support_plane(means[near], areas[near], cameras, radius)
    if plane is not None:
        normal, offset = plane
        kept &= means @ normal - offset > LIFT * radius
    if not kept.any():
        raise _no_object("nothing is where they look at")
    # A Gaussian fills the voxels of its centre and of the ends of its axes.
    axes = (rotation_matrices(gaussians.quats) * gaussians.scales[:, None]).cpu().numpy()[kept]
    ends = _REACHED * np.concatenate([axes, -axes, 0 * axes[..., :1]], axis=2).swapaxes(1, 2)
    cells = np.floor((means[kept, None] + ends - center) / (VOXEL * radius)).astype(np.int64)
    cells -= cells.min(axis=(0, 1))
    grid = np.zeros(cells.max(axis=(0, 1)) + 1, dtype=bool)
    grid[tuple(cells.reshape(-1, 3).T)] = True
    parts = label(grid, np.ones((3, 3, 3)))[0][tuple(cells[:, -1].T)]
    distances = np.linalg.norm(means[kept] - center, axis=1) / radius
    central = areas[kept] * np.exp(-0.5 * (distances / _CENTRAL) ** 2)
    is_object = parts == np.bincount(parts, weights=central).argmax()
    at_border = is_object & (distances > 0.9 * REACH)
    if areas[kept][at_border].sum() > MOST_AT_BORDER * areas[kept][is_object].sum():
        raise _no_object("what they look at is not separate from its surroundings")
    found = np.zeros(len(means), dtype=bool)
    found[np.flatnonzero(kept)[is_object]] = True
    return found


def crossing_of(cameras: Sequence[Camera]) -> tuple[np.ndarray, float]:
    """Point nearest to all optical axes, (3,) world units, and the radius that views show of it."""
    centers = np.stack([camera.center for camera in cameras])
    axes = np.stack([camera.rotation[2] for camera in cameras])
    center = looked_at(cameras)
    distances = np.linalg.norm(center - centers, axis=1)
    cosines = ((center - centers) * axes).sum(axis=1) / np.maximum(distances, 1e-12)
    if np.degrees(np.arccos(np.clip(np.median(cosines), -1, 1))) > MAX_OFF_AXIS:
        raise _no_object("they do not look at one place")
    half_views = np.array([min(camera.tan_half_fov) for camera in cameras])
    return center, float(np.median(distances * half_views))


def support_plane(
    points: np.ndarray, areas: np.ndarray, cameras: Sequence[Camera], radius: float
) -> tuple[np.ndarray, float] | None:
    """Normal n towards the cameras and offset d of the plane n . x = d of a support, if any.

    Args:
        points: (P, 3) world units
        areas: Surface that each stands for. (P,)
    """
    if len(points) < 3:
        return None
    centers, total = np.stack([camera.center for camera in cameras]), areas.sum()
    best, most = None, PLANE_SHARE * total
    for a, normal in planes_of_triples(points):
        normal = normal if ((centers - a) @ normal).mean() >= 0 else -normal
        heights = (points - a) @ normal
        own = areas[np.abs(heights) < PLANE_WIDTH * radius].sum()
        behind = areas[heights < -3 * PLANE_WIDTH * radius].sum()
        if own > most and behind < MOST_BEHIND * total and ((centers - a) @ normal).min() > 0:
            best, most = (normal, float(normal @ a)), own
    for _ in range(_REFITS if best is not None else 0):
        normal, offset = best
        rows = np.abs(points @ normal - offset) < 1.5 * PLANE_WIDTH * radius
        middle = np.average(points[rows], axis=0, weights=areas[rows])
        weighted = (points[rows] - middle) * np.sqrt(areas[rows])[:, None]
        axis = np.linalg.svd(weighted, full_matrices=False)[2][2]
        axis = axis if axis @ normal >= 0 else -axis
        best = axis, float(axis @ middle)
    return best


def _no_object(reason: str) -> UserError:
    return UserError(
        f"--masks auto: the photographs show no object by itself ({reason}); draw masks, or leave "
        "the flag out"
    )
