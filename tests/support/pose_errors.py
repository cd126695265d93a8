# SPDX-License-Identifier: Apache-2.0
"""Errors of estimated camera poses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pycolmap

from gaussian_splatting.data.cameras import Camera, camera_extent


@dataclass(frozen=True)
class Errors:
    """Return the distances of estimated cameras from known ones.

    Attributes:
        rotation: Degrees. (N,)
        position: Percent of the extent of the known cameras. (N,)
    """

    rotation: np.ndarray
    position: np.ndarray


def _best_similarity(source: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
    """Scale and rotation that bring centred points closest to others (Umeyama, PAMI 1991)."""
    a, b = source - source.mean(axis=0), target - target.mean(axis=0)
    u, s, vt = np.linalg.svd(b.T @ a)
    sign = np.array([1.0, 1.0, np.sign(np.linalg.det(u @ vt))])
    return float((s * sign).sum() / (a**2).sum()), u * sign @ vt


def pose_errors(found: dict[str, Camera], known: dict[str, Camera]) -> Errors:
    """Errors of found cameras after the similarity that brings their centres together best."""
    names = sorted(set(found) & set(known))
    a = np.stack([found[name].center for name in names])
    b = np.stack([known[name].center for name in names])
    scale, rotation = _best_similarity(a, b)
    moved = scale * (a - a.mean(axis=0)) @ rotation.T + b.mean(axis=0)
    extent = camera_extent([known[name] for name in names])
    angles = []
    for name in names:
        turned = found[name].rotation @ rotation.T @ known[name].rotation.T
        angles.append(np.degrees(np.arccos(np.clip((np.trace(turned) - 1) / 2, -1, 1))))
    return Errors(np.array(angles), 100 * np.linalg.norm(moved - b, axis=1) / extent)


def pose_of(rotation: np.ndarray, center: np.ndarray) -> Camera:
    """A camera of which only the pose counts.

    Args:
        rotation: From world to camera. (3, 3)
        center: World units. (3,)
    """
    return Camera("", 2, 2, 1.0, 1.0, 1.0, 1.0, rotation, -rotation @ center)


def registered_poses(folder: Path) -> dict[str, Camera]:
    """Poses of the registered images of a COLMAP model, by name."""
    model = pycolmap.Reconstruction(folder)
    found = {}
    for number in model.reg_image_ids():
        image = model.images[number]
        rotation = image.cam_from_world().rotation.matrix()
        found[image.name] = pose_of(rotation, image.projection_center())
    return found
