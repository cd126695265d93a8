# SPDX-License-Identifier: Apache-2.0
"""What photographs add to the Gaussians to start from: dense points, and the colours of a sky.

A reconstruction of few photographs has few points, and between them Gaussians explain each
photograph by itself. Plane sweeps put the surface there from the start: for each of many depths,
even in 1 / depth, the neighbours are warped onto the photograph as if all of it lay on a plane of
that depth. Where a small window agrees with them, by normalised cross-correlation, that is it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera, middle_of, pixel_rays, pixels_of
from gaussian_splatting.data.masks import VisualHull
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.rasterization.spherical_harmonics import rgb_to_sh, sh_to_rgb
from gaussian_splatting.sky_sphere import SkySphere
from gaussian_splatting.vanilla.initial_gaussians import initial_cloud

LONG_SIDE = 240  # pixels, of the small copies
MAX_VIEWS = 64  # photographs whose depth is found; of more, evenly spaced ones
SHARE = 1
FEWEST = 5_000
MOST = 50_000
"""Dense points for each point that is there already, and the least and largest number of them. They
show where the surface is; how fine it has to be is for densification to find out."""

MIN_SEEN = 10  # sparse points in a view from which its range of depths is taken
# least, share of the depth, pixels between points
AGREEMENT = 0.6
TOLERANCE = 0.02
STRIDE = 2
# angles in degrees
N_NEIGHBORS = 4
IDEAL_PARALLAX = 12.0
LARGEST_PARALLAX = 55.0

N_DEPTHS = 96  # depths that are told apart
REFINED = 4  # depths on either side of the coarse answer that are tried at full size
SMALLEST = 100  # pixels of the shorter side; smaller images are not halved
SMOOTHED = 5  # pixels of half size, side of the median's windows
WINDOW = 7  # side of the windows that are compared, in pixels
MIN_DEVIATION = 0.01  # of grey values; a window with less shows nothing to recognise
SEEN_THROUGH = 2.0  # tolerances beyond a point from which another view contradicts it
NOWHERE = -1.0  # agreement of a pixel that no neighbour sees, or that is flat


@dataclass(frozen=True)
class _Swept:
    view: GreyView
    colors: Tensor
    neighbors: list[int]
    depth: Tensor
    believed: Tensor
    known: Tensor  # pixels whose depth a depth map says


def with_dense_points(
    cloud: GaussianCloud,
    scene: Scene,
    load_image: Callable[[Camera], Tensor],
    hull: VisualHull | None,
    limit: int | None,
    notify: Callable[[str], None],
) -> GaussianCloud:
    """The initial Gaussians, as opaque as they are, and those of dense points, sized by all gaps.

    Args:
        load_image: (H, W, 3), or (H, W, 4) uint8 with a mask
        hull: What masks say of the object; nothing is added outside of it.
        limit: Most Gaussians that are allowed; None for any number.
    """
    points, colors = dense_points(scene, load_image, cloud.means.device)
    if hull is not None:
        inside = hull.contains(points.to(cloud.means)).cpu()
        points = points[inside]
        colors = colors[inside]
    n_found = len(points)
    room = min(max(SHARE * len(cloud), FEWEST), MOST)
    if limit is not None:
        room = min(room, max(0, limit - len(cloud)))
    if n_found > room:
        rows = torch.linspace(0, n_found - 1, room, dtype=torch.float64, device="cpu").long()
        points = points[rows]
        colors = colors[rows]
    notify(f"dense start: {len(points):,} of {n_found:,} points that photographs agree on")
    if len(points) == 0:
        return cloud
    own = (sh_to_rgb(cloud.sh_dc[:, 0]).clamp(0, 1) * 255).round().to(torch.uint8)
    start = initial_cloud(
        torch.cat([cloud.means, points.to(cloud.means)]), torch.cat([own, colors.to(own.device)])
    )
    added = start.opacity_logits[len(cloud) :]
    return replace(start, opacity_logits=torch.cat([cloud.opacity_logits, added]))


def dense_points(
    scene: Scene, load_image: Callable[[Camera], Tensor], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Points that at least two photographs agree on, or that depth maps say, on the CPU, in the
    order of the views.

    (P, 3) float32 world units, and their colours, (P, 3) uint8.
    """
    cameras, ranges = _with_ranges(evenly_chosen(scene.train_cameras), scene.points)
    smaller = [small_copy(camera, load_image(camera), device) for camera in cameras]
    swept = []
    for index, (view, colors, counted) in enumerate(smaller):
        chosen = _neighbors(cameras, index, float(np.sqrt(ranges[index][0] * ranges[index][1])))
        depth = agreement = torch.full_like(view.grey, NOWHERE)
        if chosen:
            depth, agreement = sweep(view, [smaller[i][0] for i in chosen], *ranges[index])
        believed = counted & (agreement > AGREEMENT)
        known = torch.zeros_like(counted)
        given = scene.depths.of(view.camera, depth.device)
        if given is not None:
            known = counted & (given > 0)
            depth = torch.where(known, given, depth)
            believed = believed | known
        swept.append(_Swept(view, colors, chosen, depth, believed, known))
    found = [_points_of(one, swept) for one in swept]
    if not found:
        return torch.zeros(0, 3, device="cpu"), torch.zeros(0, 3, dtype=torch.uint8, device="cpu")
    points, colors = zip(*found, strict=True)
    return torch.cat(points), torch.cat(colors)


def _with_ranges(
    cameras: Sequence[Camera], points: np.ndarray
) -> tuple[list[Camera], list[tuple[float, float]]]:
    """Views with enough sparse points in them, and where to search: a little beyond those."""
    kept = []
    ranges = []
    for camera in cameras:
        view = points.astype(np.float64) @ camera.rotation.T + camera.translation
        depth = view[view[:, 2] > 0]
        pixels = depth[:, :2] / depth[:, 2:] * (camera.fx, camera.fy) + (camera.cx, camera.cy)
        inside = ((pixels >= 0) & (pixels < (camera.width, camera.height))).all(axis=1)
        if inside.sum() >= MIN_SEEN:
            near, far = np.percentile(depth[inside, 2], (1, 99))
            kept.append(camera)
            ranges.append((0.8 * float(near), 1.3 * float(far)))
    return kept, ranges


def evenly_chosen(cameras: Sequence[Camera]) -> list[Camera]:
    """The cameras, or MAX_VIEWS evenly spaced ones of more."""
    if len(cameras) <= MAX_VIEWS:
        return list(cameras)
    return [cameras[i] for i in np.linspace(0, len(cameras) - 1, MAX_VIEWS).astype(int)]


def small_copy(
    camera: Camera, photograph: Tensor, device: torch.device | str
) -> tuple[GreyView, Tensor, Tensor]:
    """A small grey copy, its colours, (h, w, 3) uint8, and what counts in it, (h, w) bool."""
    small = camera.reduced(LONG_SIDE)
    counted = is_counted(photograph)
    if counted is None:
        counted = torch.ones_like(photograph[..., 0], dtype=torch.bool)
    planes = torch.cat([photograph[..., :3].float() / 255, counted[..., None].float()], dim=-1)
    planes = F.interpolate(
        planes.to(device).permute(2, 0, 1)[None], (small.height, small.width), mode="area"
    )[0]
    colors = (planes[:3] * 255).round().to(torch.uint8).permute(1, 2, 0).cpu()
    return GreyView(small, planes[:3].mean(dim=0)), colors, planes[3] > 0.99


def _neighbors(cameras: Sequence[Camera], index: int, depth: float) -> list[int]:
    """Views that look at the same from a good angle, the best ones first."""
    ranked = []
    for other, camera in enumerate(cameras):
        angle = parallax(cameras[index], camera, depth) if other != index else 0.0
        facing = float(camera.rotation[2] @ cameras[index].rotation[2]) > 0.5
        if facing and 0 < angle < LARGEST_PARALLAX:
            ranked.append((max(angle / IDEAL_PARALLAX, IDEAL_PARALLAX / angle), other))
    return [other for _, other in sorted(ranked)[:N_NEIGHBORS]]


def _points_of(one: _Swept, swept: Sequence[_Swept]) -> tuple[Tensor, Tensor]:
    """Points of a view that a depth map or one of its neighbours confirms, and their colours."""
    beside = [swept[i] for i in one.neighbors]
    others = [(s.view, torch.where(s.believed, s.depth, torch.inf)) for s in beside]
    kept = one.believed & (one.known | consistent(one.view, one.depth, others, TOLERANCE))
    every = torch.zeros_like(kept)
    every[::STRIDE, ::STRIDE] = True
    kept = (kept & every).cpu()
    return world_points(one.view.camera, one.depth)[kept], one.colors[kept]


@dataclass(frozen=True)
class GreyView:
    camera: Camera
    grey: Tensor  # (H, W) float32 in [0, 1]


def sweep(
    view: GreyView, neighbors: Sequence[GreyView], near: float, far: float
) -> tuple[Tensor, Tensor]:
    """Depth of each pixel in world units, and agreement of the neighbours in [-1, 1]. (H, W) each

    Every second depth is tried on images of half the size, and every depth around what agrees best.
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
    """1 / depth of the tried planes on which neighbours agree best, and agreement. (H, W) each

    Args:
        inverse: 1 / depth, evenly spaced. (D, 1, 1), or (D, H, W) for each pixel
    """
    mean, deviation = _moments(view.grey)
    each = [_agreement(view, other, inverse, mean, deviation) for other in neighbors]
    agreement = _mean_of_two_best(each)
    best, index = agreement.max(dim=0)
    # The maximum of a parabola through the best plane and the two beside it.
    middle = index.clamp(1, len(inverse) - 2)
    before, here, after = (agreement.gather(0, (middle + i)[None])[0] for i in (-1, 0, 1))
    curvature = (before - 2 * here + after).clamp_max(-1e-6)
    offset = ((before - after) / (2 * curvature)).clamp(-0.5, 0.5)
    at = inverse.expand(-1, *view.grey.shape).gather(0, middle[None])[0]
    step = (inverse[-1] - inverse[0]) / (len(inverse) - 1)
    return at + offset * step, torch.where(deviation > MIN_DEVIATION, best, NOWHERE)


def _mean_of_two_best(agreements: Sequence[Tensor]) -> Tensor:
    """Mean of the two largest of each place; ``topk`` takes many times as long on a CPU."""
    if len(agreements) <= 2:
        return sum(agreements) / len(agreements)
    first = torch.maximum(*agreements[:2])
    second = torch.minimum(*agreements[:2])
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
    pairs = zip(rays.unbind(dim=-1), shift.tolist(), strict=True)
    x, y, z = (ray + offset * inverse for ray, offset in pairs)
    scale = 1 / z.clamp_min(1e-6)
    u = x * scale * (2 * camera.fx / camera.width)
    v = y * scale * (2 * camera.fy / camera.height)
    u += 2 * camera.cx / camera.width - 1
    v += 2 * camera.cy / camera.height - 1
    inside = (u.abs() < 1) & (v.abs() < 1) & (z > 0)
    images = other.grey[None, None].expand(len(u), -1, -1, -1)
    warped = F.grid_sample(images, torch.stack([u, v], dim=-1), align_corners=False)[:, 0]
    other_mean, other_deviation = _moments(warped)
    covariance = _windows(view.grey * warped) - mean * other_mean
    correlation = covariance / (deviation * other_deviation).clamp_min(1e-6)
    return torch.where(inside, correlation, NOWHERE)


def _medians(values: Tensor) -> Tensor:
    """Medians of the ``SMOOTHED`` x ``SMOOTHED`` pixels around each. (H, W)"""
    padded = F.pad(values[None, None], (SMOOTHED // 2,) * 4, mode="replicate")[0, 0]
    around = padded.unfold(0, SMOOTHED, 1).unfold(1, SMOOTHED, 1)
    return around.flatten(start_dim=2).median(dim=-1).values


def _halved(view: GreyView) -> GreyView:
    height, width = (max(1, side // 2) for side in view.grey.shape)
    grey = F.interpolate(view.grey[None, None], (height, width), mode="area")[0, 0]
    return GreyView(view.camera.resized(width, height), grey)


def consistent(
    view: GreyView, depth: Tensor, neighbors: Sequence[tuple[GreyView, Tensor]], tolerance: float
) -> Tensor:
    """Pixels whose depth more neighbours have found as well than look through. (H, W) bool

    Args:
        depth: (H, W) world units
        neighbors: Others, with their depth; infinite where it is not to be believed.
        tolerance: Largest difference, as a share of the depth.
    """
    rays = _rays(view.camera).to(depth)
    balance = torch.zeros_like(depth, dtype=torch.int32)
    for other, its_depth in neighbors:
        turn, shift = _relative(view.camera, other.camera)
        point = (rays * depth[..., None]) @ turn.to(depth).T + shift.to(depth)
        rows, columns, inside = pixels_of(point, other.camera)
        there = its_depth[rows, columns]
        z = point[..., 2]
        beyond = (there - z) / z.clamp_min(1e-6)
        near = inside & there.isfinite()
        balance += (near & (beyond.abs() < tolerance)).int()
        balance -= (near & (beyond > SEEN_THROUGH * tolerance)).int()
    return balance > 0


def world_points(camera: Camera, depth: Tensor) -> Tensor:
    """Where the pixels of a view are. (H, W) world units -> (H, W, 3) float32 world units"""
    view = _rays(camera) * depth.double().cpu()[..., None]
    translation = torch.from_numpy(camera.translation)
    rotation = torch.from_numpy(camera.rotation)
    return ((view - translation) @ rotation).float()


def parallax(camera: Camera, other: Camera, depth: float) -> float:
    """Angle in degrees at which two cameras see the point on the first one's axis at a depth."""
    point = camera.center + camera.rotation[2] * depth
    a = camera.center - point
    b = other.center - point
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
    """Means of the windows around the pixels; pooling takes seven times as long on a CPU."""
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


def with_sky_colors(
    cloud: GaussianCloud,
    sky: SkySphere,
    cameras: Sequence[Camera],
    load_image: Callable[[Camera], Tensor],
) -> GaussianCloud:
    """The Gaussians, those of the sky in the colours of their directions."""
    rows = (sky.distance(cloud.means) > 0).nonzero()[:, 0]
    colors = directional_colors(cloud.means[rows].cpu().double(), cameras, load_image)
    if colors is None:
        return cloud
    sh_dc = cloud.sh_dc.clone()
    sh_dc[rows, 0] = rgb_to_sh(colors.float() / 255).to(sh_dc)
    return replace(cloud, sh_dc=sh_dc)


def directional_colors(
    points: Tensor, cameras: Sequence[Camera], load_image: Callable[[Camera], Tensor]
) -> Tensor | None:
    """Median colour that photographs show where points are; the nearest one's where none does.

    Args:
        points: Far away. (M, 3) float64 world units, on the CPU
        load_image: (H, W, 3), or (H, W, 4) uint8 with a mask

    Returns:
        (M, 3) uint8 on the CPU; None if no photograph shows any of them.
    """
    seen = [_colors_in(camera, load_image(camera), points) for camera in evenly_chosen(cameras)]
    if not seen or len(points) == 0:
        return None
    colors = torch.stack(seen).nanmedian(dim=0).values
    known = ~colors.isnan().any(dim=1)
    if not known.any():
        return None
    middle = torch.from_numpy(np.asarray(middle_of(cameras), dtype=np.float64))
    directions = torch.nn.functional.normalize(points - middle, dim=1)
    nearest = (directions @ directions[known].T).argmax(dim=1)
    return colors[known][nearest].round().to(torch.uint8)


def _colors_in(camera: Camera, photograph: Tensor, points: Tensor) -> Tensor:
    """Colours of a photograph where points project, NaN where it shows them not. (M, 3)"""
    view, colors, counted = small_copy(camera, photograph, "cpu")
    there = points @ torch.from_numpy(camera.rotation).T + torch.from_numpy(camera.translation)
    rows, columns, inside = pixels_of(there, view.camera)
    found = inside & counted[rows, columns]
    return torch.where(found[:, None], colors[rows, columns].double(), torch.nan)
