# SPDX-License-Identifier: Apache-2.0
"""The visual hull of masks: where an object can be without showing outside of its masks
(Laurentini, "The visual hull concept for silhouette-based image understanding", 1994)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.compositing import dilated
from gaussian_splatting.data.masks import overview

TOLERANCE = 2
"""Pixels of the small masks by which they are grown: poses and outlines are that wrong."""

_MIN_Z = 1e-6


def inside_hull(
    points: Tensor, cameras: Sequence[Camera], masks: Sequence[Tensor], tolerance: int = 0
) -> Tensor:
    """Points that no view shows outside of its mask.

    A point that a view does not show, because it is behind the camera or beside the image, is not
    judged by that view.

    Args:
        points: (N, 3) world units
        cameras: Views, at the sizes of their masks.
        masks: True where the object is. (H, W) bool each, on the device of the points
        tolerance: Pixels by which the masks are grown first.

    Returns:
        (N,) bool
    """
    inside = torch.ones(points.shape[0], dtype=torch.bool, device=points.device)
    x, y, z = points.detach().float().unbind(-1)
    for camera, mask in zip(cameras, masks, strict=True):
        # Sums of three products, not a matrix product, whose order depends on the machine.
        u, v, depth = (
            x * float(row[0]) + y * float(row[1]) + z * float(row[2]) + float(offset)
            for row, offset in zip(camera.rotation, camera.translation, strict=True)
        )
        u = camera.fx * u / depth + camera.cx
        v = camera.fy * v / depth + camera.cy
        shown = (depth > _MIN_Z) & (u >= 0) & (v >= 0) & (u < camera.width) & (v < camera.height)
        rows, columns = (torch.where(shown, value, 0).long() for value in (v, u))
        inside &= dilated(mask, tolerance)[rows, columns] | ~shown
    return inside


@dataclass(frozen=True, eq=False)
class VisualHull:
    """Masks of training views, small and grown by the tolerance.

    Attributes:
        cameras: Views that have a mask, at the sizes of the masks.
        masks: True where the object may be. (H, W) bool each
    """

    cameras: tuple[Camera, ...]
    masks: tuple[Tensor, ...]

    def contains(self, points: Tensor) -> Tensor:
        """Points that no mask excludes. (N, 3) -> (N,) bool"""
        return inside_hull(points, self.cameras, self.masks)

    def silhouette(self, camera: Camera) -> Tensor | None:
        """Pixels of a view where the object may be. (H, W) bool; None without a mask"""
        for own, mask in zip(self.cameras, self.masks, strict=True):
            if own.name == camera.name:
                size = (camera.height, camera.width)
                return functional.interpolate(mask[None, None].float(), size)[0, 0] > 0
        return None


def shows_object(cameras: Sequence[Camera]) -> bool:
    """Whether masks of the cameras say what the object is, so that they have a hull."""
    return any(_shows_object(camera) for camera in cameras)


def _shows_object(camera: Camera) -> bool:
    return camera.mask is not None and camera.mask.mode == "object"


def hull_of(cameras: Sequence[Camera], device: torch.device | str = "cpu") -> VisualHull | None:
    """The hull of the views whose masks show an object; None where there is none.

    Args:
        cameras: Training cameras.
        device: Where the points will be.
    """
    if not shows_object(cameras):
        return None
    seen = [camera for camera in cameras if _shows_object(camera)]
    views, masks = [], []
    for camera in seen:
        values = torch.from_numpy(overview(camera).copy()).to(device)
        views.append(camera.resized(values.shape[1], values.shape[0]))
        masks.append(dilated(values > 0, TOLERANCE))
    return VisualHull(tuple(views), tuple(masks))
