# SPDX-License-Identifier: Apache-2.0
"""The render call: Gaussians and a camera in, named maps out; blending weights of Gaussians."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization.projection import ChannelLayout, Projection, project
from gaussian_splatting.rasterization.rasterizers import WARP, Rasterizer, blend
from sugar_utils.device import constants

NORMAL_EPS = 1e-12
"""Keeps the square root of :func:`complete_normals` differentiable at grazing angles."""

_MIN_WEIGHT = 1e-6


@dataclass(frozen=True)
class RenderedMaps:
    """Maps of a render call; None where a map was not requested."""

    image: Tensor | None = None  # colour over the background, not clamped above 1, (H, W, 3)
    depth: Tensor | None = None  # blended view-axis depth, not divided by alpha, (H, W) world units
    # Unit normals in camera axes, towards the camera (z <= 0), (H, W, 3).
    normal: Tensor | None = None
    # Blended planes of the Gaussians: normals in camera axes towards the camera, and their
    # distances n . X to the camera (negative), not divided by alpha. (H, W, 4).
    plane: Tensor | None = None
    features: Tensor | None = None  # blended free features over a zero background, (H, W, F)


@dataclass
class RenderOutput:
    """Result of a render call.

    The properties ``image``, ``depth``, ``normal``, ``plane`` and ``features`` raise a
    ``ValueError`` where the map was not requested; ``maps`` says which were.
    """

    maps: RenderedMaps
    alpha: Tensor  # 1 minus the transmittance at the end of the ray, (H, W)
    radii: Tensor  # screen radius, 0 for Gaussians that were culled, (N,) int32 pixels
    # Projected centres; call ``retain_grad()`` before a backward pass to read the pixel-space
    # gradients that densification needs, (N, 2) pixels.
    means2d: Tensor

    @property
    def image(self) -> Tensor:
        """Colour over the background, not clamped above 1. (H, W, 3)"""
        return _requested(self.maps.image, "rgb")

    @property
    def depth(self) -> Tensor:
        """Blended view-axis depth, not divided by alpha. (H, W) world units"""
        return _requested(self.maps.depth, "depth")

    @property
    def normal(self) -> Tensor:
        """Unit normals in camera axes, towards the camera. (H, W, 3)"""
        return _requested(self.maps.normal, "normal")

    @property
    def plane(self) -> Tensor:
        """Blended planes; see :class:`RenderedMaps`. (H, W, 4)"""
        return _requested(self.maps.plane, "plane_reach")

    @property
    def features(self) -> Tensor:
        """Blended free features over a zero background. (H, W, F)"""
        return _requested(self.maps.features, "features")

    @property
    def visible(self) -> Tensor:
        """Gaussians that were not culled. (N,) bool"""
        return self.radii > 0


def _requested(values: Tensor | None, argument: str) -> Tensor:
    if values is None:
        raise ValueError(f"this map was not rendered: pass {argument} to rasterize")
    return values


def complete_normals(xy: Tensor) -> Tensor:
    """Blended x and y in camera axes with z = -sqrt(1 - min(1, x^2 + y^2)). (..., 2) -> (..., 3)

    The gradient is cut where the square root would make it infinite.
    """
    remainder = 1.0 - (xy * xy).sum(dim=-1, keepdim=True)
    return torch.cat([xy, -remainder.clamp_min(NORMAL_EPS).sqrt()], dim=-1)


def channel_background(
    projection: Projection, color: Tensor | None = None, *, farthest_depth_behind: bool = False
) -> Tensor:
    """Return the background of each channel: zero but for colour and, if requested, depth. (C,)"""
    layout = projection.layout
    depths = projection.depths
    if color is not None and layout.total == len(color):
        # There is nothing but colour; it is read only.
        return color.to(depths)
    behind = torch.zeros(layout.total, device=depths.device)
    if layout.rgb is not None and color is not None:
        behind[layout.rgb : layout.rgb + 3] = color.to(behind)
    if layout.depth is not None and farthest_depth_behind and depths.shape[0]:
        behind[layout.depth] = depths.max()
    return behind


def rasterize(
    gaussians: Gaussians,
    camera: Camera,
    background: Tensor | None = None,
    *,
    rgb: bool = True,
    depth: bool = False,
    normal: bool = False,
    plane_reach: float | None = None,
    features: Tensor | None = None,
    sh_degree: int = 3,
    farthest_depth_behind: bool = False,
    rasterizer: Rasterizer = WARP,
) -> RenderOutput:
    """Render all requested maps in one pass; every channel costs memory and time.

    Args:
        background: Colour behind everything; black when None. (3,)
        plane_reach: Maximum depth, in world units, of Gaussians whose planes are rendered: through
            their centres, square to their shortest axes.
        features: Free per-Gaussian values to blend. (N, F)
        farthest_depth_behind: Whether the largest depth of any Gaussian is the depth's background.
    """
    projection = project(
        gaussians,
        camera,
        rgb=rgb,
        depth=depth,
        normal=normal,
        plane_reach=plane_reach,
        features=features,
        sh_degree=sh_degree,
    )
    behind = channel_background(projection, background, farthest_depth_behind=farthest_depth_behind)
    pixels, transmittance = blend(projection, behind, rasterizer)
    return RenderOutput(
        maps=_maps_of(pixels, projection.layout),
        alpha=1.0 - transmittance,
        radii=projection.radii,
        means2d=projection.means2d,
    )


def _maps_of(pixels: Tensor, layout: ChannelLayout) -> RenderedMaps:
    """Split blended channels, (H, W, C), into maps."""

    def columns(start: int | None, width: int) -> Tensor | None:
        return None if start is None else pixels[..., start : start + width]

    normal_xy = columns(layout.normal, 2)
    return RenderedMaps(
        image=columns(layout.rgb, 3),
        depth=None if layout.depth is None else pixels[..., layout.depth],
        normal=None if normal_xy is None else complete_normals(normal_xy),
        plane=columns(layout.plane, 4),
        features=columns(layout.features, layout.n_features),
    )


def plain_background(white: bool, device: torch.device) -> Tensor:
    """Return white or black; a shared tensor that must not be changed. (3,)"""
    value = 1.0 if white else 0.0
    return constants((value, value, value), device)


@torch.no_grad()
def render_view(
    gaussians: Gaussians,
    camera: Camera,
    *,
    white: bool,
    geometry: bool,
    sh_degree: int = 3,
    rasterizer: Rasterizer = WARP,
) -> RenderOutput:
    """Render colour on a plain background, and depth and normals if ``geometry`` is true."""
    return rasterize(
        gaussians,
        camera,
        plain_background(white, gaussians.means.device),
        depth=geometry,
        normal=geometry,
        sh_degree=sh_degree,
        rasterizer=rasterizer,
    )


def weight_sums(
    gaussians: Gaussians, camera: Camera, pixels: Tensor, rasterizer: Rasterizer = WARP
) -> Tensor:
    """Sum blending weight times value over a view, per Gaussian. (H, W, F) -> (N, F)

    The sums are the gradient of a blended feature with respect to the Gaussian's value of it.
    """
    features = pixels.new_zeros(len(gaussians), pixels.shape[2], requires_grad=True)
    blended = rasterize(gaussians, camera, rgb=False, features=features, rasterizer=rasterizer)
    return torch.autograd.grad(blended.features, features, pixels)[0]


def masked_shares(
    gaussians: Gaussians, views: Iterable[tuple[Camera, Tensor]], rasterizer: Rasterizer = WARP
) -> Tensor:
    """Return the share of each Gaussian's blending weights inside of masks. (N,)

    Masks are (H, W), 0 to 1. The share is 0 for Gaussians that no view shows.
    """
    sums = torch.zeros(len(gaussians), 2, device=gaussians.means.device)
    for camera, mask in views:
        inside = mask.to(sums)
        pixels = torch.stack([inside, torch.ones_like(inside)], dim=-1)
        sums += weight_sums(gaussians, camera, pixels, rasterizer)
    return sums[:, 0] / sums[:, 1].clamp_min(_MIN_WEIGHT)
