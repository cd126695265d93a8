# SPDX-License-Identifier: Apache-2.0
"""Patch refinement: triangles of fillings become Delaunay, with edges as long as around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gaussian_splatting.core.subsets import is_among
from sugar_extractors.mesh.holes.rim_triangulation import RimEdges
from sugar_scene.subdivision import with_split_edges
from sugar_scene.triangle_mesh import TriangleMesh, edge_keys, sides_of

_LONG = 4 / 3  # edges longer than this are split, in mean edges around them
_REFINEMENTS = 12
_MAX_FLIPS = 50  # rounds
_OBTUSE = 1e-9  # by which the cotangents beside an edge must be below 0 before it is flipped
_LARGEST_COTANGENT = 50.0


@dataclass(frozen=True)
class Patch:
    """The fillings of all holes, as one mesh of their own."""

    mesh: TriangleMesh  # vertices on the rims first, then those inside; its colours are not used
    rows: np.ndarray  # rows of the rims' vertices in the mesh with the holes, (R,)
    holes: np.ndarray  # number of the hole of each face, (F,)
    sizes: np.ndarray  # length of edges around each vertex, (V,) world units

    @classmethod
    def of(
        cls,
        mesh: TriangleMesh,
        triangulations: Sequence[np.ndarray],
        centers: Sequence[np.ndarray],
    ) -> Patch:
        """Return the patch of triangles, (F, 3) for each hole, between rows of a mesh and centers.

        Args:
            centers: Further vertices, (3,) each, whose rows come behind those of the mesh.
        """
        faces = np.concatenate(triangulations)
        all_rows, places = np.unique(faces, return_inverse=True)
        places = places.reshape(-1, 3)
        rows = all_rows[all_rows < mesh.n_vertices]
        inner = np.reshape(centers, (-1, 3))
        patch_mesh = TriangleMesh(
            vertices=np.concatenate([mesh.vertices[rows], inner]),
            faces=places,
            colors=np.zeros((len(all_rows), 3), dtype=np.uint8),
        )
        counts = [len(triangles) for triangles in triangulations]
        rim_sizes = _mean_edges(mesh, rows)
        # A center is the last corner of its faces, which have each vertex around it once in front.
        is_fan = places[:, 2] >= len(rows)
        numbers = places[is_fan, 2] - len(rows)
        totals = np.bincount(numbers, rim_sizes[places[is_fan, 0]], len(inner))
        inner_sizes = totals / np.bincount(numbers, minlength=len(inner))
        return cls(
            mesh=patch_mesh,
            rows=rows,
            holes=np.repeat(np.arange(len(counts)), counts),
            sizes=np.concatenate([rim_sizes, inner_sizes]),
        )

    @property
    def n_rim(self) -> int:
        """Number of vertices on the rims."""
        return len(self.rows)


def _mean_edges(mesh: TriangleMesh, rows: np.ndarray) -> np.ndarray:
    """Return the mean length of a mesh's edges at some of its vertices. (R,) -> (R,) world units"""
    starts, ends = sides_of(mesh.faces)
    is_row = is_among(mesh.n_vertices, rows)
    is_counted = is_row[starts] | is_row[ends]
    starts = starts[is_counted]
    ends = ends[is_counted]
    lengths = np.linalg.norm(mesh.vertices[starts] - mesh.vertices[ends], axis=1)
    n = mesh.n_vertices
    totals = np.bincount(starts, lengths, n) + np.bincount(ends, lengths, n)
    counts = np.bincount(starts, minlength=n) + np.bincount(ends, minlength=n)
    return totals[rows] / counts[rows]


def refined(patch: Patch, edges: RimEdges) -> Patch:
    """Split long edges inside a patch, until they are as long as those around it."""
    patch = _flipped(patch, edges)
    for _ in range(_REFINEMENTS):
        faces = patch.mesh.faces
        ends = np.roll(faces, -1, axis=1)
        vertices = patch.mesh.vertices
        lengths = np.linalg.norm(vertices[faces] - vertices[ends], axis=2)
        is_long = lengths > _LONG * (patch.sizes[faces] + patch.sizes[ends]) / 2
        _, places, counts = np.unique(edge_keys(faces), return_inverse=True, return_counts=True)
        is_inside = counts[places].reshape(faces.shape) == 2
        is_split = is_long & is_inside
        if not is_split.any():
            break
        split, split_ends = with_split_edges(patch.mesh, is_split)
        midpoint_sizes = patch.sizes[split_ends].mean(axis=1)
        patch = replace(
            patch,
            mesh=split.mesh,
            holes=patch.holes[split.parents],
            sizes=np.concatenate([patch.sizes, midpoint_sizes]),
        )
        patch = _flipped(patch, edges)
    return patch


def _flipped(patch: Patch, edges: RimEdges) -> Patch:
    """Flip edges inside a patch until it is Delaunay, or nearly so."""
    mesh = patch.mesh
    forbidden = _forbidden_keys(patch, edges)
    for _ in range(_MAX_FLIPS):
        faces = _with_flips(mesh.vertices, mesh.faces, forbidden)
        if faces is None:
            break
        mesh = replace(mesh, faces=faces)
    return replace(patch, mesh=mesh)


def _forbidden_keys(patch: Patch, edges: RimEdges) -> np.ndarray:
    """Return numbers of the edges between rim vertices that the mesh has, (K,) sorted."""
    places = {row: place for place, row in enumerate(patch.rows.tolist())}
    keys = []
    for row, place in places.items():
        for neighbor in edges.neighbors.get(row, ()):
            other = places.get(neighbor, -1)
            if other > place:
                keys.append(place * patch.mesh.n_vertices + other)
    return np.array(sorted(keys), dtype=np.int64)


def _with_flips(
    vertices: np.ndarray, faces: np.ndarray, forbidden: np.ndarray
) -> np.ndarray | None:
    """Return faces with some edges flipped, at most one of each face; None where all are Delaunay.

    (V, 3), (F, 3), (K,) -> (F, 3)
    """
    n_vertices = len(vertices)
    starts, ends = sides_of(faces)
    opposites = np.roll(faces, 1, axis=1).ravel()
    keys = np.minimum(starts, ends) * n_vertices + np.maximum(starts, ends)
    order = np.argsort(keys, kind="stable")
    is_pair = keys[order][1:] == keys[order][:-1]
    one = order[:-1][is_pair]
    two = order[1:][is_pair]
    a = starts[one]
    b = ends[one]
    c = opposites[one]
    d = opposites[two]
    cotangents = corner_cotangents(vertices, c, a, b) + corner_cotangents(vertices, d, b, a)
    candidates = np.flatnonzero((cotangents < -_OBTUSE) & (c != d))
    # The most obtuse first; one edge of a face at a time, and no new edge twice.
    candidates = candidates[np.argsort(cotangents[candidates], kind="stable")]
    first_ends = c[candidates]
    last_ends = d[candidates]
    new_keys = np.minimum(first_ends, last_ends) * n_vertices + np.maximum(first_ends, last_ends)
    normals_a = normals_between(vertices, a[candidates], last_ends, first_ends)
    normals_b = normals_between(vertices, last_ends, b[candidates], first_ends)
    is_flip = (normals_a * normals_b).sum(axis=1) > 0
    is_flip &= ~_contains(keys[order], new_keys) & ~_contains(forbidden, new_keys)
    is_first = is_among(len(candidates), np.unique(new_keys, return_index=True)[1])
    candidates = candidates[is_flip & is_first]
    if len(candidates) == 0:
        return None
    face_pairs = np.stack([one[candidates] // 3, two[candidates] // 3], axis=1)
    ranks = np.full(len(faces), len(candidates))
    np.minimum.at(ranks, face_pairs.ravel(), np.repeat(np.arange(len(candidates)), 2))
    is_best = (ranks[face_pairs] == np.arange(len(candidates))[:, None]).all(axis=1)
    flips = candidates[is_best]
    flipped_faces = faces.copy()
    flipped_faces[one[flips] // 3] = np.stack([a[flips], d[flips], c[flips]], axis=1)
    flipped_faces[two[flips] // 3] = np.stack([d[flips], b[flips], c[flips]], axis=1)
    return flipped_faces


def _contains(numbers: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return which queries are among sorted numbers. (N,), (Q,) -> (Q,) bool"""
    if len(numbers) == 0:
        return np.zeros(len(queries), dtype=bool)
    places = np.searchsorted(numbers, queries)
    return numbers[np.minimum(places, len(numbers) - 1)] == queries


def normals_between(
    vertices: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    """Return normals of triangles between rows, (N,) each, of twice their area. (N, 3)"""
    return np.cross(vertices[b] - vertices[a], vertices[c] - vertices[a])


def corner_cotangents(
    vertices: np.ndarray, at: np.ndarray, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """Return the cotangent of the angle at a corner of triangles between rows, (N,) each. (N,)"""
    to_a = vertices[a] - vertices[at]
    to_b = vertices[b] - vertices[at]
    doubled_areas = np.linalg.norm(np.cross(to_a, to_b), axis=1)
    products = (to_a * to_b).sum(axis=1)
    cotangents = products / np.maximum(doubled_areas, 1e-300)
    return np.clip(cotangents, -_LARGEST_COTANGENT, _LARGEST_COTANGENT)
