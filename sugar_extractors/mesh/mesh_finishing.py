# SPDX-License-Identifier: Apache-2.0
"""Finish reconstructed meshes: decimate to an error, clean, merge and project them.

Quadric decimation removes first what changes the surface least, so the fewest triangles that keep
an error are found by halving and then by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaussian_splatting.core.subsets import about, longest_side
from gaussian_splatting.data.cameras import Camera, nearest_pixel_sizes
from sugar_extractors.mesh.decimation import decimated
from sugar_extractors.mesh.level_sets import SurfaceSamples
from sugar_extractors.mesh.seams import joined_at_box
from sugar_extractors.mesh.surface_sizes import nearest_rows
from sugar_scene import triangle_mesh as meshes
from sugar_scene.regions import Box
from sugar_scene.surface_queries import Surface
from sugar_scene.triangle_mesh import TriangleMesh

WITHIN = 0.95  # of the vertices that have to keep the error
FEWEST_FACES = 64
_BISECTIONS = 3
_MOST_VERTICES = 200_000  # whose distance is measured


def finish_mesh(
    regions: Sequence[TriangleMesh],
    surface: SurfaceSamples | None,
    box: Box | None,
) -> TriangleMesh:
    """Clean decimated regions, merge them, and snap vertices to surface points, if any.

    Args:
        surface: Points to snap to; None for none.
        box: Where foreground and background were cut; they are joined there.
    """
    parts = [meshes.clean_mesh(region) for region in regions]
    if box is not None and len(parts) == 2:
        inner, outer = parts
        mesh = joined_at_box(inner, outer, box)
    else:
        mesh = meshes.merge_meshes(parts)
    if surface is None:
        return meshes.with_vertex_normals(mesh)
    # Normals come before the clean-up, which drops faces that collapsed in the projection.
    projected = meshes.with_vertex_normals(project_on_points(mesh, surface))
    return meshes.clean_mesh(projected)


def project_on_points(mesh: TriangleMesh, surface: SurfaceSamples) -> TriangleMesh:
    """Move each vertex to the nearest surface point, whose colour it gets."""
    rows = nearest_rows(mesh.vertices, surface.points)
    return TriangleMesh(surface.points[rows].astype(np.float64), mesh.faces, surface.colors[rows])


def decimated_to_error(
    mesh: TriangleMesh,
    pixels: float,
    cameras: Sequence[Camera],
    n_faces: int,
) -> TriangleMesh:
    """Decimate a mesh as far as 95 % of its vertices stay near the surface.

    Args:
        pixels: Largest distance, in pixels of the camera nearest to a vertex.
        n_faces: Triangles at most, whatever the error.
    """
    points = about(mesh.vertices, _MOST_VERTICES)
    limits = pixels * nearest_pixel_sizes(points, cameras)
    # Trees of triangles resolve best what is about as large as 1.
    origin = points.mean(axis=0)
    size = max(longest_side(points), 1e-12)

    def keeps_error(candidate: TriangleMesh) -> bool:
        surface = Surface((candidate.vertices - origin) / size, candidate.faces)
        distances = surface.nearest((points - origin) / size).distances * size
        return float((distances <= limits).mean()) >= WITHIN

    best = decimated(mesh, n_faces)
    while True:
        low = best.n_faces // 2
        if low < FEWEST_FACES:
            return best
        smaller = decimated(best, low)
        if smaller.n_faces >= best.n_faces or not keeps_error(smaller):
            break
        best = smaller
    start = best
    high = best.n_faces
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        smaller = decimated(start, middle)
        if keeps_error(smaller):
            best = smaller
            high = middle
        else:
            low = middle
    return best
