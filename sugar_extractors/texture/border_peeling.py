# SPDX-License-Identifier: Apache-2.0
"""Peel thin borders off a refined mesh.

Poisson meshes end in flaps that the optimisation makes transparent. Rings of border triangles are
taken off, and those that Gaussians cover densely are put back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sugar_scene.geometry import neighbor_opacities
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.triangle_mesh import edge_keys
from sugar_utils.neighbors import nearest_neighbors_of

DENSITY_THRESHOLD = 0.1
ITERATIONS = 5
N_NEIGHBORS = 16
FaceDensity = Callable[[Tensor], Tensor]  # density at centres of faces, by row: (P,) -> (P,)
_CHUNK = 1 << 16  # faces


def interior_faces(faces: Tensor, iterations: int) -> Tensor:
    """Return which faces, (F, 3), remain when rings of border faces are taken off. (F,) bool"""
    keys = edge_keys(faces.cpu().numpy().astype(np.int64))
    is_inner = np.ones(len(keys), dtype=bool)
    _, edges = np.unique(keys, return_inverse=True)
    edges = edges.reshape(keys.shape)
    n_edges = edges.max(initial=-1) + 1
    for _ in range(iterations):
        counts = np.bincount(edges[is_inner].ravel(), minlength=n_edges)
        has_neighbors = (counts[edges] >= 2).all(axis=1)
        remaining = is_inner & has_neighbors
        if np.array_equal(remaining, is_inner):
            break
        is_inner = remaining
    return torch.from_numpy(is_inner).to(faces.device)


def kept_faces(
    faces: Tensor,
    density: FaceDensity,
    iterations: int = ITERATIONS,
    threshold: float = DENSITY_THRESHOLD,
) -> Tensor:
    """Return which faces, (F, 3), are away from the border or dense. (F,) bool"""
    is_kept = interior_faces(faces, iterations)
    peeled = (~is_kept).nonzero()[:, 0]
    if len(peeled):
        is_kept[peeled] = density(peeled) > threshold
    return is_kept


def face_density(cloud: BoundCloud) -> FaceDensity:
    """Return the density of bound Gaussians: the sum over the 16 nearest ones, not clamped."""
    with torch.no_grad():
        gaussians = cloud.activate()
    means = gaussians.means.contiguous()
    n_neighbors = min(N_NEIGHBORS, len(gaussians))

    @torch.no_grad()
    def density(rows: Tensor) -> Tensor:
        parts = [gaussians.opacities[:0]]
        for chunk in rows.split(_CHUNK):
            points = cloud.vertices[cloud.faces[chunk]].mean(dim=1)
            neighbors = nearest_neighbors_of(points.contiguous(), means, n_neighbors)
            opacities = neighbor_opacities(
                points,
                neighbors.indices,
                gaussians.means,
                gaussians.quats,
                gaussians.scales,
                gaussians.opacities,
            )
            parts.append(opacities.sum(dim=-1))
        return torch.cat(parts)

    return density
