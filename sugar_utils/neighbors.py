# SPDX-License-Identifier: Apache-2.0
"""Exact k-nearest neighbours in O(N) memory, to the same bits on CPU and CUDA.

Points are sorted along a Morton curve and cut into leaves of consecutive points; an implicit
binary tree of bounding boxes stands on the leaves (children of node i are 2i and 2i + 1). One
thread per query starts in the leaf of the query, or one near to it, goes up to the root and
searches each sibling subtree on the way, nearest box first. The CPU takes three levels at once.

The result is exact: a box bound is computed with the operations of the distance itself, and float32
subtraction, multiplication and addition are monotonic, so a bound never exceeds the distance of a
point inside. Nodes also have their lowest point index; with it, ties at equal distance are decided
without opening every box that ties.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import warp as wp
from torch import Tensor

from sugar_utils.errors import UserError
from sugar_utils.warp_arrays import (
    Doubles,
    Doubles2d,
    Floats2d,
    Floats3d,
    Ints,
    Ints2d,
    Longs,
)
from sugar_utils.warp_launch import (
    EXACT_OPTIONS,
    SIMD_SOURCE,
    Kernel,
    launch,
    native_kernel,
    native_source,
)

BATCH = 100_000  # default number of queries per launch
LEAF_SIZE = 16  # points per leaf. From 8 to 32 the time on a CPU differs by less than a tenth.
_MORTON_BITS = 21  # per axis
_MAX_DEPTH = 32  # of the tree
_NO_INDEX = 2**31 - 1  # row of a neighbour that is not found yet
_MIN_ITEMS = 512  # of a range of work on the CPU

wp.set_module_options(EXACT_OPTIONS)


class Neighbors(NamedTuple):
    """The k nearest points of each query."""

    indices: Tensor  # rows of the points, nearest first, (Q, k) int32
    sq_distances: Tensor  # squared distances, (Q, k) float32, world units squared


class _Cube(NamedTuple):
    """A bounding cube, or one for each of several groups."""

    low: Tensor  # lowest corner, (3,) or (G, 3) float64
    extent: Tensor  # longest side of the points' bounding box, () or (G,) float64


@dataclass(frozen=True)
class _Tree:
    """Points in a binary tree of bounding boxes, of P leaves."""

    points: Tensor  # in tree order, (N, 3)
    rows: Tensor  # row of each of them in the caller's order, (N,) int32
    boxes: Tensor  # low and high corner of each node; row 0 unused, (2 P, 6)
    lowest: Tensor  # lowest caller's row below each node, (2 P,) int32

    @functools.cached_property
    def cube(self) -> _Cube:
        """Bounding cube of all points."""
        return _bounding_cube(self.points)

    @functools.cached_property
    def codes(self) -> Tensor:
        """Morton codes of the points in the cube. (N,) int64

        They rise, because points of refined cells stay in their cells.
        """
        return _morton_codes(self.points, self.cube)

    @property
    def first_leaf(self) -> int:
        """Node of the first leaf, which is also the number of leaves."""
        return self.boxes.shape[0] // 2

    def leaves_near(self, queries: Tensor) -> Tensor:
        """Nodes of leaves near queries, (Q, 3), with which their search begins. (Q,) int32"""
        low = self.cube.low.to(queries)
        high = low + self.cube.extent.to(queries)
        inside = torch.minimum(torch.maximum(queries, low), high)
        positions = torch.searchsorted(self.codes, _morton_codes(inside, self.cube))
        leaves = positions.clamp(max=len(self.codes) - 1) // LEAF_SIZE
        return (self.first_leaf + leaves).int()


@dataclass(frozen=True)
class _Queries:
    """Positions whose neighbours are searched."""

    positions: Tensor  # in an order in which neighbouring ones are near each other, (Q, 3)
    rows: Tensor  # row of each of them in the caller's order, (Q,) int32
    # Node of the leaf with which a search begins, (Q,) int32. None: the queries are the tree's
    # points, each in its own leaf, and column 0 is the point itself.
    leaves: Tensor | None = None


def nearest_neighbors(points: Tensor, k: int = 16, *, query_batch: int | None = None) -> Neighbors:
    """Find the k nearest points of every point; (N, min(k, N)), without gradients.

    Column 0 is always the point itself, also among exact duplicates. The others follow by
    (squared distance, index), so equal distances have one right answer.

    Args:
        points: Positions, (N, 3) float32.
        k: Number of columns.
        query_batch: Points per kernel launch; if None, all on a GPU, 100,000 on a CPU.

    Raises:
        UserError: A coordinate is not finite.
    """
    points = _checked(points)
    n_columns = min(k, points.shape[0])
    if n_columns == 0:
        return _empty(points.shape[0], points.device)
    tree = _build_tree(points)
    return _search(tree, _Queries(tree.points, tree.rows), n_columns, query_batch)


def nearest_neighbors_of(queries: Tensor, points: Tensor, k: int = 16) -> Neighbors:
    """Find the k points, (N, 3), nearest to positions, (Q, 3), by (squared distance, index)."""
    queries = _checked(queries)
    points = _checked(points)
    n_columns = min(k, points.shape[0])
    if n_columns == 0 or queries.shape[0] == 0:
        return _empty(queries.shape[0], points.device, n_columns)
    order = _morton_codes(queries, _bounding_cube(queries)).argsort(stable=True)
    sorted_queries = queries[order]
    tree = _build_tree(points)
    leaves = tree.leaves_near(sorted_queries)
    return _search(tree, _Queries(sorted_queries, order.int(), leaves), n_columns)


def mean_sq_distance_to_nearest(points: Tensor) -> Tensor:
    """Mean squared distance of points, (N, 3), to the three nearest others; 0 when alone. (N,)"""
    sq_distances = nearest_neighbors(points, 4).sq_distances[:, 1:]
    n_neighbors = sq_distances.shape[1]
    return sq_distances.sum(dim=1) / max(n_neighbors, 1)


def _checked(points: Tensor) -> Tensor:
    """Points for the kernels; UserError where a coordinate is not finite."""
    points = points.detach().float().contiguous()
    n_bad = int((~points.isfinite()).any(dim=1).sum())
    if n_bad:
        raise UserError(
            f"{n_bad} of {points.shape[0]} points have a NaN or infinite coordinate, so they have "
            "no neighbours; the training diverged or the input file is damaged."
        )
    return points


def _empty(n_rows: int, device: torch.device, n_columns: int = 0) -> Neighbors:
    rows = torch.empty((n_rows, n_columns), dtype=torch.int32, device=device)
    return Neighbors(rows, torch.empty(rows.shape, device=device))


def _bounding_cube(points: Tensor) -> _Cube:
    low = points.amin(dim=0).double()
    high = points.amax(dim=0).double()
    return _Cube(low, (high - low).amax())


def _bounding_cubes(points: Tensor, group: Tensor, n_groups: int) -> _Cube:
    """Bounding cube of the points of each group; ``group`` is the number of each, (N,) int64."""
    index = group[:, None].expand(-1, 3)
    corners = points.new_zeros((n_groups, 3))
    low = corners.scatter_reduce(0, index, points, "amin", include_self=False).double()
    high = corners.scatter_reduce(0, index, points, "amax", include_self=False).double()
    return _Cube(low, (high - low).amax(dim=1))


def _morton_codes(points: Tensor, cube: _Cube, group: Tensor | None = None) -> Tensor:
    """Interleave 21 bits per axis of the position in a cube. (N,) int64

    Points lie in the cube of their ``group``, (N,) int64; if None, all in one.
    """
    codes = torch.empty(points.shape[0], dtype=torch.int64, device=points.device)
    step = (2**_MORTON_BITS - 1) / cube.extent.clamp_min(1e-300)
    group = codes.new_empty(0) if group is None else group
    arguments = [points, group, cube.low.reshape(-1, 3), step.reshape(-1), codes]
    launch(_interleave, points.shape[0], arguments, min_items=_MIN_ITEMS)
    return codes


def _tree_order(points: Tensor) -> Tensor:
    """Order along a Morton curve that is refined wherever many points share one cell. (N,) int64"""
    codes, order = _morton_codes(points, _bounding_cube(points)).sort(stable=True)
    # Positions in the order, and the cell of each, of the points that are still to be sorted.
    positions = torch.arange(points.shape[0], device=points.device)
    cells = _group_ids(codes)
    while True:
        is_crowded = (torch.bincount(cells) > LEAF_SIZE)[cells]
        positions = positions[is_crowded]
        cells = cells[is_crowded]
        if positions.numel() == 0:
            return order
        cells = _group_ids(cells)
        n_cells = int(cells[-1]) + 1
        members = points.index_select(0, order[positions])
        cubes = _bounding_cubes(members, cells, n_cells)
        codes = _morton_codes(members, cubes, cells)
        by_code = codes.argsort(stable=True)
        permutation = by_code[cells[by_code].argsort(stable=True)]
        order[positions] = order[positions[permutation]]
        # Duplicates cannot be told apart any further.
        can_split = (cubes.extent > 0)[cells]
        positions = positions[can_split]
        cells = _group_ids(cells[can_split], codes[permutation][can_split])


def _group_ids(*sorted_keys: Tensor) -> Tensor:
    """Number the runs of equal keys, from 0. (M,) int64"""
    n = sorted_keys[0].shape[0]
    starts = torch.zeros(n, dtype=torch.int64, device=sorted_keys[0].device)
    for keys in sorted_keys:
        starts[1:] |= keys[1:] != keys[:-1]
    return starts.cumsum(dim=0)


def _build_tree(points: Tensor) -> _Tree:
    n = points.shape[0]
    device = points.device
    order = _tree_order(points)
    rows = order.int()
    sorted_points = points.index_select(0, order)
    n_leaves = _next_power_of_two(_n_full_leaves(n))
    boxes = torch.empty((2 * n_leaves, 6), device=device)
    lowest = torch.empty(2 * n_leaves, dtype=torch.int32, device=device)
    arguments = [n_leaves, n, sorted_points, rows, boxes, lowest]
    launch(_leaf_boxes, n_leaves, arguments, min_items=_MIN_ITEMS)
    n_nodes = n_leaves // 2  # of a level; they are the nodes n_nodes, ..., 2 n_nodes - 1
    while n_nodes > 0:
        launch(_inner_boxes, n_nodes, [n_nodes, boxes, lowest], min_items=_MIN_ITEMS)
        n_nodes //= 2
    return _Tree(sorted_points, rows, boxes, lowest)


def _n_full_leaves(n_points: int) -> int:
    """Number of leaves that hold points."""
    return math.ceil(n_points / LEAF_SIZE)


def _next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _search(tree: _Tree, queries: _Queries, k: int, query_batch: int | None = None) -> Neighbors:
    n = queries.positions.shape[0]
    device = queries.positions.device
    neighbors = _empty(n, device, k)
    capacity = max(16, _next_power_of_two(k))
    if device.type == "cpu":
        kernel = _native_query_kernel(capacity)
        tree_arrays = _in_eights(tree)
    else:
        kernel = _query_kernel(capacity)
        tree_arrays = [tree.points, tree.rows, tree.boxes, tree.lowest]
    skip_self = int(queries.leaves is None)
    leaves = queries.rows.new_empty(0) if queries.leaves is None else queries.leaves
    arguments = [
        queries.positions,
        queries.rows,
        *tree_arrays,
        tree.first_leaf,
        leaves,
        skip_self,
        neighbors.indices,
        neighbors.sq_distances,
    ]
    if query_batch is None:
        # Fewer would leave a large GPU half empty; a CPU works in ranges anyway.
        query_batch = BATCH if device.type == "cpu" else n
    for start in range(0, n, max(query_batch, 1)):
        count = min(query_batch, n - start)
        launch(kernel, count, [start, *arguments], min_items=_MIN_ITEMS)
    return neighbors


def _in_eights(tree: _Tree) -> list[Tensor]:
    """Arrange points and boxes for vector registers of eight floats.

    Returns:
        Points with the bits of their rows, (., 4, 8), and boxes with the bits of their lowest rows,
        (., 8, 8), both float32. The last axis has eight points, or boxes, in a row.
    """
    n_points = len(tree.rows)
    points = tree.points.new_full((_n_full_leaves(n_points) * LEAF_SIZE, 4), torch.nan)
    points[:n_points, :3] = tree.points
    points[:n_points, 3] = tree.rows.view(torch.float32)
    n_nodes = tree.boxes.shape[0]
    boxes = tree.boxes.new_empty((max(n_nodes, 8), 8))
    boxes[:n_nodes, :6] = tree.boxes
    boxes[:n_nodes, 6] = tree.lowest.view(torch.float32)
    return [_transposed_eights(points), _transposed_eights(boxes)]


def _transposed_eights(values: Tensor) -> Tensor:
    """(8 M, C) -> (M, C, 8)"""
    return values.view(-1, 8, values.shape[1]).transpose(1, 2).contiguous()


@wp.kernel
def _interleave(
    first: int, points: Floats2d, group: Longs, low: Doubles2d, step: Doubles, codes: Longs
):
    i = first + wp.tid()
    cube = wp.int64(0)
    if group.shape[0] > 0:
        cube = group[i]
    code = wp.int64(0)
    for axis in range(3):
        bits = wp.int64((wp.float64(points[i, axis]) - low[cube, axis]) * step[cube])
        bits = (bits | (bits << wp.int64(32))) & wp.int64(0x1F00000000FFFF)
        bits = (bits | (bits << wp.int64(16))) & wp.int64(0x1F0000FF0000FF)
        bits = (bits | (bits << wp.int64(8))) & wp.int64(0x100F00F00F00F00F)
        bits = (bits | (bits << wp.int64(4))) & wp.int64(0x10C30C30C30C30C3)
        bits = (bits | (bits << wp.int64(2))) & wp.int64(0x1249249249249249)
        code = code | (bits << wp.int64(axis))
    codes[i] = code


@wp.kernel
def _leaf_boxes(
    first: int,
    first_leaf: int,
    n_points: int,
    points: Floats2d,
    rows: Ints,
    boxes: Floats2d,
    lowest: Ints,
):
    leaf = first + wp.tid()
    low = wp.vec3(wp.inf, wp.inf, wp.inf)
    high = -low
    row = int(wp.static(_NO_INDEX))
    begin = leaf * wp.static(LEAF_SIZE)
    for i in range(begin, wp.min(begin + wp.static(LEAF_SIZE), n_points)):
        p = wp.vec3(points[i, 0], points[i, 1], points[i, 2])
        low = wp.min(low, p)
        high = wp.max(high, p)
        row = wp.min(row, rows[i])
    for axis in range(3):
        boxes[first_leaf + leaf, axis] = low[axis]
        boxes[first_leaf + leaf, axis + 3] = high[axis]
    lowest[first_leaf + leaf] = row


@wp.kernel
def _inner_boxes(first: int, level: int, boxes: Floats2d, lowest: Ints):
    node = level + first + wp.tid()
    for axis in range(3):
        boxes[node, axis] = wp.min(boxes[2 * node, axis], boxes[2 * node + 1, axis])
        boxes[node, axis + 3] = wp.max(boxes[2 * node, axis + 3], boxes[2 * node + 1, axis + 3])
    lowest[node] = wp.min(lowest[2 * node], lowest[2 * node + 1])


@wp.func
def _axis_gap(low: float, high: float, x: float) -> float:
    return wp.max(wp.max(low - x, x - high), 0.0)


@wp.func
def _box_bound(boxes: Floats2d, node: int, q: wp.vec3) -> float:
    """Lower bound of squared distances, rounded like the distances. Infinite for empty boxes."""
    x = _axis_gap(boxes[node, 0], boxes[node, 3], q[0])
    y = _axis_gap(boxes[node, 1], boxes[node, 4], q[1])
    z = _axis_gap(boxes[node, 2], boxes[node, 5], q[2])
    return (x * x + y * y) + z * z


@wp.func
def _sq_distance(points: Floats2d, i: int, q: wp.vec3) -> float:
    x = points[i, 0] - q[0]
    y = points[i, 1] - q[1]
    z = points[i, 2] - q[2]
    return (x * x + y * y) + z * z


@wp.func
def _before(distance: float, row: int, other_distance: float, other_row: int) -> bool:
    return distance < other_distance or (distance == other_distance and row < other_row)


@functools.cache
def _query_kernel(capacity: int) -> Kernel:
    """Make the kernel that searches for up to ``capacity`` neighbours, held in local memory."""
    Distances = wp.types.vector(length=capacity, dtype=wp.float32)
    Rows = wp.types.vector(length=capacity, dtype=wp.int32)
    Nodes = wp.types.vector(length=_MAX_DEPTH, dtype=wp.int32)
    Bounds = wp.types.vector(length=_MAX_DEPTH, dtype=wp.float32)

    @wp.kernel(module="unique", module_options=EXACT_OPTIONS)
    def query(
        first: int,
        offset: int,
        queries: Floats2d,
        query_rows: Ints,
        points: Floats2d,
        rows: Ints,
        boxes: Floats2d,
        lowest: Ints,
        first_leaf: int,
        leaves: Ints,
        skip_self: int,
        indices: Ints2d,
        sq_distances: Floats2d,
    ):
        item = offset + first + wp.tid()
        q = wp.vec3(queries[item, 0], queries[item, 1], queries[item, 2])
        out_row = query_rows[item]
        own_row = int(-1)
        if skip_self == 1:
            own_row = out_row
            current = first_leaf + item / wp.static(LEAF_SIZE)
        else:
            current = leaves[item]
        last = indices.shape[1] - skip_self - 1
        distances = Distances(wp.inf)
        neighbor_rows = Rows(wp.static(_NO_INDEX))
        worst = float(wp.inf)
        worst_row = int(wp.static(_NO_INDEX))
        nodes = Nodes()
        bounds = Bounds()
        subtree = int(current)
        while subtree > 0 and last >= 0:
            n_open = int(1)
            nodes[0] = subtree
            bounds[0] = _box_bound(boxes, subtree, q)
            while n_open > 0:
                n_open -= 1
                node = nodes[n_open]
                if _before(bounds[n_open], lowest[node], worst, worst_row):
                    if node >= first_leaf:
                        begin = (node - first_leaf) * wp.static(LEAF_SIZE)
                        for i in range(
                            begin, wp.min(begin + wp.static(LEAF_SIZE), points.shape[0])
                        ):
                            d = _sq_distance(points, i, q)
                            row = rows[i]
                            if row != own_row and _before(d, row, worst, worst_row):
                                nth = int(last)
                                while nth > 0 and _before(
                                    d, row, distances[nth - 1], neighbor_rows[nth - 1]
                                ):
                                    distances[nth] = distances[nth - 1]
                                    neighbor_rows[nth] = neighbor_rows[nth - 1]
                                    nth -= 1
                                distances[nth] = d
                                neighbor_rows[nth] = row
                                worst = distances[last]
                                worst_row = neighbor_rows[last]
                    else:
                        nearer = 2 * node
                        farther = nearer + 1
                        nearer_bound = _box_bound(boxes, nearer, q)
                        farther_bound = _box_bound(boxes, farther, q)
                        if _before(farther_bound, lowest[farther], nearer_bound, lowest[nearer]):
                            swap = nearer_bound
                            nearer_bound = farther_bound
                            farther_bound = swap
                            nearer = farther
                            farther = 2 * node
                        nodes[n_open] = farther
                        bounds[n_open] = farther_bound
                        nodes[n_open + 1] = nearer
                        bounds[n_open + 1] = nearer_bound
                        n_open += 2
            # Climb: the sibling of this node is searched next, then its parent is the current node.
            subtree = int(0)
            if current > 1:
                subtree = current ^ 1
                current = current >> 1
        if skip_self == 1:
            indices[out_row, 0] = own_row
            sq_distances[out_row, 0] = 0.0
        for j in range(last + 1):
            indices[out_row, j + skip_self] = neighbor_rows[j]
            sq_distances[out_row, j + skip_self] = distances[j]

    return query


@functools.cache
def _native_query_kernel(capacity: int) -> Kernel:
    """Make the same kernel for the CPU, on eight points or boxes at a time."""
    constants = (
        f"constexpr int CAPACITY = {capacity}, LEAF_SIZE = {LEAF_SIZE}, MAX_DEPTH = {_MAX_DEPTH};\n"
        f"constexpr int NO_INDEX = {_NO_INDEX};\n"
    )

    @native_kernel(
        SIMD_SOURCE + constants + native_source(__file__, "nearest"),
        module="unique",
        module_options=EXACT_OPTIONS,
    )
    def query(
        item: int,
        offset: int,
        queries_: Floats2d,
        query_rows_: Ints,
        points_: Floats3d,
        boxes_: Floats3d,
        first_leaf: int,
        leaves_: Ints,
        skip_self: int,
        indices_: Ints2d,
        sq_distances_: Floats2d,
    ): ...

    return query
