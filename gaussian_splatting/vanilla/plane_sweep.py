# SPDX-License-Identifier: Apache-2.0
"""Depth of a photograph from its neighbours, by trying out planes (Collins, CVPR 1996).

For each of many depths the neighbours are warped onto the photograph as if all of it lay on a plane
of that depth, parallel to the image. Where a small window agrees with them, by normalised
cross-correlation, that is the depth. Depths are spaced evenly in 1 / depth, as pixels are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.pixels import pixel_rays, pixels_of

N_DEPTHS = 96
WINDOW = 7
"""Side of the windows that are compared, in pixels."""

BEST = 2
"""Neighbours whose agreement counts: the others may be hidden from what is seen here."""

MIN_DEVIATION = 0.01
"""Standard deviation of grey values below which a window holds nothing to be recognised."""

SEEN_THROUGH = 2.0
"""Tolerances beyond a point from which another view that sees there contradicts it."""

NOWHERE = -1.0
"""Agreement of a pixel that no neighbour sees, or that is flat."""


@dataclass(frozen=True)
class GreyView:
    """A posed photograph without colours.

    Attributes:
        camera: Of the photograph's size.
        grey: Values in [0, 1]. (H, W) float32
    """

    camera: Camera
    grey: Tensor


def sweep(
    view: GreyView, neighbors: Sequence[GreyView], near: float, far: float
) -> tuple[Tensor, Tensor]:
    """Depth of each pixel, and how well the neighbours agree that it is right.

    Args:
        view: The photograph.
        neighbors: Others that look at the same, at least one.
        near: Least depth in world units.
        far: Largest depth in world units.

    Returns:
        Depth along the view axis in world units, and agreement in [-1, 1]. (H, W) each
    """
    inverse = torch.linspace(1 / far, 1 / near, N_DEPTHS, dtype=torch.float64, device="cpu").to(
        view.grey
    )
    mean, deviation = _moments(view.grey)
    agreements = torch.stack([_agreement(view, n, inverse, mean, deviation) for n in neighbors])
    n_best = min(BEST, len(neighbors))
    agreement = agreements.topk(n_best, dim=0).values.mean(dim=0)
    best, index = agreement.max(dim=0)
    # The maximum of a parabola through the best plane and the two beside it.
    middle = index.clamp(1, N_DEPTHS - 2)
    before, here, after = (agreement.gather(0, (middle + i)[None])[0] for i in (-1, 0, 1))
    bend = (before - 2 * here + after).clamp_max(-1e-6)
    offset = ((before - after) / (2 * bend)).clamp(-0.5, 0.5)
    step = (1 / near - 1 / far) / (N_DEPTHS - 1)
    depth = 1 / (1 / far + (middle + offset) * step)
    return depth, torch.where(deviation > MIN_DEVIATION, best, NOWHERE)


def _agreement(
    view: GreyView, other: GreyView, inverse: Tensor, mean: Tensor, deviation: Tensor
) -> Tensor:
    """Normalised cross-correlation with a neighbour on each plane. (D, H, W)"""
    camera, found = other.camera, []
    turn, shift = _relative(view.camera, camera)
    rays = _rays(view.camera).to(view.grey) @ turn.to(view.grey).T
    shift = shift.to(view.grey)
    for plane in inverse:
        # Points times 1 / depth: the projection is the same.
        point = rays + shift * plane
        z = point[..., 2].clamp_min(1e-6)
        u = (point[..., 0] / z * camera.fx + camera.cx) * (2 / camera.width) - 1
        v = (point[..., 1] / z * camera.fy + camera.cy) * (2 / camera.height) - 1
        where = torch.stack([u, v], dim=-1)
        warped = F.grid_sample(other.grey[None, None], where[None], align_corners=False)[0, 0]
        other_mean, other_deviation = _moments(warped)
        covariance = _windows(view.grey * warped) - mean * other_mean
        correlation = covariance / (deviation * other_deviation).clamp_min(1e-6)
        inside = (where.abs() < 1).all(dim=-1) & (point[..., 2] > 0)
        found.append(torch.where(inside, correlation, NOWHERE))
    return torch.stack(found)


def consistent(
    view: GreyView,
    depth: Tensor,
    neighbors: Sequence[tuple[GreyView, Tensor]],
    tolerance: float,
) -> Tensor:
    """Pixels whose depth more neighbours have found as well than look through. (H, W) bool

    A neighbour that knows a depth clearly beyond the point would not see that if the point were
    there.

    Args:
        view: The photograph.
        depth: Its depth. (H, W) world units
        neighbors: Others, with their depth; infinite where it is not to be believed.
        tolerance: Largest difference, as a share of the depth.
    """
    rays = _rays(view.camera).to(depth)
    balance = torch.zeros_like(depth, dtype=torch.int32)
    for other, its_depth in neighbors:
        turn, shift = _relative(view.camera, other.camera)
        point = (rays * depth[..., None]) @ turn.to(depth).T + shift.to(depth)
        rows, columns, inside = pixels_of(point, other.camera)
        there, z = its_depth[rows, columns], point[..., 2]
        beyond, near = (there - z) / z.clamp_min(1e-6), inside & there.isfinite()
        balance += (near & (beyond.abs() < tolerance)).int()
        balance -= (near & (beyond > SEEN_THROUGH * tolerance)).int()
    return balance > 0


def world_points(camera: Camera, depth: Tensor) -> Tensor:
    """Where the pixels of a view are. (H, W) world units -> (H, W, 3) float32 world units"""
    view = _rays(camera) * depth.double().cpu()[..., None]
    translation, rotation = torch.from_numpy(camera.translation), torch.from_numpy(camera.rotation)
    return ((view - translation) @ rotation).float()


def parallax(camera: Camera, other: Camera, depth: float) -> float:
    """Angle in degrees at which two cameras see the point on the first one's axis at a depth."""
    point = camera.center + camera.rotation[2] * depth
    a, b = camera.center - point, other.center - point
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(a @ b) / norms if norms > 0 else 1.0
    return float(np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0))))


def _relative(camera: Camera, other: Camera) -> tuple[Tensor, Tensor]:
    """Rotation and translation from one camera's axes to another's. (3, 3) and (3,) float64"""
    turn = other.rotation @ camera.rotation.T
    return torch.from_numpy(turn), torch.from_numpy(other.translation - turn @ camera.translation)


def _rays(camera: Camera) -> Tensor:
    return pixel_rays(camera, dtype=torch.float64, device="cpu")


def _moments(grey: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the window around each pixel. (H, W) each"""
    mean = _windows(grey)
    return mean, (_windows(grey * grey) - mean * mean).clamp_min(0).sqrt()


def _windows(values: Tensor) -> Tensor:
    """Means of the windows around the pixels; beyond its borders the image stays as it is there.

    Sums of shifted copies: average pooling takes seven times as long on a CPU. (H, W)
    """
    height, width = values.shape
    padded = F.pad(values[None, None], (WINDOW // 2,) * 4, mode="replicate")[0, 0]
    rows = sum(padded[i : i + height] for i in range(WINDOW))
    return sum(rows[:, i : i + width] for i in range(WINDOW)) / WINDOW**2
