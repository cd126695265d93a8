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
from gaussian_splatting.vanilla.plane_agreement_cpu import MIN_WIDTH, agreement_on_planes

N_DEPTHS = 96
"""Depths that are told apart."""

REFINED = 4
"""Depths on either side of the coarse answer that are tried at full size."""

SMALLEST = 100
"""Shorter side in pixels below which a window would be a large part of half the image."""

SMOOTHED = 5
"""Side of the windows whose median the coarse answer becomes, in pixels of half size."""

WINDOW = 7
"""Side of the windows that are compared, in pixels."""

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

    Every second depth is tried on images of half the size. Around what agrees best there, every
    depth is tried on the images themselves. Small images are searched whole.

    Args:
        view: The photograph.
        neighbors: Others that look at the same, at least one.
        near: Least depth in world units.
        far: Largest depth in world units.

    Returns:
        Depth along the view axis in world units, and agreement in [-1, 1]. (H, W) each
    """
    step = (1 / near - 1 / far) / (N_DEPTHS - 1)
    every = torch.arange(N_DEPTHS, dtype=torch.float64, device="cpu") * step + 1 / far
    every = every.to(view.grey)[:, None, None]
    if min(view.grey.shape) < SMALLEST:
        inverse, agreement = best_plane(view, neighbors, every)
        return 1 / inverse, agreement
    found, _ = best_plane(_halved(view), [_halved(other) for other in neighbors], every[::2])
    # Windows only fit where pixels side by side start from one surface.
    middle = F.interpolate(_medians(found)[None, None], view.grey.shape, mode="bilinear")[0, 0]
    offsets = torch.arange(-REFINED, REFINED + 1, dtype=torch.float64, device="cpu") * step
    planes = (middle + offsets.to(middle)[:, None, None]).clamp(1 / far, 1 / near)
    inverse, agreement = best_plane(view, neighbors, planes)
    return 1 / inverse, agreement


def best_plane(
    view: GreyView, neighbors: Sequence[GreyView], inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """The plane on which neighbours agree best, between those that were tried.

    Args:
        view: The photograph.
        neighbors: Others that look at the same, at least one.
        inverse: 1 / depth of the planes, evenly spaced, for all pixels or for each. (D, 1, 1) or
            (D, H, W)

    Returns:
        1 / depth, and agreement in [-1, 1]. (H, W) each
    """
    mean, deviation = _moments(view.grey)
    agreement = _mean_of_two_best(
        [_agreement(view, other, inverse, mean, deviation) for other in neighbors]
    )
    best, index = agreement.max(dim=0)
    # The maximum of a parabola through the best plane and the two beside it.
    middle = index.clamp(1, len(inverse) - 2)
    before, here, after = (agreement.gather(0, (middle + i)[None])[0] for i in (-1, 0, 1))
    bend = (before - 2 * here + after).clamp_max(-1e-6)
    offset = ((before - after) / (2 * bend)).clamp(-0.5, 0.5)
    at = inverse.expand(-1, *view.grey.shape).gather(0, middle[None])[0]
    step = (inverse[-1] - inverse[0]) / (len(inverse) - 1)
    return at + offset * step, torch.where(deviation > MIN_DEVIATION, best, NOWHERE)


def _mean_of_two_best(agreements: Sequence[Tensor]) -> Tensor:
    """Mean of the two largest of each place; the other neighbours may not see it.

    All of one shape, any. In turns: ``topk`` takes many times as long on a CPU.
    """
    if len(agreements) <= 2:
        return sum(agreements) / len(agreements)
    first, second = torch.maximum(*agreements[:2]), torch.minimum(*agreements[:2])
    for more in agreements[2:]:
        second = torch.maximum(second, torch.minimum(first, more))
        first = torch.maximum(first, more)
    return (first + second) / 2


def _agreement(
    view: GreyView, other: GreyView, inverse: Tensor, mean: Tensor, deviation: Tensor
) -> Tensor:
    """Normalised cross-correlation with a neighbour on each plane. (D, H, W)"""
    camera = other.camera
    turn, shift = _relative(view.camera, camera)
    rays = _rays(view.camera).to(view.grey) @ turn.to(view.grey).T
    # Points times 1 / depth: the projection is the same.
    lens = (
        2 * camera.fx / camera.width,
        2 * camera.fy / camera.height,
        2 * camera.cx / camera.width - 1,
        2 * camera.cy / camera.height - 1,
    )
    on_cpu = view.grey.device.type == "cpu" and view.camera.width >= MIN_WIDTH
    on_planes = agreement_on_planes if on_cpu else _torch_agreement
    return on_planes(
        view.grey, mean, deviation, other.grey, rays, tuple(shift.tolist()), lens, inverse,
        WINDOW, NOWHERE,
    )  # fmt: skip


def _torch_agreement(
    grey: Tensor, mean: Tensor, deviation: Tensor, other: Tensor, rays: Tensor,
    shift: tuple[float, float, float], lens: tuple[float, float, float, float], inverse: Tensor,
    window: int, nowhere: float,
) -> Tensor:  # fmt: skip
    """Same as :func:`agreement_on_planes`, on any device."""
    x, y, z = rays.unbind(dim=-1)
    depth = z + shift[2] * inverse
    scale = 1 / depth.clamp_min(1e-6)
    u = (x + shift[0] * inverse) * scale * lens[0]
    v = (y + shift[1] * inverse) * scale * lens[1]
    u += lens[2]
    v += lens[3]
    inside = (u.abs() < 1) & (v.abs() < 1) & (depth > 0)
    images = other[None, None].expand(len(u), -1, -1, -1)
    warped = F.grid_sample(images, torch.stack([u, v], dim=-1), align_corners=False)[:, 0]
    other_mean, other_deviation = _moments(warped)
    covariance = _windows(grey * warped) - mean * other_mean
    correlation = covariance / (deviation * other_deviation).clamp_min(1e-6)
    return torch.where(inside, correlation, nowhere)


def _medians(values: Tensor) -> Tensor:
    """Medians of the ``SMOOTHED`` x ``SMOOTHED`` pixels around each. (H, W)"""
    padded = F.pad(values[None, None], (SMOOTHED // 2,) * 4, mode="replicate")[0, 0]
    around = padded.unfold(0, SMOOTHED, 1).unfold(1, SMOOTHED, 1)
    return around.flatten(start_dim=2).median(dim=-1).values


def _halved(view: GreyView) -> GreyView:
    """A copy of half the size."""
    height, width = (max(1, side // 2) for side in view.grey.shape)
    grey = F.interpolate(view.grey[None, None], (height, width), mode="area")[0, 0]
    return GreyView(view.camera.resized(width, height), grey)


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
    """Mean and standard deviation of the window around each pixel. (..., H, W) each"""
    mean = _windows(grey)
    return mean, (_windows(grey * grey) - mean * mean).clamp_min(0).sqrt()


def _windows(values: Tensor) -> Tensor:
    """Means of the windows around the pixels; beyond its borders the image stays as it is there.

    Sums of shifted copies: average pooling takes seven times as long on a CPU. (..., H, W)
    """
    height, width = values.shape[-2:]
    stack = values.reshape(1, -1, height, width)
    padded = F.pad(stack, (WINDOW // 2,) * 4, mode="replicate")[0]
    rows = padded[:, :height].clone()
    for i in range(1, WINDOW):
        rows += padded[:, i : i + height]
    sums = rows[..., :width].clone()
    for i in range(1, WINDOW):
        sums += rows[..., i : i + width]
    return (sums / WINDOW**2).reshape(values.shape)
