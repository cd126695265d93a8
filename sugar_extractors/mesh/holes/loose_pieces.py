# SPDX-License-Identifier: Apache-2.0
"""Loose pieces of a mesh that are too small for any photograph to tell what they are.

The fusion leaves none, but what is cut off, decimated and removed later leaves some. A piece of a
thin part, as of a rod, was fused from all sides and is closed; a flake has one side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaussian_splatting.data.cameras import Camera, nearest_pixel_sizes
from sugar_scene import triangle_mesh as meshes
from sugar_scene.triangle_mesh import TriangleMesh

MIN_FACES = 20  # a component of as many triangles stays
MIN_PIXELS = 9.0  # diagonal of a component that stays, in pixels of the nearest view
MIN_FLAKE_PIXELS = 24.0  # the same of a flake
MIN_FLAKE_FLATNESS = 0.5  # of a flake: that of half a sphere; a closed surface has 0


def without_loose_pieces(
    mesh: TriangleMesh, cameras: Sequence[Camera], continues: np.ndarray
) -> TriangleMesh:
    """Remove small components of few triangles.

    Args:
        continues: At which vertices the surface goes on in another mesh, (V,) bool; components
            with a face there stay.
    """
    if mesh.n_faces == 0 or not cameras:
        return mesh
    labels = meshes.component_labels(mesh)
    is_flake = _flatness(mesh, labels) >= MIN_FLAKE_FLATNESS
    pixels = np.where(is_flake, MIN_FLAKE_PIXELS, MIN_PIXELS)
    min_diagonals = pixels * nearest_pixel_sizes(mesh.vertices, cameras)
    # The component with most faces stays, however small it is.
    most_faces = int(np.bincount(labels[mesh.faces[:, 0]]).max())
    return meshes.without_small_components(
        mesh, min(MIN_FACES, most_faces), min_diagonals, continues
    )


def _flatness(mesh: TriangleMesh, labels: np.ndarray) -> np.ndarray:
    """Return the length of the mean normal of each component, at the place of its label. (V,)"""
    normals = meshes.doubled_area_normals(mesh.vertices, mesh.faces)
    face_labels = labels[mesh.faces[:, 0]]
    totals = np.zeros((mesh.n_vertices, 3))
    np.add.at(totals, face_labels, normals)
    areas = np.bincount(face_labels, np.linalg.norm(normals, axis=1), mesh.n_vertices)
    return np.linalg.norm(totals, axis=1) / np.maximum(areas, 1e-300)
