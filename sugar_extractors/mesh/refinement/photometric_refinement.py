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
from sugar_scene.triangle_mesh import TriangleMesh, border_edges, vertex_normals

if TYPE_CHECKING:
    from scipy.sparse import csr_array

REDUCTIONS = (2, 1, 1)  # how many times smaller the photographs are in each step
_LAPLACIAN_WEIGHT = 3.0
_DISTANCE_WEIGHT = 0.01  # of the distance to the first surface
_SMOOTHINGS = 4  # of the Laplacian that the surface begins with
_MAX_STEP = 1.0  # pixels of the photographs as they are compared
_TOLERANCE = 1e-3  # of the residual of the sparse system
_MAX_SOLVER_STEPS = 100


class _Start(NamedTuple):
    """The surface before it is moved."""

    vertices: np.ndarray  # (V, 3)
    neighbor_mean: csr_array  # mean of each vertex's neighbours, (V, V)
    laplacian: np.ndarray  # its Laplacian, smoothed, (V,) world units
    is_free: np.ndarray  # vertices that may move, those off the borders, (V,) 0 or 1


def refined_mesh(
    mesh: TriangleMesh,
    views: ComparedViews,
    on_step: Callable[[int, float], None] = lambda step, score: None,
) -> TriangleMesh:
    """Move the vertices of a mesh until the photographs agree; its borders stay.

    Args:
        on_step: Called in each step with its number and the mean correlation before it.
    """
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
    return mesh


def _start_of(mesh: TriangleMesh, normals: np.ndarray) -> _Start:
    neighbor_mean = _neighbor_mean(mesh)
    laplacian = _laplacian(mesh.vertices, normals, neighbor_mean)
    for _ in range(_SMOOTHINGS):
        laplacian = neighbor_mean @ laplacian
    is_free = np.ones(mesh.n_vertices)
    is_free[border_edges(mesh).ravel()] = 0
    return _Start(mesh.vertices, neighbor_mean, laplacian, is_free)


def _neighbor_mean(mesh: TriangleMesh) -> csr_array:
    """Return the matrix that takes the mean of each vertex's neighbours. (V, V)"""
    # Here and not above: it takes a tenth of the time in which a command starts.
    from scipy.sparse import csr_array

    starts = mesh.faces.ravel()
    ends = np.roll(mesh.faces, -1, axis=1).ravel()
    rows = np.concatenate([starts, ends])
    columns = np.concatenate([ends, starts])
    shape = (mesh.n_vertices, mesh.n_vertices)
    mean = csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
    n_neighbors = np.diff(mean.indptr)
    mean.data = np.repeat(1 / np.maximum(n_neighbors, 1), n_neighbors)
    return mean


def _laplacian(vertices: np.ndarray, normals: np.ndarray, neighbor_mean: csr_array) -> np.ndarray:
    """Return how far the neighbours' mean lies above each vertex, along its normal. (V,)"""
    return ((neighbor_mean @ vertices - vertices) * normals).sum(axis=1)


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
    from scipy.sparse.linalg import LinearOperator, cg

    n = len(vertices)
    # A vertex that no pair of photographs shows still has the weight of one pixel.
    unit = np.maximum(terms.n_compared, 1.0) / sizes**2
    laplacian_weight = _LAPLACIAN_WEIGHT * unit * start.is_free
    distance_weight = _DISTANCE_WEIGHT * unit
    change = _laplacian(vertices, normals, start.neighbor_mean) - start.laplacian
    distance = ((vertices - start.vertices) * normals).sum(axis=1)
    # The derivative of the Laplacian with offsets along the normals.
    by_offset = start.neighbor_mean.copy()
    row = np.repeat(np.arange(n), np.diff(by_offset.indptr))
    by_offset.data *= (normals[row] * normals[by_offset.indices]).sum(axis=1)
    by_offset = csr_array(by_offset - diags_array(np.ones(n)))
    own = terms.curvature + distance_weight
    diagonal = own + by_offset.power(2).T @ laplacian_weight
    slope = terms.gradient + by_offset.T @ (laplacian_weight * change)
    slope += distance_weight * distance

    def product(offsets: np.ndarray) -> np.ndarray:
        free = start.is_free * offsets
        # Vertices that stay have the rows of the unit matrix.
        of_laplacian = by_offset.T @ (laplacian_weight * (by_offset @ free))
        result = start.is_free * (of_laplacian + own * free)
        return result + (1 - start.is_free) * offsets

    # The stubs know the constructor of the abstract class alone.
    matrix = LinearOperator((n, n), matvec=product, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    offsets, _ = cg(
        matrix,
        -start.is_free * slope,
        rtol=_TOLERANCE,
        maxiter=_MAX_SOLVER_STEPS,
        M=diags_array(1 / np.where(start.is_free, diagonal, 1.0)),
    )
    limit = _MAX_STEP * sizes
    return np.clip(offsets, -limit, limit)
