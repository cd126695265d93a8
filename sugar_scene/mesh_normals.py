# SPDX-License-Identifier: Apache-2.0
"""Normal consistency of a mesh: 1 - cosine of the angle between neighbouring triangles.

One kernel computes the error of each pair of triangles and its gradient. Sums over the corners at a
vertex run in an order that depends on the topology alone.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import warp as wp
from torch import Tensor
from torch.autograd.function import once_differentiable

from sugar_utils.warp_arrays import Floats, Ints, Ints2d, Vec3s, Vec3s2d
from sugar_utils.warp_launch import FUSED_OPTIONS, as_array, launch

wp.set_module_options(FUSED_OPTIONS)

_MIN_ITEMS = 512
COSINE_EPS = 1e-8


def adjacent_face_pairs(faces: Tensor) -> Tensor:
    """Return the corners of every pair of faces that share an edge. (P, 4) int64

    Rows are (first end of the edge, second end, opposite corner of one face, of the other), sorted
    by edge. An edge with k faces gives k (k - 1) / 2 pairs.
    """
    faces = faces.long()
    # Each edge of each face with the opposite corner.
    edges = torch.stack([faces, faces.roll(-1, 1), faces.roll(-2, 1)], dim=-1)
    corners = edges.reshape(-1, 3)
    ends = corners[:, :2].sort(dim=1).values
    order = torch.argsort(ends[:, 1], stable=True)
    order = order[torch.argsort(ends[order, 0], stable=True)]
    ends = ends[order]
    opposite = corners[order, 2]
    pairs = []
    # Faces on one edge are adjacent now; compare each with those 1, 2, ... places further on.
    for distance in range(1, ends.shape[0]):
        on_one_edge = (ends[distance:] == ends[:-distance]).all(dim=1)
        if not bool(on_one_edge.any()):
            break
        first = on_one_edge.nonzero().squeeze(1)
        second = first + distance
        pairs.append(torch.cat([ends[first], opposite[first, None], opposite[second, None]], dim=1))
    if not pairs:
        return faces.new_zeros(0, 4)
    return torch.cat(pairs)


@wp.func
def normal_gradient(normal: wp.vec3, other: wp.vec3, cosine: float) -> wp.vec3:
    """Return the gradient of the cosine between two vectors with respect to the first."""
    length = wp.length(normal)
    bounded = wp.max(length, wp.static(COSINE_EPS))
    gradient = other / (bounded * wp.max(wp.length(other), wp.static(COSINE_EPS)))
    if length > wp.static(COSINE_EPS):
        gradient -= normal * (cosine / (length * length))
    return gradient


@wp.kernel
def compare_normals_of_pairs(
    first: int, vertices: Vec3s, pairs: Ints2d, errors: Floats, gradients: Vec3s2d
):
    """Compute 1 - cos of the angle between two triangles, and its gradient by the four corners."""
    pair = first + wp.tid()
    start = vertices[pairs[pair, 0]]
    edge = vertices[pairs[pair, 1]] - start
    a = vertices[pairs[pair, 2]] - start
    b = vertices[pairs[pair, 3]] - start
    one = wp.cross(edge, a)
    other = wp.cross(b, edge)
    least = wp.static(COSINE_EPS)
    lengths = wp.max(wp.length(one), least) * wp.max(wp.length(other), least)
    cosine = wp.dot(one, other) / lengths
    errors[pair] = 1.0 - cosine
    g_one = -normal_gradient(one, other, cosine)
    g_other = -normal_gradient(other, one, cosine)
    g_edge = wp.cross(a, g_one) + wp.cross(g_other, b)
    g_a = wp.cross(g_one, edge)
    g_b = wp.cross(edge, g_other)
    gradients[pair, 0] = -(g_edge + g_a + g_b)
    gradients[pair, 1] = g_edge
    gradients[pair, 2] = g_a
    gradients[pair, 3] = g_b


@wp.kernel
def add_up_corners(first: int, ends: Ints, corners: Ints, values: Vec3s, sums: Vec3s):
    """Add the values of all corners at a vertex."""
    vertex = first + wp.tid()
    total = wp.vec3(0.0)
    for i in range(ends[vertex], ends[vertex + 1]):
        total += values[corners[i]]
    sums[vertex] = total


class CornerSums:
    """Sums of values at corners by vertex, with the same bits every time.

    It is made of the vertex of each corner.
    """

    def __init__(self, index: Tensor, n_vertices: int) -> None:
        flat = index.reshape(-1)
        self._corners = torch.argsort(flat, stable=True).int()
        counts = torch.bincount(flat, minlength=n_vertices)
        self._ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        self._n_vertices = n_vertices

    def __call__(self, values: Tensor) -> Tensor:
        """Add vectors at corners. (..., 3) float32, M in all -> (V, 3)"""
        sums = values.new_empty(self._n_vertices, 3)
        arguments = [
            self._ends,
            self._corners,
            as_array(values.view(-1, 3), wp.vec3),
            as_array(sums, wp.vec3),
        ]
        launch(add_up_corners, self._n_vertices, arguments, min_items=_MIN_ITEMS)
        return sums


class _NormalConsistency(torch.autograd.Function):
    """Vertices, :class:`PairsOfTriangles` -> mean error."""

    @staticmethod
    def forward(ctx, vertices: Tensor, triangles: PairsOfTriangles):
        vertices = vertices.detach()
        pairs = triangles.pairs
        n = len(triangles.pairs)
        errors = vertices.new_empty(n)
        gradients = vertices.new_empty(n, 4, 3)
        arguments = [as_array(vertices, wp.vec3), pairs, errors, as_array(gradients, wp.vec3)]
        launch(compare_normals_of_pairs, n, arguments, min_items=_MIN_ITEMS)
        ctx.n_pairs = max(1, n)
        ctx.save_for_backward(triangles.sums(gradients))
        return (errors.sum(dtype=torch.float64) / ctx.n_pairs).float()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient * (d_loss / ctx.n_pairs), None


class PairsOfTriangles:
    """Triangles that share an edge, as of :func:`adjacent_face_pairs`, for their consistency."""

    def __init__(self, pairs: Tensor, n_vertices: int) -> None:
        self.pairs = pairs.int()
        self.sums = CornerSums(pairs, n_vertices)

    def normal_consistency(self, vertices: Tensor) -> Tensor:
        """Return the mean of 1 - cos between adjacent normals. vertices: (V, 3) float32"""
        return _NormalConsistency.apply(vertices, self)
