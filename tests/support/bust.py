# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a bust in a museum: a head on a neck, photographed as visitors can."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from sugar_scene.triangle_mesh import TriangleMesh
from tests.support.mesh_scenes import sphere
from tests.support.random_scenes import look_at

N_EYE_LEVEL = 40
N_ABOVE = 4
_DISTANCE = 4.2
_HEAD = (0.62, 0.75, 1.0)  # half axes
_NECK_RADIUS = 0.35
_NECK_END = -1.5


def bust() -> TriangleMesh:
    """A closed mesh, 2.5 high, whose vertices are evenly spread on its top."""
    ball = sphere(1.0, rings=60)
    directions = np.roll(ball.vertices, 1, axis=1)
    head = 1 / np.linalg.norm(directions / _HEAD, axis=1)
    sideways = np.linalg.norm(directions[:, :2], axis=1)
    downwards = np.maximum(-directions[:, 2], 1e-9)
    neck = np.minimum(_NECK_RADIUS / np.maximum(sideways, 1e-9), -_NECK_END / downwards)
    neck[directions[:, 2] >= 0] = 0
    return replace(ball, vertices=directions * np.maximum(head, neck)[:, None])


def visitors_cameras() -> list[Camera]:
    """Cameras at the height of eyes all around, and a few from a little above."""
    cameras = []
    for n, degrees in ((N_EYE_LEVEL // 2, 2), (N_EYE_LEVEL // 2, 10), (N_ABOVE, 32)):
        height = np.sin(np.radians(degrees))
        for index in range(n):
            angle = 2 * np.pi * (index + 0.3 * len(cameras)) / n
            around = np.cos(np.radians(degrees)) * np.array([np.cos(angle), np.sin(angle)])
            center = _DISTANCE * np.append(around, height)
            name = f"view_{len(cameras):03d}.png"
            cameras.append(look_at(center, width=240, height=320, focal=330, name=name))
    return cameras


def rough_mask(silhouette: Tensor, seed: int, low: float, high: float) -> Tensor:
    """A mask whose outline lies ``low`` to ``high`` pixels outside of a silhouette. (H, W) bool"""
    # Here and not above: most tests do without.
    from scipy.ndimage import distance_transform_edt, gaussian_filter

    inside = silhouette.numpy()
    outside = np.asarray(distance_transform_edt(~inside))
    outside -= np.asarray(distance_transform_edt(inside))
    noise = gaussian_filter(np.random.default_rng(seed).standard_normal(inside.shape), 12)
    ranks = noise.ravel().argsort().argsort().reshape(inside.shape) / inside.size
    return torch.from_numpy(outside < low + (high - low) * ranks)


def without_top(mask: Tensor, n_rows: int = 40) -> Tensor:
    """A mask whose highest rows are missing. (H, W) bool"""
    cut = mask.clone()
    top = int(mask.any(dim=1).nonzero()[0])
    cut[: top + n_rows] = False
    return cut
