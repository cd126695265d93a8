# SPDX-License-Identifier: Apache-2.0
"""Tile kernels for GPUs; on the CPU they run as fibers, for tests.

A warp blends a tile of 16 x 16 pixels in eight blocks of 8 x 4, each lane one pixel of every block.
Splats come in batches of 32 (``splat_batches``). Of each batch a lane tests one splat: which
blocks its box touches. What the warp then does with a splat is decided by these eight bits, which
are the same in all lanes, so blocks that a splat does not touch cost nothing. On the way back a
lane first adds up its own eight pixels; the warp then adds up the columns of 32 lanes in 16
exchanges and stores the sums once, in the row of ``pair_sums`` that the pair owns. Nothing is added
atomically. The numerics are those of the bodies in ``native/``, but for the rounding of exp and
reciprocal.
"""

import functools
from typing import Any

import torch
import warp as wp

from gaussian_splatting.rasterization.projection_kernels import HEADER
from gaussian_splatting.rasterization.splat_batches import batch_functions
from gaussian_splatting.rasterization.view import ALPHA_MAX, ALPHA_MIN, TILE, TRANSMITTANCE_MIN
from sugar_utils.warp_lanes import (
    SUM_COLUMNS,
    WARP_LANES,
    Columns,
    gauss,
    lanes_where,
    lowest_bit,
    max_over_lanes,
    or_over_lanes,
    read_lane,
    reciprocal_fast,
    sum_columns,
)
from sugar_utils.warp_launch import as_array, known_options, launch_blocks

_BLOCK_WIDTH = 8
_BLOCK_HEIGHT = WARP_LANES // _BLOCK_WIDTH
_BLOCKS_ACROSS = TILE // _BLOCK_WIDTH
_BLOCKS_DOWN = TILE // _BLOCK_HEIGHT
_PIXELS_EACH = _BLOCKS_ACROSS * _BLOCKS_DOWN

_SIDE = wp.constant(TILE)
_LANES = wp.constant(WARP_LANES)
_ACROSS = wp.constant(_BLOCKS_ACROSS)
_DOWN = wp.constant(_BLOCKS_DOWN)
_WIDTH = wp.constant(_BLOCK_WIDTH)
_HEIGHT = wp.constant(_BLOCK_HEIGHT)
_RIGHTMOST = wp.constant(float(_BLOCK_WIDTH - 1))
_LOWEST = wp.constant(float(_BLOCK_HEIGHT - 1))
_PIXELS = wp.constant(_PIXELS_EACH)
_CAP = wp.constant(ALPHA_MAX)
_FAINTEST = wp.constant(ALPHA_MIN)
_OPAQUE = wp.constant(TRANSMITTANCE_MIN)
_MANY = wp.constant(32)
"""A splat of more pairs is summed by a whole warp: each lane has one at least."""
_OPTIONS = {"enable_backward": False, "block_dim": WARP_LANES}


wp.set_module_options(_OPTIONS)

# What changes inside a condition is an element of a vector, which is changed in place. A scalar
# would be a new variable merged with the old one, and keep both in registers around the loop.
Floats = wp.types.vector(length=_PIXELS_EACH, dtype=wp.float32)
Ints = wp.types.vector(length=_PIXELS_EACH, dtype=wp.int32)
Bits = wp.types.vector(length=1, dtype=wp.int32)
Shade = wp.types.vector(length=1, dtype=wp.float32)
Pair = wp.types.vector(length=_BLOCKS_ACROSS, dtype=wp.float32)


@wp.func
def touched_blocks(x: float, y: float, reach_x: float, reach_y: float, left: int, top: int) -> int:
    """Which blocks of a tile hold a pixel inside a splat's box: one bit each, row by row."""
    across = int(0)
    for i in range(_ACROSS):
        near = float(left + i * _WIDTH)
        if wp.max(near - x, x - (near + _RIGHTMOST)) <= reach_x:
            across = across | (1 << i)
    blocks = int(0)
    for i in range(_DOWN):
        near = float(top + i * _HEIGHT)
        if wp.max(near - y, y - (near + _LOWEST)) <= reach_y:
            blocks = blocks | (across << (i * _ACROSS))
    return blocks


@wp.func
def offsets_in_x(first_x: int, x: float) -> Pair:
    """From a splat's centre to a lane's pixels in the blocks of a row."""
    d = Pair()
    for i in range(_ACROSS):
        d[i] = (float(first_x) + float(i * _WIDTH)) - x
    return d


@wp.func
def offset_in_y(first_y: int, row: int, y: float) -> float:
    """From a splat's centre to a lane's pixels in a row of blocks."""
    return (float(first_y) + float(row * _HEIGHT)) - y


@wp.func_native(
    """
const int column = group * SUM_COLUMNS + lane / 2;
if (lane % 2 == 0 && column < width) pair_sums.data[(size_t)row * width + column] = total;
""".replace("SUM_COLUMNS", str(SUM_COLUMNS))
)
def store_sum(
    pair_sums: wp.array(dtype=float), row: int, width: int, group: int, lane: int, total: float
):
    """Store what :func:`sum_columns` returned: column ``lane / 2`` of a group."""
    ...


@wp.func
def add_gradient(
    d_means2d: wp.array2d(dtype=float),
    d_splats: wp.array2d(dtype=float),
    i: int,
    column: int,
    value: float,
):
    """Add a column of a row of ``pair_sums`` to where its gradient belongs."""
    if column < 2:
        d_means2d[i, column] += value
    elif column < 6:
        d_splats[i, column] += value
    else:
        d_splats[i, HEADER + column - 6] += value


class BlockKernels:
    """Kernels for splats of some channels, and how they are launched.

    Attributes:
        forward: One warp for each tile, like the next.
        backward: Arguments of both as those of the kernels in ``blend_cpu``.
        sum_pairs: One warp for every 32 splats.
    """

    def __init__(self, n_channels: int) -> None:
        self.forward = _forward_kernel(n_channels)
        self.backward = _backward_kernel(n_channels)
        self.sum_pairs = _sum_kernel(n_channels)
        self._row = wp.types.vector(length=6 + n_channels, dtype=wp.float32)

    def launch_forward(self, n_tiles: int, inputs: list[Any], device: torch.device) -> None:
        """Blend tiles."""
        inputs = [*inputs[:7], inputs[7].view(-1), *inputs[8:]]
        _launch_warps(self.forward, n_tiles, inputs, device)

    def launch_backward(self, n_tiles: int, inputs: list[Any], device: torch.device) -> None:
        """Fill the rows of the pairs in some tiles."""
        inputs = [*inputs[:7], inputs[7].view(-1), *inputs[8:-1], inputs[-1].view(-1)]
        _launch_warps(self.backward, n_tiles, inputs, device)

    def launch_sums(self, n_splats: int, inputs: list[Any], device: torch.device) -> None:
        """Add the rows of each splat's pairs to its gradients."""
        rows = as_array(inputs[6], self._row)
        inputs = [n_splats, *inputs[:6], rows, *inputs[7:]]
        _launch_warps(self.sum_pairs, -(-n_splats // WARP_LANES), inputs, device)


@functools.cache
def block_kernels(n_channels: int) -> BlockKernels:
    """Kernels for splats of ``n_channels`` channels, made once."""
    return BlockKernels(n_channels)


def _launch_warps(kernel: Any, n_warps: int, inputs: list[Any], device: torch.device) -> None:
    launch_blocks(kernel, n_warps, inputs, device=device, block_dim=WARP_LANES)


def _options(n_channels: int) -> dict[str, Any]:
    """How blending kernels are compiled.

    Registers for 20, 16, 16 and 12 warps on a multiprocessor; the least that spills next to nothing
    in the loop over splats.
    """
    limits = ((4, 96), (8, 128), (10, 168))
    most = next((registers for channels, registers in limits if n_channels <= channels), 255)
    return known_options(grid_stride=False, cuda_max_registers=most)


def _forward_kernel(n_channels: int) -> Any:
    CHANNELS = wp.constant(n_channels)
    Colors = wp.types.matrix(shape=(_PIXELS_EACH, n_channels), dtype=wp.float32)
    batch_of = batch_functions(n_channels)
    open_batches, copy_batch = batch_of.open, batch_of.copy
    wait_for_batch, read_splat = batch_of.wait, batch_of.read

    @wp.kernel(module="unique", module_options=_OPTIONS, **_options(n_channels))
    def forward(
        first_tile: int,
        width: int,
        top_row: int,
        end_row: int,
        tiles_x: int,
        offsets: wp.array(dtype=int),
        ids: wp.array(dtype=int),
        splats: wp.array(dtype=float),
        background: wp.array(dtype=float),
        image: wp.array3d(dtype=float),
        transmittance: wp.array2d(dtype=float),
        last: wp.array2d(dtype=int),
    ):
        block, lane = wp.tid()
        tile = first_tile + block
        left = (tile % tiles_x) * _SIDE
        top = (tile / tiles_x) * _SIDE
        first_x = left + lane % _WIDTH
        first_y = top + lane / _WIDTH
        light = Floats(1.0)
        latest = Ints(-1)
        alive = Bits()
        blended = Colors()
        for q in range(_PIXELS):
            x = first_x + (q % _ACROSS) * _WIDTH
            y = first_y + (q / _ACROSS) * _HEIGHT
            # Pixels that are not blended count as opaque, so that they do not keep a tile going.
            if x < width and y >= top_row and y < end_row:
                alive[0] = alive[0] | (1 << q)
        begin = offsets[tile]
        end = offsets[tile + 1]
        batches = open_batches()
        next_id = int(0)
        if begin < end:
            copy_batch(batches, 0, lane, ids[wp.min(begin + lane, end - 1)], splats)
            next_id = ids[wp.min(begin + _LANES + lane, end - 1)]
        for batch in range((end - begin + _LANES - 1) / _LANES):
            start = begin + batch * _LANES
            buffer = batch % 2
            open_blocks = or_over_lanes(alive[0], lane)
            if open_blocks == 0:
                break
            wait_for_batch()
            if start + _LANES < end:
                copy_batch(batches, 1 - buffer, lane, next_id, splats)
                next_id = ids[wp.min(start + 2 * _LANES + lane, end - 1)]
            own = read_splat(batches, buffer, lane)
            own_blocks = int(0)
            if start + lane < end:
                own_blocks = open_blocks & touched_blocks(own[0], own[1], own[7], own[8], left, top)
            waiting = lanes_where(own_blocks, lane)
            while waiting != 0:
                j = lowest_bit(waiting)
                waiting = waiting & (waiting - 1)
                blocks = read_lane(own_blocks, lane, j)
                splat = read_splat(batches, buffer, j)
                dx = offsets_in_x(first_x, splat[0])
                xx = splat[2] * wp.cw_mul(dx, dx)
                xy = (2.0 * splat[3]) * dx
                limit = 2.0 * splat[6]
                for q in range(_PIXELS):
                    if (blocks & (1 << q)) != 0:
                        dy = offset_in_y(first_y, q / _ACROSS, splat[1])
                        square = xx[q % _ACROSS] + dy * (xy[q % _ACROSS] + splat[4] * dy)
                        if (alive[0] & (1 << q)) != 0 and square >= 0.0 and square <= limit:
                            alpha = wp.min(splat[5] * gauss(square), _CAP)
                            if alpha >= _FAINTEST:
                                after = light[q] * (1.0 - alpha)
                                if after < _OPAQUE:
                                    alive[0] = alive[0] & ~(1 << q)
                                else:
                                    weight = alpha * light[q]
                                    for c in range(CHANNELS):
                                        blended[q, c] += weight * splat[HEADER + c]
                                    light[q] = after
                                    latest[q] = start + j
        wait_for_batch()
        for q in range(_PIXELS):
            x = first_x + (q % _ACROSS) * _WIDTH
            y = first_y + (q / _ACROSS) * _HEIGHT
            if x < width and y >= top_row and y < end_row:
                transmittance[y - top_row, x] = light[q]
                last[y - top_row, x] = latest[q]
                for c in range(CHANNELS):
                    image[y - top_row, x, c] = blended[q, c] + light[q] * background[c]

    return forward


def _backward_kernel(n_channels: int) -> Any:
    CHANNELS = wp.constant(n_channels)
    WIDTH = wp.constant(6 + n_channels)
    n_groups = -(-(6 + n_channels) // SUM_COLUMNS)
    GROUPS = wp.constant(n_groups)
    Colors = wp.types.matrix(shape=(_PIXELS_EACH, n_channels), dtype=wp.float32)
    Sums = wp.types.matrix(shape=(n_groups, SUM_COLUMNS), dtype=wp.float32)
    batch_of = batch_functions(n_channels)
    open_batches, copy_batch = batch_of.open, batch_of.copy
    wait_for_batch, read_splat = batch_of.wait, batch_of.read

    @wp.kernel(module="unique", module_options=_OPTIONS, **_options(n_channels))
    def backward(
        first_tile: int,
        width: int,
        top_row: int,
        end_row: int,
        tiles_x: int,
        offsets: wp.array(dtype=int),
        ids: wp.array(dtype=int),
        splats: wp.array(dtype=float),
        background: wp.array(dtype=float),
        transmittance: wp.array2d(dtype=float),
        last: wp.array2d(dtype=int),
        d_image: wp.array3d(dtype=float),
        d_transmittance: wp.array2d(dtype=float),
        pair_sums: wp.array(dtype=float),
    ):
        block, lane = wp.tid()
        tile = first_tile + block
        left = (tile % tiles_x) * _SIDE
        top = (tile / tiles_x) * _SIDE
        first_x = left + lane % _WIDTH
        first_y = top + lane / _WIDTH
        light = Floats(1.0)
        behind = Floats(0.0)
        latest = Ints(-1)
        d_pixel = Colors()
        for q in range(_PIXELS):
            x = first_x + (q % _ACROSS) * _WIDTH
            y = first_y + (q / _ACROSS) * _HEIGHT
            if x < width and y >= top_row and y < end_row:
                light[q] = transmittance[y - top_row, x]
                latest[q] = last[y - top_row, x]
                d_end = d_transmittance[y - top_row, x]
                for c in range(CHANNELS):
                    d_pixel[q, c] = d_image[y - top_row, x, c]
                    d_end += d_pixel[q, c] * background[c]
                behind[q] = light[q] * d_end
        begin = offsets[tile]
        first_place = offsets[first_tile]
        # The last splat that a block blended is kept by the lane of the block's number.
        end = int(begin)
        block_last = int(-1)
        for q in range(_PIXELS):
            largest = max_over_lanes(latest[q], lane)
            end = wp.max(end, largest + 1)
            if lane == q:
                block_last = largest
        # What lies behind the last splat that any pixel blended has no gradient.
        for k in range(end, offsets[tile + 1]):
            for g in range(GROUPS):
                store_sum(pair_sums, k - first_place, WIDTH, g, lane, 0.0)
        sums = Sums()
        batches = open_batches()
        next_id = int(0)
        if begin < end:
            copy_batch(batches, 0, lane, ids[wp.max(end - 1 - lane, begin)], splats)
            next_id = ids[wp.max(end - 1 - _LANES - lane, begin)]
        for batch in range((end - begin + _LANES - 1) / _LANES):
            start = end - 1 - batch * _LANES
            buffer = batch % 2
            wait_for_batch()
            if start - _LANES >= begin:
                copy_batch(batches, 1 - buffer, lane, next_id, splats)
                next_id = ids[wp.max(start - 2 * _LANES - lane, begin)]
            own = read_splat(batches, buffer, lane)
            own_blocks = int(0)
            for q in range(_PIXELS):
                if start - lane <= read_lane(block_last, lane, q):
                    own_blocks = own_blocks | (1 << q)
            own_blocks = own_blocks & touched_blocks(own[0], own[1], own[7], own[8], left, top)
            for j in range(wp.min(_LANES, start - begin + 1)):
                k = start - j
                blocks = read_lane(own_blocks, lane, j)
                touched = Bits()
                if blocks != 0:
                    splat = read_splat(batches, buffer, j)
                    dx = offsets_in_x(first_x, splat[0])
                    xx = splat[2] * wp.cw_mul(dx, dx)
                    xy = (2.0 * splat[3]) * dx
                    limit = 2.0 * splat[6]
                    for q in range(_PIXELS):
                        if (blocks & (1 << q)) != 0:
                            dy = offset_in_y(first_y, q / _ACROSS, splat[1])
                            square = xx[q % _ACROSS] + dy * (xy[q % _ACROSS] + splat[4] * dy)
                            if k <= latest[q] and square >= 0.0 and square <= limit:
                                falloff = gauss(square)
                                uncapped = splat[5] * falloff
                                alpha = wp.min(uncapped, _CAP)
                                if alpha >= _FAINTEST:
                                    touched[0] = 1
                                    inverse = reciprocal_fast(1.0 - alpha)
                                    before = light[q] * inverse
                                    weight = alpha * before
                                    shade = Shade()
                                    for c in range(CHANNELS):
                                        shade[0] += d_pixel[q, c] * splat[HEADER + c]
                                        sums[(6 + c) / SUM_COLUMNS, (6 + c) % SUM_COLUMNS] += (
                                            weight * d_pixel[q, c]
                                        )
                                    # The cap passes the gradient straight through, as in 3DGS.
                                    d_alpha = before * shade[0] - behind[q] * inverse
                                    behind[q] += weight * shade[0]
                                    light[q] = before
                                    d_sigma = uncapped * d_alpha
                                    gx = d_sigma * dx[q % _ACROSS]
                                    gy = d_sigma * dy
                                    sums[0, 0] += gx
                                    sums[0, 1] += gy
                                    sums[0, 2] += gx * dx[q % _ACROSS]
                                    sums[0, 3] += gx * dy
                                    sums[0, 4] += gy * dy
                                    sums[0, 5] += falloff * d_alpha
                    gx = sums[0, 0]
                    sums[0, 0] = splat[2] * gx + splat[3] * sums[0, 1]
                    sums[0, 1] = splat[3] * gx + splat[4] * sums[0, 1]
                    sums[0, 2] = -0.5 * sums[0, 2]
                    sums[0, 3] = -sums[0, 3]
                    sums[0, 4] = -0.5 * sums[0, 4]
                any_touched = lanes_where(touched[0], lane)
                for g in range(GROUPS):
                    total = float(0.0)
                    if any_touched != 0:
                        total = sum_columns(sums[g], lane)
                    store_sum(pair_sums, k - first_place, WIDTH, g, lane, total)
                # A zero that the compiler does not recognise: it would write the known one again
                # at every way out of the first block.
                sums = Sums(0.0 * light[0])
        wait_for_batch()

    return backward


def _sum_kernel(n_channels: int) -> Any:
    WIDTH = wp.constant(6 + n_channels)
    n_groups = -(-(6 + n_channels) // SUM_COLUMNS)
    GROUPS = wp.constant(n_groups)
    Sums = wp.types.vector(length=6 + n_channels, dtype=wp.float32)

    @wp.kernel(module="unique", module_options=_OPTIONS, **known_options(grid_stride=False))
    def sum_pairs(
        n_splats: int,
        first_tile: int,
        end_tile: int,
        offsets: wp.array(dtype=int),
        first_pairs: wp.array(dtype=int),
        counts: wp.array(dtype=int),
        places: wp.array(dtype=int),
        pair_sums: wp.array(dtype=Sums),
        d_means2d: wp.array2d(dtype=float),
        d_splats: wp.array2d(dtype=float),
    ):
        warp, lane = wp.tid()
        begin = offsets[first_tile]
        end = offsets[end_tile]
        # Large splats may have neighbouring numbers, so a warp takes splats far from each other.
        n_warps = (n_splats + _LANES - 1) / _LANES
        own = lane * n_warps + warp
        own_pair = int(0)
        own_count = int(0)
        if own < n_splats:
            own_pair = first_pairs[own]
            own_count = counts[own]
        shared = lanes_where(wp.where(own_count > _MANY, 1, 0), lane)
        if own_count > 0 and own_count <= _MANY:
            total = Sums()
            for pair in range(own_pair, own_pair + own_count):
                row = places[pair] - begin
                if row >= 0 and row < end - begin:
                    total += pair_sums[row]
            for c in range(WIDTH):
                add_gradient(d_means2d, d_splats, own, c, total[c])
        while shared != 0:
            j = lowest_bit(shared)
            shared = shared & (shared - 1)
            first_pair = read_lane(own_pair, lane, j)
            count = read_lane(own_count, lane, j)
            part = Sums()
            for pair in range(first_pair + lane, first_pair + count, _LANES):
                row = places[pair] - begin
                if row >= 0 and row < end - begin:
                    part += pair_sums[row]
            for g in range(GROUPS):
                columns = Columns()
                for c in range(SUM_COLUMNS):
                    if g * SUM_COLUMNS + c < WIDTH:
                        columns[c] = part[g * SUM_COLUMNS + c]
                column_sum = sum_columns(columns, lane)
                column = g * SUM_COLUMNS + lane / 2
                if lane % 2 == 0 and column < WIDTH:
                    add_gradient(d_means2d, d_splats, j * n_warps + warp, column, column_sum)

    return sum_pairs
