# SPDX-License-Identifier: Apache-2.0
"""Depth and colour of views, rendered from Gaussians for the fusion.

Blended depth averages all Gaussians along a ray. Depth of planes is for models of the multi-view
mode, whose Gaussians are planes: a depth counts where the surface is not seen at a grazing angle,
and where a neighbouring view that sees the place has the same depth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.core.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.data.masks import VisualHull
from gaussian_splatting.rasterization import WarpRasterizer, rasterize
from sugar_scene import reprojection
from sugar_scene.depth_view import DepthView, Renderer
from sugar_scene.plane_kernels import (
    NO_PATCHES,
    ComparedMaps,
    ComparedPixels,
    depth_of_planes,
    pair_numbers,
)
from sugar_trainers.view_comparison import all_pixels

MAX_ANGLE = 80.0  # largest angle between a surface's normal and the line of sight, in degrees
MAX_MISS = 3.0  # pixels by which the way to a neighbour and back may miss; 1 leaves more holes
MAX_SIDE_MISS = 12.0  # likewise where two neighbours agree on a surface seen from the side
MAX_NEIGHBORS = 4  # neighbours that a depth is compared with
_MIN_COSINE = 1e-3  # smaller ones, as of pixels without a depth, count as this
_MIN_ALPHA = 0.5  # pixels that the Gaussians cover less have no depth
_CACHE_BYTES = 2**29
FRONT_TRANSMITTANCE = 0.3
"""Of a pixel's Gaussians only those in front count, up to the one that leaves less light than this.

What lies behind adds little to a colour, but pulls the depth inward.
"""


def view_renderer(cloud: GaussianCloud, min_alpha: float) -> Renderer:
    """Return a renderer of blended depth, unknown where alpha is less than ``min_alpha``."""
    # Faint Gaussians are part of what was trained; without them rendered depth has gaps.
    gaussians = cloud.detached().activate()
    gaussians.sh_rest = gaussians.sh_rest[:, :0].contiguous()

    def render(camera: Camera) -> DepthView:
        output = rasterize(gaussians, camera, depth=True, sh_degree=0)
        alpha = output.alpha.clamp_min(1e-6)
        # Expected depth: blended depth by alpha.
        depth = torch.where(output.alpha >= min_alpha, output.depth / alpha, 0.0)
        color = (output.image / alpha[..., None]).clamp(0, 1)
        return DepthView(camera, depth, color, torch.ones_like(depth))

    return render


def carved_renderer(render: Renderer, hull: VisualHull | None) -> Renderer:
    """Return a renderer without depth of pixels outside of the masks of their views."""
    if hull is None:
        return render

    def carved(camera: Camera) -> DepthView:
        view = render(camera)
        silhouette = hull.silhouette(camera)
        if silhouette is None:
            return view
        return replace(view, depth=torch.where(silhouette, view.depth, 0.0))

    return carved


def cached_renderer(render: Renderer, cameras: Sequence[Camera]) -> Renderer:
    """Return a renderer that keeps views, as far as the memory for that reaches."""
    largest_bytes = max(16 * camera.n_pixels for camera in cameras)
    n_views = max(1, _CACHE_BYTES // largest_bytes)
    return functools.lru_cache(maxsize=n_views)(render)


def plane_renderer(
    gaussians: Gaussians,
    cameras: Sequence[Camera],
    neighbors: reprojection.NeighborViews,
    extent: float,
) -> Renderer:
    """Return a renderer of the depth of planes, confirmed by neighbouring views.

    Args:
        extent: Of the cameras, in world units.
    """
    reach = reprojection.REACH * extent
    largest_bytes = max(4 * camera.n_pixels for camera in cameras)

    @functools.lru_cache(maxsize=max(1 + MAX_NEIGHBORS, _CACHE_BYTES // largest_bytes))
    def depth_of(camera: Camera) -> Tensor:
        return plane_view(gaussians, camera, reach, colored=False).depth

    def render(camera: Camera) -> DepthView:
        view = plane_view(gaussians, camera, reach)
        nearest = neighbors.of(camera.name)[:MAX_NEIGHBORS]
        neighbor_depths = [(neighbor, depth_of(neighbor)) for neighbor in nearest]
        # The weight of a view is cosine / depth^2.
        cosine = view.weight * view.depth.square()
        is_confirmed = confirmed_depth(view.depth, cosine, camera, neighbor_depths)
        return replace(view, depth=torch.where(is_confirmed, view.depth, 0.0))

    return render


def plane_view(
    gaussians: Gaussians, camera: Camera, reach: float, *, colored: bool = True
) -> DepthView:
    """Render the depth of the planes up to a distance and, if ``colored``, colour of degree 0.

    The weight of a pixel is cosine / z^2, the inverse of the area that it covers on the surface: a
    view from the side sees what is in front of the place as well, and its depth is too small.
    """
    output = rasterize(
        gaussians,
        camera,
        rgb=colored,
        plane_reach=reach,
        sh_degree=0,
        rasterizer=WarpRasterizer(front_transmittance=FRONT_TRANSMITTANCE),
    )
    plane = output.plane
    rays = pixel_rays(camera, dtype=plane.dtype, device=plane.device)
    depth = depth_of_planes(plane, camera)
    normals = plane[..., :3]
    lengths = normals.norm(dim=-1) * rays.norm(dim=-1)
    cosine = -(normals * rays).sum(dim=-1)
    cosine = cosine / lengths.clamp_min(1e-12)
    min_cosine = math.cos(math.radians(MAX_ANGLE))
    is_known = (depth > 0) & (output.alpha >= _MIN_ALPHA) & (cosine > min_cosine)
    color = torch.zeros_like(rays)
    if colored:
        color = (output.image / output.alpha.clamp_min(1e-6)[..., None]).clamp(0, 1)
    depth = torch.where(is_known, depth, 0.0)
    weight = torch.where(is_known, cosine / depth**2, 0.0)
    return DepthView(camera, depth, color, weight)


def confirmed_depth(
    depth: Tensor,
    cosine: Tensor,
    camera: Camera,
    neighbors: Sequence[tuple[Camera, Tensor]],
) -> Tensor:
    """Return the pixels where a neighbour has the same depth, or none has any. (H, W) bool

    The way to a neighbour and back may miss by ``MAX_MISS`` pixels. An error square to the surface
    moves the depth by 1 / cosine of it: with two neighbours it may miss by as much more.

    Args:
        depth: Of the camera, 0 where unknown. (H, W)
        cosine: Of the angle between the surface's normal and the line of sight. (H, W)
        neighbors: Other cameras with their depth.
    """
    pixels = all_pixels(camera, depth.device)
    is_compared = torch.zeros_like(depth, dtype=torch.bool).reshape(-1)
    is_agreed = is_compared.clone()
    n_agreed = torch.zeros_like(is_compared, dtype=torch.int32)
    side_miss = (MAX_MISS / cosine.reshape(-1).clamp_min(_MIN_COSINE)).clamp_max(MAX_SIDE_MISS)
    # Planes that face the camera, at these depths.
    planes = functional.pad(-depth.reshape(-1, 1), (3, 0))
    planes[:, 2] = -1.0
    for neighbor, neighbor_depth in neighbors:
        pair = reprojection.ViewPair.of(camera, neighbor)
        # The depth also stands for the images, which are not compared.
        maps = ComparedMaps(neighbor_depth, neighbor_depth, neighbor_depth)
        numbers = pair_numbers(pair, depth.device)
        error = ComparedPixels.apply(planes, pixels, maps, numbers, NO_PATCHES)[1]
        has_error = error > 0
        is_compared |= has_error
        is_agreed |= has_error & (error <= MAX_MISS)
        n_agreed += has_error & (error <= side_miss)
    is_agreed |= n_agreed >= 2
    return (is_agreed | ~is_compared).reshape(depth.shape)
