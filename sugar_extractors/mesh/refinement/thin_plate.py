# SPDX-License-Identifier: Apache-2.0
"""Offsets of the vertices of a mesh that balance their own targets and a thin plate."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sugar_scene.triangle_mesh import TriangleMesh, border_edges, sides_of

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_TOLERANCE = 1e-3  # of the residual of the sparse system


def free_vertices(mesh: TriangleMesh) -> np.ndarray:
    """Return 1 for the vertices that may move, 0 for those on borders. (V,)"""
    is_free = np.ones(mesh.n_vertices)
    is_free[border_edges(mesh).ravel()] = 0
    return is_free


def neighbor_mean(mesh: TriangleMesh) -> csr_array:
    """Return the matrix that takes the mean of each vertex's neighbours. (V, V)"""
    # Here and not above: it takes a tenth of the time in which a command starts.
    from scipy.sparse import csr_array

    starts, ends = sides_of(mesh.faces)
    rows = np.concatenate([starts, ends])
    columns = np.concatenate([ends, starts])
    shape = (mesh.n_vertices, mesh.n_vertices)
    mean = csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
    n_neighbors = np.diff(mean.indptr)
    mean.data = np.repeat(1 / np.maximum(n_neighbors, 1), n_neighbors)
    return mean


def repeated_mean(mean: csr_array, values: np.ndarray, rounds: int) -> np.ndarray:
    """Take the mean of neighbours, as of :func:`neighbor_mean`, several times. (V,) -> (V,)"""
    for _ in range(rounds):
        values = mean @ values
    return values


def laplacian_along(vertices: np.ndarray, normals: np.ndarray, mean: csr_array) -> np.ndarray:
    """Return how far the neighbours' mean lies above each vertex, along its normal. (V,)

    Args:
        mean: As of :func:`neighbor_mean`.
    """
    return ((mean @ vertices - vertices) * normals).sum(axis=1)


class ThinPlate(NamedTuple):
    """A quadratic energy of offsets o: own o² / 2 + plate (laplacian o)² / 2, summed."""

    laplacian: csr_array  # of offsets, (V, V)
    plate: np.ndarray  # weights of the Laplacian, (V,)
    own: np.ndarray  # weights of the offsets, (V,)
    is_free: np.ndarray  # 0 for vertices that stay, (V,)

    def minimum(self, slope: np.ndarray, max_steps: int) -> np.ndarray:
        """Return the offsets of the least energy plus slope o. (V,) -> (V,)

        Args:
            max_steps: Of the method of conjugate gradients.
        """
        from scipy.sparse import diags_array
        from scipy.sparse.linalg import LinearOperator, cg

        transposed = self.laplacian.T
        diagonal = self.own + self.laplacian.power(2).T @ self.plate

        def product(offsets: np.ndarray) -> np.ndarray:
            free = self.is_free * offsets
            # Vertices that stay have the rows of the unit matrix.
            of_plate = transposed @ (self.plate * (self.laplacian @ free))
            return self.is_free * (of_plate + self.own * free) + (1 - self.is_free) * offsets

        n = len(slope)
        # The stubs know the constructor of the abstract class alone.
        matrix = LinearOperator((n, n), matvec=product, dtype=np.float64)  # pyright: ignore[reportCallIssue]
        offsets, _ = cg(
            matrix,
            -self.is_free * slope,
            rtol=_TOLERANCE,
            maxiter=max_steps,
            M=diags_array(1 / np.where(self.is_free, diagonal, 1.0)),
        )
        return offsets
