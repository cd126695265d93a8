# SPDX-License-Identifier: Apache-2.0
"""Depth of a photograph by plane sweeps through its neighbours.

For each of many depths, even in 1 / depth, the neighbours are warped onto the photograph as if all
of it lay on a plane of that depth. Where a small window agrees with them, by normalised
cross-correlation, that is its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gaussian_splatting.core.color_bytes import color_bytes
from gaussian_splatting.data.cameras import Camera, pixel_rays, pixels_of
from gaussian_splatting.engine.training_views import is_counted

LONG_SIDE = 240  # pixels, of the small copies
N_DEPTHS = 96  # hypotheses of depth
REFINED = 4  # depths on either side of the coarse answer that are tried at full size
SMALLEST = 100  # pixels of the shorter side; smaller images are not halved
SMOOTHED = 5  # pixels of half size, side of the median's windows
WINDOW = 7  # side of the windows that are compared, in pixels
MIN_DEVIATION = 0.01  # of grey values; a window with less shows nothing to recognise
SEEN_THROUGH = 2.0  # tolerances beyond a point from which another view contradicts it
NOWHERE = -1.0  # agreement of a pixel that no neighbour sees, or that is flat


@dataclass(frozen=True)
class GreyView:
    """A view in grey, as it is compared."""

    camera: Camera
    grey: Tensor  # (H, W) float32 in [0, 1]


class SmallCopy(NamedTuple):
    """A small copy of a photograph."""

    view: GreyView
    colors: Tensor  # (h, w, 3) uint8 on the CPU
    counted: Tensor  # pixels that count. (h, w) bool


class Agreement(NamedTuple):
    """Where neighbours agree best at each pixel."""

    depth: Tensor  # (H, W) world units
    agreement: Tensor  # normalised cross-correlation in [-1, 1]. (H, W)


class _BestPlane(NamedTuple):
    """The plane on which neighbours agree best, for each pixel."""

    inverse: Tensor  # 1 / depth. (H, W)
    agreement: Tensor  # (H, W)


class _Relative(NamedTuple):
    """From one camera's axes to another's."""

    rotation: Tensor  # (3, 3) float64
    translation: Tensor  # (3,) float64


class _Moments(NamedTuple):
    """Of the window around each pixel."""

    mean: Tensor  # (..., H, W)
    deviation: Tensor  # standard deviation. (..., H, W)


def small_copy(camera: Camera, photograph: Tensor, device: torch.device | str) -> SmallCopy:
    """Reduce a photograph, (H, W, 3) or (H, W, 4) uint8, to the size that is compared."""
    small = camera.reduced(LONG_SIDE)
    counted = is_counted(photograph)
    if counted is None:
        counted = torch.ones_like(photograph[..., 0], dtype=torch.bool)
    colors = photograph[..., :3].float() / 255
    planes = torch.cat([colors, counted[..., None].float()], dim=-1)
    planes = planes.to(device).permute(2, 0, 1)[None]
    planes = F.interpolate(planes, small.shape, mode="area")[0]
    small_colors = color_bytes(planes[:3]).permute(1, 2, 0).cpu()
    return SmallCopy(GreyView(small, planes[:3].mean(dim=0)), small_colors, planes[3] > 0.99)


def sweep(view: GreyView, neighbors: Sequence[GreyView], near: float, far: float) -> Agreement:
    """Find the depth of each pixel between ``near`` and ``far``, in world units.

    Every second depth is tried on images of half the size, and every depth around what agrees best.
    """
    step = (1 / near - 1 / far) / (N_DEPTHS - 1)
    inverse = torch.arange(N_DEPTHS, dtype=torch.float64, device="cpu") * step + 1 / far
    inverse = inverse.to(view.grey)[:, None, None]
    if min(view.grey.shape) < SMALLEST:
        best = best_plane(view, neighbors, inverse)
        return Agreement(1 / best.inverse, best.agreement)
    small_neighbors = [_halved(neighbor) for neighbor in neighbors]
    coarse = best_plane(_halved(view), small_neighbors, inverse[::2])
    # Windows only fit where pixels side by side start from one surface.
    smooth = _medians(coarse.inverse)[None, None]
    middle = F.interpolate(smooth, view.grey.shape, mode="bilinear")[0, 0]
    offsets = torch.arange(-REFINED, REFINED + 1, dtype=torch.float64, device="cpu") * step
    planes = middle + offsets.to(middle)[:, None, None]
    best = best_plane(view, neighbors, planes.clamp(1 / far, 1 / near))
    return Agreement(1 / best.inverse, best.agreement)


def best_plane(view: GreyView, neighbors: Sequence[GreyView], inverse: Tensor) -> _BestPlane:
    """Find 1 / depth of the plane on which neighbours agree best, for each pixel.

    Args:
        inverse: 1 / depth of the planes to try, evenly spaced. (D, 1, 1), or (D, H, W) for each
            pixel
    """
    moments = _moments(view.grey)
    by_neighbor = [_agreement(view, other, inverse, moments) for other in neighbors]
    agreement = _mean_of_two_best(by_neighbor)
    best, index = agreement.max(dim=0)
    # The maximum of a parabola through the best plane and the two beside it.
    middle = index.clamp(1, len(inverse) - 2)
    before = agreement.gather(0, (middle - 1)[None])[0]
    center = agreement.gather(0, middle[None])[0]
    after = agreement.gather(0, (middle + 1)[None])[0]
    curvature = (before - 2 * center + after).clamp_max(-1e-6)
    offset = ((before - after) / (2 * curvature)).clamp(-0.5, 0.5)
    at_middle = inverse.expand(-1, *view.grey.shape).gather(0, middle[None])[0]
    step = (inverse[-1] - inverse[0]) / (len(inverse) - 1)
    has_texture = moments.deviation > MIN_DEVIATION
    return _BestPlane(at_middle + offset * step, torch.where(has_texture, best, NOWHERE))


def consistent(
    view: GreyView, depth: Tensor, neighbors: Sequence[tuple[GreyView, Tensor]], tolerance: float
) -> Tensor:
    """Find pixels whose depth more neighbours have found as well than look through. (H, W) bool

    Args:
        depth: (H, W) world units
        neighbors: Others, with their depth; infinite where it is not to be believed.
        tolerance: Largest difference, as a share of the depth.
    """
    rays = _rays(view.camera).to(depth)
    balance = torch.zeros_like(depth, dtype=torch.int32)
    for other, other_depth in neighbors:
        relative = _relative(view.camera, other.camera)
        points = (rays * depth[..., None]) @ relative.rotation.to(depth).T
        points = points + relative.translation.to(depth)
        rows, columns, inside = pixels_of(points, other.camera)
        depth_there = other_depth[rows, columns]
        z = points[..., 2]
        beyond = (depth_there - z) / z.clamp_min(1e-6)
        is_known = inside & depth_there.isfinite()
        balance += (is_known & (beyond.abs() < tolerance)).int()
        balance -= (is_known & (beyond > SEEN_THROUGH * tolerance)).int()
    return balance > 0


def world_points(camera: Camera, depth: Tensor) -> Tensor:
    """Place the pixels of a view in the world. (H, W) world units -> (H, W, 3) float32"""
    view_points = _rays(camera) * depth.double().cpu()[..., None]
    translation = torch.from_numpy(camera.translation)
    rotation = torch.from_numpy(camera.rotation)
    return ((view_points - translation) @ rotation).float()


def parallax(camera: Camera, other: Camera, depth: float) -> float:
    """Angle in degrees at which two cameras see the point on the first one's axis at a depth."""
    point = camera.center + camera.rotation[2] * depth
    to_first = camera.center - point
    to_other = other.center - point
    norms = float(np.linalg.norm(to_first) * np.linalg.norm(to_other))
    cosine = float(to_first @ to_other) / norms if norms > 0 else 1.0
    return float(np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0))))


def _agreement(view: GreyView, other: GreyView, inverse: Tensor, moments: _Moments) -> Tensor:
    """Normalised cross-correlation with a neighbour on each plane. (D, H, W)"""
    camera = other.camera
    relative = _relative(view.camera, camera)
    rays = _rays(view.camera).to(view.grey) @ relative.rotation.to(view.grey).T
    # Points times 1 / depth: the projection is the same.
    x_offset, y_offset, z_offset = relative.translation.tolist()
    x = rays[..., 0] + x_offset * inverse
    y = rays[..., 1] + y_offset * inverse
    z = rays[..., 2] + z_offset * inverse
    scale = 1 / z.clamp_min(1e-6)
    u = x * scale * (2 * camera.fx / camera.width)
    v = y * scale * (2 * camera.fy / camera.height)
    u += 2 * camera.cx / camera.width - 1
    v += 2 * camera.cy / camera.height - 1
    inside = (u.abs() < 1) & (v.abs() < 1) & (z > 0)
    images = other.grey[None, None].expand(len(u), -1, -1, -1)
    warped = F.grid_sample(images, torch.stack([u, v], dim=-1), align_corners=False)[:, 0]
    warped_moments = _moments(warped)
    covariance = _windows(view.grey * warped) - moments.mean * warped_moments.mean
    deviations = moments.deviation * warped_moments.deviation
    return torch.where(inside, covariance / deviations.clamp_min(1e-6), NOWHERE)


def _mean_of_two_best(agreements: Sequence[Tensor]) -> Tensor:
    """Mean of the two largest at each pixel; ``topk`` takes many times as long on a CPU."""
    if len(agreements) == 1:
        return agreements[0]
    first = torch.maximum(agreements[0], agreements[1])
    second = torch.minimum(agreements[0], agreements[1])
    for agreement in agreements[2:]:
        second = torch.maximum(second, torch.minimum(first, agreement))
        first = torch.maximum(first, agreement)
    return (first + second) / 2


def _medians(values: Tensor) -> Tensor:
    """Medians of the ``SMOOTHED`` x ``SMOOTHED`` pixels around each. (H, W)"""
    padding = (SMOOTHED // 2,) * 4
    padded = F.pad(values[None, None], padding, mode="replicate")[0, 0]
    windows = padded.unfold(0, SMOOTHED, 1).unfold(1, SMOOTHED, 1)
    return windows.flatten(start_dim=2).median(dim=-1).values


def _halved(view: GreyView) -> GreyView:
    height, width = (max(1, side // 2) for side in view.grey.shape)
    grey = F.interpolate(view.grey[None, None], (height, width), mode="area")[0, 0]
    return GreyView(view.camera.resized(width, height), grey)


def _relative(camera: Camera, other: Camera) -> _Relative:
    rotation = other.rotation @ camera.rotation.T
    translation = other.translation - rotation @ camera.translation
    return _Relative(torch.from_numpy(rotation), torch.from_numpy(translation))


def _rays(camera: Camera) -> Tensor:
    return pixel_rays(camera, dtype=torch.float64, device="cpu")


def _moments(grey: Tensor) -> _Moments:
    mean = _windows(grey)
    variance = _windows(grey * grey) - mean * mean
    return _Moments(mean, variance.clamp_min(0).sqrt())


def _windows(values: Tensor) -> Tensor:
    """Means of the windows around the pixels; pooling takes seven times as long on a CPU."""
    height, width = values.shape[-2:]
    stack = values.reshape(1, -1, height, width)
    padding = (WINDOW // 2,) * 4
    padded = F.pad(stack, padding, mode="replicate")[0]
    rows = padded[:, :height].clone()
    for i in range(1, WINDOW):
        rows += padded[:, i : i + height]
    sums = rows[..., :width].clone()
    for i in range(1, WINDOW):
        sums += rows[..., i : i + width]
    return (sums / WINDOW**2).reshape(values.shape)
