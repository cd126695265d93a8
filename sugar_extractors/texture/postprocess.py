# SPDX-License-Identifier: Apache-2.0
"""Peeling of thin borders: triangles at open edges where there is little density.

Poisson meshes end in flaps that the optimisation makes transparent. Rings of border triangles are
taken off, and those that Gaussians cover densely are put back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from sugar_scene.fields.reference_fields import density_at
from sugar_scene.mesh.triangle_mesh import edge_keys
from sugar_scene.mesh_bound import BoundCloud
from sugar_utils.neighbors import nearest_neighbors_of

DENSITY_THRESHOLD = 0.1
ITERATIONS = 5
N_NEIGHBORS = 16
_CHUNK = 1 << 16

FaceDensity = Callable[[Tensor], Tensor]
"""Density at the centres of some faces, given their rows. (P,) int64 -> (P,)"""


def interior_faces(faces: Tensor, iterations: int) -> Tensor:
    """Faces that are left after rings of border faces were taken off.

    Args:
        faces: (F, 3) integers
        iterations: Rings to take off. A face goes when one of its edges belongs to no other face
            that is still there.

    Returns:
        (F,) bool
    """
    keys = edge_keys(faces.cpu().numpy().astype(np.int64))
    keep = np.ones(len(keys), dtype=bool)
    edges = np.unique(keys, return_inverse=True)[1].reshape(keys.shape)
    for _ in range(iterations):
        counts = np.bincount(edges[keep].ravel(), minlength=edges.max(initial=-1) + 1)
        inner = keep & (counts[edges] >= 2).all(axis=1)
        if np.array_equal(inner, keep):
            break
        keep = inner
    return torch.from_numpy(keep).to(faces.device)


def kept_faces(
    faces: Tensor,
    density: FaceDensity,
    iterations: int = ITERATIONS,
    threshold: float = DENSITY_THRESHOLD,
) -> Tensor:
    """Faces away from the border, and those at it that are dense.

    Args:
        faces: (F, 3) integers
        density: Density at the centres of faces.
        iterations: Rings of border faces to take off.
        threshold: Faces of a larger density stay.

    Returns:
        (F,) bool
    """
    keep = interior_faces(faces, iterations)
    peeled = (~keep).nonzero()[:, 0]
    if len(peeled):
        keep[peeled] = density(peeled) > threshold
    return keep


def face_density(cloud: BoundCloud) -> FaceDensity:
    """Density of mesh-bound Gaussians: the sum over the 16 nearest ones, not clamped."""
    with torch.no_grad():
        gaussians = cloud.activate()

    def density(rows: Tensor) -> Tensor:
        parts = [
            _density(cloud.vertices[cloud.faces[chunk]].mean(dim=1), gaussians)
            for chunk in rows.split(_CHUNK)
        ]
        return torch.cat(parts) if parts else gaussians.opacities[:0]

    return torch.no_grad()(density)


def _density(points: Tensor, gaussians: Gaussians) -> Tensor:
    k = min(N_NEIGHBORS, len(gaussians))
    rows = nearest_neighbors_of(points.contiguous(), gaussians.means.contiguous(), k).indices
    return density_at(
        points, rows, gaussians.means, gaussians.quats, gaussians.scales, gaussians.opacities
    )
