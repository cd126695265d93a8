# SPDX-License-Identifier: Apache-2.0
"""Loss terms of the SuGaR stages: pure functions of tensors, unweighted.

Each is a mean. A caller that works in chunks passes ``total``, the number of elements of the
whole, to every chunk; the chunk losses (and their gradients) then add up to those of the whole.
Empty input gives 0. Sources: SuGaR (Guédon & Lepetit, CVPR 2024), section 4, and the
depth-normal consistency of 2D Gaussian Splatting (Huang et al., SIGGRAPH 2024), section 5.
DOCS/METHODS.md has the formulas.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from sugar_scene.geometry import smallest_scales
from sugar_scene.plane_kernels import MIN_SQUARED_CROSS, UNCOUNTED, DepthNormalErrors
from sugar_scene.reprojection import bilinear
from sugar_utils.device import constants

MIN_VIEW_Z = 1e-4  # world units; points with less have no pixel

_MIN_BETA = 1e-12
_LOG_EPS = 1e-10

_LUMA = (0.299, 0.587, 0.114)
_MIN_SLOPE = 1e-6


def _mean(values: Tensor, total: int | Tensor | None) -> Tensor:
    """Sum divided by the number of elements of the whole, which is that of ``values`` if None."""
    if isinstance(total, Tensor):
        return values.sum() / total
    if total is None:
        total = values.numel()
    return values.sum() / max(total, 1)


def _mean_of_rows(values: Tensor, total: int | Tensor | None, has_spare: bool) -> Tensor:
    """The same of rows, where zeros of rows to spare may follow; these need a total."""
    if not has_spare or total is None:
        return _mean(values, total)
    # The number of zeros changes the rounding of a sum: in float64, where float32 does not show it.
    return values.sum(dtype=torch.float64).float() / total


def opacity_entropy(
    opacities: Tensor, total: int | Tensor | None = None, counted: Tensor | None = None
) -> Tensor:
    """Binary entropy of opacities, (V,) in [0, 1], pushing them to 0 or 1. counted: (V,) bool"""
    present = opacities * (opacities + _LOG_EPS).log()
    absent = (1 - opacities) * (1 - opacities + _LOG_EPS).log()
    entropy = -present - absent
    if counted is not None:
        entropy = entropy * counted
    return _mean(entropy, total)


def density_estimation_loss(
    density: Tensor,
    plane_distance: Tensor,
    beta: Tensor,
    total: int | Tensor | None = None,
    has_spare: bool = False,
) -> Tensor:
    """Mean |d - exp(-delta^2 / (2 beta^2))|: the density of a cloud that is already flat.

    Args:
        density: Unclamped density at the samples. (S,)
        plane_distance: Signed distance delta to the tangent planes. (S,) world units
        beta: Scale of the field. (S,) world units
        has_spare: Whether rows follow that are no samples; see ``_mean_of_rows``.
    """
    deviations = plane_distance / beta.clamp_min(_MIN_BETA)
    target = torch.exp(-0.5 * deviations.square())
    return _mean_of_rows((density - target).abs(), total, has_spare)


def sdf_estimation_loss(
    sdf: Tensor,
    depth_gap: Tensor,
    extent: float,
    total: int | Tensor | None = None,
    counted: Tensor | None = None,
    has_spare: bool = False,
) -> Tensor:
    """Mean of min(|sdf - |gap|| / (E / 10), 10 E).

    The clamp compares a normalised error with a length; this is how the method was published
    and tuned, and it acts only on errors beyond E squared.

    Args:
        sdf: Signed distance at the samples in front of the camera. (S,) world units
        depth_gap: Rendered depth at the sample's pixel minus the sample's depth. (S,) world units
        extent: Camera extent E in world units.
        counted: Samples that count; None for all. (S,) bool
        has_spare: Whether rows follow that are no samples and do not count.
    """
    error = (sdf - depth_gap.abs()).abs() / (extent / 10)
    error = error.clamp_max(10 * extent)
    if counted is not None:
        error = torch.where(counted, error, 0.0)
    return _mean_of_rows(error, total, has_spare)


def better_normal_loss(
    normal_error: Tensor, total: int | Tensor | None = None, *, has_spare: bool = False
) -> Tensor:
    """Mean squared distance of normals to the weighted mean of their neighbours' normals. (S,)"""
    return _mean_of_rows(normal_error, total, has_spare)


def normals_from_depth(depth: Tensor, fx: float, fy: float, cx: float, cy: float) -> Tensor:
    """Normals of the surface that a depth map describes, by central differences.

    Pixel (x, y) is unprojected to D ((x - cx) / fx, (y - cy) / fy, 1) with integer x and y: half a
    pixel away from the rasterizer's convention, which shifts the surface and keeps its normals.

    Unit normals, towards the camera, are zero on the border of one pixel and where the depth map
    has no surface (no gradient there). (H, W) world units -> (H, W, 3) in camera axes
    """
    height, width = depth.shape
    if height < 3 or width < 3:
        return (depth * 0)[..., None].expand(-1, -1, 3)
    columns = torch.arange(width, device=depth.device, dtype=depth.dtype)
    rows = torch.arange(height, device=depth.device, dtype=depth.dtype)
    x = (columns - cx) / fx
    y = (rows - cy) / fy
    points = torch.stack([depth * x, depth * y[:, None], depth], dim=-1)
    down = points[2:, 1:-1] - points[:-2, 1:-1]
    right = points[1:-1, 2:] - points[1:-1, :-2]
    cross = torch.linalg.cross(down, right)
    squared = cross.square().sum(dim=-1, keepdim=True)
    # Normalising a zero vector multiplies its gradient by the inverse of an epsilon.
    is_regular = squared > MIN_SQUARED_CROSS
    length = torch.where(is_regular, squared, 1.0).sqrt()
    normals = torch.where(is_regular, cross / length, 0.0)
    return functional.pad(normals, (0, 0, 1, 1, 1, 1))


def fused_depth_normal_consistency(
    depth: Tensor,
    normal_xy: Tensor,
    intrinsics: Tensor,
    *,
    rows: slice | None = None,
    total: int | Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Mean of 1 - N . n_D over all pixels, n_D the normals of the depth map.

    The border and empty pixels count with the constant 1.

    Args:
        depth: May be a column of wider pixels. (H, W) float32, world units
        normal_xy: Blended x and y of the normals in camera axes, likewise, which
            ``complete_normals`` makes unit normals towards the camera. (H, W, 2) float32
        intrinsics: fx, fy, cx and cy in pixels, from the top left edge of this map. (4,)
        rows: Rows that count; strips continue one row beyond them as a halo.
        counted: Pixels that count; None for all. (H, W) bool
    """
    if rows is None:
        rows = slice(None)
    if total is None:
        total = max(depth[rows].numel(), 1)
    weights = 1.0 if counted is None else counted
    return DepthNormalErrors.apply(depth, normal_xy, intrinsics, weights, rows, total)


def lookup_depth(depth_map: Tensor, view_points: Tensor, intrinsics: Tensor) -> Tensor:
    """Read a depth map, (H, W), where points in camera axes, (S, 3), project. (S,) world units

    Bilinearly, clamped at the border; gradients reach the map and the points. Points with z below
    ``MIN_VIEW_Z`` have no pixel: their values are finite but mean nothing, mask them out.

    Args:
        intrinsics: fx, fy, cx and cy in pixels. (4,)
    """
    fx, fy, cx, cy = intrinsics.unbind()
    x, y, z = view_points.unbind(-1)
    z = torch.where(z > MIN_VIEW_Z, z, 1.0)
    u = fx * x / z + cx
    v = fy * y / z + cy
    return bilinear(depth_map, u, v)


def near_surface_mask(depth_gap: Tensor, view_std: Tensor, visible: Tensor) -> Tensor:
    """Visible Gaussians within two deviations, along the line of sight, of the depth map. (N,)"""
    return visible & (depth_gap.detach().abs() < 2 * view_std.detach())


@functools.lru_cache(maxsize=16)
def _luma(of_bytes: bool, device: torch.device) -> Tensor:
    """Shares of the colours in a grey value in 0 to 1. (3, 1, 1)"""
    shares = constants(_LUMA, device)
    if of_bytes:
        shares = shares / 255.0
    return shares[:, None, None]


def gray_values(photograph: Tensor, counted: Tensor | None) -> Tensor:
    """Grey values in 0 to 1 of bytes or floats, (H, W, 3); ``UNCOUNTED`` out of masks. (H, W)"""
    luma = _luma(photograph.dtype == torch.uint8, photograph.device)
    # Colour by colour: sums along rows of three are slow.
    planes = photograph.movedim(-1, 0).contiguous()
    gray = (planes * luma).sum(dim=0)
    return gray if counted is None else torch.where(counted, gray, UNCOUNTED)


def edge_weights(gray: Tensor) -> Tensor:
    """(1 - |grad I|)^2 with the slopes scaled to [0, 1]: normals may change at image edges. (H, W)

    0 at the border and where slopes are not known, as for grey values of ``UNCOUNTED``.
    """
    weights = torch.zeros_like(gray)
    if min(gray.shape) < 3:
        return weights
    dx = (gray[1:-1, 2:] - gray[1:-1, :-2]) / 2
    dy = (gray[2:, 1:-1] - gray[:-2, 1:-1]) / 2
    is_counted = gray >= 0
    has_slope = is_counted[1:-1, 1:-1] & is_counted[1:-1, 2:] & is_counted[1:-1, :-2]
    has_slope = has_slope & is_counted[2:, 1:-1] & is_counted[:-2, 1:-1]
    slope = (dx.square() + dy.square()).sqrt()
    slope = torch.where(has_slope, slope, 0.0)
    slope = slope / slope.max().clamp_min(_MIN_SLOPE)
    weights[1:-1, 1:-1] = torch.where(has_slope, (1 - slope).square(), 0.0)
    return weights


def flatness_loss(scales: Tensor, extent: float, counted: Tensor) -> Tensor:
    """Mean smallest scale in camera extents: a flat Gaussian is a plane. (N, 3), (N,) bool"""
    total = torch.where(counted, smallest_scales(scales), 0.0).sum()
    return total / (counted.sum().clamp_min(1) * extent)
