# SPDX-License-Identifier: Apache-2.0
"""Normal consistency of a mesh: how much neighbouring triangles bend against each other."""

from __future__ import annotations

import torch
from torch import Tensor

from sugar_scene.mesh.vertex_rows import vertex_rows

COSINE_EPS = 1e-8


def adjacent_face_pairs(faces: Tensor) -> Tensor:
    """Corners of every pair of faces that share an edge; depends on the topology alone.

    An edge with k faces gives k (k - 1) / 2 pairs.

    Args:
        faces: Vertex indices. (F, 3) integers

    Returns:
        Rows (first end of the edge, second end, opposite corner of one face, of the other).
        (P, 4) int64, sorted by edge
    """
    faces = faces.long()
    corners = torch.stack([faces, faces.roll(-1, 1), faces.roll(-2, 1)], dim=-1).reshape(-1, 3)
    ends = corners[:, :2].sort(dim=1).values
    order = torch.argsort(ends[:, 1], stable=True)
    order = order[torch.argsort(ends[order, 0], stable=True)]
    ends, opposite = ends[order], corners[order, 2]
    pairs = []
    # Faces on one edge are adjacent now; compare each with those 1, 2, ... places further on.
    for distance in range(1, ends.shape[0]):
        same = (ends[distance:] == ends[:-distance]).all(dim=1)
        if not bool(same.any()):
            break
        first = same.nonzero().squeeze(1)
        pairs.append(
            torch.cat([ends[first], opposite[first, None], opposite[first + distance, None]], dim=1)
        )
    return torch.cat(pairs) if pairs else faces.new_zeros(0, 4)


def normal_consistency(vertices: Tensor, pairs: Tensor) -> Tensor:
    """Mean of 1 - cos of the angle between the normals of adjacent faces.

    The normals come from the opposite corners, so the winding of the faces does not matter.

    Args:
        vertices: (V, 3) world units
        pairs: As :func:`adjacent_face_pairs` returns them. (P, 4)

    Returns:
        Scalar; 0 for a mesh without shared edges.
    """
    if pairs.shape[0] == 0:
        return vertices.sum() * 0.0
    start, end, a, b = vertex_rows(vertices, pairs).unbind(dim=1)
    edge = end - start
    first = torch.linalg.cross(edge, a - start)
    second = -torch.linalg.cross(edge, b - start)
    cosine = torch.nn.functional.cosine_similarity(first, second, dim=-1, eps=COSINE_EPS)
    return (1.0 - cosine).mean()
