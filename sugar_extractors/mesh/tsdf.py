# SPDX-License-Identifier: Apache-2.0
"""Mesh extraction by fusing rendered depth into a truncated signed distance field.

The field (Curless and Levoy, SIGGRAPH 1996) lives in blocks of voxels near the surface only. The
first of two passes over the views finds the blocks that some depth reaches, the second averages
distances and colours in them. So the memory does not depend on the number of views, and the result
not on their order of arrival.

Behind a thin part, views from the other side say that a place lies inside, as far as the truncation
reaches, and the mean of all views makes the part thicker by that. So a second mean is taken, in
which a view counts less, the farther a place lies from the surface that it shows: the nearest
surface decides. Where it says that a place lies farther outside than the first, by more than noise,
it is taken.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization.projection_kernels import View, make_view
from sugar_extractors.mesh.depth_views import DepthView, Renderer
from sugar_extractors.mesh.level_sets import Box
from sugar_extractors.mesh.marching_cubes import EMPTY_MESH, SparseField, extract_surface
from sugar_extractors.mesh.observed_region import ObservedRegion
from sugar_scene import triangle_mesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.console import Console
from sugar_utils.flags import non_negative_float, positive_float
from sugar_utils.settings import flag
from sugar_utils.warp_arrays import Floats, Floats2d, Vec3s, Vec3s2d
from sugar_utils.warp_launch import as_array, launch

wp.set_module_options({"enable_backward": False})

BLOCK = 8  # voxels along the side of a block
DEPTHS = ("blended", "plane")  # where depth comes from
PLANE_MARGIN = 0.05  # of a multi-view model, in camera extents
PLANE_FILL = 32  # edges of pinholes in its meshes: at grazing angles some depths are not confirmed
_BLOCK_SIDE = wp.constant(BLOCK)
# Of the second mean; lengths in voxels.
_BEHIND = wp.constant(2.0)  # a view's weight falls to its least this far behind the surface
_LEAST_SHARE = wp.constant(0.05)  # of the weight, there and farther behind
_BEFORE = wp.constant(2.0 / 3.0)  # farther before the surface than this, the weight falls
_ALLOWANCE = 0.33  # by which the means may differ: noise alone makes the second one larger
_N_FOOTPRINT_VIEWS = 8  # views from which the size of a pixel on the surface is measured
_COARSER = 1.25  # least factor by which voxels grow where there are too many
_MOST_VOXELS_PER_SIDE = 2048  # of the box, with automatic voxels
_MIN_ITEMS = 4096
_flag = partial(flag, group="surface", no_effect_when="with --mesh_extractor poisson")


@dataclass(frozen=True)
class TsdfConfig:
    """Constants of the fusion.

    Blended depth is the mean along the ray, divided by alpha. The automatic voxel is the median
    side of a pixel on the surface times ``pixels_per_voxel``, at least 1/2048 of the box.
    """

    tsdf_depth: str = _flag(
        "blended",
        "blended: depth as rendered, all Gaussians averaged; plane: of the planes that "
        "Gaussians are, checked against neighbouring views; unset: plane of a multiview model, "
        "else blended",
        choices=DEPTHS,
        modes={"multiview": "plane"},
    )
    tsdf_voxel_size: float | None = _flag(
        None, "world units; unset: from the size of a pixel on the surface", parse=positive_float
    )
    pixels_per_voxel: float = 1.5
    tsdf_margin: float | None = _flag(
        None,
        "camera extents by which the surface may lie outside of the convex hull of the "
        f"reconstruction's points; unset: {PLANE_MARGIN} with --tsdf_depth plane, else anywhere",
        parse=non_negative_float,
        no_effect_when="where the scene has no tracks of points",
    )
    truncation: float = 4.0  # reach of the fused distances, in voxels
    min_alpha: float = 0.5
    min_component: int = 300
    # Ceiling of the voxels stored; where it is met, voxels are made larger.
    max_voxels: int = 40_000_000

    @property
    def margin(self) -> float | None:
        """The margin around the reconstruction's points in camera extents; None for none."""
        if self.tsdf_margin is not None:
            return self.tsdf_margin
        return PLANE_MARGIN if self.tsdf_depth == "plane" else None

    @property
    def fill(self) -> int:
        """Edges of the largest holes that are closed before decimation; 0 for none."""
        return PLANE_FILL if self.tsdf_depth == "plane" else 0


@dataclass(frozen=True)
class FusedRegion:
    """The surface within a box."""

    mesh: TriangleMesh
    voxel_size: float  # side of a voxel, world units
    n_voxels: int  # that were stored


@dataclass(frozen=True)
class Fusion:
    """The fusion of all views within a box."""

    render: Renderer
    cameras: Sequence[Camera]
    box: Box
    config: TsdfConfig
    console: Console

    def surface(self, region: ObservedRegion | None = None) -> FusedRegion:
        """Fuse all views within the box and extract the surface within a region."""
        config = self.config
        with torch.no_grad():
            voxel = config.tsdf_voxel_size or self._automatic_voxel()
            if voxel is None:
                return FusedRegion(EMPTY_MESH, voxel_size=0.0, n_voxels=0)
            field = self._empty_field(voxel)
            self._fill(field)
        mesh = extract_surface(field)
        if region is not None and mesh.n_faces:
            mesh = triangle_mesh.keep_vertices(mesh, region.contains(mesh.vertices))
        mesh = triangle_mesh.without_small_components(mesh, config.min_component)
        if config.fill:
            mesh = triangle_mesh.with_holes_filled(mesh, config.fill)
        return FusedRegion(mesh, field.voxel, field.distances.numel())

    def _automatic_voxel(self) -> float | None:
        """Return the side of a voxel in world units; None where no depth is in the box."""
        box = self.box
        stride = max(1, len(self.cameras) // _N_FOOTPRINT_VIEWS)
        parts = []
        for camera in self.cameras[::stride]:
            view = self.render(camera)
            points = view.world_points(view.depth)
            depths = view.depth.flatten()
            low = points.new_tensor(box.low)
            high = points.new_tensor(box.high)
            is_inside = ((points > low) & (points < high)).all(dim=-1)
            is_inside &= depths > 0
            parts.append(depths[is_inside] / math.sqrt(camera.fx * camera.fy))
        pixel_sizes = torch.cat(parts)
        if len(pixel_sizes) == 0:
            return None
        median = float(pixel_sizes.sort().values[len(pixel_sizes) // 2])
        longest_side = max(np.subtract(box.high, box.low))
        smallest = longest_side / _MOST_VOXELS_PER_SIDE
        return max(self.config.pixels_per_voxel * median, smallest)

    def _empty_field(self, voxel: float) -> SparseField:
        """Return blocks within the truncation distance of some depth.

        Voxels are made larger if there are too many.
        """
        max_voxels = self.config.max_voxels
        while True:
            reached = self._reached_blocks(voxel)
            n = int(reached.sum()) * BLOCK**3
            if n <= max_voxels:
                break
            larger = voxel * max(_COARSER, math.sqrt(n / max_voxels))
            self.console.info(f"voxels of {voxel:.4g} would be too many; taking {larger:.4g}")
            voxel = larger
        numbers = reached.flatten().cumsum(0).int() - 1
        numbers = numbers.reshape(reached.shape)
        device = reached.device
        return SparseField(
            origin=self.box.low,
            voxel=voxel,
            table=torch.where(reached, numbers, -1).int(),
            distances=torch.zeros(n, device=device),
            weights=torch.zeros(n, device=device),
            colors=torch.zeros(n, 3, device=device),
        )

    def _reached_blocks(self, voxel: float) -> Tensor:
        """Return which blocks of the box the depth of some view reaches. (X, Y, Z) bool"""
        block_side = voxel * BLOCK
        sides = np.subtract(self.box.high, self.box.low).tolist()
        shape = [max(1, math.ceil(side / block_side)) for side in sides]
        device = self.render(self.cameras[0]).depth.device
        reached = torch.zeros(shape, dtype=torch.bool, device=device)
        with self.console.progress("blocks", 1, len(self.cameras)) as progress:
            for done, camera in enumerate(self.cameras, start=1):
                self._mark(self.render(camera), voxel, reached)
                progress.update(done)
        return reached

    def _mark(self, view: DepthView, voxel: float, reached: Tensor) -> None:
        """Mark the blocks that the depth of a view reaches. reached: (X, Y, Z) bool"""
        block_side = voxel * BLOCK
        reach = self.config.truncation * voxel
        n_steps = math.ceil(2 * reach / (block_side / 2)) + 1
        is_known = view.depth.flatten() > 0
        shape = torch.tensor(reached.shape, device=reached.device)
        for offset in torch.linspace(-reach, reach, n_steps, device="cpu").tolist():
            points = view.world_points(view.depth + offset)[is_known]
            blocks = (points - points.new_tensor(self.box.low)) / block_side
            blocks = blocks.floor().long()
            is_inside = ((blocks >= 0) & (blocks < shape)).all(dim=1)
            x, y, z = blocks[is_inside].unbind(1)
            reached[x, y, z] = True

    def _fill(self, field: SparseField) -> None:
        """Average all views into the field."""
        n = field.distances.numel()
        if n == 0:
            return
        blocks = (field.table >= 0).nonzero().int().contiguous()
        nearest_distances = torch.zeros_like(field.distances)
        nearest_weights = torch.zeros_like(field.weights)
        with self.console.progress("fusion", 1, len(self.cameras)) as progress:
            for done, camera in enumerate(self.cameras, start=1):
                view = self.render(camera)
                arguments = [
                    make_view(camera),
                    wp.vec3(*field.origin),
                    field.voxel,
                    self.config.truncation * field.voxel,
                    as_array(blocks, wp.vec3i),
                    view.depth.contiguous(),
                    as_array(view.color.contiguous(), wp.vec3),
                    view.weight.contiguous(),
                    field.distances,
                    field.weights,
                    nearest_distances,
                    nearest_weights,
                    as_array(field.colors, wp.vec3),
                ]
                launch(integrate, n, arguments, min_items=_MIN_ITEMS)
                progress.update(done, fields={"voxels": f"{n:,}"})
        nearest_distances -= _ALLOWANCE / self.config.truncation
        torch.maximum(field.distances, nearest_distances, out=field.distances)


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


@wp.kernel
def integrate(
    first: int,
    view: View,
    origin: wp.vec3,
    voxel: float,
    truncation: float,
    blocks: wp.array(dtype=wp.vec3i),
    depth: Floats2d,
    color: Vec3s2d,
    weight: Floats2d,
    distances: Floats,
    weights: Floats,
    nearest_distances: Floats,
    nearest_weights: Floats,
    colors: Vec3s,
):
    """Average one view into the field; a work item is one voxel corner."""
    i = first + wp.tid()
    side = _BLOCK_SIDE
    block = blocks[i / (side * side * side)]
    part = i % (side * side * side)
    corner = wp.vec3(
        float(block[0] * side + part / (side * side)),
        float(block[1] * side + (part / side) % side),
        float(block[2] * side + part % side),
    )
    point = view.rotation * (origin + voxel * corner) + view.translation
    if not (point[2] > 0.0):
        return
    x = view.fx * point[0] / point[2] + view.cx
    y = view.fy * point[1] / point[2] + view.cy
    if not (x >= 0.0 and y >= 0.0 and x < float(view.width) and y < float(view.height)):
        return
    surface_depth = interpolated_depth(depth, x - 0.5, y - 0.5, truncation)
    distance = surface_depth - point[2]
    if surface_depth <= 0.0 or distance < -truncation:
        return
    distance = wp.min(distance, truncation)
    view_weight = weight[int(y), int(x)]
    share = view_weight / (weights[i] + view_weight)
    distances[i] += (distance / truncation - distances[i]) * share
    colors[i] += (color[int(y), int(x)] - colors[i]) * share
    weights[i] += view_weight
    view_weight *= share_of_nearest(distance, voxel)
    share = view_weight / (nearest_weights[i] + view_weight)
    nearest_distances[i] += (distance / truncation - nearest_distances[i]) * share
    nearest_weights[i] += view_weight
