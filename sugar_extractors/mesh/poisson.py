# SPDX-License-Identifier: Apache-2.0
"""From surface points to a mesh: outliers, Poisson, density cut, decimation, projection.

The steps and their order are those of SuGaR (Guédon & Lepetit, CVPR 2024, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sugar_extractors.mesh.meshing_backends import MeshingBackend, SolverConfig
from sugar_extractors.mesh.surface_samples import SurfaceSamples
from sugar_scene.mesh.triangle_mesh import (
    TriangleMesh,
    clean_mesh,
    keep_vertices,
    merge_meshes,
    with_vertex_normals,
)
from sugar_utils.neighbors import nearest_neighbors_of

MIN_POINTS = 64
"""Fewer points in a region count as none: Poisson would make a blob of them."""

_QUERY_CHUNK = 1 << 20


@dataclass(frozen=True)
class PoissonConfig:
    """Constants of the reconstruction.

    Attributes:
        solver: Constants of the solver.
        density_quantile: Share of vertices, those with the least support, that is cut away; 0
            keeps the surface closed.
        max_gap: Vertices farther than this many octree cells from every point go, too; 0 keeps
            them. Acts only where a share is cut away: who wants the surface closed gets it.
        outlier_neighbors: Neighbours whose mean distance decides about outliers.
        outlier_ratio: Points farther from their neighbours than the mean over all points plus
            this many standard deviations are outliers.
    """

    solver: SolverConfig = SolverConfig()
    density_quantile: float = 0.1
    max_gap: float = 4.0
    outlier_neighbors: int = 20
    outlier_ratio: float = 20.0


def outlier_mask(points: np.ndarray, n_neighbors: int, ratio: float) -> np.ndarray:
    """Statistical outliers: mean distance to the neighbours above mean + ratio * deviation.

    Args:
        points: (P, 3) float32 world units.
        n_neighbors: Neighbours, the point itself counted as one of them.
        ratio: Factor of the standard deviation.

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
    samples: SurfaceSamples, config: PoissonConfig, backend: MeshingBackend
) -> TriangleMesh:
    """Mesh of one region, before decimation.

    Args:
        samples: At least ``MIN_POINTS`` surface points with outward normals.
        config: Constants.
        backend: Library to use.

    Returns:
        The surface without its least supported vertices; normals are not computed yet.
    """
    outliers = outlier_mask(samples.points, config.outlier_neighbors, config.outlier_ratio)
    if outliers.any():
        samples = samples.select(~outliers)
    mesh, densities = backend.reconstruct(samples, config.solver)
    if config.density_quantile > 0 and mesh.n_vertices:
        keep = densities >= np.quantile(densities, config.density_quantile)
        if config.max_gap > 0:
            largest = config.max_gap * cell_size(samples.points, config.solver)
            keep &= gaps(mesh.vertices, samples.points) <= largest
        mesh = keep_vertices(mesh, keep)
    return mesh


def cell_size(points: np.ndarray, solver: SolverConfig) -> float:
    """Side of the finest octree cell in world units; points: (P, 3)"""
    if solver.width > 0:
        return solver.width
    side = float((points.max(axis=0) - points.min(axis=0)).max())
    return solver.scale * side / 2**solver.depth


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
        regions: Meshes of the foreground and, if wanted, the background.
        n_faces: Triangles of each region.
        backend: Library to use.
        surface: Points that vertices move to, the nearest one each; None leaves them in place.

    Returns:
        The final mesh with vertex normals.
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
