# SPDX-License-Identifier: Apache-2.0
"""Move the vertices of a mesh along their normals until the photographs agree.

Vu, Labatut, Pons and Keriven, "High accuracy and visibility-consistent dense multiview stereo"
(PAMI 2012), descend the correlation of photographs that are compared through the mesh, against a
thin plate. Here each step solves a sparse system of all vertices (Gauss-Newton), which needs few
steps.

Three terms have one unit, pixels that were compared: the disagreement of photographs; the change of
the surface's Laplacian from the smoothed one that it begins with, so that thin parts do not shrink
where the photographs say little; and the distance to where the surface begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gaussian_splatting.data.cameras import nearest_pixel_sizes
from sugar_extractors.mesh.refinement.compared_views import (
    ComparedViews,
    VertexTerms,
    vertex_terms,
)
from sugar_extractors.mesh.refinement.thin_plate import (
    ThinPlate,
    free_vertices,
    laplacian_along,
    neighbor_mean,
    repeated_mean,
)
from sugar_scene.triangle_mesh import TriangleMesh, vertex_normals

if TYPE_CHECKING:
    from scipy.sparse import csr_array

REDUCTIONS = (2, 1, 1)  # how many times smaller the photographs are in each step
_LAPLACIAN_WEIGHT = 3.0
_DISTANCE_WEIGHT = 0.01  # of the distance to the first surface
_SMOOTHINGS = 4  # of the Laplacian that the surface begins with
_MAX_STEP = 1.0  # pixels of the photographs as they are compared
_MAX_SOLVER_STEPS = 100


class RefinedMesh(NamedTuple):
    """A mesh whose vertices were moved."""

    mesh: TriangleMesh
    # How much the photographs disagree more if a vertex moves by one pixel, in the last step. (V,)
    certainty: np.ndarray
    pixel_sizes: np.ndarray  # at each vertex, (V,) world units


class _Start(NamedTuple):
    """The surface before it is moved."""

    vertices: np.ndarray  # (V, 3)
    mean: csr_array  # mean of each vertex's neighbours, (V, V)
    laplacian: np.ndarray  # its Laplacian, smoothed, (V,) world units
    is_free: np.ndarray  # vertices that may move, those off the borders, (V,) 0 or 1


def refined_mesh(
    mesh: TriangleMesh,
    views: ComparedViews,
    on_step: Callable[[int, float], None] = lambda step, score: None,
) -> RefinedMesh:
    """Move the vertices of a mesh until the photographs agree; its borders stay.

    Args:
        on_step: Called in each step with its number and the mean correlation before it.
    """
    certainty = np.zeros(mesh.n_vertices)
    normals = vertex_normals(mesh)
    start = _start_of(mesh, normals)
    for step, reduction in enumerate(REDUCTIONS):
        terms = vertex_terms(mesh, views, reduction)
        on_step(step, terms.score)
        sizes = reduction * nearest_pixel_sizes(mesh.vertices, views.cameras)
        offsets = _offsets(mesh.vertices, normals, start, terms, sizes)
        vertices = mesh.vertices + offsets[:, None] * normals
        mesh = replace(mesh, vertices=vertices, normals=None)
        normals = vertex_normals(mesh)
        certainty = terms.curvature * sizes**2
    return RefinedMesh(mesh, certainty, nearest_pixel_sizes(mesh.vertices, views.cameras))


def _start_of(mesh: TriangleMesh, normals: np.ndarray) -> _Start:
    mean = neighbor_mean(mesh)
    laplacian = laplacian_along(mesh.vertices, normals, mean)
    laplacian = repeated_mean(mean, laplacian, _SMOOTHINGS)
    return _Start(mesh.vertices, mean, laplacian, free_vertices(mesh))


def _offsets(
    vertices: np.ndarray,
    normals: np.ndarray,
    start: _Start,
    terms: VertexTerms,
    sizes: np.ndarray,
) -> np.ndarray:
    """Return how far each vertex moves along its normal. (V,) world units

    Args:
        vertices: As they are now. (V, 3)
        normals: Theirs. (V, 3)
        start: The surface before it was moved.
        terms: The disagreement of the photographs.
        sizes: Of a pixel at each vertex. (V,) world units
    """
    from scipy.sparse import csr_array, diags_array

    n = len(vertices)
    # A vertex that no pair of photographs shows still has the weight of one pixel.
    unit = np.maximum(terms.n_compared, 1.0) / sizes**2
    laplacian_weight = _LAPLACIAN_WEIGHT * unit * start.is_free
    distance_weight = _DISTANCE_WEIGHT * unit
    change = laplacian_along(vertices, normals, start.mean) - start.laplacian
    distance = ((vertices - start.vertices) * normals).sum(axis=1)
    # The derivative of the Laplacian with offsets along the normals.
    by_offset = start.mean.copy()
    row = np.repeat(np.arange(n), np.diff(by_offset.indptr))
    by_offset.data *= (normals[row] * normals[by_offset.indices]).sum(axis=1)
    by_offset = csr_array(by_offset - diags_array(np.ones(n)))
    slope = terms.gradient + by_offset.T @ (laplacian_weight * change)
    slope += distance_weight * distance
    plate = ThinPlate(
        laplacian=by_offset,
        plate=laplacian_weight,
        own=terms.curvature + distance_weight,
        is_free=start.is_free,
    )
    offsets = plate.minimum(slope, _MAX_SOLVER_STEPS)
    limit = _MAX_STEP * sizes
    return np.clip(offsets, -limit, limit)
