# SPDX-License-Identifier: Apache-2.0
"""Sums of the gradient rows of a splat's intersections on GPUs, always in the same order.

A row has two columns for the centre, four for conic and opacity, one for each channel. A lane adds
up the rows of one splat; splats of many intersections are taken by all lanes of a warp, each every
32nd row, and the 32 sums are added in a fixed tree.
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
_COLUMNS = wp.constant(SUM_COLUMNS)
_SPLAT_COLUMNS = wp.constant(SPLAT_COLUMNS)
_MANY = wp.constant(16)
"""Splats of more intersections are taken by a whole warp; fewest instructions for 10^6 splats."""

_STORE = f"""
const int column = group * {SUM_COLUMNS} + lane / 2;
if (lane % 2 == 0 && column < WIDTH) gradient_sums.data[row][column] = total;
"""


@wp.func
def splat_of(warp: int, lane: int, n_splats: int) -> int:
    """Return the splat of a lane.

    Large splats may have neighbouring numbers, so a warp takes splats far from each other.
    """
    return lane * ((n_splats + _LANES - 1) / _LANES) + warp


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
    elif column < _SPLAT_COLUMNS:
        d_splats[i, column] += value
    else:
        d_splats[i, HEADER + column - _SPLAT_COLUMNS] += value


def launch_sums(kernel: wp.Kernel, n_splats: int, inputs: SumInputs) -> None:
    """Launch a kernel of :func:`sum_kernel`; its first argument is added."""
    launch_blocks(
        kernel,
        -(-n_splats // WARP_LANES),
        [n_splats, *inputs],
        device=inputs.offsets.device,
        block_dim=WARP_LANES,
        together=_WARPS_TOGETHER,
    )


def sum_kernel(n_channels: int) -> wp.Kernel:
    """Return a kernel of one warp for every 32 splats.

    Its arguments are the number of splats and :class:`~.blend_inputs.SumInputs`.
    """
    width = SPLAT_COLUMNS + n_channels
    WIDTH = wp.constant(width)
    GROUPS = wp.constant(-(-width // SUM_COLUMNS))
    Sums = wp.types.vector(length=width, dtype=wp.float32)
    options = {"enable_backward": False, "block_dim": _WARPS_TOGETHER * WARP_LANES}

    @wp.kernel(module="unique", module_options=options, **known_options(grid_stride=False))
    def sum_gradient_rows(
        n_splats: int,
        first_tile: int,
        end_tile: int,
        offsets: Ints,
        first_intersections: Ints,
        counts: Ints,
        places: Ints,
        gradient_sums: wp.array(dtype=Sums),
        d_means2d: Floats2d,
        d_splats: Floats2d,
    ):
        warp, lane = wp.tid()
        begin = offsets[first_tile]
        end = offsets[end_tile]
        own_splat = splat_of(warp, lane, n_splats)
        own_first = int(0)
        own_count = int(0)
        if own_splat < n_splats:
            own_first = first_intersections[own_splat]
            # Intersections for which the lists had no room have no place.
            own_count = wp.min(counts[own_splat], places.shape[0] - own_first)
        if own_count > 0 and own_count <= _MANY:
            own_sum = Sums()
            for k in range(own_first, own_first + own_count):
                place = places[k]
                if place >= begin and place < end:
                    own_sum += gradient_sums[place - begin]
            for c in range(WIDTH):
                add_gradient(d_means2d, d_splats, own_splat, c, own_sum[c])
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
                    part += gradient_sums[place - begin]
            for g in range(GROUPS):
                columns = Columns()
                for c in range(_COLUMNS):
                    if g * _COLUMNS + c < WIDTH:
                        columns[c] = part[g * _COLUMNS + c]
                total = sum_columns(columns, lane)
                column = g * _COLUMNS + lane / 2
                if lane % 2 == 0 and column < WIDTH:
                    add_gradient(d_means2d, d_splats, splat_of(warp, j, n_splats), column, total)

    return sum_gradient_rows
