# SPDX-License-Identifier: Apache-2.0
"""Which way is up in a capture: by how its cameras were held, and by the ground they stood on."""

from __future__ import annotations

import numpy as np

MIN_GROUND_SHARE = 0.15
"""Points that lie in a plane before it is taken for the ground."""

_MAX_TILT = 25.0
_PLANE_TRIALS = 500
_PLANE_WIDTH = 0.01
_MAX_PLANE_POINTS = 20_000
_LEVEL_SPREAD = 0.3


def up_direction(rotations: np.ndarray, points: np.ndarray, seed: int = 0) -> np.ndarray:
    """The direction against gravity.

    People tilt cameras up and down and hardly roll them, so the axis that is most square to all
    images' horizontal axes is the vertical. Where many points lie in a plane that is level within
    25 degrees by this, its normal is more exact still.

    Args:
        rotations: World to camera, x right, y down. (N, 3, 3)
        points: Of the reconstruction; may be none. (P, 3)

    Returns:
        (3,) float64 of length 1.
    """
    mean = -rotations[:, 1].mean(axis=0)
    mean = mean / max(np.linalg.norm(mean), 1e-12)
    values, axes = np.linalg.eigh(np.einsum("ni,nj->ij", rotations[:, 0], rotations[:, 0]))
    up = axes[:, 0] * (1.0 if axes[:, 0] @ mean >= 0 else -1.0)
    # Horizontal axes that all point one way, or rolled cameras, leave the vertical open.
    if values[0] > _LEVEL_SPREAD * values[1] or up @ mean < np.cos(np.radians(60)):
        up = mean
    ground = _ground_normal(points, up, seed)
    return up if ground is None else ground


def _ground_normal(points: np.ndarray, up: np.ndarray, seed: int) -> np.ndarray | None:
    points = points[np.isfinite(points).all(axis=1)]
    points = points[:: max(1, len(points) // _MAX_PLANE_POINTS)].astype(np.float64)
    if len(points) < 100:
        return None
    low, high = np.percentile(points, (5, 95), axis=0)
    width = _PLANE_WIDTH * np.linalg.norm(high - low)
    level = np.cos(np.radians(_MAX_TILT))
    draws = np.random.default_rng(seed).integers(len(points), size=(_PLANE_TRIALS, 3))
    best, best_count = None, MIN_GROUND_SHARE * len(points)
    for a, b, c in points[draws]:
        normal = np.cross(b - a, c - a)
        length = np.linalg.norm(normal)
        if length < 1e-12 or abs(normal @ up) < level * length:
            continue
        inside = np.abs((points - a) @ (normal / length)) < width
        if inside.sum() > best_count:
            best, best_count = inside, int(inside.sum())
    if best is None:
        return None
    _, _, axes = np.linalg.svd(points[best] - points[best].mean(axis=0), full_matrices=False)
    normal = axes[2] * (1.0 if axes[2] @ up >= 0 else -1.0)
    return normal if normal @ up >= level else None


def upright_rotation(up: np.ndarray, front: np.ndarray) -> np.ndarray:
    """The rotation that brings ``up`` to +y and what of ``front`` is level to +z, as glTF wants.

    Args:
        up: (3,) of length 1.
        front: From the object to who looks at it. (3,)

    Returns:
        (3, 3) float64, to be multiplied with columns.
    """
    z = front - (front @ up) * up
    if np.linalg.norm(z) < 1e-9 * max(np.linalg.norm(front), 1.0):
        # Seen from straight above: any level direction will do.
        z = np.cross(up, np.eye(3)[np.abs(up).argmin()])
    z = z / np.linalg.norm(z)
    return np.stack([np.cross(up, z), up, z])
