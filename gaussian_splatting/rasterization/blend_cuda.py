# SPDX-License-Identifier: Apache-2.0
"""Tile kernels for GPUs; on the CPU they run as fibers, for tests.

A warp blends a tile, each lane eight pixels (``pixel_blocks``). Splats come in batches of 32
(``splat_batches``), of which a lane tests one: which blocks of pixels its box touches. What the
warp then does with a splat is decided by these eight bits, which all lanes know, so blocks that it
does not touch cost nothing. On the way back a lane first adds up its own eight pixels; the warp
then adds up the columns of 32 lanes in 16 exchanges and stores the sums at once, in the row of
``pair_sums`` that the pair owns. Nothing is added atomically. The numerics are those of the bodies
in ``native/``, but for the rounding of exponentials and reciprocals.
"""

import functools
from typing import Any

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.rasterization.pair_sums_cuda import (
    SPLAT_COLUMNS,
    launch_sums,
    store_row_function,
    sum_kernel,
)
from gaussian_splatting.rasterization.pixel_blocks import (
    BLOCKS,
    BLOCKS_ACROSS,
    Places,
    batch_functions,
    blocks_that_reach,
    first_pixel,
    form_at,
    form_of,
    last_of_blocks,
    offset_in_y,
    pixel_in_block,
    tile_corner,
    touched_blocks,
)
from gaussian_splatting.rasterization.projection_kernels import HEADER, SPLAT_HEADER
from gaussian_splatting.rasterization.view import ALPHA_MAX, ALPHA_MIN, TRANSMITTANCE_MIN
from sugar_utils.prepared_launch import TypedTensor
from sugar_utils.warp_launch import as_array, known_options, launch_blocks
from sugar_utils.warp_math import (
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
)

_LANES = wp.constant(WARP_LANES)
_BLOCKS = wp.constant(BLOCKS)
_ACROSS = wp.constant(BLOCKS_ACROSS)
_GROUP = wp.constant(SUM_COLUMNS)
_CHANNEL_0 = wp.constant(SPLAT_COLUMNS)
_CAP = wp.constant(ALPHA_MAX)
_FAINTEST = wp.constant(ALPHA_MIN)
_OPAQUE = wp.constant(TRANSMITTANCE_MIN)
_FORWARD_REGISTERS = ((3, 80), (4, 96), (8, 128), (12, 168))
"""Up to so many channels, so many registers of a thread: for 24, 20, 16 and 12 warps on a
multiprocessor. With fewer, the loop over splats would keep much in memory."""
_BACKWARD_REGISTERS = ((4, 96), (8, 128), (10, 168))

wp.set_module_options({"enable_backward": False})

# What changes inside a condition is an element of a vector, which is changed in place. A scalar
# would be a new variable merged with the old one, and keep both in registers around the loop.
Floats = wp.types.vector(length=BLOCKS, dtype=wp.float32)
Bits = wp.types.vector(length=1, dtype=wp.int32)
Shade = wp.types.vector(length=1, dtype=wp.float32)


class BlockKernels:
    """Kernels for splats of some channels, and how they are launched."""

    def __init__(self, n_channels: int) -> None:
        self.forward = _forward_kernel(n_channels)
        self.backward = _backward_kernel(n_channels)
        self.sum_pairs = sum_kernel(n_channels)

    def launch_forward(self, n_tiles: int, inputs: list[Any], device: torch.device) -> None:
        """Blend tiles."""
        inputs = [*inputs[:7], as_rows(inputs[7]), *inputs[8:]]
        _launch_on_tiles(self.forward, n_tiles, inputs, device)

    def launch_backward(self, n_tiles: int, inputs: list[Any], device: torch.device) -> None:
        """Fill the rows of the pairs in some tiles."""
        inputs = [*inputs[:7], as_rows(inputs[7]), *inputs[8:-1], as_rows(inputs[-1])]
        _launch_on_tiles(self.backward, n_tiles, inputs, device)

    def launch_sums(self, n_splats: int, inputs: list[Any], device: torch.device) -> None:
        """Add the rows of each splat's pairs to its gradients."""
        inputs = [*inputs[:6], as_rows(inputs[6]), *inputs[7:]]
        launch_sums(self.sum_pairs, n_splats, inputs, device)


@functools.cache
def block_kernels(n_channels: int) -> BlockKernels:
    """Kernels for splats of ``n_channels`` channels, made once."""
    return BlockKernels(n_channels)


def _launch_on_tiles(kernel: Any, n_tiles: int, inputs: list[Any], device: torch.device) -> None:
    together = kernel.module.options["block_dim"] // WARP_LANES
    launch_blocks(kernel, n_tiles, inputs, device=device, block_dim=WARP_LANES, together=together)


def as_rows(table: Tensor) -> TypedTensor:
    """A table of floats to Warp as one vector per row."""
    return as_array(table, _row_type(table.shape[1]))


@functools.cache
def _row_type(width: int) -> Any:
    return wp.types.vector(length=width, dtype=wp.float32)


def _tiles_together(n_channels: int) -> int:
    """Tiles in one block of a GPU: two where registers allow more warps than 16, the least number
    of blocks that a multiprocessor holds."""
    return 2 if n_channels <= 4 else 1


def _options(n_channels: int, limits: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    most = next((registers for channels, registers in limits if n_channels <= channels), 255)
    block_dim = _tiles_together(n_channels) * WARP_LANES
    return {
        "module_options": {"enable_backward": False, "block_dim": block_dim},
        **known_options(grid_stride=False, cuda_max_registers=most),
    }


@wp.func
def shape_gradients(sums: Columns, conic: wp.vec3) -> Columns:
    """Five columns: gradients of centre and conic, from sums of dL/dsigma times offsets."""
    result = sums
    result[0] = conic[0] * sums[0] + conic[1] * sums[1]
    result[1] = conic[1] * sums[0] + conic[2] * sums[1]
    result[2] = -0.5 * sums[2]
    result[3] = -sums[3]
    result[4] = -0.5 * sums[4]
    return result


def _forward_kernel(n_channels: int) -> Any:
    CHANNELS = wp.constant(n_channels)
    Colors = wp.types.matrix(shape=(BLOCKS, n_channels), dtype=wp.float32)
    Row = wp.types.vector(length=SPLAT_HEADER + n_channels, dtype=wp.float32)
    batch_of = batch_functions(n_channels)

    @wp.kernel(module="unique", **_options(n_channels, _FORWARD_REGISTERS))
    def forward(
        first_tile: int, width: int, top_row: int, end_row: int, tiles_x: int,
        offsets: wp.array(dtype=int), ids: wp.array(dtype=int),
        splats: wp.array(dtype=Row), background: wp.array(dtype=float),
        image: wp.array3d(dtype=float), transmittance: wp.array2d(dtype=float),
        last: wp.array2d(dtype=int),
    ):  # fmt: skip
        warp, lane = wp.tid()
        tile = first_tile + warp
        corner = tile_corner(tile, tiles_x)
        first = first_pixel(corner, lane)
        light = Floats(1.0)
        latest = Places(-1)
        alive = Bits()
        blended = Colors()
        for q in range(_BLOCKS):
            at = pixel_in_block(first, q)
            # Pixels that are not blended count as opaque, so that they do not keep a tile going.
            if at[0] < width and at[1] >= top_row and at[1] < end_row:
                alive[0] = alive[0] | (1 << q)
        begin = offsets[tile]
        end = offsets[tile + 1]
        batches = batch_of.open()
        next_id = int(0)
        if begin < end:
            batch_of.copy(batches, 0, lane, ids[wp.min(begin + lane, end - 1)], splats)
            next_id = ids[wp.min(begin + _LANES + lane, end - 1)]
        for batch in range((end - begin + _LANES - 1) / _LANES):
            start = begin + batch * _LANES
            buffer = batch % 2
            open_blocks = or_over_lanes(alive[0], lane)
            if open_blocks == 0:
                break
            batch_of.wait()
            if start + _LANES < end:
                batch_of.copy(batches, 1 - buffer, lane, next_id, splats)
                next_id = ids[wp.min(start + 2 * _LANES + lane, end - 1)]
            own = batch_of.read(batches, buffer, lane)
            own_blocks = int(0)
            if start + lane < end:
                own_blocks = open_blocks & touched_blocks(corner, own[0], own[1], own[7], own[8])
            waiting = lanes_where(own_blocks, lane)
            while waiting != 0:
                j = lowest_bit(waiting)
                waiting = waiting & (waiting - 1)
                blocks = read_lane(own_blocks, lane, j)
                splat = batch_of.read(batches, buffer, j)
                conic = wp.vec3(splat[2], splat[3], splat[4])
                form = form_of(first, splat[0], splat[1], conic)
                limit = 2.0 * splat[6]
                for q in range(_BLOCKS):
                    if (blocks & (1 << q)) != 0:
                        dy = offset_in_y(form, q)
                        square = form_at(form, q, dy)
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
        # Nothing may still be on its way into the memory of a warp that ends.
        batch_of.wait()
        for q in range(_BLOCKS):
            at = pixel_in_block(first, q)
            if at[0] < width and at[1] >= top_row and at[1] < end_row:
                transmittance[at[1] - top_row, at[0]] = light[q]
                last[at[1] - top_row, at[0]] = latest[q]
                for c in range(CHANNELS):
                    image[at[1] - top_row, at[0], c] = blended[q, c] + light[q] * background[c]

    return forward


def _loading_function(n_channels: int) -> wp.Function:
    """Loads what the way back begins with."""
    CHANNELS = wp.constant(n_channels)
    Colors = wp.types.matrix(shape=(BLOCKS, n_channels), dtype=wp.float32)

    @wp.func
    def load_pixels(
        first: wp.vec2i, width: int, top_row: int, end_row: int,
        background: wp.array(dtype=float),
        transmittance: wp.array2d(dtype=float), last: wp.array2d(dtype=int),
        d_image: wp.array3d(dtype=float), d_transmittance: wp.array2d(dtype=float),
    ):  # fmt: skip
        light = Floats(1.0)
        behind = Floats(0.0)
        latest = Places(-1)
        d_pixel = Colors()
        for q in range(_BLOCKS):
            at = pixel_in_block(first, q)
            if at[0] < width and at[1] >= top_row and at[1] < end_row:
                light[q] = transmittance[at[1] - top_row, at[0]]
                latest[q] = last[at[1] - top_row, at[0]]
                d_end = d_transmittance[at[1] - top_row, at[0]]
                for c in range(CHANNELS):
                    d_pixel[q, c] = d_image[at[1] - top_row, at[0], c]
                    d_end += d_pixel[q, c] * background[c]
                behind[q] = light[q] * d_end
        return light, behind, latest, d_pixel

    return load_pixels


def _backward_kernel(n_channels: int) -> Any:
    CHANNELS = wp.constant(n_channels)
    load_pixels = _loading_function(n_channels)
    SumsRow, Sums, store_row = store_row_function(n_channels)
    Row = wp.types.vector(length=SPLAT_HEADER + n_channels, dtype=wp.float32)
    batch_of = batch_functions(n_channels)

    @wp.kernel(module="unique", **_options(n_channels, _BACKWARD_REGISTERS))
    def backward(
        first_tile: int, width: int, top_row: int, end_row: int, tiles_x: int,
        offsets: wp.array(dtype=int), ids: wp.array(dtype=int),
        splats: wp.array(dtype=Row), background: wp.array(dtype=float),
        transmittance: wp.array2d(dtype=float), last: wp.array2d(dtype=int),
        d_image: wp.array3d(dtype=float), d_transmittance: wp.array2d(dtype=float),
        pair_sums: wp.array(dtype=SumsRow),
    ):  # fmt: skip
        warp, lane = wp.tid()
        tile = first_tile + warp
        corner = tile_corner(tile, tiles_x)
        first = first_pixel(corner, lane)
        light, behind, latest, d_pixel = load_pixels(
            first, width, top_row, end_row, background, transmittance, last, d_image,
            d_transmittance,
        )  # fmt: skip
        kept = last_of_blocks(latest, lane)
        begin = offsets[tile]
        end = wp.max(max_over_lanes(kept, lane) + 1, begin)
        first_place = offsets[first_tile]
        sums = Sums()
        # What lies behind the last splat that any pixel blended has no gradient.
        for k in range(end, offsets[tile + 1]):
            store_row(pair_sums, k - first_place, sums, 0, lane)
        batches = batch_of.open()
        next_id = int(0)
        if begin < end:
            batch_of.copy(batches, 0, lane, ids[wp.max(end - 1 - lane, begin)], splats)
            next_id = ids[wp.max(end - 1 - _LANES - lane, begin)]
        for batch in range((end - begin + _LANES - 1) / _LANES):
            start = end - 1 - batch * _LANES
            buffer = batch % 2
            batch_of.wait()
            if start - _LANES >= begin:
                batch_of.copy(batches, 1 - buffer, lane, next_id, splats)
                next_id = ids[wp.max(start - 2 * _LANES - lane, begin)]
            own = batch_of.read(batches, buffer, lane)
            own_blocks = touched_blocks(corner, own[0], own[1], own[7], own[8])
            own_blocks = own_blocks & blocks_that_reach(kept, start - lane, lane)
            for j in range(wp.min(_LANES, start - begin + 1)):
                k = start - j
                blocks = read_lane(own_blocks, lane, j)
                touched = Bits()
                if blocks != 0:
                    splat = batch_of.read(batches, buffer, j)
                    conic = wp.vec3(splat[2], splat[3], splat[4])
                    form = form_of(first, splat[0], splat[1], conic)
                    limit = 2.0 * splat[6]
                    for q in range(_BLOCKS):
                        if (blocks & (1 << q)) != 0:
                            dy = offset_in_y(form, q)
                            square = form_at(form, q, dy)
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
                                        d_c = d_pixel[q, c]
                                        shade[0] += d_c * splat[HEADER + c]
                                        sums[
                                            (_CHANNEL_0 + c) / _GROUP, (_CHANNEL_0 + c) % _GROUP
                                        ] += weight * d_c
                                    # The cap passes the gradient straight through, as in 3DGS.
                                    d_alpha = before * shade[0] - behind[q] * inverse
                                    behind[q] += weight * shade[0]
                                    light[q] = before
                                    d_sigma = uncapped * d_alpha
                                    gx = d_sigma * form.dx[q % _ACROSS]
                                    gy = d_sigma * dy
                                    sums[0, 0] += gx
                                    sums[0, 1] += gy
                                    sums[0, 2] += gx * form.dx[q % _ACROSS]
                                    sums[0, 3] += gx * dy
                                    sums[0, 4] += gy * dy
                                    sums[0, 5] += falloff * d_alpha
                    sums[0] = shape_gradients(sums[0], conic)
                any_touched = lanes_where(touched[0], lane)
                store_row(pair_sums, k - first_place, sums, any_touched, lane)
                # A zero that the compiler does not know: it would write the known one again at
                # every way out of the first block.
                sums = Sums(0.0 * light[0])
        batch_of.wait()

    return backward
