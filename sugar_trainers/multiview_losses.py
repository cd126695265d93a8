# SPDX-License-Identifier: Apache-2.0
"""Loss terms of the multi-view mode: pure functions of tensors, unweighted.

Each is a mean; a caller that works in strips passes the divisor of the whole. What they are and
where they come from is told in DOCS/MULTIVIEW.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.pixels import pixel_rays
from sugar_scene.geometry import smallest_scales
from sugar_scene.multiview.patch_matching import UNCOUNTED, patch_correlation
from sugar_scene.multiview.plane_depth import plane_depth
from sugar_scene.multiview.reprojection import ViewPair, cycle_error, cycle_weights
from sugar_trainers.losses import normals_from_depth

_LUMA = (0.299, 0.587, 0.114)
_MIN_SLOPE = 1e-6


def gray_values(photograph: Tensor, counted: Tensor | None) -> Tensor:
    """Grey values that patches are made of.

    Args:
        photograph: (H, W, 3) bytes, or floats in [0, 1]
        counted: Pixels that count; None for all. (H, W) bool

    Returns:
        In [0, 1], ``UNCOUNTED`` where pixels do not count. (H, W) float32
    """
    luma = torch.tensor(_LUMA, device=photograph.device)
    if photograph.dtype == torch.uint8:
        luma, photograph = luma / 255.0, photograph.to(torch.float32)
    gray = (photograph * luma).sum(dim=-1)
    return gray if counted is None else torch.where(counted, gray, UNCOUNTED)


def edge_weights(gray: Tensor) -> Tensor:
    """(1 - |grad I|)^2 with the slopes scaled to [0, 1]: surfaces bend where pictures have edges.

    Args:
        gray: As :func:`gray_values` returns it. (H, W)

    Returns:
        (H, W); 0 at the border and where slopes are not known.
    """
    weights = torch.zeros_like(gray)
    if min(gray.shape) < 3:
        return weights
    dx = (gray[1:-1, 2:] - gray[1:-1, :-2]) / 2
    dy = (gray[2:, 1:-1] - gray[:-2, 1:-1]) / 2
    known = gray >= 0
    crosses = known[1:-1, 1:-1] & known[1:-1, 2:] & known[1:-1, :-2] & known[2:, 1:-1]
    crosses &= known[:-2, 1:-1]
    slope = torch.where(crosses, (dx.square() + dy.square()).sqrt(), 0.0)
    slope = slope / slope.max().clamp_min(_MIN_SLOPE)
    weights[1:-1, 1:-1] = torch.where(crosses, (1 - slope).square(), 0.0)
    return weights


def plane_normal_loss(
    plane: Tensor,
    camera: Camera,
    first_row: int,
    weights: Tensor,
    *,
    rows: slice,
    total: int | Tensor,
) -> Tensor:
    """Mean of w (1 - N . n(z)): normals of the planes against those of their depth.

    Args:
        plane: Blended planes of some rows of the image. (R, W, 4)
        camera: The view, at the size of the whole image.
        first_row: Row of the image that the first of these is.
        weights: See :func:`edge_weights`, of these rows. (R, W)
        rows: Rows that count; the others are only neighbours of those.
        total: Divisor, the pixels of the whole image.

    Returns:
        Scalar. Pixels without a depth, or beside one, count as 0.
    """
    height, width = plane.shape[:2]
    if height < 3 or width < 3:
        return plane.sum() * 0
    span = first_row, first_row + height
    rays = pixel_rays(camera, span, dtype=plane.dtype, device=plane.device)
    depth, known = plane_depth(plane, rays)
    from_depth = normals_from_depth(
        depth, camera.fx, camera.fy, camera.cx - 0.5, camera.cy - 0.5 - first_row
    )
    blended = functional.normalize(plane[..., :3], dim=-1)
    error = weights * (1 - (blended * from_depth).sum(dim=-1))
    around = known[2:, 1:-1] & known[:-2, 1:-1] & known[1:-1, 2:] & known[1:-1, :-2]
    whole = functional.pad(around & known[1:-1, 1:-1], (1, 1, 1, 1))
    return torch.where(whole, error, 0.0)[rows].sum() / total


def rays_of(pixels: Tensor, camera: Camera, dtype: torch.dtype = torch.float32) -> Tensor:
    """Points at depth 1 of the middles of pixels. (n, 2) columns and rows -> (n, 3)"""
    middle = torch.tensor([camera.cx, camera.cy], dtype=dtype, device=pixels.device)
    focal = torch.tensor([camera.fx, camera.fy], dtype=dtype, device=pixels.device)
    xy = (pixels.to(dtype) + 0.5 - middle) / focal
    return torch.cat([xy, torch.ones_like(xy[:, :1])], dim=1)


def cycle_of(
    planes: Tensor, pixels: Tensor, neighbor_depth: Tensor, pair: ViewPair
) -> tuple[Tensor, Tensor]:
    """How far pixels of the reference are missed by way of the neighbour, and what that says.

    Args:
        planes: Blended planes at the pixels. (n, 4)
        pixels: Columns and rows. (n, 2) int32
        neighbor_depth: Depth of the neighbour's planes, 0 where unknown. (H', W') world units
        pair: The two views.

    Returns:
        Errors in pixels, differentiable; and weights, 0 where the views do not see the same, where
        errors mean nothing. (n,) each
    """
    rays = rays_of(pixels, pair.reference, planes.dtype)
    depth, known = plane_depth(planes, rays)
    error, met = cycle_error(rays, depth, neighbor_depth, pair)
    return error, cycle_weights(error, known & met)


def patch_mismatch(
    planes: Tensor, pixels: Tensor, gray: Tensor, neighbor_gray: Tensor, pair: ViewPair
) -> tuple[Tensor, Tensor]:
    """1 - NCC of the patches around pixels with what their planes say is the same.

    Args:
        planes: Blended planes at the pixels. (n, 4)
        pixels: Columns and rows. (n, 2) int32
        gray: Of the reference, see :func:`gray_values`. (H, W)
        neighbor_gray: Of the neighbour. (H', W')
        pair: The two views.

    Returns:
        0 where a patch does not count; and which do. (n,) each
    """
    known = plane_depth(planes, rays_of(pixels, pair.reference, planes.dtype))[1]
    # Rows without a plane get one that no ray meets, and so no patch.
    distance = torch.where(known, planes[:, 3], -1.0)
    normals = torch.where(known[:, None], planes[:, :3] / distance[:, None], 0.0)
    correlation, matched = patch_correlation(normals, pixels, gray, neighbor_gray, pair)
    return torch.where(matched, 1 - correlation, 0.0), matched


def flatness_loss(scales: Tensor, extent: float) -> Tensor:
    """Mean smallest scale in camera extents: a flat Gaussian is a plane. (V, 3) -> scalar"""
    return smallest_scales(scales).sum() / (max(scales.shape[0], 1) * extent)
