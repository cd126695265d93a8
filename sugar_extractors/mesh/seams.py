# SPDX-License-Identifier: Apache-2.0
"""Two meshes that meet at the faces of a box, made into one surface.

Foreground and background have voxels of different sizes. Both are cut exactly at the box, which
leaves them with borders on its faces, and a strip of triangles joins these borders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sugar_extractors.mesh.level_sets import Box
from sugar_scene import triangle_mesh as meshes
from sugar_scene.triangle_mesh import TriangleMesh

REACH = 4.0  # largest distance that is bridged, in median edges of the coarser border
_SLIT = 8.0  # longest border around a slit that is closed, in the distance that is bridged
_SNAP = 1e-6  # a vertex this near to a plane lies in it, in sides of the box

_DETOUR = 3.0  # longest way along a border, in straight distances between its ends


def cut_at_box(mesh: TriangleMesh, box: Box, *, inside: bool) -> TriangleMesh:
    """The part of a mesh inside or outside of a box, with triangles split where they cross it."""
    if mesh.n_faces == 0:
        return mesh
    for axis in range(3):
        for value in (box.low[axis], box.high[axis]):
            mesh = _split(mesh, axis, value, _SNAP * (box.high[axis] - box.low[axis]))
    centers = mesh.vertices[mesh.faces].mean(axis=1)
    kept = box.contains(centers) == inside
    return meshes.without_unused_vertices(replace(mesh, faces=mesh.faces[kept]))


def _split(mesh: TriangleMesh, axis: int, value: float, snap: float) -> TriangleMesh:
    vertices = mesh.vertices.copy()
    near = np.abs(vertices[:, axis] - value) <= snap
    vertices[near, axis] = value
    sides = np.sign(vertices[:, axis] - value).astype(np.int64)
    corners = sides[mesh.faces]
    crossed = (corners.min(axis=1) < 0) & (corners.max(axis=1) > 0)
    if not crossed.any():
        return replace(mesh, vertices=vertices, normals=None)
    faces = mesh.faces[crossed]
    corners = corners[crossed]
    # First the corner in the plane, or else the one that is alone on its side.
    alone = np.where(corners == 0, 2, corners == -np.sign(corners.sum(axis=1))[:, None])
    turn = (alone.argmax(axis=1)[:, None] + np.arange(3)) % 3
    faces = np.take_along_axis(faces, turn, axis=1)
    in_plane = sides[faces[:, 0]] == 0
    thirds = faces[~in_plane]
    halves = faces[in_plane]

    ends = np.concatenate([thirds[:, :2], thirds[:, [0, 2]], halves[:, 1:]])
    ends, rows = np.unique(np.sort(ends, axis=1), axis=0, return_inverse=True)
    rows = rows.reshape(-1) + len(vertices)
    a = vertices[ends[:, 0]]
    b = vertices[ends[:, 1]]
    share = ((value - a[:, axis]) / (b[:, axis] - a[:, axis]))[:, None]
    points = a + share * (b - a)
    points[:, axis] = value
    color_a, color_b = (mesh.colors[end].astype(np.float64) for end in ends.T)
    colors = np.rint(color_a + share * (color_b - color_a)).astype(np.uint8)

    n = len(thirds)
    (a, b, c), p, q = thirds.T, rows[:n], rows[n : 2 * n]
    parts = [(a, p, q), (p, b, c), (p, c, q)]
    (a, b, c), p = halves.T, rows[2 * n :]
    parts += [(a, b, p), (a, p, c)]
    return TriangleMesh(
        np.concatenate([vertices, points]),
        np.concatenate([mesh.faces[~crossed], *(np.stack(part, axis=1) for part in parts)]),
        np.concatenate([mesh.colors, colors]),
    )


def joined_at_box(inner: TriangleMesh, outer: TriangleMesh, box: Box) -> TriangleMesh:
    """One mesh of an inner and an outer one, whose borders at a box are joined by triangles."""
    # Here and not above: most commands start without it.
    from scipy.spatial import cKDTree

    mesh = meshes.merge_meshes([inner, outer])
    ours = meshes.border_edges(inner)
    theirs = meshes.border_edges(outer)
    lengths = [
        np.linalg.norm(np.subtract(*m.vertices[e.T]), axis=1)
        for m, e in ((inner, ours), (outer, theirs))
        if len(e)
    ]
    if len(lengths) < 2:
        return mesh
    reach = REACH * max(float(np.median(own)) for own in lengths)
    ours = ours[_is_near(inner.vertices[ours], box, reach)]
    theirs = theirs[_is_near(outer.vertices[theirs], box, reach)] + inner.n_vertices
    if not len(ours) or not len(theirs):
        return mesh
    # Faces at both sides of an edge run along it in opposite directions.
    following = {int(end): int(start) for start, end in theirs}
    candidates = np.unique(theirs)
    tree = cKDTree(mesh.vertices[candidates])
    faces = []
    for chain in _chains(ours):
        far, nearest = tree.query(mesh.vertices[chain])
        faces += _strip(mesh.vertices, chain, candidates[nearest], far <= reach, reach, following)
    if not faces:
        return mesh
    joined = np.concatenate([mesh.faces, np.array(faces, dtype=np.int64)])
    mesh = meshes.clean_mesh(replace(mesh, faces=joined))
    return meshes.with_loops_filled(
        mesh,
        [loop for loop in meshes.border_loops(mesh) if _is_slit(mesh.vertices[loop], box, reach)],
    )


def _is_slit(loop: np.ndarray, box: Box, reach: float) -> bool:
    """Whether a short border, (N, 3), runs along a box, as where two strips did not meet."""
    edges = np.stack([loop, np.roll(loop, -1, axis=0)], axis=1)
    length = np.linalg.norm(edges[:, 1] - edges[:, 0], axis=1).sum()
    return bool(length <= _SLIT * reach and _is_near(edges, box, reach).all())


def _is_near(edges: np.ndarray, box: Box, reach: float) -> np.ndarray:
    """Edges both of whose ends, (E, 2, 3), are near the surface of a box. (E,) bool"""
    low = np.array(box.low)
    high = np.array(box.high)
    beyond = np.maximum(low - edges, edges - high).max(axis=-1)
    return (np.abs(beyond) <= reach).all(axis=1)


def _chains(edges: np.ndarray) -> Iterator[np.ndarray]:
    """Walks along directed edges, each edge once; a closed walk ends where it began."""
    after: dict[int, list[int]] = {}
    for start, end in edges.tolist():
        after.setdefault(start, []).append(end)
    # Walks that are open begin where no edge ends.
    starts = [*sorted(set(after) - set(edges[:, 1].tolist())), *after]
    for first in starts:
        while after.get(first):
            walk = [first]
            while after.get(walk[-1]):
                walk.append(after[walk[-1]].pop())
            yield np.array(walk)


def _strip(
    vertices: np.ndarray,
    chain: np.ndarray,
    nearest: np.ndarray,
    reached: np.ndarray,
    reach: float,
    following: dict[int, int],
) -> list[tuple[int, int, int]]:
    """Triangles between a chain and the other border, along which ``following`` leads.

    Args:
        nearest: The vertex of the other border that is nearest to each of the chain. (N,)
        reached: Whether it is near enough. (N,) bool
    """
    faces: list[tuple[int, int, int]] = []
    rows = chain.tolist()
    goals = nearest.tolist()
    good = reached.tolist()
    at: int | None = None
    for k, there in enumerate(rows[1:], start=1):
        if not good[k]:
            at = None
            continue
        if at is None:
            at = goals[k - 1] if good[k - 1] else goals[k]
        faces.append((there, rows[k - 1], at))
        way = _steps(vertices, at, goals[k], following)
        if way is None:
            # The goal is behind, or on another border.
            at = at if _apart(vertices, at, there) <= reach else None
            continue
        for step in way:
            faces.append((there, at, step))
            at = step
    return faces


def _apart(vertices: np.ndarray, a: int, b: int) -> float:
    return float(np.linalg.norm(vertices[a] - vertices[b]))


def _steps(vertices: np.ndarray, at: int, goal: int, following: dict[int, int]) -> list[int] | None:
    """The way along a border to a goal; None if that is not ahead."""
    way: list[int] = []
    left = _DETOUR * _apart(vertices, at, goal)
    while at != goal:
        step = following.get(at)
        if step is None:
            return None
        left -= _apart(vertices, at, step)
        if left < 0:
            return None
        way.append(step)
        at = step
    return way
