# SPDX-License-Identifier: Apache-2.0
"""Terms of blended planes in torch, of any type: twins of :mod:`sugar_scene.plane_kernels`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera, pixel_rays
from sugar_scene.plane_kernels import EPSILON, PATCH_RADIUS
from sugar_scene.reprojection import (
    MAX_CYCLE,
    MIN_DEPTH,
    MIN_FACING,
    MIN_SQUARE,
    ViewPair,
)
from sugar_trainers.losses import normals_from_depth


def plane_depth(plane: Tensor, rays: Tensor) -> tuple[Tensor, Tensor]:
    """Depth at which rays of depth 1, (..., 3), meet blended planes N and D, (..., 4).

    Returns:
        Depth along the view axis, 1 where it is undefined, in world units; and where it is known.
        (...,) each. The gradient reaches the planes, where there is a depth.
    """
    facing = (plane[..., :3] * rays).sum(dim=-1)
    distance = plane[..., 3]
    known = (facing < -MIN_FACING) & (distance < MIN_DEPTH * facing)
    return torch.where(known, distance, -1.0) / torch.where(known, facing, -1.0), known


def bilinear_depth(depth: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Read a depth map, (H, W), 0 where unknown, between the middles of its pixels, (n, 2).

    Returns:
        Depth, and where all of the four pixels around have one. (n,) each; the gradient reaches
        the positions.
    """
    height, width = depth.shape
    x, y = (at - 0.5).unbind(-1)
    x0, y0 = x.detach().floor(), y.detach().floor()
    inside = (x0 >= 0) & (y0 >= 0) & (x0 < width - 1) & (y0 < height - 1)
    # Positions that are not finite are inside of nothing.
    first = torch.where(inside, y0, 0).long() * width + torch.where(inside, x0, 0).long()
    right, down = x - x0, y - y0
    step, below = int(width > 1), width if height > 1 else 0
    flat = depth.reshape(-1)
    corners = [flat[first + more] for more in (0, step, below, below + step)]
    known = inside & (torch.stack(corners) > 0).all(dim=0)
    top = corners[0] + (corners[1] - corners[0]) * right
    bottom = corners[2] + (corners[3] - corners[2]) * right
    return torch.where(known, top + (bottom - top) * down, 1.0), known


def cycle_error(
    rays: Tensor, depth: Tensor, neighbor_depth: Tensor, pair: ViewPair
) -> tuple[Tensor, Tensor]:
    """Return by how much pixels are missed on the way to the neighbour and back.

    Args:
        rays: Points of the pixels' rays at depth 1. (n, 3)
        depth: Depth of the reference at the pixels. (n,) world units
        neighbor_depth: Depth map of the neighbour, 0 where unknown. (H', W') world units

    Returns:
        Distances in pixels of the reference, (n,), with a gradient to ``depth``, and where there is
        one: the point lies in the neighbour's image, which has a depth there.
    """
    reference, neighbor = pair.reference, pair.neighbor
    rotation = depth.new_tensor(pair.rotation)
    translation = depth.new_tensor(pair.translation)
    there = (rays * depth[:, None]) @ rotation.T + translation
    in_front = there[:, 2] > MIN_DEPTH
    tangents = there[:, :2] / torch.where(in_front, there[:, 2], 1.0)[:, None]
    focal = depth.new_tensor([neighbor.fx, neighbor.fy])
    middle = depth.new_tensor([neighbor.cx, neighbor.cy])
    seen, known = bilinear_depth(neighbor_depth, tangents * focal + middle)
    met = torch.cat([tangents, torch.ones_like(tangents[:, :1])], dim=1) * seen[:, None]
    back = (met - translation) @ rotation
    known = known & in_front & (back[:, 2] > MIN_DEPTH)
    again = back[:, :2] / torch.where(known, back[:, 2], 1.0)[:, None]
    missed = (again - rays[:, :2]) * depth.new_tensor([reference.fx, reference.fy])
    missed = torch.where(known[:, None], missed, 0.0)
    squares = missed.square().sum(dim=-1)
    # A square root has no gradient at zero.
    return squares.clamp_min(MIN_SQUARE).sqrt(), known


def cycle_weights(error: Tensor, known: Tensor) -> Tensor:
    """exp(-error), and 0 where the neighbour sees something else; without a gradient. (n,)"""
    error = error.detach()
    return torch.where(known & (error < MAX_CYCLE), (-error).exp(), 0.0)


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

    Pixels without a depth, or beside one, count as 0.

    Args:
        plane: (R, W, 4)
        first_row: Of the image.
        weights: See ``edge_weights``. (H, W)
        rows: Rows that count.
        total: Divisor, the pixels of the whole image.
    """
    height, width = plane.shape[:2]
    if height < 3 or width < 3:
        return plane.sum() * 0
    rays = pixel_rays(camera, dtype=plane.dtype, device=plane.device)
    rays = rays[first_row : first_row + height]
    depth, known = plane_depth(plane, rays)
    from_depth = normals_from_depth(
        depth, camera.fx, camera.fy, camera.cx - 0.5, camera.cy - 0.5 - first_row
    )
    blended = functional.normalize(plane[..., :3], dim=-1)
    error = weights[first_row : first_row + height] * (1 - (blended * from_depth).sum(dim=-1))
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
    """Cycle errors in pixels, differentiable, and their weights. (n,) each

    Weights are 0 where the views do not see the same; errors mean nothing there.

    Args:
        planes, pixels: Blended planes, (n, 4), at columns and rows, (n, 2) int32.
        neighbor_depth: Depth of the neighbour's planes, 0 where unknown. (H', W') world units
    """
    rays = rays_of(pixels, pair.reference, planes.dtype)
    depth, known = plane_depth(planes, rays)
    error, met = cycle_error(rays, depth, neighbor_depth, pair)
    return error, cycle_weights(error, known & met)


def patch_correlation(
    planes: Tensor, pixels: Tensor, gray: Tensor, gray2: Tensor, pair: ViewPair
) -> Tensor:
    """NCC of patches on planes m . X = 1, (n, 3), that lie in both images. (n,)"""
    reference, neighbor = pair.reference, pair.neighbor
    offsets = torch.arange(-PATCH_RADIUS, PATCH_RADIUS + 1)
    dy, dx = torch.meshgrid(offsets, offsets, indexing="ij")
    patch = pixels[:, None, :].long() + torch.stack([dx, dy], dim=-1).reshape(1, -1, 2)
    a = gray[patch[..., 1], patch[..., 0]]
    rays = rays_of(patch.reshape(-1, 2), reference, planes.dtype).reshape(*patch.shape[:2], 3)
    points = rays / (rays * planes[:, None, :]).sum(dim=-1, keepdim=True)
    there = points @ torch.tensor(pair.rotation).T + torch.tensor(pair.translation)
    u = neighbor.fx * there[..., 0] / there[..., 2] + neighbor.cx - 0.5
    v = neighbor.fy * there[..., 1] / there[..., 2] + neighbor.cy - 0.5
    x0, y0 = u.detach().floor().long(), v.detach().floor().long()
    right, down = u - x0, v - y0
    top = gray2[y0, x0] * (1 - right) + gray2[y0, x0 + 1] * right
    bottom = gray2[y0 + 1, x0] * (1 - right) + gray2[y0 + 1, x0 + 1] * right
    b = top * (1 - down) + bottom * down
    a, b = (values - values.mean(dim=1, keepdim=True) for values in (a, b))
    scale = ((a * a).mean(dim=1) + EPSILON) * ((b * b).mean(dim=1) + EPSILON)
    return (a * b).mean(dim=1) / scale.sqrt()
