# SPDX-License-Identifier: Apache-2.0
"""Mesh extraction on tetrahedra between points that the Gaussians give.

Two points on either side of each Gaussian, along its thin axis, are corners of Delaunay tetrahedra.
The distances of all views, the same as on voxels, decide which corners lie inside. Tetrahedra too
coarse for the surface get more corners; where it crosses their edges is found by halving. So parts
thinner than a voxel have corners inside, and a corner that no view knows does not end the surface.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from gaussian_splatting.core.cloud import Gaussians, rotation_matrices
from sugar_extractors.mesh.fusion.fused_distances import FusedDistances
from sugar_extractors.mesh.fusion.marching_cubes import EMPTY_MESH
from sugar_extractors.mesh.fusion.marching_tetrahedra import (
    EDGES,
    CrossedEdges,
    PointSamples,
    crossed_edges,
    crossings,
)
from sugar_extractors.mesh.fusion.observed_region import ObservedRegion
from sugar_extractors.mesh.fusion.tsdf import FusedRegion, Fusion, cleaned
from sugar_scene import triangle_mesh
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.device import float32_tensor

MIN_OPACITY = 0.03  # fainter Gaussians give no corners
FEWEST_PAIRS = 8  # fewer do not make a surface
MOST_PAIRS = 600_000  # more take more memory than a laptop has: about 3 KB for each corner
# Lengths in voxels, which are 1.5 pixels on the surface.
_OFFSET = 0.47  # of the corners from the middle of a flat Gaussian
_MOST_OFFSET = 2.0
_OFFSET_SIGMAS = 3.0  # of a Gaussian that is not flat
_LONG_SIGMA = 1.33  # Gaussians of this standard deviation and more have corners along it, too
_LONG_SIGMAS = 1.5  # from their middle
_COARSE_EDGE = 1.33  # longest edge of a tetrahedron that gets no more corners
_COARSE_TRIANGLE = 0.67  # largest distance of a corner from the middle of such a triangle
_TOLERANCE = 0.17  # from the middle of a triangle to the surface
_MOST_BEND = 2.67  # farther from it the surface is another one
_MOST_STEP = 4.0  # of the distance between the last ends of an edge; larger ones are edges of views
_MARGIN = 8.0  # by which what is excluded reaches into the region of another mesh
_SHORTEST = 4.0  # diagonal of the smallest component
_FIRST_CELL = 0.5  # side of cells with one pair each, where there are too many
_COARSER = 1.25  # factor by which they grow
_REFINEMENTS = 2
_COARSE_HALVINGS = 3
_HALVINGS = 5


@dataclass(frozen=True)
class PointField:
    """Fused distances at any points."""

    fusion: Fusion
    voxel: float  # world units

    def __call__(self, points: np.ndarray) -> PointSamples:
        """Return fused signed distances at points, in voxels. (N, 3) world units"""
        fusion = self.fusion
        truncation = fusion.config.truncation
        device = fusion.device
        places = float32_tensor(points).to(device)
        means = FusedDistances.empty(len(points), self.voxel, truncation * self.voxel, device)
        for camera in fusion.cameras:
            means.add_at_points(fusion.render(camera), places)
        is_known = means.weights > 0
        # Behind everything that is known.
        distances = torch.where(is_known, means.fused(), -1.0) * truncation
        return PointSamples(
            distances=distances.double().cpu().numpy(),
            is_known=is_known.cpu().numpy(),
            colors=means.colors.cpu().numpy(),
        )


@dataclass(frozen=True)
class _Complex:
    """Delaunay tetrahedra with the field at their corners."""

    points: np.ndarray  # (N, 3)
    samples: PointSamples
    tetrahedra: np.ndarray = field(init=False)  # those with a corner outside, (T, 4)

    def __post_init__(self) -> None:
        # Here and not above: most commands start without it.
        from scipy.spatial import Delaunay

        tetrahedra = Delaunay(self.points).simplices.astype(np.int64)
        is_outside = ~self.samples.is_inside
        object.__setattr__(self, "tetrahedra", tetrahedra[is_outside[tetrahedra].any(axis=1)])

    def with_points(self, points: np.ndarray, samples: PointSamples) -> _Complex:
        """Return the complex of these and more points."""
        joined = PointSamples(*map(np.concatenate, zip(self.samples, samples, strict=True)))
        return _Complex(np.concatenate([self.points, points]), joined)

    def crossed(self, first: int = 0) -> CrossedEdges:
        """Return where the surface crosses tetrahedra with a corner of this row or a later one."""
        tetrahedra = self.tetrahedra[self.tetrahedra.max(axis=1, initial=-1) >= first]
        return crossed_edges(self.points, tetrahedra, self.samples.is_inside)


class Pairs(NamedTuple):
    """Corners on both sides of M places."""

    upper: np.ndarray  # (M, 3) world units
    lower: np.ndarray  # (M, 3) world units


@dataclass(frozen=True)
class TetrahedraFusion:
    """The surface within a box, on tetrahedra."""

    fusion: Fusion
    gaussians: Gaussians
    excluded: Box | None = None  # another mesh covers it

    def surface(self, region: ObservedRegion | None = None) -> FusedRegion:
        """Return the surface within a region; its ``n_voxels`` counts corners of tetrahedra."""
        fusion = self.fusion
        config = fusion.config
        with torch.no_grad():
            voxel = config.tsdf_voxel_size or fusion.automatic_voxel()
            if voxel is None:
                return FusedRegion(EMPTY_MESH, voxel_size=0.0, n_voxels=0)
            pairs = self._pairs(voxel, region)
            if len(pairs.upper) < FEWEST_PAIRS:
                return FusedRegion(EMPTY_MESH, voxel_size=voxel, n_voxels=0)
            values = PointField(fusion, voxel)
            with fusion.console.waiting("tetrahedra") as show:
                cells = self._first_cells(values, voxel, pairs)
                first = 0
                for _ in range(_REFINEMENTS):
                    more = self._more_corners(values, voxel, cells, first)
                    first = len(cells.points)
                    if len(more) == 0:
                        break
                    cells = cells.with_points(more, values(more))
                    show({"corners": f"{len(cells.points):,}"})
                mesh = _surface_of(values, cells)
        if region is not None:
            mesh = triangle_mesh.keep_vertices(mesh, region.contains(mesh.vertices))
        mesh = cleaned(mesh, config, _SHORTEST * voxel)
        return FusedRegion(mesh, voxel, len(cells.points))

    def _pairs(self, voxel: float, region: ObservedRegion | None) -> Pairs:
        """Return corners around the Gaussians in the box."""
        box = self.fusion.box
        means = self.gaussians.means.double().cpu().numpy()
        is_used = box.contains(means) & (self.gaussians.opacities.cpu().numpy() > MIN_OPACITY)
        is_used &= ~self._excludes(means, voxel)
        if region is not None:
            is_used &= region.contains(means)
        axes = rotation_matrices(self.gaussians.quats).double().cpu().numpy()[is_used]
        scales = self.gaussians.scales.double().cpu().numpy()[is_used]
        pairs = pair_corners(means[is_used], axes, scales, voxel)
        return thinned(pairs, _FIRST_CELL * voxel, MOST_PAIRS)

    def _first_cells(self, values: PointField, voxel: float, pairs: Pairs) -> _Complex:
        """Return the complex of pairs, of what is missing outside of them, and of the box."""
        upper = values(pairs.upper).distances
        lower = values(pairs.lower).distances
        # The surface is farther away from its Gaussian than both corners.
        is_missing = (upper < 0) & (lower < 0)
        is_upper_nearer = (upper > lower)[:, None]
        ways = pairs.upper - pairs.lower
        ways /= np.linalg.norm(ways, axis=1, keepdims=True)
        ways = np.where(is_upper_nearer, ways, -ways)
        nearer = np.where(is_upper_nearer, pairs.upper, pairs.lower)
        distances = np.maximum(upper, lower)
        steps = (_OFFSET - distances) * voxel
        outside = nearer + steps[:, None] * ways
        outside = outside[is_missing]
        low = np.array(self.fusion.box.low)
        high = np.array(self.fusion.box.high)
        places = np.indices((2, 2, 2)).reshape(3, -1)
        box_corners = low + places.T * (high - low)
        corners = np.concatenate([pairs.upper, pairs.lower, outside, box_corners])
        corners = np.unique(corners, axis=0)
        return _Complex(corners, values(corners))

    def _excludes(self, points: np.ndarray, voxel: float) -> np.ndarray:
        """Return which points another mesh covers, farther from its border than a margin. (N,)"""
        if self.excluded is None:
            return np.zeros(len(points), dtype=bool)
        low = np.array(self.excluded.low) + _MARGIN * voxel
        high = np.array(self.excluded.high) - _MARGIN * voxel
        return np.all((points > low) & (points < high), axis=1)

    def _more_corners(
        self, values: PointField, voxel: float, cells: _Complex, first: int
    ) -> np.ndarray:
        """Return corners that are missing around those of row ``first`` and later ones. (M, 3)"""
        in_tetrahedra = _middles_on_the_other_side(values, voxel, cells, first)
        in_triangles = _middles_beside_the_surface(values, voxel, cells, first)
        more = np.concatenate([in_tetrahedra, in_triangles])
        more = more[~self._excludes(more, voxel)]
        return np.unique(more, axis=0)


def pair_corners(means: np.ndarray, axes: np.ndarray, scales: np.ndarray, voxel: float) -> Pairs:
    """Return points on both sides of Gaussians, more of them along long axes.

    Args:
        means: (N, 3) world units
        axes: Unit vectors as columns. (N, 3, 3)
        scales: Standard deviations along them. (N, 3) world units
        voxel: World units.
    """
    order = scales.argsort(axis=1)
    scales = np.take_along_axis(scales, order, axis=1)
    axes = np.take_along_axis(axes, order[:, None, :], axis=2)
    offsets = np.clip(_OFFSET_SIGMAS * scales[:, 0], _OFFSET * voxel, _MOST_OFFSET * voxel)
    sides = offsets[:, None] * axes[:, :, 0]
    middles = [means]
    rows = [np.arange(len(means))]
    for axis in (1, 2):
        long = np.flatnonzero(scales[:, axis] > _LONG_SIGMA * voxel)
        way = _LONG_SIGMAS * scales[long, axis, None] * axes[long, :, axis]
        middles += [means[long] - way, means[long] + way]
        rows += [long, long]
    middles = np.concatenate(middles)
    sides = sides[np.concatenate(rows)]
    return Pairs(middles + sides, middles - sides)


def thinned(pairs: Pairs, cell: float, most: int) -> Pairs:
    """Return one pair in each cell of a grid, if there are too many; the cells grow until they fit.

    Args:
        pairs: Corners on both sides of places.
        cell: Side of the first cells, world units.
        most: Number of pairs that may stay.
    """
    if len(pairs.upper) <= most:
        return pairs
    middles = (pairs.upper + pairs.lower) / 2
    while True:
        places = np.floor(middles / cell).astype(np.int64)
        _, rows = np.unique(places, axis=0, return_index=True)
        if len(rows) <= most:
            return Pairs(pairs.upper[rows], pairs.lower[rows])
        cell *= _COARSER


def _middles_on_the_other_side(
    values: PointField, voxel: float, cells: _Complex, first: int
) -> np.ndarray:
    """Return centres of tetrahedra on another side of the surface than interpolated."""
    samples = cells.samples
    tetrahedra = cells.tetrahedra
    corners = cells.points[tetrahedra]
    edges = corners[:, EDGES[:, 0]] - corners[:, EDGES[:, 1]]
    is_coarse = np.linalg.norm(edges, axis=2).max(axis=1, initial=0.0) > _COARSE_EDGE * voxel
    is_coarse &= tetrahedra.max(axis=1, initial=-1) >= first
    is_coarse &= samples.is_known[tetrahedra].sum(axis=1) >= 2
    middles = corners[is_coarse].mean(axis=1)
    expected = samples.distances[tetrahedra[is_coarse]].mean(axis=1)
    actual = values(middles)
    differs = actual.is_inside != (expected < 0)
    differs &= (np.abs(actual.distances) > _TOLERANCE) | ~actual.is_known
    # What no view knows counts as inside, also before a surface.
    differs &= actual.is_known | (expected >= 0)
    return middles[differs]


def _middles_beside_the_surface(
    values: PointField, voxel: float, cells: _Complex, first: int
) -> np.ndarray:
    """Return middles of triangles that do not lie on the surface."""
    edges = cells.crossed(first)
    crossing = crossings(values, cells.points, cells.samples, edges, _COARSE_HALVINGS)
    corners = crossing.points[edges.faces]
    middles = corners.mean(axis=1)
    sizes = np.linalg.norm(corners - middles[:, None], axis=2).max(axis=1, initial=0.0)
    is_coarse = sizes > _COARSE_TRIANGLE * voxel
    middles = middles[is_coarse]
    samples = values(middles)
    amounts = np.abs(samples.distances)
    is_bent = (amounts > _TOLERANCE) & (amounts < _MOST_BEND)
    return middles[samples.is_known & is_bent]


def _surface_of(values: PointField, cells: _Complex) -> TriangleMesh:
    """Return the surface between known corners of tetrahedra."""
    edges = cells.crossed()
    if len(edges.faces) == 0:
        return EMPTY_MESH
    crossing = crossings(values, cells.points, cells.samples, edges, _HALVINGS)
    colors = values(crossing.points).colors
    levels = np.rint(255 * colors)
    levels = np.clip(levels, 0, 255)
    mesh = TriangleMesh(
        vertices=crossing.points,
        faces=edges.faces,
        colors=levels.astype(np.uint8),
    )
    is_surface = crossing.is_known & (crossing.steps < _MOST_STEP)
    return triangle_mesh.keep_vertices(mesh, is_surface)
