# SPDX-License-Identifier: Apache-2.0
"""Loose pieces of a mesh that are too small for any photograph to tell what they are.

The fusion leaves none, but what is cut off, decimated and removed later leaves some: flakes with
one side, or with two and nothing between them. Pieces of thin parts such as rods are slender.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaussian_splatting.data.cameras import Camera, nearest_pixel_sizes
from sugar_scene import triangle_mesh as meshes
from sugar_scene.triangle_mesh import TriangleMesh

MIN_FACES = 20  # a component of as many triangles stays
MIN_PIXELS = 24.0  # diagonal of a component that stays, in pixels of the nearest view
MIN_SLENDER_PIXELS = 9.0  # the same of a slender one
MAX_SLENDER_WIDTH = 0.25  # of a slender component, along its second principal axis in its length


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
    pixels = np.where(_is_slender(mesh.vertices, labels), MIN_SLENDER_PIXELS, MIN_PIXELS)
    min_diagonals = pixels * nearest_pixel_sizes(mesh.vertices, cameras)
    # The component with most faces stays, however small it is.
    most_faces = int(np.bincount(labels[mesh.faces[:, 0]]).max())
    return meshes.without_small_components(
        mesh, min(MIN_FACES, most_faces), min_diagonals, continues
    )


def _is_slender(vertices: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return which vertices, (V, 3), belong to slender components. (V,) bool"""
    _, rows, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), 3))
    np.add.at(sums, rows, vertices)
    centered = vertices - (sums / counts[:, None])[rows]
    moments = np.zeros((len(counts), 3, 3))
    np.add.at(moments, rows, centered[:, :, None] * centered[:, None, :])
    variances = np.linalg.eigvalsh(moments)
    is_slender = variances[:, 1] < MAX_SLENDER_WIDTH**2 * variances[:, 2]
    return is_slender[rows]
