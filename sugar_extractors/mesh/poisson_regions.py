# SPDX-License-Identifier: Apache-2.0
"""Poisson reconstruction of one region, without outliers and badly supported parts."""

from __future__ import annotations

import numpy as np
import torch

from sugar_extractors.mesh.level_sets import SurfaceSamples
from sugar_extractors.mesh.meshing_backends import MeshingBackend, PoissonConfig, Waiting
from sugar_extractors.mesh.surface_sizes import cell_size, gaps
from sugar_scene import triangle_mesh as meshes
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.neighbors import nearest_neighbors_of

MIN_POINTS = 64  # fewer points in a region count as none: Poisson would make a blob of them
OUTLIER_NEIGHBORS = 20
OUTLIER_RATIO = 20.0  # standard deviations of the mean distance to the neighbours
_QUERY_CHUNK = 1 << 20


def outlier_mask(points: np.ndarray) -> np.ndarray:
    """Return which points, (P, 3), are far from their neighbours. (P,) bool"""
    cloud = torch.from_numpy(points)
    distances = np.empty(len(points), dtype=np.float64)
    for first in range(0, len(points), _QUERY_CHUNK):
        chunk = cloud[first : first + _QUERY_CHUNK]
        squares = nearest_neighbors_of(chunk, cloud, OUTLIER_NEIGHBORS).sq_distances
        means = squares.double().sqrt().mean(dim=1)
        distances[first : first + len(chunk)] = means.numpy()
    limit = distances.mean() + OUTLIER_RATIO * distances.std(ddof=1)
    return distances > limit


def reconstruct_region(
    samples: SurfaceSamples,
    config: PoissonConfig,
    backend: MeshingBackend,
    waiting: Waiting = lambda n_bytes: None,
) -> TriangleMesh:
    """Return the mesh of one region, before decimation.

    Args:
        waiting: Called now and then with the bytes in use.
    """
    config = config.resolved(has_hull=False)
    is_outlier = outlier_mask(samples.points)
    if is_outlier.any():
        samples = samples.select(~is_outlier)
    mesh, densities = backend.reconstruct(samples, config, waiting)
    quantile = config.vertices_density_quantile
    depth = config.poisson_depth
    if quantile is None or isinstance(depth, str):
        raise ValueError("the Poisson settings are not resolved")
    if quantile > 0 and mesh.n_vertices:
        is_kept = densities >= np.quantile(densities, quantile)
        if config.max_gap > 0:
            largest = config.max_gap * cell_size(samples.points, depth)
            is_kept &= gaps(mesh.vertices, samples.points) <= largest
        mesh = meshes.keep_vertices(mesh, is_kept)
    return mesh
