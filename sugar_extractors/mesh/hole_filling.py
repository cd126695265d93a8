# SPDX-License-Identifier: Apache-2.0
"""Close holes of a mesh by the smoothest surface that no photograph contradicts.

A hole is a closed loop of open edges. It is triangulated with the least area, refined to the edges
around it and faired: its thin plate (bi-Laplacian) energy is least while the rim and one ring of
vertices around it stay where they are, so the surface's tangents go on. Where photographs
contradict the result, it moves toward the membrane (Laplacian) of the rim, which is the flattest
surface; where they contradict that as well, the hole stays open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sugar_extractors.mesh.level_sets import Box
from sugar_extractors.mesh.subdivision import with_split_edges
from sugar_scene import triangle_mesh as meshes
from sugar_scene.triangle_mesh import TriangleMesh, edge_keys

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MODES = ("auto", "none")
HOLE_SHARE = 0.15
"""Longest extent of a hole that is filled, in diagonals of the bounding box of its component.

A larger one is a side without photographs, whose shape the rim does not tell: the border of a
half sphere has 0.67, and on a whole sphere 0.15 is a cap of 15 degrees around its axis.
"""
MIN_COVERING_VIEWS = 3  # in whose images all of a hole lies: from two sides it can be a background
MAX_BULGE = 0.5  # height above the membrane in extents of the hole: that of a half sphere
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the way from the membrane to the smoothest surface
MAX_LOOP = 2048  # edges of a loop: chords of larger ones take too much memory
_MAX_PART = 128  # edges of a loop that is triangulated at once; larger ones are divided
_COMPACTNESS = 0.02  # weight of squared sides beside the area, for triangles that are no slivers
_LEAST_AREA = 1e-6  # of a triangle, in squares of its sides; smaller ones are degenerate
_LONG = 4 / 3  # edges longer than this are split, in edges of the surroundings
_REFINEMENTS = 12
_MAX_FLIPS = 50  # rounds
_OBTUSE = 1e-9  # by which the cotangents beside an edge must be below 0 before it is flipped
_LEAST_WEIGHT = 0.01  # of an edge in the Laplacian, so that it has a maximum principle
_LARGEST_COTANGENT = 50.0
_SOLUTIONS = 2  # each with the weights of the surface before


class Judgement(NamedTuple):
    """Evidence of photographs about points."""

    n_views: np.ndarray  # views that show the place of a point, (N,) int64
    is_contradicted: np.ndarray  # whether there can be no surface, (N,) bool


Judge = Callable[[np.ndarray], Judgement]
"""Returns what photographs say about points, (N, 3) in world units."""


@dataclass(frozen=True)
class HoleCounts:
    """Holes of a mesh by what became of them."""

    filled: int = 0
    too_large: int = 0
    outer_borders: int = 0  # of open surfaces such as a ground
    outside_views: int = 0
    contradicted: int = 0
    degenerate: int = 0  # with triangles of no area

    def figures(self) -> dict[str, int]:
        """Return the counts for the record of a mesh."""
        return {
            "holes_filled": self.filled,
            "holes_too_large": self.too_large,
            "holes_outer_borders": self.outer_borders,
            "holes_outside_views": self.outside_views,
            "holes_contradicted": self.contradicted,
            "holes_degenerate": self.degenerate,
        }

    def __str__(self) -> str:
        reasons = {
            "larger than a hole": self.too_large,
            "outer borders": self.outer_borders,
            f"not in {MIN_COVERING_VIEWS} views": self.outside_views,
            "contradicted by photographs": self.contradicted,
            "degenerate": self.degenerate,
        }
        text = f"{self.filled:,} holes filled, {sum(reasons.values()):,} left open"
        parts = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
        return f"{text} ({', '.join(parts)})" if parts else text


class FilledMesh(NamedTuple):
    """A mesh of which some holes were closed."""

    mesh: TriangleMesh  # the one before where no hole was filled
    counts: HoleCounts


def fill_holes(
    mesh: TriangleMesh,
    judge: Judge,
    *,
    is_object: bool,
    box: Box | None = None,
    goes_on: np.ndarray | None = None,
) -> FilledMesh:
    """Fill the holes of a mesh that photographs allow.

    Args:
        mesh: Its vertices and faces stay, in their order; new ones come behind them.
        judge: Says what photographs tell about points.
        is_object: Whether masks tell what the object is. If not, the longest border of each
            component is the end of what was reconstructed and stays.
        box: Vertices outside of it do not count for the size of a component; None: all count.
        goes_on: At which vertices the surface goes on in another mesh, (V,) bool; borders through
            them stay. None: nowhere.
    """
    loops = simple_loops(meshes.border_loops(mesh))
    reasons = _open_reasons(mesh, loops, is_object, box)
    if goes_on is not None:
        for number, loop in enumerate(loops):
            if goes_on[loop].any():
                reasons[number] = "outer_borders"
    candidates = [number for number, reason in enumerate(reasons) if not reason]
    edges = _RimEdges.of(mesh, loops)
    if not candidates:
        return FilledMesh(mesh, HoleCounts(**Counter(reasons)))
    triangulations = []
    centers: list[np.ndarray] = []
    for number in candidates:
        loop = loops[number]
        faces = _triangulated(mesh.vertices, loop, edges)
        if faces is None:
            # As where all vertices are joined already: edges to a new vertex are never there.
            center = np.full_like(loop, mesh.n_vertices + len(centers))
            faces = np.stack([np.roll(loop, -1), loop, center], axis=1)
            centers.append(mesh.vertices[loop].mean(axis=0))
        triangulations.append(faces)
    patch = _Patch.of(mesh, triangulations, centers)
    patch = _refined(patch, edges)
    surroundings = _Surroundings.of(mesh, patch)
    shaped = _shaped(patch, surroundings, judge, [loops[number] for number in candidates])
    for number, reason in zip(candidates, shaped.reasons, strict=True):
        reasons[number] = reason
    counts = HoleCounts(**Counter(reasons))
    if not counts.filled:
        return FilledMesh(mesh, counts)
    is_filled = np.array([reason == "filled" for reason in shaped.reasons])
    patch = replace(patch, mesh=replace(patch.mesh, vertices=shaped.vertices))
    return FilledMesh(_joined(mesh, patch, is_filled, surroundings), counts)


def simple_loops(walks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Divide closed walks where they come to a vertex again, as where two holes touch."""
    loops = []
    for walk in walks:
        path: list[int] = []
        places: dict[int, int] = {}
        for vertex in [*walk.tolist(), int(walk[0])]:
            if vertex in places:
                start = places[vertex]
                loops.append(np.array(path[start:], dtype=np.int64))
                for passed in path[start:]:
                    del places[passed]
                del path[start:]
            places[vertex] = len(path)
            path.append(vertex)
    return [loop for loop in loops if len(loop) >= 3]


def _open_reasons(
    mesh: TriangleMesh, loops: Sequence[np.ndarray], is_object: bool, box: Box | None
) -> list[str]:
    """Return why each loop stays open before photographs are looked at; empty where it may not."""
    if not loops:
        return []
    labels = meshes.component_labels(mesh)
    diagonals = _component_diagonals(mesh, labels, box)
    components = [int(labels[loop[0]]) for loop in loops]
    lengths = [_length(mesh.vertices[loop]) for loop in loops]
    longest: dict[int, int] = {}
    for number, component in enumerate(components):
        if component not in longest or lengths[number] > lengths[longest[component]]:
            longest[component] = number
    reasons = []
    for number, loop in enumerate(loops):
        component = components[number]
        largest = HOLE_SHARE * diagonals[component]
        reason = ""
        if not is_object and longest[component] == number:
            reason = "outer_borders"
        elif len(loop) > MAX_LOOP or _extent(mesh.vertices[loop]) > largest:
            reason = "too_large"
        reasons.append(reason)
    return reasons


def _component_diagonals(mesh: TriangleMesh, labels: np.ndarray, box: Box | None) -> np.ndarray:
    """Return the diagonal of each component's bounding box at the row of its label. (V,)"""
    counted = np.ones(mesh.n_vertices, dtype=bool)
    if box is not None:
        is_inside = box.contains(mesh.vertices)
        # What lies outside of the box altogether is measured as it is.
        has_inside = np.zeros(mesh.n_vertices, dtype=bool)
        has_inside[labels[is_inside]] = True
        counted = is_inside | ~has_inside[labels]
    low = np.full((mesh.n_vertices, 3), np.inf)
    high = np.full((mesh.n_vertices, 3), -np.inf)
    np.minimum.at(low, labels[counted], mesh.vertices[counted])
    np.maximum.at(high, labels[counted], mesh.vertices[counted])
    is_label = np.isfinite(low).all(axis=1)
    diagonals = np.zeros(mesh.n_vertices)
    diagonals[is_label] = np.linalg.norm(high[is_label] - low[is_label], axis=1)
    return diagonals


def _length(points: np.ndarray) -> float:
    """Return the length of a closed polygon. (N, 3) -> world units"""
    return float(np.linalg.norm(np.roll(points, -1, axis=0) - points, axis=1).sum())


def _extent(points: np.ndarray) -> float:
    """Return the extent of points along their first principal axis. (N, 3) -> world units"""
    centered = points - points.mean(axis=0)
    _, axes = np.linalg.eigh(centered.T @ centered)
    return float(np.ptp(centered @ axes[:, -1]))


@dataclass(frozen=True)
class _RimEdges:
    """Edges between vertices on rims of holes, of the mesh and of fillings; none is made twice."""

    neighbors: dict[int, set[int]]  # by row of a vertex

    @classmethod
    def of(cls, mesh: TriangleMesh, loops: Sequence[np.ndarray]) -> _RimEdges:
        """Return the edges of a mesh both of whose ends lie on loops."""
        is_rim = np.zeros(mesh.n_vertices, dtype=bool)
        for loop in loops:
            is_rim[loop] = True
        edges = cls({})
        starts = mesh.faces
        ends = np.roll(mesh.faces, -1, axis=1)
        is_between = is_rim[starts] & is_rim[ends]
        pairs = zip(starts[is_between].tolist(), ends[is_between].tolist(), strict=True)
        for start, end in pairs:
            edges.add(start, end)
        return edges

    def add(self, start: int, end: int) -> None:
        """Add an edge."""
        self.neighbors.setdefault(start, set()).add(end)
        self.neighbors.setdefault(end, set()).add(start)

    def between(self, loop: np.ndarray) -> np.ndarray:
        """Return which pairs of vertices of a loop are ends of an edge. (N,) -> (N, N) bool"""
        places = {row: place for place, row in enumerate(loop.tolist())}
        joined = np.zeros((len(loop), len(loop)), dtype=bool)
        for row, place in places.items():
            for neighbor in self.neighbors.get(row, ()):
                if neighbor in places:
                    joined[place, places[neighbor]] = True
        return joined


def _triangulated(vertices: np.ndarray, loop: np.ndarray, edges: _RimEdges) -> np.ndarray | None:
    """Return triangles between the vertices of a loop, (N - 2, 3), and add their edges.

    None where there are none without degenerate triangles or edges of more than two faces.
    """
    is_joined = edges.between(loop)
    faces: list[tuple[int, int, int]] = []
    chords: list[tuple[int, int]] = []
    parts = [np.arange(len(loop))]
    while parts:
        part = parts.pop()
        points = vertices[loop[part]]
        is_forbidden = is_joined[np.ix_(part, part)]
        if len(part) > _MAX_PART:
            chord = _dividing_chord(points, is_forbidden)
            if chord is None:
                return None
            first, last = chord
            parts.append(part[first : last + 1])
            parts.append(np.concatenate([part[last:], part[: first + 1]]))
            chords.append((int(part[first]), int(part[last])))
            continue
        triangles = _least_triangles(points, is_forbidden)
        if triangles is None:
            return None
        # Against the sense of the faces around, as faces on two sides of an edge are.
        faces += [(int(part[c]), int(part[b]), int(part[a])) for a, b, c in triangles]
    rows = loop[np.array(faces, dtype=np.int64)]
    for triangle in rows.tolist():
        for corner in range(3):
            edges.add(triangle[corner], triangle[corner - 1])
    return rows


def _dividing_chord(points: np.ndarray, is_forbidden: np.ndarray) -> tuple[int, int] | None:
    """Return the ends of the shortest chord that leaves a quarter of a loop on either side.

    (N, 3), (N, N) bool -> None where there is none
    """
    n = len(points)
    places = np.arange(n)
    steps = places[None, :] - places[:, None]
    is_balanced = (steps >= n // 4) & (steps <= n - n // 4)
    squares = (points**2).sum(axis=1)
    lengths = squares[:, None] + squares[None, :] - 2 * points @ points.T
    lengths[~is_balanced | is_forbidden] = np.inf
    first, last = np.unravel_index(lengths.argmin(), lengths.shape)
    if not np.isfinite(lengths[first, last]):
        return None
    return int(first), int(last)


def _least_triangles(
    points: np.ndarray, is_forbidden: np.ndarray
) -> list[tuple[int, int, int]] | None:
    """Return the triangulation of least cost of a closed polygon, by dynamic programming.

    Args:
        points: Corners of the polygon. (N, 3)
        is_forbidden: Pairs of corners between which there is an edge already. (N, N) bool

    Returns:
        Corners of N - 2 triangles in ascending order; None where there is no triangulation.
    """
    n = len(points)
    costs = np.full((n, n), np.inf)
    middles = np.zeros((n, n), dtype=np.int64)
    first = np.arange(n - 1)
    costs[first, first + 1] = 0.0
    for gap in range(2, n):
        start = np.arange(n - gap)
        end = start + gap
        middle = start[:, None] + np.arange(1, gap)
        total = costs[start[:, None], middle] + costs[middle, end[:, None]]
        total += _triangle_costs(points[start][:, None], points[middle], points[end][:, None])
        best = total.argmin(axis=1)
        least = total[start, best]
        if gap < n - 1:
            least[is_forbidden[start, end]] = np.inf
        costs[start, end] = least
        middles[start, end] = middle[start, best]
    if not np.isfinite(costs[0, n - 1]):
        return None
    triangles = []
    spans = [(0, n - 1)]
    while spans:
        a, c = spans.pop()
        if c - a < 2:
            continue
        b = int(middles[a, c])
        triangles.append((a, b, c))
        spans.append((a, b))
        spans.append((b, c))
    return triangles


def _triangle_costs(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the costs of triangles; infinite for degenerate ones. (..., 3) -> (...)"""
    ab = b - a
    ac = c - a
    bc = c - b
    areas = np.linalg.norm(np.cross(ab, ac), axis=-1) / 2
    squares = (ab**2).sum(axis=-1) + (ac**2).sum(axis=-1) + (bc**2).sum(axis=-1)
    costs = areas + _COMPACTNESS * squares
    return np.where(areas > _LEAST_AREA * squares, costs, np.inf)


@dataclass(frozen=True)
class _Patch:
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
    ) -> _Patch:
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
    starts = mesh.faces.ravel()
    ends = np.roll(mesh.faces, -1, axis=1).ravel()
    is_row = np.zeros(mesh.n_vertices, dtype=bool)
    is_row[rows] = True
    is_counted = is_row[starts] | is_row[ends]
    starts = starts[is_counted]
    ends = ends[is_counted]
    lengths = np.linalg.norm(mesh.vertices[starts] - mesh.vertices[ends], axis=1)
    n = mesh.n_vertices
    totals = np.bincount(starts, lengths, n) + np.bincount(ends, lengths, n)
    counts = np.bincount(starts, minlength=n) + np.bincount(ends, minlength=n)
    return totals[rows] / counts[rows]


def _refined(patch: _Patch, edges: _RimEdges) -> _Patch:
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


def _flipped(patch: _Patch, edges: _RimEdges) -> _Patch:
    """Flip edges inside a patch until it is Delaunay, or nearly so."""
    mesh = patch.mesh
    forbidden = _forbidden_keys(patch, edges)
    for _ in range(_MAX_FLIPS):
        faces = _with_flips(mesh.vertices, mesh.faces, forbidden)
        if faces is None:
            break
        mesh = replace(mesh, faces=faces)
    return replace(patch, mesh=mesh)


def _forbidden_keys(patch: _Patch, edges: _RimEdges) -> np.ndarray:
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
    starts = faces.ravel()
    ends = np.roll(faces, -1, axis=1).ravel()
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
    cotangents = _cotangents(vertices, c, a, b) + _cotangents(vertices, d, b, a)
    candidates = np.flatnonzero((cotangents < -_OBTUSE) & (c != d))
    # The most obtuse first; one edge of a face at a time, and no new edge twice.
    candidates = candidates[np.argsort(cotangents[candidates], kind="stable")]
    first_ends = c[candidates]
    last_ends = d[candidates]
    new_keys = np.minimum(first_ends, last_ends) * n_vertices + np.maximum(first_ends, last_ends)
    normals_a = _normals(vertices, a[candidates], last_ends, first_ends)
    normals_b = _normals(vertices, last_ends, b[candidates], first_ends)
    is_flip = (normals_a * normals_b).sum(axis=1) > 0
    is_flip &= ~_contains(keys[order], new_keys) & ~_contains(forbidden, new_keys)
    is_first = np.zeros(len(candidates), dtype=bool)
    is_first[np.unique(new_keys, return_index=True)[1]] = True
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


def _normals(vertices: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return normals of triangles between rows, (N,) each, of twice their area. (N, 3)"""
    return np.cross(vertices[b] - vertices[a], vertices[c] - vertices[a])


def _cotangents(vertices: np.ndarray, at: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cotangent of the angle at a corner of triangles between rows, (N,) each. (N,)"""
    to_a = vertices[a] - vertices[at]
    to_b = vertices[b] - vertices[at]
    doubled_areas = np.linalg.norm(np.cross(to_a, to_b), axis=1)
    products = (to_a * to_b).sum(axis=1)
    cotangents = products / np.maximum(doubled_areas, 1e-300)
    return np.clip(cotangents, -_LARGEST_COTANGENT, _LARGEST_COTANGENT)


@dataclass(frozen=True)
class _Surroundings:
    """A patch with the faces around it: vertices of the patch first, then the ring around them."""

    ring: np.ndarray  # vertices of the ring, (N, 3)
    ring_faces: np.ndarray  # between all these vertices, (F, 3)
    colors: np.ndarray  # of the vertices on the rims, (R, 3) float64

    @classmethod
    def of(cls, mesh: TriangleMesh, patch: _Patch) -> _Surroundings:
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


class _Laplacian(NamedTuple):
    """Cotangent Laplacian of a surface."""

    matrix: csr_array  # rows of a patch, columns of it and of the ring around it, (P, P + N)
    areas: np.ndarray  # of the vertices of the patch, (P,)


def _laplacian(patch: _Patch, vertices: np.ndarray, surroundings: _Surroundings) -> _Laplacian:
    """Return the Laplacian of a patch whose vertices, (P, 3), lie elsewhere than in its mesh."""
    # Here and not above: most commands start without it.
    from scipy.sparse import coo_array

    points = np.concatenate([vertices, surroundings.ring])
    n = len(points)
    faces = np.concatenate([patch.mesh.faces, surroundings.ring_faces])
    rows = []
    columns = []
    weights = []
    for corner in range(3):
        at = faces[:, corner]
        a = faces[:, corner - 2]
        b = faces[:, corner - 1]
        half_cotangents = _cotangents(points, at, a, b) / 2
        rows += [a, b]
        columns += [b, a]
        weights += [half_cotangents, half_cotangents]
    entries = (np.concatenate(weights), (np.concatenate(rows), np.concatenate(columns)))
    # Adds up the two sides of an edge.
    edges = coo_array(entries, shape=(n, n)).tocsr()
    edges.data = np.maximum(edges.data, _LEAST_WEIGHT)
    diagonal = np.arange(n)
    sums = coo_array((edges.sum(axis=1), (diagonal, diagonal)), shape=(n, n)).tocsr()
    face_areas = np.linalg.norm(_normals(points, *faces.T), axis=1) / 2
    areas = np.zeros(n)
    for corner in range(3):
        areas += np.bincount(faces[:, corner], face_areas / 3, n)
    n_patch = len(vertices)
    matrix = (sums - edges).tocsr()[:n_patch]
    least = 1e-9 * float(areas[:n_patch].max())
    return _Laplacian(matrix, np.maximum(areas[:n_patch], least))


def _membrane(laplacian: _Laplacian, values: np.ndarray, n_rim: int) -> np.ndarray:
    """Return harmonic values inside of a patch whose rim has some. (R, K) -> (P, K)"""
    # Here and not above: most commands start without it.
    from scipy.sparse import csc_array
    from scipy.sparse.linalg import splu

    n_patch = len(laplacian.areas)
    rows = csc_array(laplacian.matrix[n_rim:])
    inner = csc_array(rows[:, n_rim:n_patch])
    right_side = -(rows[:, :n_rim] @ values)
    return np.concatenate([values, splu(inner).solve(right_side)])


def _thin_plate(
    laplacian: _Laplacian, vertices: np.ndarray, surroundings: _Surroundings, n_rim: int
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
    fixed += weighted[:, n_patch:] @ surroundings.ring
    normal_matrix = csc_array(inner.T @ inner)
    solution = splu(normal_matrix).solve(-(inner.T @ fixed))
    return np.concatenate([vertices[:n_rim], solution])


class _Shapes(NamedTuple):
    """The flattest and the smoothest shape of a patch."""

    flat: np.ndarray  # membrane, (P, 3)
    smooth: np.ndarray  # thin plate, (P, 3)


def _extreme_shapes(patch: _Patch, surroundings: _Surroundings) -> _Shapes:
    """Return the membrane and the thin plate of the rims of a patch."""
    n_rim = patch.n_rim
    flat = patch.mesh.vertices
    if patch.mesh.n_vertices == n_rim:
        return _Shapes(flat, flat)
    for _ in range(_SOLUTIONS):
        laplacian = _laplacian(patch, flat, surroundings)
        flat = _membrane(laplacian, flat[:n_rim], n_rim)
    smooth = flat
    for _ in range(_SOLUTIONS):
        laplacian = _laplacian(patch, smooth, surroundings)
        smooth = _thin_plate(laplacian, smooth, surroundings, n_rim)
    return _Shapes(flat, smooth)


class _Shaped(NamedTuple):
    """The shape of a patch."""

    vertices: np.ndarray  # (P, 3)
    reasons: list[str]  # what becomes of each hole, a field of :class:`HoleCounts`


def _shaped(
    patch: _Patch, surroundings: _Surroundings, judge: Judge, loops: Sequence[np.ndarray]
) -> _Shaped:
    """Return the smoothest shape of each filling that photographs do not contradict.

    Args:
        loops: Rims of the holes, rows of the mesh.
    """
    n_rim = patch.n_rim
    n_inside = patch.mesh.n_vertices - n_rim
    holes = _holes_of_inner_vertices(patch)
    rims = [np.searchsorted(patch.rows, loop) for loop in loops]
    flat, smooth = _extreme_shapes(patch, surroundings)
    bulge = (smooth - flat)[n_rim:]
    shares = np.array(SHARES)[:, None]
    shapes = flat[n_rim:] + shares[:, :, None] * bulge
    judgement = judge(np.concatenate([flat[:n_rim], shapes.reshape(-1, 3)]))
    # Of each share of each vertex off the rims.
    n_views = judgement.n_views[n_rim:].reshape(len(SHARES), n_inside)
    is_refuted = judgement.is_contradicted[n_rim:].reshape(len(SHARES), n_inside)
    is_refuted = is_refuted | (n_views < MIN_COVERING_VIEWS)
    extents = np.array([_extent(flat[rim]) for rim in rims])
    heights = shares * np.linalg.norm(bulge, axis=1)
    is_refuted = is_refuted | (heights > MAX_BULGE * extents[holes])
    levels = _levels(is_refuted, patch)
    best_levels = np.minimum(levels, len(SHARES) - 1)
    vertices = np.concatenate([flat[:n_rim], shapes[best_levels, np.arange(n_inside)]])

    is_covered = judgement.n_views[:n_rim] >= MIN_COVERING_VIEWS
    uncovered_holes = set(holes[n_views[-1] < MIN_COVERING_VIEWS].tolist())
    contradicted_holes = set(holes[levels == len(SHARES)].tolist())
    degenerate_holes = _degenerate_holes(patch, vertices)
    reasons = []
    for number, rim in enumerate(rims):
        reason = "filled"
        if number in uncovered_holes or not is_covered[rim].all():
            reason = "outside_views"
        elif number in contradicted_holes:
            reason = "contradicted"
        elif number in degenerate_holes:
            reason = "degenerate"
        reasons.append(reason)
    return _Shaped(vertices, reasons)


def _holes_of_inner_vertices(patch: _Patch) -> np.ndarray:
    """Return the number of the hole in which each vertex off the rims lies. (I,)"""
    numbers = np.zeros(patch.mesh.n_vertices, dtype=np.int64)
    numbers[patch.mesh.faces] = patch.holes[:, None]
    return numbers[patch.n_rim :]


def _degenerate_holes(patch: _Patch, vertices: np.ndarray) -> set[int]:
    """Return the holes with triangles without area between vertices, (P, 3)."""
    a, b, c = vertices[patch.mesh.faces].swapaxes(0, 1)
    is_degenerate = np.isinf(_triangle_costs(a, b, c))
    return set(patch.holes[is_degenerate].tolist())


def _levels(is_refuted: np.ndarray, patch: _Patch) -> np.ndarray:
    """Return the first level of ``SHARES`` that each vertex off the rims may have.

    Neighbours differ by one level at most. A filling one of whose vertices may have none ends with
    ``len(SHARES)`` there.

    Args:
        is_refuted: Whether a vertex may not have a level. (L, I) bool
    """
    n_levels, n_inside = is_refuted.shape
    # First level from each one on that is allowed: a filling is pulled in, never out.
    following = np.full((n_levels + 1, n_inside), n_levels)
    for level in range(n_levels - 1, -1, -1):
        following[level] = np.where(is_refuted[level], following[level + 1], level)
    inner_faces = patch.mesh.faces - patch.n_rim
    starts = inner_faces.ravel()
    ends = np.roll(inner_faces, -1, axis=1).ravel()
    is_inside = (starts >= 0) & (ends >= 0)
    starts = starts[is_inside]
    ends = ends[is_inside]
    columns = np.arange(n_inside)
    levels = following[0]
    while True:
        lower = levels.copy()
        np.maximum.at(lower, starts, levels[ends] - 1)
        np.maximum.at(lower, ends, levels[starts] - 1)
        lower = following[lower, columns]
        if (lower == levels).all():
            return levels
        levels = lower


def _joined(
    mesh: TriangleMesh, patch: _Patch, is_filled: np.ndarray, surroundings: _Surroundings
) -> TriangleMesh:
    """Return a mesh with the fillings of some holes, (H,) bool, whose vertices are marked."""
    n_rim = patch.n_rim
    faces = patch.mesh.faces[is_filled[patch.holes]]
    is_used = np.zeros(patch.mesh.n_vertices, dtype=bool)
    is_used[faces] = True
    is_used[:n_rim] = False
    numbers = np.concatenate([patch.rows, np.zeros(len(is_used) - n_rim, dtype=np.int64)])
    numbers[is_used] = mesh.n_vertices + np.arange(int(is_used.sum()))
    colors = surroundings.colors
    if patch.mesh.n_vertices > n_rim:
        laplacian = _laplacian(patch, patch.mesh.vertices, surroundings)
        colors = _membrane(laplacian, colors, n_rim)
    colors = np.rint(np.clip(colors, 0, 255)).astype(np.uint8)
    before = mesh.filled
    if before is None:
        before = np.zeros(mesh.n_vertices, dtype=bool)
    joined = TriangleMesh(
        vertices=np.concatenate([mesh.vertices, patch.mesh.vertices[is_used]]),
        faces=np.concatenate([mesh.faces, numbers[faces]]),
        colors=np.concatenate([mesh.colors, colors[is_used]]),
        filled=np.concatenate([before, np.ones(int(is_used.sum()), dtype=bool)]),
    )
    return meshes.with_vertex_normals(joined)
