# SPDX-License-Identifier: Apache-2.0
"""From surface points to a mesh: outliers, Poisson, density cut, decimation, projection.

The steps and their order are those of SuGaR (Guédon & Lepetit, CVPR 2024, section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from gaussian_splatting.data.cameras import Camera
from sugar_extractors.mesh.meshing_backends import MeshingBackend, SolverConfig
from sugar_extractors.mesh.surface_samples import SurfaceSamples
from sugar_scene.mesh.triangle_mesh import (
    TriangleMesh,
    clean_mesh,
    keep_vertices,
    merge_meshes,
    with_vertex_normals,
)
from sugar_utils.flags import AUTO, non_negative_float, positive_float, positive_int, share
from sugar_utils.neighbors import nearest_neighbors_of
from sugar_utils.settings import flag

MIN_POINTS = 64
"""Fewer points in a region count as none: Poisson would make a blob of them."""

_QUERY_CHUNK = 1 << 20
_SAMPLED_POINTS = 10_000

LEAST_DEPTH, MOST_DEPTH = 4, 10
"""Of octrees whose depth is chosen by the program."""

USUAL_QUANTILE = 0.1
"""Of the original. Of an object inside of its masks it would cut thin parts away."""


_flag = partial(flag, group="surface", idle="with --mesh_extractor tsdf")


@dataclass(frozen=True)
class PoissonConfig:
    """Constants of the reconstruction.

    Outliers are farther from their neighbours, on average, than the mean over all points plus
    ``outlier_ratio`` standard deviations. ``max_gap`` acts only where a share of the vertices is
    cut away: who wants the surface closed gets it.
    """

    solver: SolverConfig = SolverConfig()
    vertices_density_quantile: float | None = _flag(
        None, "share of badly supported Poisson vertices to cut away; 0 avoids holes; unset: 0.1, "
        "or 0 where masks say what the object is and cut off the rest", parse=share,
    )  # fmt: skip
    max_gap: float = _flag(
        4.0, "cut away Poisson vertices farther than this many octree cells from every surface "
        "point; 0 keeps them", parse=non_negative_float, idle="with --mesh_extractor tsdf; with "
        "--vertices_density_quantile 0, which asks for a closed surface",
    )  # fmt: skip
    outlier_neighbors: int = _flag(
        20, "neighbours that decide whether a surface point is an outlier", parse=positive_int
    )
    outlier_ratio: float = _flag(
        20.0, "standard deviations beyond which it is one", parse=positive_float
    )

    def with_depth(self, points: np.ndarray, cameras: Sequence[Camera]) -> PoissonConfig:
        """The same with a number where the depth was left to the program."""
        if self.solver.poisson_depth != AUTO:
            return self
        pixel = pixel_size(points, cameras)
        depth = automatic_depth(points, pixel, self.solver.poisson_scale)
        return replace(self, solver=replace(self.solver, poisson_depth=depth))

    def resolved(self, has_hull: bool) -> PoissonConfig:
        """The same with a number where the share was left open; a hull cuts off what is outside."""
        if self.vertices_density_quantile is not None:
            return self
        return replace(self, vertices_density_quantile=0.0 if has_hull else USUAL_QUANTILE)


def outlier_mask(points: np.ndarray, n_neighbors: int, ratio: float) -> np.ndarray:
    """Statistical outliers: mean distance to the neighbours above mean + ratio * deviation.

    Args:
        points: (P, 3) float32 world units.

    Returns:
        (P,) bool
    """
    cloud = torch.from_numpy(points)
    distances = np.empty(len(points), dtype=np.float64)
    for first in range(0, len(points), _QUERY_CHUNK):
        chunk = cloud[first : first + _QUERY_CHUNK]
        squares = nearest_neighbors_of(chunk, cloud, n_neighbors).sq_distances
        distances[first : first + len(chunk)] = squares.double().sqrt().mean(dim=1).numpy()
    if len(points) < 2:
        return np.zeros(len(points), dtype=bool)
    return distances > distances.mean() + ratio * distances.std(ddof=1)


def reconstruct_region(
    samples: SurfaceSamples,
    config: PoissonConfig,
    backend: MeshingBackend,
    waiting: Callable[[int], None] = lambda n_bytes: None,
) -> TriangleMesh:
    """Mesh of one region, before decimation.

    Args:
        samples: At least ``MIN_POINTS`` surface points with outward normals.
        config: Constants; a share left open is that of a scene without a hull.
        waiting: Called now and then with the bytes that the solver has in memory.

    Returns:
        The surface without its least supported vertices; normals are not computed yet.
    """
    config = config.resolved(has_hull=False)
    outliers = outlier_mask(samples.points, config.outlier_neighbors, config.outlier_ratio)
    if outliers.any():
        samples = samples.select(~outliers)
    mesh, densities = backend.reconstruct(samples, config.solver, waiting)
    if config.vertices_density_quantile > 0 and mesh.n_vertices:
        keep = densities >= np.quantile(densities, config.vertices_density_quantile)
        if config.max_gap > 0:
            largest = config.max_gap * cell_size(samples.points, config.solver)
            keep &= gaps(mesh.vertices, samples.points) <= largest
        mesh = keep_vertices(mesh, keep)
    return mesh


def pixel_size(points: np.ndarray, cameras: Sequence[Camera]) -> float:
    """Median size of a pixel at points, in the view that is nearest to each.

    Args:
        points: (P, 3) world units, at least one.
    """
    some = points[:: max(1, len(points) // _SAMPLED_POINTS)]
    sizes = [np.linalg.norm(some - camera.center, axis=1) / camera.fx for camera in cameras]
    return float(np.median(np.min(sizes, axis=0)))


def automatic_depth(points: np.ndarray, pixel: float, scale: float) -> int:
    """Octree depth for ``--poisson_depth auto``.

    The cells are as small as a pixel, which nothing in the photographs is smaller than; a surface
    that crosses the whole cube, six sides of it, still has a point in each.

    Args:
        points: (P, 3) world units.
        pixel: Size of a pixel on the surface in world units.
    """
    side = scale * float((points.max(axis=0) - points.min(axis=0)).max())
    by_pixel = math.ceil(math.log2(max(side, pixel) / pixel)) if pixel > 0 else MOST_DEPTH
    by_points = round(math.log(max(len(points), 6) / 6, 4))
    return max(LEAST_DEPTH, min(by_pixel, by_points, MOST_DEPTH))


def cell_size(points: np.ndarray, solver: SolverConfig) -> float:
    """Side of the finest octree cell in world units; points: (P, 3)"""
    if solver.poisson_width > 0:
        return solver.poisson_width
    side = float((points.max(axis=0) - points.min(axis=0)).max())
    return solver.poisson_scale * side / 2**solver.poisson_depth


def gaps(vertices: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Distance of each vertex to the nearest surface point. (V, 3), (P, 3) -> (V,) world units"""
    cloud = torch.from_numpy(points)
    parts = [
        nearest_neighbors_of(torch.from_numpy(chunk.astype(np.float32)), cloud, 1).sq_distances
        for chunk in np.array_split(vertices, max(1, len(vertices) // _QUERY_CHUNK))
    ]
    return torch.cat(parts)[:, 0].sqrt().numpy()


def finish_mesh(
    regions: Sequence[TriangleMesh],
    n_faces: int,
    backend: MeshingBackend,
    surface: SurfaceSamples | None,
) -> TriangleMesh:
    """Decimate and clean each region, put them together and snap them to the surface points.

    Args:
        surface: Points that vertices move to, the nearest one each; None leaves them in place.
    """
    mesh = merge_meshes([clean_mesh(backend.decimate(region, n_faces)) for region in regions])
    if surface is None:
        return with_vertex_normals(mesh)
    # Normals come before the clean-up, which drops faces that collapsed in the projection.
    return clean_mesh(with_vertex_normals(project_on_points(mesh, surface)))


def project_on_points(mesh: TriangleMesh, surface: SurfaceSamples) -> TriangleMesh:
    """Give each vertex the position and colour of the nearest surface point."""
    rows = nearest_neighbors_of(
        torch.from_numpy(mesh.vertices.astype(np.float32)), torch.from_numpy(surface.points), 1
    ).indices[:, 0].numpy()  # fmt: skip
    return TriangleMesh(surface.points[rows].astype(np.float64), mesh.faces, surface.colors[rows])
