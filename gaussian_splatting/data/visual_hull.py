# SPDX-License-Identifier: Apache-2.0
"""The visual hull of masks: where an object can be without showing outside of its masks
(Laurentini, "The visual hull concept for silhouette-based image understanding", 1994).

Views vote. The vote of a view against a point grows with the distance of the point from the mask,
so that neither a single wrong mask nor an imprecise outline decides alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.masks import overview

TOLERANCE = 2
"""Pixels of the small masks by which a point may lie outside: poses are that wrong."""

OUTLINE_ERRORS = 1.0
"""The same in outline errors of the masks, where those are imprecise."""

VOTES_SHARE = 0.1
"""A point is outside if at least this share of the views that show it vote against it."""

MIN_VOTES, FEW_VIEWS_SHARE = 1.5, 0.25
"""Votes that are needed in any case, or this share of the views where that is less."""

_MIN_Z = 1e-6
_STEPS = 4
"""Steps of a pixel in which distances are stored, which end at 255 steps."""


def votes_outside(
    points: Tensor,
    cameras: Sequence[Camera],
    distances: Sequence[Tensor],
    tolerance: float = 0.0,
    weights: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Votes of the views that points lie outside of the object.

    A vote grows from 0 at ``tolerance`` to the weight of the view at twice that distance, at least
    one pixel later. A view that does not show a point, because the point is behind the camera or
    beside the image, has no vote.

    Args:
        points: (N, 3) world units
        distances: Distance of each pixel from the mask, as of :func:`distance_outside`, on the
            device of the points. (H, W) uint8 each
        tolerance: Distance in pixels up to which a point counts as inside.
        weights: Of the views; None for 1.

    Returns:
        Sum of the votes, and of the weights of the views that show a point. (N,), (N,) float32
    """
    votes = torch.zeros(points.shape[0], dtype=torch.float32, device=points.device)
    shown_by = torch.zeros_like(votes)
    x, y, z = points.detach().float().unbind(-1)
    ramp = max(tolerance, 1.0)
    for camera, distance, weight in zip(
        cameras, distances, weights or [1.0] * len(cameras), strict=True
    ):
        # Sums of three products, not a matrix product, whose order depends on the machine.
        u, v, depth = (
            x * float(row[0]) + y * float(row[1]) + z * float(row[2]) + float(offset)
            for row, offset in zip(camera.rotation, camera.translation, strict=True)
        )
        u = camera.fx * u / depth + camera.cx
        v = camera.fy * v / depth + camera.cy
        shown = (depth > _MIN_Z) & (u >= 0) & (v >= 0) & (u < camera.width) & (v < camera.height)
        rows, columns = (torch.where(shown, value, 0).long() for value in (v, u))
        beyond = distance[rows, columns].float() / _STEPS - tolerance
        votes += (beyond / ramp).clamp(0, 1) * shown * weight
        shown_by += shown * weight
    return votes, shown_by


def is_outside(votes: Tensor, shown_by: Tensor) -> Tensor:
    """Whether so many votes are enough. (N,), (N,) -> (N,) bool"""
    needed = (FEW_VIEWS_SHARE * shown_by).clamp_max(MIN_VOTES)
    needed = torch.maximum(VOTES_SHARE * shown_by, needed)
    return (votes >= needed) & (votes > 0)


def distance_outside(mask: Tensor) -> Tensor:
    """Distance of each pixel from a mask, in quarters of a pixel; 0 inside, at most 255.

    Args:
        mask: (H, W) bool

    Returns:
        (H, W) uint8, on the device of the mask
    """
    # Here and not above: it takes a tenth of the time in which a command starts.
    from scipy.ndimage import distance_transform_edt

    if not bool(mask.any()):
        return torch.full(mask.shape, 255, dtype=torch.uint8, device=mask.device)
    found = distance_transform_edt(~mask.cpu().numpy()) * _STEPS
    return torch.from_numpy(np.minimum(np.rint(found), 255).astype(np.uint8)).to(mask.device)


@dataclass(frozen=True, eq=False)
class VisualHull:
    """Masks of training views, small.

    Attributes:
        distances: Distances from the masks, as of :func:`distance_outside`. (H, W) uint8 each
        tolerance: Distance in pixels up to which a point counts as inside.
    """

    cameras: tuple[Camera, ...]
    distances: tuple[Tensor, ...]
    tolerance: float = float(TOLERANCE)
    weights: tuple[float, ...] | None = None

    def contains(self, points: Tensor) -> Tensor:
        """Points that too few masks exclude. (N, 3) -> (N,) bool"""
        return ~is_outside(
            *votes_outside(points, self.cameras, self.distances, self.tolerance, self.weights)
        )

    def silhouette(self, camera: Camera) -> Tensor | None:
        """Pixels of a view where the object may be. (H, W) bool; None without a mask"""
        for own, distance in zip(self.cameras, self.distances, strict=True):
            if own.name == camera.name:
                inside = distance <= min(math.ceil(self.tolerance * _STEPS), 254)
                size = (camera.height, camera.width)
                return functional.interpolate(inside[None, None].float(), size)[0, 0] > 0
        return None


def shows_object(cameras: Sequence[Camera]) -> bool:
    """Whether masks of the cameras say what the object is, so that they have a hull."""
    return any(_shows_object(camera) for camera in cameras)


def _shows_object(camera: Camera) -> bool:
    return camera.mask is not None and camera.mask.mode == "object"


def hull_of(cameras: Sequence[Camera], device: torch.device | str = "cpu") -> VisualHull | None:
    """The hull of the views whose masks show an object; None where there is none."""
    if not shows_object(cameras):
        return None
    seen = [camera for camera in cameras if _shows_object(camera)]
    views, distances = [], []
    for camera in seen:
        mask = torch.from_numpy(overview(camera) > 0)
        views.append(camera.resized(mask.shape[1], mask.shape[0]))
        distances.append(distance_outside(mask).to(device))
    side = max(max(view.width, view.height) for view in views)
    error = max((c.mask.outline_error for c in seen if c.mask.weight > 0), default=0.0)
    tolerance = max(float(TOLERANCE), OUTLINE_ERRORS * error * side)
    weights = tuple(camera.mask.weight for camera in seen)
    return VisualHull(tuple(views), tuple(distances), tolerance, weights)
