# SPDX-License-Identifier: Apache-2.0
"""Sums over the corners of triangles by vertex, in an order that the topology alone decides."""

from __future__ import annotations

import torch
import warp as wp
from torch import Tensor

from sugar_utils.warp_launch import as_array, launch

wp.set_module_options({"enable_backward": False, "cpu_compiler_flags": "-march=native"})

_MIN_ITEMS = 1_024


@wp.kernel
def add_up_corners(
    first: int,
    ends: wp.array(dtype=int),
    corners: wp.array(dtype=int),
    values: wp.array(dtype=wp.vec3),
    sums: wp.array(dtype=wp.vec3),
):
    """Sum of the values at a vertex's corners."""
    vertex = first + wp.tid()
    total = wp.vec3(0.0)
    for i in range(ends[vertex], ends[vertex + 1]):
        total += values[corners[i]]
    sums[vertex] = total


class CornerSums:
    """Adds up what corners say to their vertices: no atomics, the same bits every time.

    Args:
        index: Vertex of each corner, any shape of M values. int64
        n_vertices: Number of vertices V.
    """

    def __init__(self, index: Tensor, n_vertices: int) -> None:
        flat = index.reshape(-1)
        self._corners = torch.argsort(flat, stable=True).int()
        counts = torch.bincount(flat, minlength=n_vertices)
        self._ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        self._n_vertices = n_vertices

    def __call__(self, values: Tensor) -> Tensor:
        """Sums of vectors at corners. (..., 3) float32, M in all -> (V, 3)"""
        sums = values.new_empty(self._n_vertices, 3)
        vectors = as_array(values.view(-1, 3), wp.vec3), as_array(sums, wp.vec3)
        arguments = [self._ends, self._corners, *vectors]
        launch(
            add_up_corners, self._n_vertices, arguments, device=values.device, min_items=_MIN_ITEMS
        )
        return sums
