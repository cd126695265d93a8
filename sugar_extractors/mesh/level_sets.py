# SPDX-License-Identifier: Apache-2.0
"""Points on level sets of the density, found along the rays of one view.

The depth of a triangle soup of diamonds tells where to look: around it, the density is sampled
along the ray from -3 to +3 standard deviations of the Gaussian that was hit, and the first
crossing of the level is interpolated (SuGaR, Guédon & Lepetit, CVPR 2024, section 4.2). Rays go
through pixel centres, and normals point out of the object.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud, Gaussians, opacities_of
from gaussian_splatting.core.color_bytes import color_bytes
from gaussian_splatting.core.random import generator
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.masks import VisualHull
from gaussian_splatting.rasterization import rasterize
from gaussian_splatting.rasterization.projection_kernels import View, make_view
from sugar_scene.field_device import PACK_SIZE, pack_rows, vec3_of, whitening_of
from sugar_scene.geometry import MIN_SCALE, diamond_faces, diamond_vertices
from sugar_scene.triangle_rasterizer import TriangleHits, rasterize_camera_triangles
from sugar_utils.neighbors import nearest_neighbors
from sugar_utils.warp_arrays import (
    Floats,
    Floats2d,
    Ints,
    Ints2d,
    Vec2s,
    Vec3s,
    Vec3s2d,
    Vec4s,
)
from sugar_utils.warp_launch import FUSED_OPTIONS, as_array, launch
from sugar_utils.warp_math import rotation_matrix

wp.set_module_options(FUSED_OPTIONS)

MIN_OPACITY = 0.5
N_NEIGHBORS = 16
DIAMOND_EXTENT = 2.0  # half diagonals of the diamonds that rays are cast at, standard deviations
RAY_SAMPLES = 21  # densities per ray
RAY_REACH = 3.0  # standard deviations searched before and behind a diamond
CANDIDATES_PER_POINT = 2  # pixels tried per surface point wanted
_MIN_ITEMS = 512
_NEGLIGIBLE_SQUARE = 80.0

Profile = wp.types.vector(length=RAY_SAMPLES, dtype=wp.float32)


@dataclass(frozen=True)
class LevelSetModel:
    """Opaque Gaussians, ready to be searched for level sets."""

    gaussians: Gaussians
    neighbors: Tensor  # neighbours of each, itself first, (N, K) int32
    packed: Tensor  # rows of ``field_device.pack_rows``, (N, 16)
    corners: Tensor  # corners of the diamonds, (4 N, 3) world units
    faces: Tensor  # triangles of the diamonds; face f belongs to Gaussian f // 2, (2 N, 3)

    def __len__(self) -> int:
        return len(self.gaussians)


class LevelSetPoints(NamedTuple):
    """Results of one view for L levels and S rays."""

    points: Tensor  # (L, S, 3) world units
    normals: Tensor  # unit, out of the object, (L, S, 3)
    valid: Tensor  # rays that start below the level and cross it, (L, S) bool


def build_model(cloud: GaussianCloud) -> LevelSetModel:
    """Return the opaque Gaussians of a cloud with their neighbours and diamonds."""
    is_opaque = opacities_of(cloud.opacity_logits.detach()) > MIN_OPACITY
    activated = cloud.select(is_opaque).activate()
    values = [tensor.float().contiguous() for tensor in activated.tensors()]
    gaussians = Gaussians(*values, **cloud.rendering()).without_bands()
    means = gaussians.means
    quats = gaussians.quats
    scales = gaussians.scales
    n = len(gaussians)
    packed = torch.empty(n, PACK_SIZE, device=means.device)
    arguments = [means, quats, scales, gaussians.opacities, packed]
    launch(pack_rows, n, arguments, min_items=_MIN_ITEMS)
    corners = diamond_vertices(means, quats, scales, DIAMOND_EXTENT)
    return LevelSetModel(
        gaussians=gaussians,
        neighbors=nearest_neighbors(means, N_NEIGHBORS).indices,
        packed=packed,
        corners=corners.reshape(-1, 3),
        faces=diamond_faces(n, means.device).int(),
    )


@wp.kernel
def billboard(first: int, view: View, means: Vec3s, corners: Vec3s, moved: Vec3s):
    """Slide corners along their lines of sight; corners behind the plane of sight become NaN."""
    i = first + wp.tid()
    center = view.rotation * means[i / 4] + view.translation
    corner = view.rotation * corners[i] + view.translation
    along = wp.dot(corner, center)
    factor = wp.dot(center, center) / along
    if not (along > 0.0):
        factor = float(wp.nan)
    moved[i] = corner * factor


def diamond_hits(model: LevelSetModel, camera: Camera) -> TriangleHits:
    """Return the first hit of every pixel on the diamonds, turned towards the camera.

    The corners of a diamond slide along their lines of sight onto the plane through the centre
    that is orthogonal to the line of sight of the centre. A diamond so close that a corner has
    more than 90 degrees to the centre has no such corner; its triangles are left out.
    """
    moved = torch.empty_like(model.corners)
    vectors = [as_array(t, wp.vec3) for t in (model.gaussians.means, model.corners, moved)]
    launch(billboard, moved.shape[0], [make_view(camera), *vectors], min_items=4096)
    return rasterize_camera_triangles(moved, model.faces, camera)


@wp.func
def density_gradient(point: wp.vec3, gaussian: int, neighbors: Ints2d, packed: Floats2d) -> wp.vec3:
    """Sum of o_j Sigma_j^-1 (x - mean_j): minus the gradient of the density."""
    total = wp.vec3(0.0, 0.0, 0.0)
    for j in range(neighbors.shape[1]):
        row = neighbors[gaussian, j]
        whitening = whitening_of(packed, row)
        y = whitening * (point - vec3_of(packed, row))
        square = wp.min(wp.dot(y, y), 1.0e8)
        total += packed[row, 3] * wp.exp(-0.5 * square) * (wp.transpose(whitening) * y)
    return total


@wp.kernel
def march(
    first: int,
    view: View,
    coordinates: Vec2s,
    depths: Floats,
    hit_gaussians: Ints,
    neighbors: Ints2d,
    packed: Floats2d,
    quats: Vec4s,
    scales: Vec3s,
    levels: Floats,
    points: Vec3s2d,
    normals: Vec3s2d,
    valid: wp.array2d(dtype=wp.bool),
):
    """Sample the density along a ray and find its first crossing of each level."""
    i = first + wp.tid()
    gaussian = hit_gaussians[i]
    pixel = coordinates[i]
    ray = wp.vec3((pixel[0] - view.cx) / view.fx, (pixel[1] - view.cy) / view.fy, 1.0)
    direction = wp.transpose(view.rotation) * ray
    origin = view.center + depths[i] * direction
    direction = wp.normalize(direction)

    sight = wp.normalize(view.center - vec3_of(packed, gaussian))
    local = wp.transpose(rotation_matrix(quats[gaussian])) * sight
    sigma = wp.length(wp.cw_mul(scales[gaussian], local))
    start = -wp.static(RAY_REACH) * sigma
    step = wp.static(2.0 * RAY_REACH) * sigma / float(wp.static(RAY_SAMPLES - 1))

    density = Profile()
    for j in range(neighbors.shape[1]):
        row = neighbors[gaussian, j]
        whitening = whitening_of(packed, row)
        y = whitening * (origin - vec3_of(packed, row))
        dy = whitening * direction
        for k in range(wp.static(RAY_SAMPLES)):
            z = y + (start + float(k) * step) * dy
            square = wp.dot(z, z)
            if square < wp.static(_NEGLIGIBLE_SQUARE):
                density[k] += packed[row, 3] * wp.exp(-0.5 * square)

    for level_index in range(levels.shape[0]):
        level = levels[level_index]
        crossing = int(0)  # the first sample above the level
        # Level 0 would never start outside; a full first sample means inside.
        if wp.min(density[0], 1.0) < level:
            for k in range(1, wp.static(RAY_SAMPLES)):
                if crossing == 0 and wp.min(density[k], 1.0) > level:
                    crossing = k
        valid[level_index, i] = crossing > 0
        points[level_index, i] = wp.vec3(0.0, 0.0, 0.0)
        normals[level_index, i] = wp.vec3(0.0, 0.0, 0.0)
        if crossing > 0:
            before = wp.min(density[crossing - 1], 1.0)
            after = wp.min(density[crossing], 1.0)
            share = (level - before) / (after - before)
            point = origin + (start + (float(crossing - 1) + share) * step) * direction
            points[level_index, i] = point
            outward = density_gradient(point, gaussian, neighbors, packed)
            normals[level_index, i] = wp.normalize(outward)


def march_rays(
    model: LevelSetModel,
    camera: Camera,
    coordinates: Tensor,
    depths: Tensor,
    hit_gaussians: Tensor,
    levels: Sequence[float],
) -> LevelSetPoints:
    """Search the level sets along rays.

    All samples of a ray use the neighbours of the Gaussian that the ray hit. Densities of 1 and
    more count as 1. Memory is O(S L): no product of rays, samples and neighbours is stored.

    Args:
        coordinates: Image coordinates, (0.5, 0.5) in the middle of the first pixel. (S, 2) pixels
        depths: Depth of the hits along the view axis. (S,) world units
        hit_gaussians: Rows of the Gaussians that the rays hit. (S,)
        levels: Densities to search for.
    """
    n = coordinates.shape[0]
    device = coordinates.device
    shape = (len(levels), n)
    points = torch.empty(*shape, 3, device=device)
    normals = torch.empty(*shape, 3, device=device)
    valid = torch.empty(shape, dtype=torch.bool, device=device)
    scales = model.gaussians.scales.clamp_min(MIN_SCALE)
    arguments = [
        make_view(camera),
        as_array(coordinates.float().contiguous(), wp.vec2),
        depths.float().contiguous(),
        hit_gaussians.int(),
        model.neighbors,
        model.packed,
        as_array(model.gaussians.quats, wp.vec4),
        as_array(scales, wp.vec3),
        torch.tensor(list(levels), dtype=torch.float32, device=device),
        as_array(points, wp.vec3),
        as_array(normals, wp.vec3),
        valid,
    ]
    launch(march, n, arguments, min_items=_MIN_ITEMS)
    return LevelSetPoints(points, normals, valid)


def pixel_centers(pixels: Tensor, width: int) -> Tensor:
    """Return the centres of pixels with row-major indices. (S,) -> (S, 2) pixels"""
    places = torch.stack([pixels % width, pixels // width], dim=-1)
    return places.float() + 0.5


@dataclass(frozen=True)
class SurfaceSamples:
    """Coloured points with normals; P of them, on the CPU."""

    points: np.ndarray  # (P, 3) float32 world units
    normals: np.ndarray  # unit, outward, (P, 3) float32
    colors: np.ndarray  # (P, 3) uint8

    def __len__(self) -> int:
        return len(self.points)

    @classmethod
    def empty(cls, n: int) -> SurfaceSamples:
        """Allocate n points with arbitrary values."""
        shape = (n, 3)
        return cls(
            points=np.empty(shape, np.float32),
            normals=np.empty(shape, np.float32),
            colors=np.empty(shape, np.uint8),
        )

    def select(self, rows: np.ndarray | slice) -> SurfaceSamples:
        """Return some of the points."""
        return SurfaceSamples(self.points[rows], self.normals[rows], self.colors[rows])


def collect_surface_samples(
    model: LevelSetModel,
    cameras: Sequence[Camera],
    levels: Sequence[float],
    *,
    target: int,
    seed: int,
    hull: VisualHull | None = None,
    on_view: Callable[[int, int], None] = lambda done, found: None,
) -> list[SurfaceSamples]:
    """Sample the level sets from all views, within a hull if there is one.

    Every view gives at most ``target // views + 1`` points per level, taken at random from
    twice as many random pixels. Memory does not grow with the views.

    Args:
        target: Points per level, about.
        on_view: Called after each view with the number of views and of points so far.

    Returns:
        The points of each level.
    """
    per_view = target // len(cameras) + 1
    stores = [SurfaceSamples.empty(per_view * len(cameras)) for _ in levels]
    filled = [0] * len(levels)
    for view, camera in enumerate(cameras):
        hits = diamond_hits(model, camera)
        pixels = hits.covered.flatten().nonzero()[:, 0]
        pixels = _random_rows(pixels, CANDIDATES_PER_POINT * per_view, seed, "pixels", view)
        centers = pixel_centers(pixels, camera.width)
        depths = hits.depth.flatten()[pixels]
        owners = hits.face.flatten()[pixels] // 2
        samples = march_rays(model, camera, centers, depths, owners, levels)
        image = rasterize(model.gaussians, camera, sh_degree=0).image.reshape(-1, 3)
        colors = color_bytes(image[pixels].clamp(0, 1))
        for index, (level, store) in enumerate(zip(levels, stores, strict=True)):
            # A gradient of zero has no direction; it is as rare as it is useless to Poisson.
            points = samples.points[index]
            normals = samples.normals[index]
            is_usable = samples.valid[index] & (normals != 0).any(dim=-1)
            is_usable &= points.isfinite().all(dim=-1)
            if hull is not None:
                is_usable &= hull.contains(points)
            # By the level itself: a mesh must not depend on which others are made beside it.
            candidates = is_usable.nonzero()[:, 0]
            name = repr(float(level))
            rows = _random_rows(candidates, per_view, seed, "points", view, name)
            begin = filled[index]
            end = begin + rows.shape[0]
            store.points[begin:end] = points[rows].cpu().numpy()
            store.normals[begin:end] = normals[rows].cpu().numpy()
            store.colors[begin:end] = colors[rows].cpu().numpy()
            filled[index] = end
        on_view(view + 1, sum(filled))
    return [store.select(slice(n)) for store, n in zip(stores, filled, strict=True)]


def _random_rows(rows: Tensor, n: int, seed: int, *labels: str | int) -> Tensor:
    """Choose at most ``n`` of the rows, without replacement and in ascending order.

    Args:
        labels: What the rows are for; each combination has random numbers of its own.
    """
    if rows.shape[0] <= n:
        return rows
    rng = generator(seed, *labels)
    chosen = torch.randperm(rows.shape[0], generator=rng, device="cpu")[:n]
    return rows[chosen.sort().values.to(rows.device)]
