# SPDX-License-Identifier: Apache-2.0
"""Fuse parts again that are too thin for the voxels.

Where a part is thinner than a few voxels, distances to both of its sides share voxels: the surface
has gaps there, and pieces that are too small to stay. But several views show depth that lies far
from the surface. Around such places the views are fused again, with smaller voxels. What comes
replaces the surface only where it is thin: elsewhere it was noise of the depth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gaussian_splatting.core.subsets import longest_side
from sugar_extractors.mesh.fusion.fused_cubes import FusedCubes, n_cubes
from sugar_extractors.mesh.fusion.fused_distances import BLOCK
from sugar_extractors.mesh.fusion.marching_cubes import SparseField, extract_surface
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import DepthView
from sugar_scene.regions import Box
from sugar_scene.surface_queries import Surface
from sugar_scene.triangle_mesh import TriangleMesh, vertex_normals
from sugar_utils.console import Console

_FINER = 2.0  # times so much smaller are their voxels
_MOST_PER_SIDE = 2560  # of these voxels along the box; each cube of them takes 20 bytes
MIN_VIEWS = 8  # that show a lost place
_MIN_PLACES = 2  # lost places, or thin vertices of the surface, in a cube that is fused again
_REACH = 2  # cubes beyond those of lost places that are tried
_THICKNESS = 12.0  # of parts that are thin, in the smaller voxels
_OPPOSED = -0.3  # cosine between the normals of two sides of a part, at most
_MIN_THIN = 0.5  # share of the vertices in a cube, for the cube to replace the surface
_ALL_NEIGHBORS = np.ones((3, 3, 3), dtype=bool)


def lost_places(
    mesh: TriangleMesh, field: SparseField, views: Sequence[Callable[[], DepthView]]
) -> np.ndarray:
    """Return corners of voxels at the depth of several views, but not beside the surface. (L, 3)

    Args:
        mesh: What stays of the surface of the field.
        views: Those that were fused.
    """
    device = field.distances.device
    n = len(field.distances)
    if n == 0:
        return np.zeros((0, 3))
    is_beside_surface = torch.zeros(n, dtype=torch.bool, device=device)
    nearest = field.nearest_corners(torch.from_numpy(mesh.vertices).to(device))
    steps = torch.cartesian_prod(*[torch.arange(-1, 2, device=device)] * 3)
    for step in steps:
        rows = field.rows_of(nearest + step)
        is_beside_surface[rows[rows >= 0]] = True
    n_views = torch.zeros(n, dtype=torch.int16, device=device)
    for view in views:
        shown = view()
        is_known = shown.depth.flatten() > 0
        points = shown.world_points(shown.depth)[is_known]
        rows = field.rows_of(field.nearest_corners(points))
        rows = rows[rows >= 0]
        n_views[rows[~is_beside_surface[rows]].unique()] += 1
    lost = (n_views >= MIN_VIEWS).nonzero().flatten()
    return field.positions(lost).cpu().numpy()


def thin_vertices(mesh: TriangleMesh, thickness: float) -> np.ndarray:
    """Return which vertices have another side of the surface close behind them. (V,) bool

    Args:
        thickness: Largest distance of the sides, world units.
    """
    if mesh.n_faces == 0:
        return np.zeros(mesh.n_vertices, dtype=bool)
    size = longest_side(mesh.vertices)
    points = (mesh.vertices - mesh.vertices.mean(axis=0)) / size
    normals = vertex_normals(mesh)
    # From the middle of a thicker part its own side is the nearest.
    behind = thickness / 2 / size
    nearest = Surface(points, mesh.faces).nearest(points - behind * normals)
    is_opposed = (nearest.normals * normals).sum(axis=1) < _OPPOSED
    return is_opposed & (nearest.distances < behind)


@dataclass(frozen=True)
class ThinParts:
    """The fusion of places that a surface lacks, in cubes of smaller voxels."""

    box: Box
    voxel: float  # side of the surface's own voxels, world units
    truncation: float  # reach of the fused distances, in voxels
    views: Sequence[Callable[[], DepthView]]
    device: torch.device
    console: Console
    # Whether the surface stays as it is at the sides of the box, where it has to fit others.
    keeps_sides: bool = False

    @functools.cached_property
    def _cubes(self) -> FusedCubes:
        voxel = max(self.voxel / _FINER, self.box.longest_side / _MOST_PER_SIDE)
        return FusedCubes(self.box.low, voxel, self.truncation * voxel)

    @property
    def _shape(self) -> tuple[int, int, int]:
        """Cubes along the sides of the box."""
        return n_cubes(self.box.low, self.box.high, self._cubes.voxel)

    def added_to(self, mesh: TriangleMesh, lost: np.ndarray) -> TriangleMesh:
        """Return the surface with thin parts as they are fused of smaller voxels.

        Args:
            mesh: The surface of larger voxels.
            lost: As of :func:`lost_places`. (L, 3)
        """
        is_candidate = self._counts(lost) >= _MIN_PLACES
        if not is_candidate.any():
            return mesh
        tried = self._tried(mesh, is_candidate)
        finer = self._surface_in(tried)
        is_thin = thin_vertices(finer, _THICKNESS * self._cubes.voxel)
        n_vertices = self._counts(finer.vertices)
        n_thin = self._counts(finer.vertices[is_thin])
        replaced = tried & (n_vertices > 0) & (n_thin >= _MIN_THIN * n_vertices)
        if self.keeps_sides:
            replaced &= self._off_the_sides()
        self.console.info(f"thin parts fused again in {int(replaced.sum()):,} cubes of voxels")
        remaining = triangle_mesh.keep_faces(mesh, ~self._in(mesh, replaced))
        added = triangle_mesh.keep_faces(finer, self._in(finer, replaced))
        return triangle_mesh.merge_meshes([remaining, added])

    def _tried(self, mesh: TriangleMesh, is_candidate: np.ndarray) -> np.ndarray:
        """Return the cubes where lost places are, and where thin parts go on from there."""
        # Here and not above: most commands start without it.
        from scipy.ndimage import binary_dilation, binary_propagation

        is_thin = thin_vertices(mesh, _THICKNESS * self._cubes.voxel)
        around = np.asarray(binary_dilation(is_candidate, _ALL_NEIGHBORS), dtype=bool)
        has_thin_parts = self._counts(mesh.vertices[is_thin]) >= _MIN_PLACES
        connected = binary_propagation(around, _ALL_NEIGHBORS, around | has_thin_parts)
        return binary_dilation(connected, _ALL_NEIGHBORS, iterations=_REACH)

    def _surface_in(self, tried: np.ndarray) -> TriangleMesh:
        """Return the surface of smaller voxels in some cubes."""
        from scipy.ndimage import binary_dilation

        reached = torch.zeros(self._shape, dtype=torch.bool, device=self.device)
        for view in self.views:
            self._cubes.mark(view(), reached)
        # Voxels at the border of a cube have corners in the next one.
        reached &= torch.from_numpy(binary_dilation(tried, _ALL_NEIGHBORS)).to(self.device)
        with torch.no_grad():
            field = self._cubes.averaged(self.views, reached, self.console, "thin parts")
        return extract_surface(field)

    def _off_the_sides(self) -> np.ndarray:
        """Return the cubes at least half of their side away from the sides of the box."""
        cube_side = self._cubes.voxel * BLOCK
        sides = np.subtract(self.box.high, self.box.low) / cube_side
        is_off = np.zeros(self._shape, dtype=bool)
        x, y, z = np.floor(sides - 0.5).astype(int).clip(min=0)
        is_off[1:x, 1:y, 1:z] = True
        return is_off

    def _in(self, mesh: TriangleMesh, is_selected: np.ndarray) -> np.ndarray:
        """Return the triangles whose middles lie in selected cubes. (F,) bool"""
        places, is_inside = self._places(mesh.vertices[mesh.faces].mean(axis=1))
        return is_inside & is_selected[tuple(places.T)]

    def _counts(self, points: np.ndarray) -> np.ndarray:
        """Return how many points, (P, 3), lie in each cube. (X, Y, Z) int32"""
        counts = np.zeros(self._shape, dtype=np.int32)
        places, is_inside = self._places(points)
        np.add.at(counts, tuple(places[is_inside].T), 1)
        return counts

    def _places(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the cubes of points, (P, 3), the nearest ones of those outside, and which are.

        (P, 3) int64, (P,) bool
        """
        places = np.floor((points - self._cubes.low) / (self._cubes.voxel * BLOCK)).astype(np.int64)
        last = np.array(self._shape) - 1
        nearest = np.clip(places, 0, last)
        return nearest, (places == nearest).all(axis=1)
