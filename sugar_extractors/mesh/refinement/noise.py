# SPDX-License-Identifier: Apache-2.0
"""Smooth a surface where photographs do not tell its noise from its shape.

Decimation keeps triangles where a surface is rough, so the noise of a ground that few photographs
see takes those of the object. A thin plate smooths it, the more the less the photographs tell, and
never by more than they leave open. What the plate is drawn to is not a plane but the mean curvature
around each vertex, and where that is large, as on wires, it has little weight.
"""

from __future__ import annotations

import numpy as np

from sugar_extractors.mesh.refinement.thin_plate import (
    ThinPlate,
    free_vertices,
    laplacian_along,
    neighbor_mean,
    repeated_mean,
)
from sugar_scene.triangle_mesh import TriangleMesh, vertex_normals

_PLATE = 3.0  # weight of the Laplacian, in squared disagreements per squared pixel
_LEAST_CERTAINTY = 0.03  # of a vertex, disagreement per squared pixel
_CERTAINTY_ROUNDS = 2  # means of neighbours that certainty is smoothed by
_CURVATURE_ROUNDS = 64  # likewise for the curvature that the plate is drawn to
_USUAL_LAPLACIAN = 0.05  # pixels, at which the plate has a quarter of its weight
_DEVIATION = 0.3  # pixels that a vertex of certainty 1 may move
_MAX_MOVE = 2.0  # pixels that any vertex may move
_MAX_SOLVER_STEPS = 1000
_LEAST_WEIGHT = 0.1  # of a vertex in decimation, as a certainty; the largest is 1
_WEIGHT_ROUNDS = 8  # means of neighbours that weights are smoothed by


def without_noise(mesh: TriangleMesh, certainty: np.ndarray, sizes: np.ndarray) -> TriangleMesh:
    """Move vertices within what photographs leave open, so that the surface is smooth.

    Args:
        certainty: How much photographs disagree more if a vertex moves by a pixel. (V,)
        sizes: Of a pixel at each vertex. (V,) world units
    """
    from scipy.sparse import csr_array, eye_array

    mean = neighbor_mean(mesh)
    certainty = repeated_mean(mean, certainty, _CERTAINTY_ROUNDS)
    normals = vertex_normals(mesh)
    curvature = laplacian_along(mesh.vertices, normals, mean)
    curvature = repeated_mean(mean, curvature, _CURVATURE_ROUNDS)
    is_free = free_vertices(mesh)
    flatness = 1 / (1 + (curvature / sizes / _USUAL_LAPLACIAN) ** 2) ** 2
    # Also along the surface: vertices of unequal distances have a Laplacian even on a plane.
    laplacian = csr_array(mean - eye_array(mesh.n_vertices))
    plate = ThinPlate(
        laplacian=laplacian,
        plate=_PLATE * is_free * flatness,
        own=np.maximum(certainty, _LEAST_CERTAINTY) ** 2,
        is_free=is_free,
    )
    rest = laplacian @ mesh.vertices - curvature[:, None] * normals
    slopes = laplacian.T @ (plate.plate[:, None] * rest)
    moves = np.stack([plate.minimum(slope, _MAX_SOLVER_STEPS) for slope in slopes.T], axis=1)
    smooth = mesh.vertices + moves
    normals = vertex_normals(TriangleMesh(smooth, mesh.faces, mesh.colors))
    heights = (moves * normals).sum(axis=1)
    limits = sizes * np.minimum(_MAX_MOVE, _DEVIATION / np.sqrt(np.maximum(certainty, 1e-9)))
    excess = heights - np.clip(heights, -limits, limits)
    return TriangleMesh(smooth - excess[:, None] * normals, mesh.faces, mesh.colors)


def error_weights(mesh: TriangleMesh, certainty: np.ndarray) -> np.ndarray:
    """Return how much a squared distance from the surface counts in decimation. (V,)

    It counts less where photographs do not tell the noise of a surface from its shape.

    Args:
        certainty: How much photographs disagree more if a vertex moves by a pixel. (V,)
    """
    smooth = repeated_mean(neighbor_mean(mesh), certainty, _WEIGHT_ROUNDS)
    return np.clip(smooth, _LEAST_WEIGHT, 1.0)
