# SPDX-License-Identifier: Apache-2.0
"""One surface of all blocks, fused region by region.

All regions share one grid of voxels. The corners at the border of two regions get their distances
from the same views in the same order, hence the same bits, so the surfaces of the regions end in
the same vertices and can be joined without a seam. In memory are the voxels of one region and one
view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sugar_extractors.mesh.fusion.fused_cubes import FusedCubes, n_cubes
from sugar_extractors.mesh.fusion.fused_distances import BLOCK
from sugar_extractors.mesh.fusion.marching_cubes import EMPTY_MESH, extract_surface
from sugar_extractors.mesh.fusion.observed_region import ObservedRegion
from sugar_extractors.mesh.fusion.thin_parts import ThinParts, lost_places
from sugar_extractors.mesh.fusion.tsdf import TsdfConfig, cleaned
from sugar_pipeline.blocks.block_depths import StoredView
from sugar_pipeline.blocks.partition import BlockBox
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import DepthView
from sugar_scene.regions import EVERYWHERE, Box, Corner, Region, SharedPlane
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.console import Console

_WELD = 1e-3  # voxels; vertices of two halves that are nearer are one
_Places = tuple[int, int, int]


@dataclass(frozen=True)
class VoxelGrid:
    """The grid of all regions: cubes of ``BLOCK`` voxels along each side."""

    low: Corner  # corner of cube (0, 0, 0), world units
    voxel: float  # side of a voxel, world units
    shape: _Places  # cubes along each axis

    @classmethod
    def over(cls, bounds: BlockBox, voxel: float) -> VoxelGrid:
        """Return the grid over a box."""
        return cls(bounds.low, voxel, n_cubes(bounds.low, bounds.high, voxel))

    @property
    def cube_side(self) -> float:
        """Side of a cube, world units."""
        return self.voxel * BLOCK

    def region_of(self, box: BlockBox) -> GridRegion:
        """Return the cubes of a block; those of all blocks fill the grid."""
        first = []
        end = []
        for axis in range(3):
            ends = []
            for bound in (box.low[axis], box.high[axis]):
                # Infinite ones are the ends of the grid.
                cubes = (bound - self.low[axis]) / self.cube_side
                ends.append(round(min(max(cubes, 0), self.shape[axis])))
            first.append(ends[0])
            end.append(ends[1])
        return GridRegion(_places(first), _places(end))

    def box_of(self, cubes: GridRegion) -> Box:
        """Return the box of some cubes."""
        low = np.array(self.low)
        first = low + np.array(cubes.first) * self.cube_side
        return Box.of_corners(first, low + np.array(cubes.end) * self.cube_side)

    def ends_of(self, cubes: GridRegion) -> Region:
        """Return the planes at which the mesh of some cubes has to fit its neighbours."""
        box = self.box_of(cubes)
        planes = []
        for axis in range(3):
            if cubes.first[axis] > 0:
                planes.append(SharedPlane(axis, box.low[axis]))
            if cubes.end[axis] < self.shape[axis]:
                planes.append(SharedPlane(axis, box.high[axis]))
        return Region(EVERYWHERE, tuple(planes), self.voxel)


@dataclass(frozen=True)
class GridRegion:
    """Cubes of a grid between two corners."""

    first: _Places
    end: _Places  # after the last ones

    @property
    def shape(self) -> _Places:
        """Cubes along each axis."""
        return _places([max(0, b - a) for a, b in zip(self.first, self.end, strict=True)])

    def halves(self) -> tuple[GridRegion, GridRegion]:
        """Divide the region across its longest side."""
        axis = int(np.argmax(self.shape))
        middle = (self.first[axis] + self.end[axis]) // 2
        end = list(self.end)
        end[axis] = middle
        first = list(self.first)
        first[axis] = middle
        return GridRegion(self.first, _places(end)), GridRegion(_places(first), self.end)


class SearchOfThinParts(NamedTuple):
    """What is known of places that the surface lacks."""

    region: ObservedRegion  # where they may be
    # That show them: of one block, as those of its neighbours show parts of the same photographs.
    views: Sequence[StoredView]


@dataclass(frozen=True)
class JoinedFusion:
    """The fusion of stored views on one grid."""

    views: Sequence[StoredView]
    grid: VoxelGrid
    config: TsdfConfig
    device: torch.device
    console: Console
    search: SearchOfThinParts | None = None

    def surface(self, region: GridRegion) -> TriangleMesh:
        """Return the surface in a region; its border is that of its neighbours, to the bit."""
        mesh, lost = self._surface_and_lost_places(region)
        if not len(lost):
            return mesh
        parts = ThinParts(
            box=self.grid.box_of(region),
            voxel=self.grid.voxel,
            truncation=self.config.truncation,
            views=self._views_of(region, self.views),
            device=self.device,
            console=self.console,
            keeps_sides=True,
        )
        return parts.added_to(mesh, lost)

    def _surface_and_lost_places(self, region: GridRegion) -> tuple[TriangleMesh, np.ndarray]:
        """Return the surface in a region, and where thin parts are looked for. (L, 3)

        A region with too many voxels is halved.
        """
        nowhere = np.zeros((0, 3))
        if 0 in region.shape:
            return EMPTY_MESH, nowhere
        reached = self._reached(region)
        n = int(reached.sum()) * BLOCK**3
        if n > self.config.max_voxels and max(region.shape) > 1:
            halves = [self._surface_and_lost_places(half) for half in region.halves()]
            mesh = welded([mesh for mesh, _ in halves], _WELD * self.grid.voxel)
            return mesh, np.concatenate([lost for _, lost in halves])
        if n == 0:
            return EMPTY_MESH, nowhere
        views = self._views_of(region, self.views)
        field = self._cubes(region).averaged(views, reached, self.console)
        mesh = self._within(extract_surface(field), region)
        if self.search is None:
            return mesh, nowhere
        ends = self.grid.ends_of(region)
        # What is too small to stay is lost as well.
        remaining = cleaned(mesh, self.config, self.config.min_diagonal * self.grid.voxel, ends)
        lost = lost_places(remaining, field, self._views_of(region, self.search.views))
        is_searched = self.search.region.contains(lost) & self.grid.box_of(region).contains(lost)
        return mesh, lost[is_searched]

    def _views_of(
        self, region: GridRegion, stored: Sequence[StoredView]
    ) -> list[Callable[[], DepthView]]:
        """Return what reads the views with a pixel near a region, in their order."""
        reach = (self.config.truncation + 1) * self.grid.voxel
        box = self.grid.box_of(region)
        low = np.array(box.low) - reach
        # With the cubes after the last ones, see below.
        high = np.array(box.high) + self.grid.cube_side + reach
        views = []
        for view in stored:
            record = view.record
            if (np.array(record.low) < high).all() and (np.array(record.high) > low).all():
                views.append(partial(view.read, self.device))
        return views

    def _reached(self, region: GridRegion) -> Tensor:
        """Which cubes of a region, and those after it, the depth of some view reaches. bool"""
        # The lowest corners of the cubes after the last ones are the highest of these.
        shape = [n + 1 for n in region.shape]
        reached = torch.zeros(shape, dtype=torch.bool, device=self.device)
        cubes = self._cubes(region)
        for view in self._views_of(region, self.views):
            cubes.mark(view(), reached)
        return reached

    def _cubes(self, region: GridRegion) -> FusedCubes:
        reach = self.config.truncation * self.grid.voxel
        return FusedCubes(self.grid.low, self.grid.voxel, reach, region.first)

    def _within(self, mesh: TriangleMesh, region: GridRegion) -> TriangleMesh:
        """Return the triangles whose cells belong to a region, not to the cubes after it."""
        middles = mesh.vertices[mesh.faces].mean(axis=1)
        is_inside = (middles < self.grid.box_of(region).high).all(axis=1)
        return triangle_mesh.keep_faces(mesh, is_inside)


def voxel_size(views: Sequence[StoredView], config: TsdfConfig) -> float:
    """Return the side of a voxel: as asked for, or from the size of a pixel on the surface."""
    if config.tsdf_voxel_size is not None:
        return config.tsdf_voxel_size
    pixels = [view.record.pixel for view in views]
    return config.pixels_per_voxel * float(np.median(pixels))


def welded(meshes: Sequence[TriangleMesh], distance: float) -> TriangleMesh:
    """Join meshes; vertices nearer than about a distance, in world units, become one."""
    joined = triangle_mesh.merge_meshes(meshes)
    if joined.n_vertices == 0:
        return joined
    cells = np.rint(joined.vertices / distance).astype(np.int64)
    _, first, numbers = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    mesh = TriangleMesh(
        joined.vertices[first], numbers.reshape(-1)[joined.faces], joined.colors[first]
    )
    return triangle_mesh.clean_mesh(mesh)


def _places(values: Sequence[int]) -> _Places:
    x, y, z = values
    return x, y, z
