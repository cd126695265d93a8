# SPDX-License-Identifier: Apache-2.0
"""Signed distances to the depth of views, fused at places.

Distances of all views are averaged, positive outside. Behind a thin part, views from the other side
say that a place lies inside, as far as the truncation reaches, and the mean makes the part thicker
by that. So a second mean is taken, in which a view counts less, the farther a place lies from the
surface that it shows: the nearest surface decides. Where it says that a place lies farther outside
than the first, by more than noise, it is taken.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.rasterization.projection_kernels import View, make_view
from sugar_scene.depth_view import DepthView
from sugar_utils.warp_arrays import Floats, Floats2d, Vec3s, Vec3s2d
from sugar_utils.warp_launch import as_array, launch

wp.set_module_options({"enable_backward": False})

BLOCK = 8  # voxels along the side of a block
_BLOCK_SIDE = wp.constant(BLOCK)
# Of the second mean; lengths in voxels.
_BEHIND = wp.constant(2.0)  # a view's weight falls to its least this far behind the surface
_LEAST_SHARE = wp.constant(0.05)  # of the weight, there and farther behind
_BEFORE = wp.constant(2.0 / 3.0)  # farther before the surface than this, the weight falls
_ALLOWANCE = 0.4  # by which the means may differ: noise alone makes the second one larger
_MIN_ITEMS = 4096


@wp.struct
class Maps:
    """Depth and colour of a view, as a kernel argument."""

    depth: Floats2d  # 0 where unknown. (H, W) world units
    color: Vec3s2d  # (H, W)
    weight: Floats2d  # (H, W)


@wp.struct
class Means:
    """:class:`FusedDistances` as a kernel argument."""

    voxel: float
    truncation: float
    distances: Floats
    weights: Floats
    nearest_distances: Floats
    nearest_weights: Floats
    colors: Vec3s


@dataclass(frozen=True)
class FusedDistances:
    """Means over views at N places; distances in truncations, 1 at most, positive outside."""

    voxel: float  # unit of the lengths above, world units
    truncation: float  # reach of the distances, world units
    distances: Tensor  # of all views, (N,)
    weights: Tensor  # 0 where no view has a distance, (N,)
    nearest_distances: Tensor  # of the second mean, (N,)
    nearest_weights: Tensor  # (N,)
    colors: Tensor  # 0 to 1, (N, 3)

    @classmethod
    def empty(cls, n: int, voxel: float, truncation: float, device: torch.device) -> FusedDistances:
        """Return means of no view at n places."""
        return cls(
            voxel=voxel,
            truncation=truncation,
            distances=torch.zeros(n, device=device),
            weights=torch.zeros(n, device=device),
            nearest_distances=torch.zeros(n, device=device),
            nearest_weights=torch.zeros(n, device=device),
            colors=torch.zeros(n, 3, device=device),
        )

    def add_at_points(self, view: DepthView, points: Tensor) -> None:
        """Average a view into the means. points: (N, 3) float32 world units"""
        arguments = [
            make_view(view.camera),
            _maps_of(view),
            self._as_argument(),
            as_array(points.contiguous(), wp.vec3),
        ]
        launch(add_at_points, len(points), arguments, min_items=_MIN_ITEMS)

    def add_at_corners(
        self, view: DepthView, blocks: Tensor, origin: tuple[float, float, float]
    ) -> None:
        """Average a view into the means at the voxel corners of blocks.

        Args:
            view: Depth and colour.
            blocks: Places of the blocks. (B, 3) int32
            origin: Corner (0, 0, 0) in world units.
        """
        arguments = [
            make_view(view.camera),
            _maps_of(view),
            self._as_argument(),
            wp.vec3(*origin),
            as_array(blocks, wp.vec3i),
        ]
        launch(add_at_corners, len(self.distances), arguments, min_items=_MIN_ITEMS)

    def fused(self) -> Tensor:
        """Return the distances that both means give. (N,) truncations"""
        allowance = _ALLOWANCE * self.voxel / self.truncation
        return torch.maximum(self.distances, self.nearest_distances - allowance)

    def _as_argument(self) -> Means:
        means = Means()
        means.voxel = self.voxel
        means.truncation = self.truncation
        means.distances = wp.from_torch(self.distances)
        means.weights = wp.from_torch(self.weights)
        means.nearest_distances = wp.from_torch(self.nearest_distances)
        means.nearest_weights = wp.from_torch(self.nearest_weights)
        means.colors = wp.from_torch(self.colors, dtype=wp.vec3)
        return means


def _maps_of(view: DepthView) -> Maps:
    maps = Maps()
    maps.depth = wp.from_torch(view.depth.contiguous())
    maps.color = wp.from_torch(view.color.contiguous(), dtype=wp.vec3)
    maps.weight = wp.from_torch(view.weight.contiguous())
    return maps


@wp.func
def interpolated_depth(depth: Floats2d, x: float, y: float, largest_step: float) -> float:
    """Return the depth between the middles of four pixels; of the nearest one at an edge.

    Args:
        x: Column, of the image's first pixel 0 in its middle.
        y: Row, likewise.
        largest_step: Difference of four depths on one surface, at most.
    """
    last_column = depth.shape[1] - 1
    last_row = depth.shape[0] - 1
    column = wp.clamp(int(wp.floor(x)), 0, last_column)
    row = wp.clamp(int(wp.floor(y)), 0, last_row)
    next_column = wp.min(column + 1, last_column)
    next_row = wp.min(row + 1, last_row)
    a = depth[row, column]
    b = depth[row, next_column]
    c = depth[next_row, column]
    d = depth[next_row, next_column]
    nearest = wp.min(wp.min(a, b), wp.min(c, d))
    farthest = wp.max(wp.max(a, b), wp.max(c, d))
    if nearest <= 0.0 or farthest - nearest > largest_step:
        return depth[wp.min(int(y + 0.5), last_row), wp.min(int(x + 0.5), last_column)]
    right = wp.clamp(x - float(column), 0.0, 1.0)
    down = wp.clamp(y - float(row), 0.0, 1.0)
    return (1.0 - down) * ((1.0 - right) * a + right * b) + down * ((1.0 - right) * c + right * d)


@wp.func
def share_of_nearest(distance: float, voxel: float) -> float:
    """Return the factor on a view's weight in the mean of the nearest surface.

    Args:
        distance: To the surface that the view shows, positive before it.
        voxel: Side of a voxel.
    """
    behind = wp.clamp(1.0 + distance / (_BEHIND * voxel), _LEAST_SHARE, 1.0)
    return behind / wp.max(1.0, distance / (_BEFORE * voxel))


@wp.func
def add_view(i: int, place: wp.vec3, view: View, maps: Maps, means: Means):
    """Average one view into the means at a place."""
    point = view.rotation * place + view.translation
    if not (point[2] > 0.0):
        return
    x = view.fx * point[0] / point[2] + view.cx
    y = view.fy * point[1] / point[2] + view.cy
    if not (x >= 0.0 and y >= 0.0 and x < float(view.width) and y < float(view.height)):
        return
    surface_depth = interpolated_depth(maps.depth, x - 0.5, y - 0.5, means.truncation)
    distance = surface_depth - point[2]
    if surface_depth <= 0.0 or distance < -means.truncation:
        return
    distance = wp.min(distance, means.truncation)
    value = distance / means.truncation
    weight = maps.weight[int(y), int(x)]
    share = weight / (means.weights[i] + weight)
    means.distances[i] += (value - means.distances[i]) * share
    means.colors[i] += (maps.color[int(y), int(x)] - means.colors[i]) * share
    means.weights[i] += weight
    weight *= share_of_nearest(distance, means.voxel)
    share = weight / (means.nearest_weights[i] + weight)
    means.nearest_distances[i] += (value - means.nearest_distances[i]) * share
    means.nearest_weights[i] += weight


@wp.kernel
def add_at_points(first: int, view: View, maps: Maps, means: Means, points: Vec3s):
    """Average one view into the means; a work item is one point."""
    i = first + wp.tid()
    add_view(i, points[i], view, maps, means)


@wp.kernel
def add_at_corners(
    first: int,
    view: View,
    maps: Maps,
    means: Means,
    origin: wp.vec3,
    blocks: wp.array(dtype=wp.vec3i),
):
    """Average one view into the means; a work item is one voxel corner."""
    i = first + wp.tid()
    side = _BLOCK_SIDE
    block = blocks[i / (side * side * side)]
    part = i % (side * side * side)
    corner = wp.vec3(
        float(block[0] * side + part / (side * side)),
        float(block[1] * side + (part / side) % side),
        float(block[2] * side + part % side),
    )
    add_view(i, origin + means.voxel * corner, view, maps, means)
