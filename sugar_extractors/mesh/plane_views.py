# SPDX-License-Identifier: Apache-2.0
"""Views of the planes that Gaussians blend to, with the depth left out that is not to be trusted.

For models of the multi-view mode, whose Gaussians are planes. A depth counts where the surface is
not seen at a grazing angle, and where a neighbouring view that sees the place has the same depth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.rasterization import rasterize
from sugar_extractors.mesh.tsdf import DepthView, Renderer
from sugar_scene.multiview.reprojection import (
    REACH,
    NeighborViews,
    ViewPair,
    cycle_error,
    plane_depth,
)

MAX_ANGLE = 80.0  # largest angle between a surface's normal and the line of sight, in degrees
MIN_ALPHA = 0.5  # pixels that the Gaussians cover less have no depth
MAX_MISS = 3.0  # pixels by which the way to a neighbour and back may miss; 1 leaves more holes

MAX_NEIGHBORS = 4  # neighbours that a depth is compared with
_KEPT_BYTES = 2**30


def plane_renderer(
    gaussians: Gaussians, cameras: Sequence[Camera], neighbors: NeighborViews, extent: float
) -> Renderer:
    """What renders depth and colour of a view for the fusion. extent: in world units"""
    reach = REACH * extent
    largest = max(4 * camera.width * camera.height for camera in cameras)

    @functools.lru_cache(maxsize=max(1 + MAX_NEIGHBORS, _KEPT_BYTES // largest))
    def depth_of(camera: Camera) -> Tensor:
        return plane_view(gaussians, camera, reach, colored=False).depth

    def render(camera: Camera) -> DepthView:
        view = plane_view(gaussians, camera, reach)
        others = [(other, depth_of(other)) for other in neighbors.of(camera.name)[:MAX_NEIGHBORS]]
        confirmed = confirmed_depth(view.depth, camera, others)
        return DepthView(camera, torch.where(confirmed, view.depth, 0.0), view.color)

    return render


def plane_view(
    gaussians: Gaussians, camera: Camera, reach: float, *, colored: bool = True
) -> DepthView:
    """Depth of the planes up to a distance and, if wanted, colour of degree 0."""
    output = rasterize(gaussians, camera, rgb=colored, plane_reach=reach, sh_degree=0)
    plane = output.plane
    rays = pixel_rays(camera, dtype=plane.dtype, device=plane.device)
    depth, known = plane_depth(plane, rays)
    cosine = -(plane[..., :3] * rays).sum(dim=-1)
    cosine = cosine / (plane[..., :3].norm(dim=-1) * rays.norm(dim=-1)).clamp_min(1e-12)
    known &= (output.alpha >= MIN_ALPHA) & (cosine > math.cos(math.radians(MAX_ANGLE)))
    color = torch.zeros_like(rays)
    if colored:
        color = (output.image / output.alpha.clamp_min(1e-6)[..., None]).clamp(0, 1)
    return DepthView(camera, torch.where(known, depth, 0.0), color)


def confirmed_depth(
    depth: Tensor, camera: Camera, neighbors: Sequence[tuple[Camera, Tensor]]
) -> Tensor:
    """Where a neighbour has the same depth, or none has any (0) there. (H, W) bool"""
    rays = pixel_rays(camera, dtype=depth.dtype, device=depth.device)
    compared = torch.zeros_like(depth, dtype=torch.bool).reshape(-1)
    agreed = compared.clone()
    flat = depth.reshape(-1)
    for neighbor, there in neighbors:
        pair = ViewPair.of(camera, neighbor)
        error, known = cycle_error(rays.reshape(-1, 3), flat, there, pair)
        compared |= known
        agreed |= known & (error <= MAX_MISS)
    return (agreed | ~compared).reshape(depth.shape)
