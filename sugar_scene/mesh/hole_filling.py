# SPDX-License-Identifier: Apache-2.0
"""Closing what is left open of a mesh: a fan of triangles over every hole."""

from __future__ import annotations

import numpy as np

from sugar_scene.mesh.triangle_mesh import TriangleMesh, edge_keys


def border_loops(mesh: TriangleMesh) -> list[np.ndarray]:
    """Closed walks along open edges, in the sense of rotation of the faces beside them.

    Where holes touch in a vertex a walk may go around both. Edges that no walk comes back from,
    as they are beside faces of opposite senses, are in none.

    Returns:
        Vertices of each walk, each once per visit.
    """
    _, inverse, counts = np.unique(edge_keys(mesh.faces), return_inverse=True, return_counts=True)
    is_open = counts[inverse.reshape(-1)] == 1
    starts = mesh.faces.reshape(-1)[is_open]
    ends = np.roll(mesh.faces, -1, axis=1).reshape(-1)[is_open]
    after: dict[int, list[int]] = {}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        after.setdefault(start, []).append(end)
    loops = []
    for first in starts.tolist():
        walk, at = [], first
        while after.get(at):
            walk.append(at)
            at = after[at].pop()
            if at == first:
                loops.append(np.array(walk))
                break
    return loops


def with_holes_filled(mesh: TriangleMesh, longest: int | None = None) -> TriangleMesh:
    """The mesh with each hole covered by triangles between its border and its middle.

    Args:
        mesh: Any; a closed one comes back as it is.
        longest: Holes with more edges stay open; None fills all.

    Returns:
        The same vertices and faces, then those of the covers; without normals.
    """
    most = mesh.n_faces * 3 if longest is None else longest
    loops = [loop for loop in border_loops(mesh) if 3 <= len(loop) <= most]
    if not loops:
        return mesh
    vertices, faces, colors = [mesh.vertices], [mesh.faces], [mesh.colors]
    for number, loop in enumerate(loops):
        middle = np.full_like(loop, mesh.n_vertices + number)
        # Against the sense of the faces beside it, as faces on two sides of an edge are.
        faces.append(np.stack([np.roll(loop, -1), loop, middle], axis=1))
        vertices.append(mesh.vertices[loop].mean(axis=0, keepdims=True))
        colors.append(mesh.colors[loop].mean(axis=0, keepdims=True).round().astype(np.uint8))
    return TriangleMesh(np.concatenate(vertices), np.concatenate(faces), np.concatenate(colors))
