# SPDX-License-Identifier: Apache-2.0
"""Split triangles that cover many pixels of an image into four.

Midpoints of edges become vertices, so that the surface stays as it is. Triangles beside those that
are split have one or two such edges and become two or three, so that no gap opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from gaussian_splatting.core.subsets import is_among
from gaussian_splatting.data.cameras import Camera
from sugar_scene.triangle_mesh import TriangleMesh, edge_keys, sides_of, with_corners_in
from sugar_scene.triangle_rasterizer import mesh_tensors, rasterize_triangles

# Parts of a triangle by the bits of the edges that are split. Numbers 0 to 2 are its corners,
# 3 to 5 the midpoints of its edges.
_PATTERNS = {
    0: [(0, 1, 2)],
    1: [(0, 3, 2), (3, 1, 2)],
    2: [(0, 1, 4), (0, 4, 2)],
    4: [(0, 1, 5), (5, 1, 2)],
    3: [(3, 1, 4), (3, 4, 2), (0, 3, 2)],
    5: [(0, 3, 5), (3, 1, 2), (3, 2, 5)],
    6: [(5, 4, 2), (0, 1, 4), (0, 4, 5)],
    7: [(0, 3, 5), (3, 1, 4), (5, 4, 2), (3, 4, 5)],
}
_MOST_ADDED = 6  # triangles by which splitting one grows a mesh, those beside it included
_ENOUGH = 0.01  # share of the triangles to split in the last round
_COUNTING_SIDE = 1280  # longest side in pixels of the views in which pixels are counted
_SHARES = (1.0, 0.5, 0.25, 0.25)  # area of a part with 0 to 3 midpoints, in that of its parent


class SplitMesh(NamedTuple):
    """A mesh with some faces split."""

    mesh: TriangleMesh  # new vertices, the midpoints, come last
    shares: np.ndarray  # area of each face in that of its parent, (F,)
    parents: np.ndarray  # row of the face before that each one is a part of, (F,)


class SplitEdges(NamedTuple):
    """A mesh with some edges split."""

    split: SplitMesh
    ends: np.ndarray  # ends of the edge of each midpoint, (N, 2) rows of vertices


def split_to_pixels(
    mesh: TriangleMesh, covered: np.ndarray, pixels: float, n_faces: int
) -> TriangleMesh:
    """Split triangles that cover more pixels of some image, largest first.

    Args:
        covered: Pixels that each triangle covers, (F,); parts cover theirs in proportion to their
            area.
        pixels: Triangles that cover more are split.
        n_faces: Triangles of the result at most.
    """
    while mesh.n_faces + _MOST_ADDED <= n_faces:
        room = (n_faces - mesh.n_faces) // _MOST_ADDED
        largest = np.argsort(-covered, kind="stable")[:room]
        marked = largest[covered[largest] > pixels]
        if len(marked) <= _ENOUGH * mesh.n_faces:
            break
        split = with_split_faces(mesh, marked)
        mesh = split.mesh
        covered = split.shares * covered[split.parents]
    return mesh


def visible_part(mesh: TriangleMesh, covered: np.ndarray) -> TriangleMesh:
    """Return the triangles that some view sees, and those that touch them.

    Args:
        covered: Pixels that each triangle covers in views, as of :func:`covered_pixels`. (F,)
    """
    return with_corners_in(mesh, is_among(mesh.n_vertices, mesh.faces[covered > 0]))


def covered_pixels(
    mesh: TriangleMesh, cameras: Sequence[Camera], device: torch.device
) -> np.ndarray:
    """Return the most pixels that each triangle covers in one of the views. (F,) float32

    The pixels are those of the images, counted in views of at most ``_COUNTING_SIDE`` pixels.
    """
    vertices, faces = mesh_tensors(mesh, device)
    most = torch.zeros(mesh.n_faces, device=device)
    for camera in cameras:
        view = camera.reduced(_COUNTING_SIDE)
        first = rasterize_triangles(vertices, faces, view).face
        counts = torch.bincount(first[first >= 0].long(), minlength=mesh.n_faces)
        scale = camera.n_pixels / view.n_pixels
        most = torch.maximum(most, scale * counts)
    return most.cpu().numpy()


def with_split_faces(mesh: TriangleMesh, marked: np.ndarray) -> SplitMesh:
    """Split some faces into four, and their neighbours into two or three.

    Args:
        marked: Rows of the faces to split. (M,)
    """
    is_split = np.zeros(mesh.faces.shape, dtype=bool)
    is_split[marked] = True
    return with_split_edges(mesh, is_split).split


def with_split_edges(mesh: TriangleMesh, marked: np.ndarray) -> SplitEdges:
    """Split some edges at their midpoints, and the faces on both sides into two to four.

    Args:
        marked: Edges to split, from corner k of a face to k + 1; one side is enough. (F, 3) bool
    """
    keys, first, edges = np.unique(edge_keys(mesh.faces), return_index=True, return_inverse=True)
    edges = edges.reshape(-1, 3)
    is_split = is_among(len(keys), edges[marked])
    numbers = mesh.n_vertices + np.cumsum(is_split) - 1
    midpoints = np.where(is_split, numbers, -1)[edges]
    split_edges = first[is_split]
    starts, ends = (rows[split_edges] for rows in sides_of(mesh.faces))
    colors = np.rint(mesh.colors[[starts, ends]].mean(axis=0)).astype(np.uint8)
    points = (mesh.vertices[starts] + mesh.vertices[ends]) / 2
    filled = mesh.filled
    if filled is not None:
        # An edge with one end in a filling lies in it.
        filled = np.concatenate([filled, filled[starts] | filled[ends]])
    nodes = np.hstack([mesh.faces, midpoints])
    patterns = (midpoints >= 0) @ [1, 2, 4]
    parts = []
    part_parents = []
    for pattern, corners in _PATTERNS.items():
        rows = np.flatnonzero(patterns == pattern)
        parts.append(nodes[rows][:, corners].reshape(-1, 3))
        part_parents.append(rows.repeat(len(corners)))
    faces = np.concatenate(parts)
    n_midpoints = (faces >= mesh.n_vertices).sum(axis=1)
    finer = TriangleMesh(
        vertices=np.concatenate([mesh.vertices, points]),
        faces=faces,
        colors=np.concatenate([mesh.colors, colors]),
        filled=filled,
    )
    split = SplitMesh(finer, np.array(_SHARES)[n_midpoints], np.concatenate(part_parents))
    return SplitEdges(split, np.stack([starts, ends], axis=1))
