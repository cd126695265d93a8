# SPDX-License-Identifier: Apache-2.0
"""Tile kernels for GPUs; on the CPU they run as fibers, for tests.

A warp blends a tile, each lane eight pixels, one of each block of 8 x 4. Blocks are numbered row by
row, and so are lanes within a block. Splats come in batches of 32, of which a lane tests one: which
blocks of pixels its box touches, eight bits that all lanes know. In the backward pass a lane first
adds up its own eight pixels; the warp then adds up the columns of 32 lanes in 16 exchanges and
stores the sums at once, in the row of ``gradient_sums`` that the intersection owns. Nothing is
added atomically. The numerics are those of ``native/``, but for the rounding of exponentials and
reciprocals.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportAssignmentType=false

import functools
from typing import Any

import warp as wp
from torch import Tensor

from gaussian_splatting.rasterization.blend_batches_cuda import batch_functions
from gaussian_splatting.rasterization.blend_inputs import BackwardInputs, ForwardInputs, SumInputs
from gaussian_splatting.rasterization.gradient_sums_cuda import (
    SPLAT_COLUMNS,
    launch_sums,
    store_row_function,
    sum_kernel,
)
from gaussian_splatting.rasterization.projection_kernels import (
    ALPHA_MAX,
    ALPHA_MIN,
    HEADER,
    SPLAT_HEADER,
    TILE,
    TRANSMITTANCE_MIN,
)
from sugar_utils.warp_arrays import Floats2d, Floats3d, Ints, Ints2d
from sugar_utils.warp_launch import TypedTensor, as_array, known_options, launch_blocks
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

wp.set_module_options({"enable_backward": False})

_WIDTH = 8  # pixels of a block
_HEIGHT = WARP_LANES // _WIDTH
BLOCKS_ACROSS = TILE // _WIDTH
BLOCKS = BLOCKS_ACROSS * (TILE // _HEIGHT)
_SIDE = wp.constant(TILE)
_BLOCKS = wp.constant(BLOCKS)
_ACROSS = wp.constant(BLOCKS_ACROSS)
_DOWN = wp.constant(TILE // _HEIGHT)
_PIXELS_ACROSS = wp.constant(_WIDTH)
_PIXELS_DOWN = wp.constant(_HEIGHT)
_TO_LAST_COLUMN = wp.constant(float(_WIDTH - 1))
_TO_LAST_ROW = wp.constant(float(_HEIGHT - 1))
Offsets = wp.types.vector(length=BLOCKS_ACROSS, dtype=wp.float32)
"""One number for each block of a row."""

Places = wp.types.vector(length=BLOCKS, dtype=wp.int32)

_LANES = wp.constant(WARP_LANES)
_GROUP = wp.constant(SUM_COLUMNS)
_CHANNEL_0 = wp.constant(SPLAT_COLUMNS)
_CAP = wp.constant(ALPHA_MAX)
_FAINTEST = wp.constant(ALPHA_MIN)
_OPAQUE = wp.constant(TRANSMITTANCE_MIN)
_FORWARD_REGISTERS = ((3, 80), (4, 96), (8, 128), (12, 168))
"""Up to so many channels, so many registers of a thread: for 24, 20, 16 and 12 warps on a
multiprocessor. With fewer, the loop over splats would keep much in memory."""
_BACKWARD_REGISTERS = ((4, 96), (8, 128), (10, 168))
# What changes inside a condition is an element of a vector, which is changed in place. A scalar
# would be a new variable merged with the old one, and keep both in registers around the loop.
Floats = wp.types.vector(length=BLOCKS, dtype=wp.float32)
Bits = wp.types.vector(length=1, dtype=wp.int32)
Shade = wp.types.vector(length=1, dtype=wp.float32)


@wp.func
def tile_corner(tile: int, tiles_x: int) -> wp.vec2i:
    """Return the column and row of a tile's first pixel."""
    return wp.vec2i((tile % tiles_x) * _SIDE, (tile / tiles_x) * _SIDE)


@wp.func
def first_pixel(corner: wp.vec2i, lane: int) -> wp.vec2i:
    """A lane's pixel in the first block of a tile."""
    return corner + wp.vec2i(lane % _PIXELS_ACROSS, lane / _PIXELS_ACROSS)


@wp.func
def pixel_in_block(first: wp.vec2i, block: int) -> wp.vec2i:
    """A lane's pixel in any block, from that in the first."""
    return first + wp.vec2i((block % _ACROSS) * _PIXELS_ACROSS, (block / _ACROSS) * _PIXELS_DOWN)


@wp.struct
class Form:
    """The quadratic form d^T conic d of a splat, evaluated for the two columns of a lane."""

    dx: Offsets  # from the centre to the columns
    xx: Offsets  # conic xx times dx^2
    xy: Offsets  # 2 conic xy times dx
    yy: float  # conic yy
    first_y: float  # row of the lane's first pixel
    y: float  # row of the centre


@wp.func
def form_of(first: wp.vec2i, x: float, y: float, conic: wp.vec3) -> Form:
    """Return the form of a splat with its centre at (x, y) for a lane's first pixel."""
    form = Form()
    for i in range(_ACROSS):
        form.dx[i] = (float(first[0]) + float(i * _PIXELS_ACROSS)) - x
    form.xx = conic[0] * wp.cw_mul(form.dx, form.dx)
    form.xy = (2.0 * conic[1]) * form.dx
    form.yy = conic[2]
    form.first_y = float(first[1])
    form.y = y
    return form


@wp.func
def offset_in_y(form: Form, block: int) -> float:
    """Return the y offset from a splat's centre to a lane's pixel in a block."""
    return (form.first_y + float((block / _ACROSS) * _PIXELS_DOWN)) - form.y


@wp.func
def form_at(form: Form, block: int, dy: float) -> float:
    """Return the form's value at a lane's pixel in a block: twice the exponent."""
    return form.xx[block % _ACROSS] + dy * (form.xy[block % _ACROSS] + form.yy * dy)


@wp.func
def touched_blocks(corner: wp.vec2i, x: float, y: float, extent_x: float, extent_y: float) -> int:
    """Return the blocks that hold a pixel inside of a splat's box, one bit each."""
    across = int(0)
    for i in range(_ACROSS):
        first_column = float(corner[0] + i * _PIXELS_ACROSS)
        if wp.max(first_column - x, x - (first_column + _TO_LAST_COLUMN)) <= extent_x:
            across = across | (1 << i)
    blocks = int(0)
    for i in range(_DOWN):
        first_row = float(corner[1] + i * _PIXELS_DOWN)
        if wp.max(first_row - y, y - (first_row + _TO_LAST_ROW)) <= extent_y:
            blocks = blocks | (across << (i * _ACROSS))
    return blocks


@wp.func
def last_of_blocks(latest: Places, lane: int) -> int:
    """Return the largest place of any lane in the block whose number is this lane's."""
    last_place = int(-1)
    for block in range(_BLOCKS):
        largest = max_over_lanes(latest[block], lane)
        if lane == block:
            last_place = largest
    return last_place


@wp.func
def blocks_that_reach(last_place: int, place: int, lane: int) -> int:
    """Return the blocks whose last place, from :func:`last_of_blocks`, is not before ``place``."""
    blocks = int(0)
    for block in range(_BLOCKS):
        if place <= read_lane(last_place, lane, block):
            blocks = blocks | (1 << block)
    return blocks


class BlockKernels:
    """Kernels of GPUs for splats of some number of channels; see :class:`BlendKernels`."""

    def __init__(self, n_channels: int) -> None:
        self.forward = _forward_kernel(n_channels)
        self.backward = _backward_kernel(n_channels)
        self.sum_gradient_rows = sum_kernel(n_channels)

    def launch_forward(self, n_tiles: int, inputs: ForwardInputs) -> None:
        """Blend the pixels of some tiles."""
        inputs = inputs._replace(splats=_rows_of(inputs.splats))
        _launch_on_tiles(self.forward, n_tiles, inputs)

    def launch_backward(self, n_tiles: int, inputs: BackwardInputs) -> None:
        """Fill the gradient rows of all intersections in some tiles."""
        inputs = inputs._replace(
            splats=_rows_of(inputs.splats), gradient_sums=_rows_of(inputs.gradient_sums)
        )
        _launch_on_tiles(self.backward, n_tiles, inputs)

    def launch_sums(self, n_splats: int, inputs: SumInputs) -> None:
        """Add the rows of each splat's intersections to its gradients."""
        launch_sums(self.sum_gradient_rows, n_splats, inputs)


block_kernels = functools.cache(BlockKernels)


def _launch_on_tiles(
    kernel: wp.Kernel, n_tiles: int, inputs: ForwardInputs | BackwardInputs
) -> None:
    launch_blocks(
        kernel,
        n_tiles,
        inputs,
        device=inputs.offsets.device,
        block_dim=WARP_LANES,
        together=kernel.module.options["block_dim"] // WARP_LANES,
    )


def _rows_of(table: Tensor) -> TypedTensor:
    """A table of floats as one vector per row."""
    return as_array(table, wp.types.vector(length=table.shape[1], dtype=wp.float32))


def _kernel_options(
    n_channels: int, register_limits: tuple[tuple[int, int], ...]
) -> dict[str, Any]:
    """Options of a kernel; the limits are pairs of a number of channels and of registers."""
    n_registers = 255
    for max_channels, limit in register_limits:
        if n_channels <= max_channels:
            n_registers = limit
            break
    # Tiles in one block of a GPU: two where registers allow more than 16 warps.
    tiles_together = 2 if n_channels <= 4 else 1
    return {
        "module_options": {"enable_backward": False, "block_dim": tiles_together * WARP_LANES},
        **known_options(grid_stride=False, cuda_max_registers=n_registers),
    }


@wp.func
def shape_gradients(sums: Columns, conic: wp.vec3) -> Columns:
    """Turn sums of dL/dsigma times offsets into gradients of centre and conic, five columns."""
    result = sums
    result[0] = conic[0] * sums[0] + conic[1] * sums[1]
    result[1] = conic[1] * sums[0] + conic[2] * sums[1]
    result[2] = -0.5 * sums[2]
    result[3] = -sums[3]
    result[4] = -0.5 * sums[4]
    return result


def _forward_kernel(n_channels: int) -> wp.Kernel:
    """Kernel that blends tiles, one warp each; arguments are :class:`ForwardInputs`."""
    CHANNELS = wp.constant(n_channels)
    Colors = wp.types.matrix(shape=(BLOCKS, n_channels), dtype=wp.float32)
    Row = wp.types.vector(length=SPLAT_HEADER + n_channels, dtype=wp.float32)
    batch_of = batch_functions(n_channels)

    @wp.kernel(module="unique", **_kernel_options(n_channels, _FORWARD_REGISTERS))
    def forward(
        first_tile: int,
        width: int,
        top_row: int,
        end_row: int,
        tiles_x: int,
        front_transmittance: float,
        offsets: Ints,
        ids: Ints,
        splats: wp.array(dtype=Row),
        background: wp.array(dtype=float),
        image: Floats3d,
        transmittance: Floats2d,
        last: Ints2d,
    ):
        warp, lane = wp.tid()
        tile = first_tile + warp
        corner = tile_corner(tile, tiles_x)
        first = first_pixel(corner, lane)
        transmitted = Floats(1.0)
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
            own_splat = batch_of.read(batches, buffer, lane)
            own_blocks = int(0)
            if start + lane < end:
                own_blocks = touched_blocks(
                    corner, own_splat[0], own_splat[1], own_splat[7], own_splat[8]
                )
                own_blocks = own_blocks & open_blocks
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
                                after = transmitted[q] * (1.0 - alpha)
                                if after < _OPAQUE:
                                    alive[0] = alive[0] & ~(1 << q)
                                else:
                                    weight = alpha * transmitted[q]
                                    for c in range(CHANNELS):
                                        blended[q, c] += weight * splat[HEADER + c]
                                    transmitted[q] = after
                                    latest[q] = start + j
                                    if after < front_transmittance:
                                        alive[0] = alive[0] & ~(1 << q)
        # Nothing may still be on its way into the memory of a warp that ends.
        batch_of.wait()
        for q in range(_BLOCKS):
            at = pixel_in_block(first, q)
            if at[0] < width and at[1] >= top_row and at[1] < end_row:
                transmittance[at[1] - top_row, at[0]] = transmitted[q]
                last[at[1] - top_row, at[0]] = latest[q]
                for c in range(CHANNELS):
                    image[at[1] - top_row, at[0], c] = (
                        blended[q, c] + transmitted[q] * background[c]
                    )

    return forward


def _loading_function(n_channels: int) -> wp.Function:
    """Function that loads the state and gradients of a lane's pixels for the backward pass."""
    CHANNELS = wp.constant(n_channels)
    Colors = wp.types.matrix(shape=(BLOCKS, n_channels), dtype=wp.float32)

    @wp.func
    def load_pixels(
        first: wp.vec2i,
        width: int,
        top_row: int,
        end_row: int,
        background: wp.array(dtype=float),
        transmittance: Floats2d,
        last: Ints2d,
        d_image: Floats3d,
        d_transmittance: Floats2d,
    ):
        transmitted = Floats(1.0)
        behind = Floats(0.0)
        latest = Places(-1)
        d_pixel = Colors()
        for q in range(_BLOCKS):
            at = pixel_in_block(first, q)
            if at[0] < width and at[1] >= top_row and at[1] < end_row:
                transmitted[q] = transmittance[at[1] - top_row, at[0]]
                latest[q] = last[at[1] - top_row, at[0]]
                d_end = d_transmittance[at[1] - top_row, at[0]]
                for c in range(CHANNELS):
                    d_pixel[q, c] = d_image[at[1] - top_row, at[0], c]
                    d_end += d_pixel[q, c] * background[c]
                behind[q] = transmitted[q] * d_end
        return transmitted, behind, latest, d_pixel

    return load_pixels


def _backward_kernel(n_channels: int) -> wp.Kernel:
    """Kernel that fills gradient rows, one warp a tile; arguments are :class:`BackwardInputs`."""
    CHANNELS = wp.constant(n_channels)
    load_pixels = _loading_function(n_channels)
    row_functions = store_row_function(n_channels)
    SumsRow = row_functions.Row
    Sums = row_functions.Part
    store_row = row_functions.store
    Row = wp.types.vector(length=SPLAT_HEADER + n_channels, dtype=wp.float32)
    batch_of = batch_functions(n_channels)

    @wp.kernel(module="unique", **_kernel_options(n_channels, _BACKWARD_REGISTERS))
    def backward(
        first_tile: int,
        width: int,
        top_row: int,
        end_row: int,
        tiles_x: int,
        offsets: Ints,
        ids: Ints,
        splats: wp.array(dtype=Row),
        background: wp.array(dtype=float),
        transmittance: Floats2d,
        last: Ints2d,
        d_image: Floats3d,
        d_transmittance: Floats2d,
        gradient_sums: wp.array(dtype=SumsRow),
    ):
        warp, lane = wp.tid()
        tile = first_tile + warp
        corner = tile_corner(tile, tiles_x)
        first = first_pixel(corner, lane)
        transmitted, behind, latest, d_pixel = load_pixels(
            first,
            width,
            top_row,
            end_row,
            background,
            transmittance,
            last,
            d_image,
            d_transmittance,
        )
        last_place = last_of_blocks(latest, lane)
        begin = offsets[tile]
        end = wp.max(max_over_lanes(last_place, lane) + 1, begin)
        first_place = offsets[first_tile]
        sums = Sums()
        # What lies behind the last splat that any pixel blended has no gradient.
        for k in range(end, offsets[tile + 1]):
            store_row(gradient_sums, k - first_place, sums, 0, lane)
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
            own_splat = batch_of.read(batches, buffer, lane)
            own_blocks = touched_blocks(
                corner, own_splat[0], own_splat[1], own_splat[7], own_splat[8]
            )
            own_blocks = own_blocks & blocks_that_reach(last_place, start - lane, lane)
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
                                    before = transmitted[q] * inverse
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
                                    transmitted[q] = before
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
                store_row(gradient_sums, k - first_place, sums, any_touched, lane)
                # A zero that the compiler does not know: it would write the known one again at
                # every way out of the first block.
                sums = Sums(0.0 * transmitted[0])
        batch_of.wait()

    return backward
