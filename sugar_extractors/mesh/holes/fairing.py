# SPDX-License-Identifier: Apache-2.0
"""The flattest and the smoothest surface in the rim of a hole: membrane and thin plate.

The membrane has the least Laplacian energy for its rim. The thin plate has the least bi-Laplacian
energy while the rim and one ring of vertices around it stay where they are, so that the tangents
of the surface go on. Weights are cotangents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sugar_extractors.mesh.holes.patches import Patch, corner_cotangents, normals_between
from sugar_scene.triangle_mesh import TriangleMesh

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_LEAST_WEIGHT = 0.01  # of an edge in the Laplacian, so that it has a maximum principle
_SOLUTIONS = 2  # each with the weights of the surface before


@dataclass(frozen=True)
class OneRing:
    """The faces around a patch; vertices are those of the patch, then those of the ring."""

    ring: np.ndarray  # vertices of the ring, (N, 3)
    ring_faces: np.ndarray  # between all these vertices, (F, 3)
    colors: np.ndarray  # of the vertices on the rims, (R, 3) float64

    @classmethod
    def of(cls, mesh: TriangleMesh, patch: Patch) -> OneRing:
        """Return the faces of a mesh that touch the rims of a patch."""
        numbers = np.full(mesh.n_vertices, -1, dtype=np.int64)
        numbers[patch.rows] = np.arange(patch.n_rim)
        faces = mesh.faces[(numbers[mesh.faces] >= 0).any(axis=1)]
        ring_rows = np.unique(faces)
        ring_rows = ring_rows[numbers[ring_rows] < 0]
        numbers[ring_rows] = patch.mesh.n_vertices + np.arange(len(ring_rows))
        return cls(
            ring=mesh.vertices[ring_rows],
            ring_faces=numbers[faces],
            colors=mesh.colors[patch.rows].astype(np.float64),
        )


class Laplacian(NamedTuple):
    """Cotangent Laplacian of a surface."""

    matrix: csr_array  # rows of a patch, columns of it and of the ring around it, (P, P + N)
    areas: np.ndarray  # of the vertices of the patch, (P,)


def cotangent_laplacian(patch: Patch, vertices: np.ndarray, one_ring: OneRing) -> Laplacian:
    """Return the Laplacian of a patch at other vertex positions, (P, 3)."""
    # Here and not above: most commands start without it.
    from scipy.sparse import coo_array

    points = np.concatenate([vertices, one_ring.ring])
    n = len(points)
    faces = np.concatenate([patch.mesh.faces, one_ring.ring_faces])
    rows = []
    columns = []
    weights = []
    for corner in range(3):
        at = faces[:, corner]
        a = faces[:, corner - 2]
        b = faces[:, corner - 1]
        half_cotangents = corner_cotangents(points, at, a, b) / 2
        rows += [a, b]
        columns += [b, a]
        weights += [half_cotangents, half_cotangents]
    entries = (np.concatenate(weights), (np.concatenate(rows), np.concatenate(columns)))
    # Adds up the two sides of an edge.
    edges = coo_array(entries, shape=(n, n)).tocsr()
    edges.data = np.maximum(edges.data, _LEAST_WEIGHT)
    diagonal = np.arange(n)
    sums = coo_array((edges.sum(axis=1), (diagonal, diagonal)), shape=(n, n)).tocsr()
    face_areas = np.linalg.norm(normals_between(points, *faces.T), axis=1) / 2
    areas = np.zeros(n)
    for corner in range(3):
        areas += np.bincount(faces[:, corner], face_areas / 3, n)
    n_patch = len(vertices)
    matrix = (sums - edges).tocsr()[:n_patch]
    least = 1e-9 * float(areas[:n_patch].max())
    return Laplacian(matrix, np.maximum(areas[:n_patch], least))


def membrane(laplacian: Laplacian, values: np.ndarray, n_rim: int) -> np.ndarray:
    """Interpolate values of the rim harmonically inside a patch. (R, K) -> (P, K)"""
    # Here and not above: most commands start without it.
    from scipy.sparse import csc_array
    from scipy.sparse.linalg import splu

    n_patch = len(laplacian.areas)
    rows = csc_array(laplacian.matrix[n_rim:])
    inner = csc_array(rows[:, n_rim:n_patch])
    right_side = -(rows[:, :n_rim] @ values)
    return np.concatenate([values, splu(inner).solve(right_side)])


def _thin_plate(
    laplacian: Laplacian, vertices: np.ndarray, one_ring: OneRing, n_rim: int
) -> np.ndarray:
    """Return the vertices of a patch where its thin plate energy is least.

    The Laplacian of the rim's vertices counts as well, and the ring is part of it: this keeps the
    tangents. (P, 3) -> (P, 3)
    """
    # Here and not above: most commands start without it.
    from scipy.sparse import csc_array, diags_array
    from scipy.sparse.linalg import splu

    n_patch = len(vertices)
    weighted = csc_array(diags_array(1 / np.sqrt(laplacian.areas)) @ laplacian.matrix)
    inner = csc_array(weighted[:, n_rim:n_patch])
    fixed = weighted[:, :n_rim] @ vertices[:n_rim]
    fixed += weighted[:, n_patch:] @ one_ring.ring
    normal_matrix = csc_array(inner.T @ inner)
    solution = splu(normal_matrix).solve(-(inner.T @ fixed))
    return np.concatenate([vertices[:n_rim], solution])


class Shapes(NamedTuple):
    """The flattest and the smoothest shape of a patch."""

    flat: np.ndarray  # membrane, (P, 3)
    smooth: np.ndarray  # thin plate, (P, 3)


def extreme_shapes(patch: Patch, one_ring: OneRing) -> Shapes:
    """Return the membrane and the thin plate of the rims of a patch."""
    n_rim = patch.n_rim
    flat = patch.mesh.vertices
    if patch.mesh.n_vertices == n_rim:
        return Shapes(flat, flat)
    for _ in range(_SOLUTIONS):
        laplacian = cotangent_laplacian(patch, flat, one_ring)
        flat = membrane(laplacian, flat[:n_rim], n_rim)
    smooth = flat
    for _ in range(_SOLUTIONS):
        laplacian = cotangent_laplacian(patch, smooth, one_ring)
        smooth = _thin_plate(laplacian, smooth, one_ring, n_rim)
    return Shapes(flat, smooth)
