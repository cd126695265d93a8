# SPDX-License-Identifier: Apache-2.0
"""Dense torch twin of the rasterizer, for tests: every Gaussian against every pixel, any dtype.

It is differentiated by autograd. The places where the 3DGS rasterizer's gradient is not the
derivative of its image are written with ``detach``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.spherical_harmonics import sh_basis_of
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization.projection_kernels import (
    ALPHA_MAX,
    ALPHA_MIN,
    LOW_PASS,
    MIN_COVERAGE,
    TILE,
    TRANSMITTANCE_MIN,
    linearisation_limits,
    n_tiles,
)
from gaussian_splatting.rasterization.render import RenderedMaps, RenderOutput, complete_normals


@dataclass
class ReferenceSplats:
    """Projected Gaussians, culled ones with radius 0; centres in camera axes."""

    centers: Tensor
    means2d: Tensor
    conics: Tensor
    radii: Tensor
    depths: Tensor
    tiles: Tensor
    shares: Tensor  # of the opacities that are left where splats are widened
    cutoff: float  # exponent at which splats end at the latest


def rotation_matrices_reference(quats: Tensor) -> Tensor:
    """Rotations of unit quaternions, wxyz. (N, 4) -> (N, 3, 3)"""
    w, x, y, z = quats.unbind(-1)
    rows = [
        1 - 2 * (y * y + z * z),
        2 * (x * y - w * z),
        2 * (x * z + w * y),
        2 * (x * y + w * z),
        1 - 2 * (x * x + z * z),
        2 * (y * z - w * x),
        2 * (x * z - w * y),
        2 * (y * z + w * x),
        1 - 2 * (x * x + y * y),
    ]
    return torch.stack(rows, dim=-1).reshape(-1, 3, 3)


def _clamp_as_constant(value: Tensor, depth: Tensor, low: float, high: float) -> Tensor:
    ratio = value / depth
    clamped = (ratio.clamp(low, high) * depth).detach()
    return torch.where((ratio < low) | (ratio > high), clamped, value)


def project_reference(gaussians: Gaussians, camera: Camera) -> ReferenceSplats:
    """EWA projection of all Gaussians at once."""
    like = gaussians.means
    rotation = torch.as_tensor(camera.rotation, dtype=like.dtype, device=like.device)
    translation = torch.as_tensor(camera.translation, dtype=like.dtype, device=like.device)
    t = like @ rotation.T + translation
    x, y, z = t.unbind(-1)
    x_min, x_max, y_min, y_max = linearisation_limits(camera)
    tx = _clamp_as_constant(x, z, x_min, x_max)
    ty = _clamp_as_constant(y, z, y_min, y_max)
    zero = torch.zeros_like(z)
    jacobian = torch.stack(
        [camera.fx / z, zero, -camera.fx * tx / z**2, zero, camera.fy / z, -camera.fy * ty / z**2],
        dim=-1,
    ).reshape(-1, 2, 3)
    scaled = rotation_matrices_reference(gaussians.quats) * gaussians.scales[:, None, :]
    v = jacobian @ rotation @ scaled
    cov = v @ v.transpose(1, 2)
    a, b, c = cov[:, 0, 0] + LOW_PASS, cov[:, 0, 1], cov[:, 1, 1] + LOW_PASS
    det = a * c - b * b
    means2d = torch.stack(
        [camera.fx * x / z + camera.cx - 0.5, camera.fy * y / z + camera.cy - 0.5], dim=-1
    )
    middle = 0.5 * (a + c)
    radii = torch.ceil(3 * (middle + (middle**2 - det).clamp_min(0.1).sqrt()).sqrt()).detach()
    valid = (z > camera.near) & (det > 0) & torch.isfinite(gaussians.opacities)
    across, down = n_tiles(camera)
    u, v = means2d.unbind(-1)
    corners = [
        ((u - radii) / TILE, across),
        ((u + radii + TILE - 1) / TILE, across),
        ((v - radii) / TILE, down),
        ((v + radii + TILE - 1) / TILE, down),
    ]
    tiles = torch.stack([q.detach().clamp(0, n).nan_to_num().int() for q, n in corners], dim=-1)
    valid &= (tiles[:, 1] > tiles[:, 0]) & (tiles[:, 3] > tiles[:, 2])
    conics = torch.stack([c / det, -b / det, a / det], dim=-1)
    shares = torch.ones_like(z)
    if gaussians.antialiased:
        own = (a - LOW_PASS) * (c - LOW_PASS) - b * b
        shares = (own / det).clamp_min(MIN_COVERAGE).sqrt()
    radii = torch.where(valid, radii, zero).int()
    cutoff = 0.5 * gaussians.cutoff_deviations**2
    return ReferenceSplats(t, means2d, conics, radii, z, tiles, shares, cutoff)


def _alphas(splats: ReferenceSplats, opacities: Tensor, camera: Camera) -> Tensor:
    """Opacity of each splat at each pixel, zero where the contract says so. (H, W, N)"""
    like = splats.means2d
    row = torch.arange(camera.height, dtype=like.dtype, device=like.device)[:, None, None]
    col = torch.arange(camera.width, dtype=like.dtype, device=like.device)[None, :, None]
    dx, dy = col - splats.means2d[:, 0], row - splats.means2d[:, 1]
    conic = splats.conics
    sigma = 0.5 * (conic[:, 0] * dx * dx + conic[:, 2] * dy * dy) + conic[:, 1] * dx * dy
    uncapped = opacities * torch.exp(-sigma)
    # Straight through: the cap changes the value, not the gradient.
    alpha = uncapped + (uncapped.clamp_max(ALPHA_MAX) - uncapped).detach()
    tile_x, tile_y = (col // TILE), (row // TILE)
    t = splats.tiles
    inside = (tile_x >= t[:, 0]) & (tile_x < t[:, 1]) & (tile_y >= t[:, 2]) & (tile_y < t[:, 3])
    used = inside & (splats.radii > 0) & (sigma >= 0) & (alpha >= ALPHA_MIN)
    used &= sigma <= splats.cutoff
    return torch.where(used, alpha, torch.zeros_like(alpha))


def _colors(gaussians: Gaussians, camera: Camera, degree: int) -> Tensor:
    center = torch.as_tensor(
        camera.center, dtype=gaussians.means.dtype, device=gaussians.means.device
    )
    direction = torch.nn.functional.normalize(gaussians.means - center, dim=-1)
    n = (degree + 1) ** 2
    basis = sh_basis_of(direction)[:, :n, None]
    coefficients = torch.cat([gaussians.sh_dc, gaussians.sh_rest], dim=1)[:, :n]
    return ((basis * coefficients).sum(dim=1) + 0.5).clamp_min(0)


def _normals(gaussians: Gaussians, camera: Camera) -> Tensor:
    axis = gaussians.scales.argmin(dim=-1)
    rotations = rotation_matrices_reference(gaussians.quats)
    normal = rotations[torch.arange(len(gaussians), device=axis.device), :, axis]
    to_camera = (
        torch.as_tensor(camera.center, dtype=normal.dtype, device=normal.device) - gaussians.means
    )
    facing = torch.sign((normal * to_camera).sum(-1, keepdim=True)).detach()
    return (normal * facing) @ torch.as_tensor(
        camera.rotation, dtype=normal.dtype, device=normal.device
    ).T


def rasterize_reference(
    gaussians: Gaussians,
    camera: Camera,
    background: Tensor | None = None,
    *,
    features: Tensor | None = None,
    sh_degree: int = 3,
    farthest_depth_behind: bool = False,
    plane_reach: float | None = None,
    front_transmittance: float = 0.0,
) -> RenderOutput:
    """All images of :func:`rasterize`, in O(H W N) memory; arguments as there."""
    dtype = gaussians.means.dtype
    splats = project_reference(gaussians, camera)
    # The contract orders by float32 depth, which decides near-ties.
    order = torch.argsort(splats.depths.detach().float(), stable=True)
    features = gaussians.means.new_zeros(len(gaussians), 0) if features is None else features
    normals = _normals(gaussians, camera)
    distances = (normals * splats.centers).sum(dim=-1)
    planes = torch.cat([normals, distances[:, None]], dim=-1)
    if plane_reach is not None:
        planes = torch.where(splats.depths[:, None] <= plane_reach, planes, 0.0)
    values = torch.cat(
        [
            _colors(gaussians, camera, sh_degree),
            splats.depths[:, None],
            normals[:, :2],
            planes,
            features,
        ],
        dim=-1,
    )[order]
    alpha = _alphas(splats, gaussians.opacities * splats.shares, camera)[..., order]
    # A splat that would take the transmittance below the limit is not blended, nor any after it.
    through = torch.cumprod(1 - alpha, dim=-1)
    alpha = alpha * torch.cumprod((through.detach() >= TRANSMITTANCE_MIN).to(dtype), dim=-1)
    through = torch.cumprod(1 - alpha, dim=-1)
    # One that takes it below the other limit is the last that is blended.
    before = torch.cat([torch.ones_like(through[..., :1]), through[..., :-1]], dim=-1)
    alpha = alpha * (before.detach() >= front_transmittance).to(dtype)
    through = torch.cumprod(1 - alpha, dim=-1)
    before = torch.cat([torch.ones_like(through[..., :1]), through[..., :-1]], dim=-1)
    left = through[..., -1]
    behind = torch.zeros(values.shape[1], dtype=dtype, device=values.device)
    if background is not None:
        behind[:3] = background.to(dtype)
    if farthest_depth_behind:
        behind[3] = splats.depths.detach().max()
    pixels = (alpha * before) @ values + left[..., None] * behind
    maps = RenderedMaps(
        image=pixels[..., :3],
        depth=pixels[..., 3],
        normal=complete_normals(pixels[..., 4:6]),
        plane=pixels[..., 6:10],
        features=pixels[..., 10:],
    )
    return RenderOutput(
        maps=maps,
        alpha=1 - left,
        radii=splats.radii,
        means2d=splats.means2d,
    )
