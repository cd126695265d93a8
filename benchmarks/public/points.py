# SPDX-License-Identifier: Apache-2.0
"""Point sets of surface benchmarks: points of a mesh, thinning, averages of voxels, distances."""

from __future__ import annotations

import numpy as np
from scipy.spatial import KDTree

from sugar_scene.surface_queries import sample_surface
from sugar_scene.triangle_mesh import TriangleMesh, doubled_area_normals

MAX_SAMPLES = 20_000_000  # of one mesh
_CHUNK = 1 << 20  # points whose neighbours are looked up at once


def corner_and_center_points(mesh: TriangleMesh) -> np.ndarray:
    """Return the vertices that faces use, and the centres of all faces. (N, 3) float64"""
    corners = mesh.vertices[np.unique(mesh.faces)]
    return np.concatenate([corners, mesh.vertices[mesh.faces].mean(axis=1)])


def even_points(mesh: TriangleMesh, spacing: float, samples_per_cell: float) -> np.ndarray:
    """Return the vertices that faces use, and points that are even in area. (N, 3) float64

    Args:
        spacing: Side of a square cell of the surface, in units of the mesh.
        samples_per_cell: Points of each; fewer where there would be more than ``MAX_SAMPLES``.
    """
    area = 0.5 * np.linalg.norm(doubled_area_normals(mesh.vertices, mesh.faces), axis=1).sum()
    count = min(MAX_SAMPLES, int(np.ceil(samples_per_cell * area / spacing**2)))
    samples = sample_surface(mesh.vertices, mesh.faces, count)
    return np.concatenate([mesh.vertices[np.unique(mesh.faces)], samples.points])


def thinned(points: np.ndarray, spacing: float, seed: int = 0) -> np.ndarray:
    """Return points of which no two are closer than a spacing. (N, 3) -> (M, 3)

    The result is that of going through the points in a random order and dropping all that are
    nearer than the spacing to one that was kept before. Here all points are kept at once that come
    before every neighbour that is still undecided, until none is undecided.
    """
    points = points[np.random.default_rng(seed).permutation(len(points))]
    earlier, later = _close_pairs(points, spacing)
    is_open = np.ones(len(points), bool)
    is_kept = np.zeros(len(points), bool)
    while is_open.any():
        is_first = is_open.copy()
        is_first[later] = False
        is_kept |= is_first
        is_open &= ~is_first
        is_open[later[is_first[earlier]]] = False
        both_open = is_open[earlier] & is_open[later]
        earlier = earlier[both_open]
        later = later[both_open]
    return points[is_kept]


def _close_pairs(points: np.ndarray, spacing: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of all pairs of points nearer than a spacing: the lower and the higher."""
    pairs = KDTree(points).query_pairs(spacing, output_type="ndarray")
    lengths = np.linalg.norm(points[pairs[:, 0]] - points[pairs[:, 1]], axis=1)
    pairs = pairs[lengths < spacing]
    return pairs.min(axis=1, initial=len(points)), pairs.max(axis=1, initial=-1)


def voxel_means(points: np.ndarray, size: float) -> np.ndarray:
    """Return the mean of the points of each voxel. (N, 3) -> (M, 3)

    Args:
        size: Side of a voxel. The lowest point is in the middle of the first one.
    """
    if len(points) == 0:
        return points
    cells = np.floor((points - points.min(axis=0)) / size + 0.5).astype(np.int64)
    extent = cells.max(axis=0) + 1
    keys = (cells[:, 0] * extent[1] + cells[:, 1]) * extent[2] + cells[:, 2]
    _, rows, counts = np.unique(keys, return_inverse=True, return_counts=True)
    sums = [np.bincount(rows, weights=points[:, axis]) for axis in range(3)]
    return np.stack(sums, axis=1) / counts[:, None]


def distances_to(targets: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return the distance of each point to the nearest target; infinite without targets. (N,)"""
    if len(targets) == 0:
        return np.full(len(points), np.inf)
    tree = KDTree(targets)
    chunks = [points[first : first + _CHUNK] for first in range(0, len(points), _CHUNK)]
    distances = [tree.query(chunk, workers=-1)[0] for chunk in chunks]
    return np.concatenate([np.empty(0), *distances])
