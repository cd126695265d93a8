# SPDX-License-Identifier: Apache-2.0
"""Sums of the gradient rows of a splat's intersections on GPUs, always in the same order.

A row has two columns for the centre, four for conic and opacity, one for each channel. Half a warp
adds up the rows of one splat, a lane for each column, so that its lanes read neighbouring numbers.
Splats of many intersections are taken by all lanes of a warp, each every 32nd row, and the 32 sums
are added in a fixed tree.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportAssignmentType=false

import functools
from typing import NamedTuple

import warp as wp

from gaussian_splatting.rasterization.blend_inputs import SumInputs
from gaussian_splatting.rasterization.projection_kernels import HEADER
from sugar_utils.warp_arrays import Floats2d, Ints
from sugar_utils.warp_launch import known_options, launch_blocks
from sugar_utils.warp_math import (
    SUM_COLUMNS,
    TEAM_LANES,
    WARP_LANES,
    Columns,
    lanes_where,
    lowest_bit,
    read_lane,
    sum_columns,
)

_WARPS_TOGETHER = 4  # in one block of a GPU, because a multiprocessor holds at most 16 to 32 blocks
SPLAT_COLUMNS = 6  # columns of a row before those of the channels
_LANES = wp.constant(WARP_LANES)
_TEAM = wp.constant(TEAM_LANES)
_TEAMS = wp.constant(WARP_LANES // TEAM_LANES)
_COLUMNS = wp.constant(SUM_COLUMNS)
_SPLAT_COLUMNS = wp.constant(SPLAT_COLUMNS)
_MANY = wp.constant(16)
"""Splats of more intersections are taken by a whole warp."""

_MANY_WARPS = 8192
"""A large GPU holds so many at once; with fewer splats to each, a warp waits for less in turn."""

_STORE = f"""
const int column = group * {SUM_COLUMNS} + lane / 2;
if (lane % 2 == 0 && column < WIDTH) gradient_sums.data[row][column] = total;
"""


@wp.func
def splat_of(warp: int, lane: int, n_warps: int) -> int:
    """Return the splat of a lane.

    Large splats may have neighbouring numbers, so a warp takes splats far from each other.
    """
    return lane * n_warps + warp


class RowFunctions(NamedTuple):
    """Types and the Warp function for gradient rows of some number of channels."""

    Row: type  # a row of ``gradient_sums``
    Part: type  # a lane's part of it: columns in groups of ``SUM_COLUMNS``
    store: wp.Function  # (gradient_sums, row, part, any_part, lane): adds the parts and stores them


@functools.cache
def store_row_function(n_channels: int) -> RowFunctions:
    """Return what stores the gradient row of an intersection."""
    width = SPLAT_COLUMNS + n_channels
    n_groups = -(-width // SUM_COLUMNS)
    GROUPS = wp.constant(n_groups)
    Part = wp.types.matrix(shape=(n_groups, SUM_COLUMNS), dtype=wp.float32)
    Row = wp.types.vector(length=width, dtype=wp.float32)

    @wp.func_native(_STORE.replace("WIDTH", str(width)))
    def store_sum(
        gradient_sums: wp.array(dtype=Row),
        row: int,
        group: int,
        lane: int,
        total: float,
    ): ...

    @wp.func
    def store_row(
        gradient_sums: wp.array(dtype=Row),
        row: int,
        part: Part,
        any_part: int,
        lane: int,
    ):
        for g in range(GROUPS):
            total = float(0.0)
            if any_part != 0:
                total = sum_columns(part[g], lane)
            store_sum(gradient_sums, row, g, lane, total)

    return RowFunctions(Row, Part, store_row)


@wp.func
def add_gradient(d_means2d: Floats2d, d_splats: Floats2d, i: int, column: int, value: float):
    """Add a column of a splat's sum to where its gradient belongs."""
    if column < 2:
        d_means2d[i, column] += value
    else:
        at = column
        if column >= _SPLAT_COLUMNS:
            at = HEADER + column - _SPLAT_COLUMNS
        d_splats[i, at] += value


def splats_of_a_warp(n_splats: int) -> int:
    """Return the number of splats that a warp takes: 2 to 32, so that many warps have some."""
    return min(max(n_splats // _MANY_WARPS, WARP_LANES // TEAM_LANES), WARP_LANES)


def launch_sums(kernel: wp.Kernel, n_splats: int, inputs: SumInputs) -> None:
    """Launch a kernel of :func:`sum_kernel`; its first two arguments are added."""
    n_warps = -(-n_splats // splats_of_a_warp(n_splats))
    launch_blocks(
        kernel,
        n_warps,
        [n_splats, n_warps, *inputs],
        device=inputs.offsets.device,
        block_dim=WARP_LANES,
        together=_WARPS_TOGETHER,
    )


def sum_kernel(n_channels: int) -> wp.Kernel:
    """Return a kernel of one warp for at most 32 splats.

    Its arguments are the numbers of splats and of warps, and :class:`~.blend_inputs.SumInputs`.
    """
    width = SPLAT_COLUMNS + n_channels
    WIDTH = wp.constant(width)
    GROUPS = wp.constant(-(-width // SUM_COLUMNS))
    Sums = wp.types.vector(length=width, dtype=wp.float32)
    options = {"enable_backward": False, "block_dim": _WARPS_TOGETHER * WARP_LANES}

    @wp.kernel(module="unique", module_options=options, **known_options(grid_stride=False))
    def sum_gradient_rows(
        n_splats: int,
        n_warps: int,
        first_tile: int,
        end_tile: int,
        offsets: Ints,
        first_intersections: Ints,
        counts: Ints,
        places: Ints,
        gradient_sums: Floats2d,
        d_means2d: Floats2d,
        d_splats: Floats2d,
    ):
        warp, lane = wp.tid()
        begin = offsets[first_tile]
        end = offsets[end_tile]
        if begin == end:
            return
        own_splat = splat_of(warp, lane, n_warps)
        own_first = int(0)
        own_count = int(0)
        if own_splat < n_splats:
            own_first = first_intersections[own_splat]
            # Intersections for which the lists had no room have no place.
            own_count = wp.min(counts[own_splat], places.shape[0] - own_first)
        member = lane % _TEAM
        n_rows = end - begin
        n_splats_here = (n_splats - warp + n_warps - 1) / n_warps
        for step in range((n_splats_here + _TEAMS - 1) / _TEAMS):
            j = step * _TEAMS + lane / _TEAM
            first_of_run = read_lane(own_first, lane, j)
            count = read_lane(own_count, lane, j)
            if count > 0 and count <= _MANY:
                for c in range(member, WIDTH, _TEAM):
                    total = float(0.0)
                    for k in range(first_of_run, first_of_run + count):
                        # No branch, so that several rows are on their way at once.
                        row = places[k] - begin
                        value = gradient_sums[wp.clamp(row, 0, n_rows - 1), c]
                        total += wp.where(row >= 0 and row < n_rows, value, 0.0)
                    add_gradient(d_means2d, d_splats, splat_of(warp, j, n_warps), c, total)
        waiting = lanes_where(wp.where(own_count > _MANY, 1, 0), lane)
        while waiting != 0:
            j = lowest_bit(waiting)
            waiting = waiting & (waiting - 1)
            first_of_run = read_lane(own_first, lane, j)
            count = read_lane(own_count, lane, j)
            part = Sums()
            for k in range(first_of_run + lane, first_of_run + count, _LANES):
                place = places[k]
                if place >= begin and place < end:
                    for c in range(WIDTH):
                        part[c] += gradient_sums[place - begin, c]
            for g in range(GROUPS):
                columns = Columns()
                for c in range(_COLUMNS):
                    if g * _COLUMNS + c < WIDTH:
                        columns[c] = part[g * _COLUMNS + c]
                total = sum_columns(columns, lane)
                column = g * _COLUMNS + lane / 2
                if lane % 2 == 0 and column < WIDTH:
                    add_gradient(d_means2d, d_splats, splat_of(warp, j, n_warps), column, total)

    return sum_gradient_rows
