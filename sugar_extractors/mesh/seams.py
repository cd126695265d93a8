# SPDX-License-Identifier: Apache-2.0
"""Join two meshes that meet at the faces of a box into one surface.

Foreground and background have voxels of different sizes. Both are cut exactly at the box, which
leaves them with borders on its faces, and a strip of triangles joins these borders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gaussian_splatting.core.subsets import values_by_key
from sugar_scene import triangle_mesh as meshes
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh

REACH = 4.0  # largest distance that is bridged, in median edges of the coarser border
_SLIT = 8.0  # longest border around a slit that is closed, in the distance that is bridged
_SNAP = 1e-6  # a vertex this near to a plane lies in it, in sides of the box
_DETOUR = 3.0  # longest way along a border, in straight distances between its ends


def cut_at_box(mesh: TriangleMesh, box: Box, *, inside: bool) -> TriangleMesh:
    """Return the part of a mesh inside or outside of a box.

    Triangles are split where they cross it.
    """
    if mesh.n_faces == 0:
        return mesh
    for axis in range(3):
        snap = _SNAP * (box.high[axis] - box.low[axis])
        mesh = _split(mesh, axis, box.low[axis], snap)
        mesh = _split(mesh, axis, box.high[axis], snap)
    centers = mesh.vertices[mesh.faces].mean(axis=1)
    is_kept = box.contains(centers) == inside
    return meshes.keep_faces(mesh, is_kept)


def _split(mesh: TriangleMesh, axis: int, value: float, snap: float) -> TriangleMesh:
    """Split triangles at a plane across an axis; vertices within ``snap`` of it move into it."""
    vertices = mesh.vertices.copy()
    is_close = np.abs(vertices[:, axis] - value) <= snap
    vertices[is_close, axis] = value
    sides = np.sign(vertices[:, axis] - value).astype(np.int64)
    corner_sides = sides[mesh.faces]
    is_crossed = (corner_sides.min(axis=1) < 0) & (corner_sides.max(axis=1) > 0)
    if not is_crossed.any():
        return replace(mesh, vertices=vertices, normals=None)
    faces = mesh.faces[is_crossed]
    corner_sides = corner_sides[is_crossed]
    # First the corner in the plane, or else the one that is alone on its side.
    majority = np.sign(corner_sides.sum(axis=1))[:, None]
    priority = np.where(corner_sides == 0, 2, corner_sides == -majority)
    first = priority.argmax(axis=1)[:, None]
    faces = np.take_along_axis(faces, (first + np.arange(3)) % 3, axis=1)
    is_in_plane = sides[faces[:, 0]] == 0
    thirds = faces[~is_in_plane]  # become three triangles
    halves = faces[is_in_plane]  # become two
    # New vertices, one at each edge that crosses the plane.
    ends = np.concatenate([thirds[:, :2], thirds[:, [0, 2]], halves[:, 1:]])
    ends, rows = np.unique(np.sort(ends, axis=1), axis=0, return_inverse=True)
    rows = rows.reshape(-1) + len(vertices)
    a, b = vertices[ends.T]
    share = ((value - a[:, axis]) / (b[:, axis] - a[:, axis]))[:, None]
    points = a + share * (b - a)
    points[:, axis] = value
    color_a, color_b = mesh.colors[ends.T].astype(np.float64)
    colors = np.rint(color_a + share * (color_b - color_a)).astype(np.uint8)
    n = len(thirds)
    parts = [
        mesh.faces[~is_crossed],
        *_thirds(thirds, rows[:n], rows[n : 2 * n]),
        *_halves(halves, rows[2 * n :]),
    ]
    return TriangleMesh(
        vertices=np.concatenate([vertices, points]),
        faces=np.concatenate(parts),
        colors=np.concatenate([mesh.colors, colors]),
    )


def _thirds(faces: np.ndarray, ab: np.ndarray, ac: np.ndarray) -> list[np.ndarray]:
    """Return three triangles for each, (N, 3), whose first corner is cut off at ab and ac, (N,)."""
    a, b, c = faces.T
    return [
        np.stack([a, ab, ac], axis=1),
        np.stack([ab, b, c], axis=1),
        np.stack([ab, c, ac], axis=1),
    ]


def _halves(faces: np.ndarray, bc: np.ndarray) -> list[np.ndarray]:
    """Return two triangles for each, (N, 3), cut from its first corner to bc, (N,)."""
    a, b, c = faces.T
    return [np.stack([a, b, bc], axis=1), np.stack([a, bc, c], axis=1)]


def joined_at_box(inner: TriangleMesh, outer: TriangleMesh, box: Box) -> TriangleMesh:
    """Merge an inner and an outer mesh, and join their borders at a box by triangles."""
    # Here and not above: most commands start without it.
    from scipy.spatial import KDTree

    mesh = meshes.merge_meshes([inner, outer])
    inner_edges = meshes.border_edges(inner)
    outer_edges = meshes.border_edges(outer)
    if not len(inner_edges) or not len(outer_edges):
        return mesh
    inner_length = _median_length(inner, inner_edges)
    outer_length = _median_length(outer, outer_edges)
    reach = REACH * max(inner_length, outer_length)
    inner_edges = inner_edges[_is_near(inner.vertices[inner_edges], box, reach)]
    outer_edges = outer_edges[_is_near(outer.vertices[outer_edges], box, reach)]
    if not len(inner_edges) or not len(outer_edges):
        return mesh
    border = _Border.of(mesh.vertices, outer_edges + inner.n_vertices)
    tree = KDTree(mesh.vertices[border.rows])
    faces = []
    for chain in _chains(inner_edges):
        distances, nearest = tree.query(mesh.vertices[chain])
        faces += _strip(chain, border, border.rows[nearest], distances <= reach, reach)
    if not faces:
        return mesh
    all_faces = np.concatenate([mesh.faces, np.array(faces, dtype=np.int64)])
    mesh = meshes.clean_mesh(replace(mesh, faces=all_faces))
    loops = meshes.border_loops(mesh)
    slits = [loop for loop in loops if _is_slit(mesh.vertices[loop], box, reach)]
    return meshes.with_loops_filled(mesh, slits)


@dataclass(frozen=True)
class _Border:
    """The border of the outer mesh, along which a strip is laid."""

    vertices: np.ndarray  # of the merged mesh, (V, 3)
    rows: np.ndarray  # vertices on the border, (B,)
    following: dict[int, int]  # the next vertex along the border

    @classmethod
    def of(cls, vertices: np.ndarray, edges: np.ndarray) -> _Border:
        """Return the border of directed edges, (E, 2), between vertices, (V, 3)."""
        # Faces at both sides of an edge run along it in opposite directions.
        following = {int(end): int(start) for start, end in edges}
        return cls(vertices, np.unique(edges), following)

    def distance(self, a: int, b: int) -> float:
        """Return the distance of two vertices in world units."""
        return float(np.linalg.norm(self.vertices[a] - self.vertices[b]))

    def path(self, start: int, goal: int) -> list[int] | None:
        """Return the vertices after ``start`` up to a goal; None if that is not ahead."""
        path: list[int] = []
        current = start
        remaining = _DETOUR * self.distance(start, goal)
        while current != goal:
            step = self.following.get(current)
            if step is None:
                return None
            remaining -= self.distance(current, step)
            if remaining < 0:
                return None
            path.append(step)
            current = step
        return path


def _median_length(mesh: TriangleMesh, edges: np.ndarray) -> float:
    starts, ends = mesh.vertices[edges.T]
    return float(np.median(np.linalg.norm(starts - ends, axis=1)))


def _is_slit(loop: np.ndarray, box: Box, reach: float) -> bool:
    """Return whether a short border, (N, 3), runs along a box, as where two strips did not meet."""
    edges = np.stack([loop, np.roll(loop, -1, axis=0)], axis=1)
    length = np.linalg.norm(edges[:, 1] - edges[:, 0], axis=1).sum()
    return bool(length <= _SLIT * reach and _is_near(edges, box, reach).all())


def _is_near(edges: np.ndarray, box: Box, reach: float) -> np.ndarray:
    """Return which edges have both ends, (E, 2, 3), near the surface of a box. (E,) bool"""
    low = np.array(box.low)
    high = np.array(box.high)
    beyond = np.maximum(low - edges, edges - high).max(axis=-1)
    return (np.abs(beyond) <= reach).all(axis=1)


def _chains(edges: np.ndarray) -> Iterator[np.ndarray]:
    """Yield walks along directed edges, each edge once; a closed walk ends where it began."""
    after = values_by_key(edges.tolist())
    # Walks that are open begin where no edge ends.
    open_starts = set(after) - set(edges[:, 1].tolist())
    for first in [*sorted(open_starts), *after]:
        while after.get(first):
            walk = [first]
            while after.get(walk[-1]):
                walk.append(after[walk[-1]].pop())
            yield np.array(walk)


def _strip(
    chain: np.ndarray,
    border: _Border,
    nearest: np.ndarray,
    is_reached: np.ndarray,
    reach: float,
) -> list[tuple[int, int, int]]:
    """Return triangles between a chain of vertices of the inner mesh and the outer border.

    Args:
        chain: Rows of vertices in the order of the border. (N,)
        nearest: Vertex of the outer border that is nearest to each of the chain. (N,)
        is_reached: Whether it is near enough. (N,) bool
        reach: Largest distance that is bridged, in world units.
    """
    faces: list[tuple[int, int, int]] = []
    rows = chain.tolist()
    goals = nearest.tolist()
    reached = is_reached.tolist()
    opposite: int | None = None  # the vertex of the outer border up to which the strip goes
    for k in range(1, len(rows)):
        vertex = rows[k]
        if not reached[k]:
            opposite = None
            continue
        if opposite is None:
            opposite = int(goals[k - 1] if reached[k - 1] else goals[k])
        faces.append((vertex, rows[k - 1], opposite))
        path = border.path(opposite, goals[k])
        if path is None:
            # The goal is behind, or on another border.
            if border.distance(opposite, vertex) > reach:
                opposite = None
            continue
        for step in path:
            faces.append((vertex, opposite, step))
            opposite = step
    return faces
