# SPDX-License-Identifier: Apache-2.0
"""Photographs compared through a mesh: what they say about the offsets of its vertices.

A pixel of one photograph is carried into another one by the first surface on its ray. Moving the
surface along its normal moves that point along the ray, and the place in the other photograph with
it; the chain of these derivatives, by the weights of a triangle's corners, reaches the vertices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.data.images import dilated, sampled_at
from sugar_extractors.mesh.refinement.window_correlation import RADIUS, Correlation, correlate
from sugar_extractors.photographs import Photograph
from sugar_scene.reprojection import NeighborViews, ViewPair, ordered_sum
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_scene.triangle_rasterizer import mesh_tensors, rasterize_triangles

NEIGHBORS = 4  # views that each one is compared with
_MIN_COSINE = 0.2  # of the angle between normal and line of sight, of surfaces that count
_BEHIND = 3.0  # pixels behind the first surface at which a place is still seen
_JUMP = 6.0  # pixels between the depths of neighbouring pixels that lie on two surfaces
_CACHE_BYTES = 2**29
_PIXEL_BYTES = 45  # of a view that is kept


@dataclass(frozen=True)
class ComparedViews:
    """The photographs that are compared."""

    cameras: Sequence[Camera]
    neighbors: NeighborViews
    photograph: Photograph
    device: torch.device


class VertexTerms(NamedTuple):
    """The disagreement of photographs as a quadratic function of the vertices' offsets.

    Offsets are along normals, in world units. Disagreement is the sum of weight (1 - score).
    """

    gradient: np.ndarray  # (V,)
    curvature: np.ndarray  # at least 0, (V,)
    n_compared: np.ndarray  # pixels that were compared around each vertex, (V,)
    score: float  # mean correlation of the windows that count


class _View(NamedTuple):
    """A photograph and the mesh in it."""

    camera: Camera
    grey: Tensor  # (H, W) in [-0.5, 0.5]
    gradient: Tensor  # of the grey values, along x and y, (2, H, W) per pixel
    counts: Tensor  # pixels that are compared, N in all, (H, W) bool
    depth: Tensor  # of the mesh, (H, W)
    corners: Tensor  # rows of the vertices of the triangle at each of these pixels, (N, 3) int32
    weights: Tensor  # of the corners, (N, 3)
    lift: Tensor  # how depth changes as the surface moves along its normal, (N,)


class _Carried(NamedTuple):
    """A neighbouring photograph as a view's pixels see it through the mesh."""

    grey: Tensor  # (H, W)
    by_depth: Tensor  # its derivative with the depth of the view's pixels, (H, W)
    counts: Tensor  # pixels that both views see, (H, W) bool


def vertex_terms(mesh: TriangleMesh, views: ComparedViews, reduction: int) -> VertexTerms:
    """Compare each view with its neighbours.

    Args:
        mesh: The mesh that photographs are compared through.
        reduction: How many times smaller the photographs are compared than they are.
    """
    vertices, faces = mesh_tensors(mesh, views.device)
    largest = max(camera.n_pixels for camera in views.cameras)
    n_kept = max(1 + NEIGHBORS, _CACHE_BYTES * reduction**2 // (_PIXEL_BYTES * largest))

    @functools.lru_cache(maxsize=n_kept)
    def view_of(camera: Camera) -> _View:
        return _view(camera, vertices, faces, views.photograph, reduction)

    totals = torch.zeros(3, mesh.n_vertices, dtype=torch.float64, device=views.device)
    sum_scores = 0.0
    sum_weights = 0.0
    for camera in views.cameras:
        view = view_of(camera)
        planes = torch.zeros(3, *view.grey.shape, device=views.device)
        for neighbor in views.neighbors.of(camera.name)[:NEIGHBORS]:
            carried = _carried(view, view_of(neighbor))
            found = correlate(view.grey, carried.grey, carried.counts)
            planes += _by_depth(found, carried)
            sum_scores += float((found.weight * found.score).sum())
            sum_weights += float(found.weight.sum())
        totals += _at_vertices(view, planes, mesh.n_vertices)
    gradient, curvature, n_compared = totals.cpu().numpy()
    return VertexTerms(gradient, curvature, n_compared, sum_scores / max(sum_weights, 1e-12))


def _view(
    camera: Camera, vertices: Tensor, faces: Tensor, photograph: Photograph, reduction: int
) -> _View:
    image = photograph(camera).permute(2, 0, 1)
    if reduction > 1:
        camera = camera.scaled(1 / reduction)
        image = functional.interpolate(image[None], camera.shape, mode="area")[0]
    grey = image[:3].mean(dim=0) - 0.5
    along_y, along_x = torch.gradient(grey, dim=(0, 1))
    hits = rasterize_triangles(vertices, faces, camera)
    counts = (image[3] >= 1) & (hits.cosines > _MIN_COSINE)
    counts &= ~dilated(_jumps(hits.depth, camera), RADIUS - 1)
    # Only what is needed of the hits: they hold the vertices of the whole mesh.
    return _View(
        camera,
        grey,
        torch.stack([along_x, along_y]),
        counts,
        hits.depth,
        corners=hits.mesh[1][hits.face[counts].long()],
        weights=hits.barycentrics[counts],
        lift=-1 / (hits.cosines[counts] * _rays(camera, counts.device)[counts].norm(dim=-1)),
    )


def _rays(camera: Camera, device: torch.device) -> Tensor:
    """Return the rays of pixels to a depth of 1, in camera axes. (H, W, 3)"""
    return pixel_rays(camera, dtype=torch.float32, device=device)


def _jumps(depth: Tensor, camera: Camera) -> Tensor:
    """Return pixels beside which another surface begins. (H, W) bool"""
    jumps = torch.zeros_like(depth, dtype=torch.bool)
    for dim, focal in ((0, camera.fy), (1, camera.fx)):
        size = depth.shape[dim]
        before = depth.narrow(dim, 0, size - 1)
        after = depth.narrow(dim, 1, size - 1)
        pixel_size = torch.minimum(before, after) / focal
        # Written so that two infinite depths are a jump, too.
        is_jump = ~((after - before).abs() <= _JUMP * pixel_size)
        jumps.narrow(dim, 0, size - 1).logical_or_(is_jump)
        jumps.narrow(dim, 1, size - 1).logical_or_(is_jump)
    return jumps


def _carried(view: _View, neighbor: _View) -> _Carried:
    """Read a neighbouring photograph where a view's pixels are in it."""
    pair = ViewPair.of(view.camera, neighbor.camera)
    camera = neighbor.camera
    depth = torch.where(view.counts, view.depth, 1.0)
    # The direction in which a point moves as its depth grows.
    direction = _rays(view.camera, depth.device) @ depth.new_tensor(pair.rotation).T
    points = direction * depth[..., None] + depth.new_tensor(pair.translation)
    z = points[..., 2]
    x = points[..., 0] / z
    y = points[..., 1] / z
    u = camera.fx * x + camera.cx
    v = camera.fy * y + camera.cy
    is_inside = (z > 0) & (u >= 1) & (v >= 1)
    is_inside &= (u <= camera.width - 1) & (v <= camera.height - 1)
    column = torch.where(is_inside, u, 0.0).long()
    row = torch.where(is_inside, v, 0.0).long()
    farthest = neighbor.depth[row, column] + _BEHIND * z / camera.fx
    counts = view.counts & is_inside & (z <= farthest) & neighbor.counts[row, column]
    planes = torch.cat([neighbor.grey[None], neighbor.gradient])
    grey, along_x, along_y = sampled_at(planes, u, v)
    du = camera.fx * (direction[..., 0] - x * direction[..., 2]) / z
    dv = camera.fy * (direction[..., 1] - y * direction[..., 2]) / z
    by_depth = along_x * du + along_y * dv
    zero = torch.zeros_like(grey)
    return _Carried(torch.where(counts, grey, zero), torch.where(counts, by_depth, zero), counts)


def _by_depth(found: Correlation, carried: _Carried) -> Tensor:
    """Return gradient and curvature with the depth of pixels, and which were compared. (3, H, W)"""
    return torch.stack(
        [
            found.gradient * carried.by_depth,
            found.curvature * carried.by_depth.square(),
            carried.counts.to(found.gradient.dtype),
        ]
    )


def _at_vertices(view: _View, planes: Tensor, n_vertices: int) -> Tensor:
    """Add what pixels say, as of :func:`_by_depth`, to the corners of their triangles. (3, V)"""
    corners = view.corners.reshape(-1).long()
    gradient, curvature, n_compared = planes[:, view.counts]
    sums = []
    for values in (gradient * view.lift, curvature * view.lift.square(), n_compared):
        at_corners = (values[:, None] * view.weights).reshape(-1)
        sums.append(ordered_sum(at_corners, corners, n_vertices).double())
    return torch.stack(sums)
