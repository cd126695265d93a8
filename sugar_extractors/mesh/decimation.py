# SPDX-License-Identifier: Apache-2.0
"""As few triangles as an error allows: many on an ear, few on a flat wall.

Quadric decimation removes first what changes the surface least, so a number of triangles that
keeps the error is found by halving and then by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gaussian_splatting.data.cameras import Camera
from sugar_extractors.mesh_quality import Surface
from sugar_scene.triangle_mesh import TriangleMesh

WITHIN = 0.95  # of the vertices that have to keep the error
FEWEST_FACES = 64
_BISECTIONS = 3
_MOST_VERTICES = 200_000  # whose distance is measured


def nearest_pixel_sizes(points: np.ndarray, cameras: Sequence[Camera]) -> np.ndarray:
    """Size of a pixel at points, (P, 3), in the camera nearest to each. (P,) world units"""
    sizes = np.full(len(points), np.inf)
    for camera in cameras:
        distances = np.linalg.norm(points - camera.center, axis=1)
        np.minimum(sizes, distances / camera.fx, out=sizes)
    return sizes


def decimated_to_error(
    mesh: TriangleMesh, pixels: float, cameras: Sequence[Camera], n_faces: int,
    decimate: Callable[[TriangleMesh, int], TriangleMesh],
) -> TriangleMesh:  # fmt: skip
    """Decimate a mesh as far as 95 % of its vertices stay near the surface.

    Args:
        pixels: How near, in pixels of the camera nearest to a vertex.
        n_faces: Triangles at most, whatever the error.
    """
    points = mesh.vertices[:: max(1, mesh.n_vertices // _MOST_VERTICES)]
    limits = pixels * nearest_pixel_sizes(points, cameras)
    # Trees of triangles resolve best what is about as large as 1.
    origin, size = points.mean(axis=0), max(float(np.ptp(points, axis=0).max()), 1e-12)

    def keeps_error(candidate: TriangleMesh) -> bool:
        surface = Surface((candidate.vertices - origin) / size, candidate.faces)
        distances = surface.nearest((points - origin) / size).distances * size
        return float((distances <= limits).mean()) >= WITHIN

    best = decimate(mesh, n_faces)
    while True:
        few = best.n_faces // 2
        if few < FEWEST_FACES:
            return best
        smaller = decimate(best, few)
        if smaller.n_faces >= best.n_faces or not keeps_error(smaller):
            break
        best = smaller
    start, low, high = best, few, best.n_faces
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        smaller = decimate(start, middle)
        if keeps_error(smaller):
            best, high = smaller, middle
        else:
            low = middle
    return best
