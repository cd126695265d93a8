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
from sugar_extractors.mesh.fusion.thin_parts import FINER, ThinParts, lost_places
from sugar_extractors.mesh.fusion.tsdf import MOST_FINER_VOXELS_PER_SIDE, TsdfConfig, cleaned
from sugar_pipeline.blocks.block_depths import StoredView
from sugar_pipeline.blocks.partition import BlockBox
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import DepthView
from sugar_scene.regions import EVERYWHERE, Corner, Region, SharedPlane
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

    def ends_of(self, cubes: GridRegion) -> Region:
        """Return the planes at which the mesh of some cubes has to fit its neighbours."""
        planes = []
        for axis in range(3):
            if cubes.first[axis] > 0:
                planes.append(self._plane(axis, cubes.first[axis]))
            if cubes.end[axis] < self.shape[axis]:
                planes.append(self._plane(axis, cubes.end[axis]))
        return Region(EVERYWHERE, tuple(planes), self.voxel)

    def _plane(self, axis: int, place: int) -> SharedPlane:
        return SharedPlane(axis, self.low[axis] + place * self.cube_side)


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
        """Return the surface in a region; its border is that of its neighbours, to the bit.

        A region with too many voxels is halved, and one whose thin parts have too many cubes.
        """
        if 0 in region.shape:
            return EMPTY_MESH
        # With the cubes after the last ones, whose lowest corners are the highest of these.
        reached = self._reached(region)
        n = int(reached.sum()) * BLOCK**3
        is_large = n > self.config.max_voxels
        if self.search is not None:
            is_large |= max(region.shape) * BLOCK * FINER > MOST_FINER_VOXELS_PER_SIDE
        if is_large and max(region.shape) > 1:
            below, above = region.halves()
            return welded([self.surface(below), self.surface(above)], _WELD * self.grid.voxel)
        if n == 0:
            return EMPTY_MESH
        views = self._views_of(region, self.views)
        field = self._cubes(region).averaged(views, reached, self.console)
        mesh = self._within(extract_surface(field), region)
        if self.search is None:
            return mesh
        ends = self.grid.ends_of(region)
        # What is too small to stay is lost as well.
        remaining = cleaned(mesh, self.config, self.config.min_diagonal * self.grid.voxel, ends)
        lost = lost_places(remaining, field, self._views_of(region, self.search.views))
        # The memory of large voxels is for smaller ones now.
        del field
        parts = ThinParts(
            cubes=self._cubes(region, FINER),
            shape=_places([FINER * n for n in region.shape]),
            views=views,
            device=self.device,
            console=self.console,
            keeps_sides=True,
        )
        return parts.added_to(mesh, lost[self.search.region.contains(lost)])

    def _views_of(
        self, region: GridRegion, stored: Sequence[StoredView]
    ) -> list[Callable[[], DepthView]]:
        """Return what reads the views with a pixel near a region, in their order."""
        reach = (self.config.truncation + 1) * self.grid.voxel
        low = np.array(self.grid.low) + np.array(region.first) * self.grid.cube_side - reach
        # One more cube, see above.
        high = np.array(self.grid.low) + (np.array(region.end) + 1) * self.grid.cube_side + reach
        views = []
        for view in stored:
            record = view.record
            if (np.array(record.low) < high).all() and (np.array(record.high) > low).all():
                views.append(partial(view.read, self.device))
        return views

    def _reached(self, region: GridRegion) -> Tensor:
        """Which cubes of a region, and those after it, the depth of some view reaches. bool"""
        shape = [n + 1 for n in region.shape]
        reached = torch.zeros(shape, dtype=torch.bool, device=self.device)
        cubes = self._cubes(region)
        for view in self._views_of(region, self.views):
            cubes.mark(view(), reached)
        return reached

    def _cubes(self, region: GridRegion, finer: int = 1) -> FusedCubes:
        """Return the cubes of a region, of voxels that are so many times finer than the grid's."""
        voxel = self.grid.voxel / finer
        first = _places([finer * place for place in region.first])
        return FusedCubes(self.grid.low, voxel, self.config.truncation * voxel, first)

    def _within(self, mesh: TriangleMesh, region: GridRegion) -> TriangleMesh:
        """Return the triangles whose cells belong to a region, not to the cubes after it."""
        end = np.array(self.grid.low) + np.array(region.end) * self.grid.cube_side
        middles = mesh.vertices[mesh.faces].mean(axis=1)
        return triangle_mesh.keep_faces(mesh, np.all(middles < end, axis=1))


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
