# SPDX-License-Identifier: Apache-2.0
"""Triangles as small as photographs resolve: those that cover many pixels are split into four.

Midpoints of edges become vertices, so that the surface stays as it is. Triangles beside those that
are split have one or two such edges and become two or three, so that no gap opens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gaussian_splatting.data.cameras import Camera
from sugar_scene.triangle_mesh import TriangleMesh, edge_keys
from sugar_scene.triangle_rasterizer import rasterize_triangles

# Triangles by which of their edges are split (bits): rows of three corners, then three midpoints.
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


def split_to_pixels(
    mesh: TriangleMesh, covered: np.ndarray, pixels: float, n_faces: int
) -> TriangleMesh:
    """Split triangles that cover more pixels of some photograph, largest first; n_faces at most.

    covered: pixels that each triangle covers, (F,); parts have theirs in proportion to their area.
    """
    while (room := (n_faces - mesh.n_faces) // _MOST_ADDED) > 0:
        largest = np.argsort(-covered, kind="stable")[:room]
        marked = largest[covered[largest] > pixels]
        if len(marked) <= _ENOUGH * mesh.n_faces:
            break
        mesh, share, parents = with_split_faces(mesh, marked)
        covered = share * covered[parents]
    return mesh


def covered_pixels(
    mesh: TriangleMesh, cameras: Sequence[Camera], device: torch.device
) -> np.ndarray:
    """The most pixels that each triangle covers in one of the views. (F,) float32

    Pixels of the photographs; they are counted in views of at most ``_COUNTING_SIDE`` pixels.
    """
    vertices = torch.from_numpy(mesh.vertices.astype(np.float32)).to(device)
    faces = torch.from_numpy(mesh.faces).to(device)
    most = torch.zeros(mesh.n_faces, device=device)
    for camera in cameras:
        view = camera.reduced(_COUNTING_SIDE)
        first = rasterize_triangles(vertices, faces, view).face
        counts = torch.bincount(first[first >= 0].long(), minlength=mesh.n_faces)
        scale = camera.width * camera.height / (view.width * view.height)
        most = torch.maximum(most, scale * counts)
    return most.cpu().numpy()


def with_split_faces(
    mesh: TriangleMesh, marked: np.ndarray
) -> tuple[TriangleMesh, np.ndarray, np.ndarray]:
    """Split some faces, rows of ``mesh.faces``, into four, and those beside them. (M,)

    Returns the mesh, and of each of its faces the share in its parent's area and the parent's row.
    """
    keys, where, edge = np.unique(edge_keys(mesh.faces), return_index=True, return_inverse=True)
    edge = edge.reshape(-1, 3)
    is_split = np.zeros(len(keys), dtype=bool)
    is_split[edge[marked]] = True
    midpoints = np.where(is_split, mesh.n_vertices + np.cumsum(is_split) - 1, -1)[edge]
    starts = mesh.faces.ravel()
    ends = np.roll(mesh.faces, -1, axis=1).ravel()
    a = starts[where[is_split]]
    b = ends[where[is_split]]
    colors = np.rint(mesh.colors[[a, b]].mean(axis=0)).astype(np.uint8)
    nodes = np.hstack([mesh.faces, midpoints])
    case = (midpoints >= 0) @ [1, 2, 4]
    split = [(np.flatnonzero(case == k), rows) for k, rows in _PATTERNS.items()]
    parents = np.concatenate([which.repeat(len(rows)) for which, rows in split])
    faces = np.concatenate([nodes[which][:, rows].reshape(-1, 3) for which, rows in split])
    shares = np.array([1.0, 0.5, 0.25, 0.25])[(faces >= mesh.n_vertices).sum(axis=1)]
    vertices = np.concatenate([mesh.vertices, (mesh.vertices[a] + mesh.vertices[b]) / 2])
    finer = TriangleMesh(vertices, faces, np.concatenate([mesh.colors, colors]))
    return finer, shares, parents
