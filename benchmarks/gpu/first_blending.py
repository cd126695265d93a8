# SPDX-License-Identifier: Apache-2.0
"""The first tile kernels for GPUs, kept to be timed beside those that took their place.

Neither had been run on a GPU when the others were written, so the first run compares the two; once
that is done, this file can go. They are in Warp's tile language, and fibers on the CPU.

One warp of 32 threads blends a tile, each thread eight pixels of one column. The splats of a tile
come in batches of 32, gathered into shared memory by the whole warp. On the way back a thread first
adds up its own eight pixels; the warp then adds up 32 numbers per column with shuffles and stores
them once, in the row of ``pair_sums`` that the pair owns. With one warp per block nothing waits at
a barrier, and a pair costs an eighth of the shuffles that one pixel per thread would. Nothing is
added atomically. The numerics are those of the bodies in ``native/``.
"""

import functools
from typing import Any

import torch
import warp as wp

from gaussian_splatting.rasterization.blend_cuda import BlockKernels, as_rows
from gaussian_splatting.rasterization.projection import MIN_ITEMS
from gaussian_splatting.rasterization.projection_kernels import HEADER, SPLAT_HEADER
from gaussian_splatting.rasterization.view import ALPHA_MAX, ALPHA_MIN, TILE, TRANSMITTANCE_MIN
from sugar_utils.warp_launch import launch

BLOCK_DIM = 32
"""Threads of a block: one warp."""

_COLUMNS = wp.constant(TILE)
_THREADS = wp.constant(BLOCK_DIM)
_ROW_STEP = wp.constant(BLOCK_DIM // TILE)
_PIXELS_EACH = TILE * TILE // BLOCK_DIM
_PIXELS = wp.constant(_PIXELS_EACH)
_CAP = wp.constant(ALPHA_MAX)
_FAINTEST = wp.constant(ALPHA_MIN)
_OPAQUE = wp.constant(TRANSMITTANCE_MIN)
_OPTIONS = {"enable_backward": False, "block_dim": BLOCK_DIM}

wp.set_module_options(_OPTIONS)

# What changes inside a condition is an element of a vector, which is changed in place. A scalar
# would be a new variable merged with the old one, and keep both in registers around the loop.
Floats = wp.types.vector(length=_PIXELS_EACH, dtype=wp.float32)
Ints = wp.types.vector(length=_PIXELS_EACH, dtype=wp.int32)
Bits = wp.types.vector(length=1, dtype=wp.int32)
Shade = wp.types.vector(length=1, dtype=wp.float32)
vec5 = wp.types.vector(length=5, dtype=wp.float32)


# A vote without a reduction through memory. Fibers have no warp: there, nothing is left out.
@wp.func_native("""
#if defined(__CUDA_ARCH__)
return __any_sync(0xffffffffu, yes != 0);
#else
return 1;
#endif
""")
def anyone(yes: int) -> int: ...


@wp.func
def half_square(scale: float, d: float) -> float:
    return 0.5 * scale * d * d


@wp.func
def shape_gradients(dx: float, moments: wp.vec3, conic: wp.vec3) -> vec5:
    """Gradients of centre and conic from sums of dL/dsigma times 1, dy, dy^2 over one column."""
    gx = moments[0] * dx
    gy = moments[1]
    return vec5(
        conic[0] * gx + conic[1] * gy,
        conic[1] * gx + conic[2] * gy,
        -0.5 * gx * dx,
        -gy * dx,
        -0.5 * moments[2],
    )


class FirstBlockKernels(BlockKernels):
    """The same arguments as those in use, but one thread for the sum of each splat."""

    def __init__(self, n_channels: int) -> None:
        self.forward = _forward_kernel(n_channels)
        self.backward = _backward_kernel(n_channels)
        self.sum_pairs = _sum_kernel(n_channels)

    def launch_sums(self, n_splats: int, inputs: list[Any], device: torch.device) -> None:
        """Add the rows of each splat's pairs to its gradients."""
        inputs = [*inputs[:6], as_rows(inputs[6]), *inputs[7:]]
        launch(self.sum_pairs, n_splats, inputs, device=device, min_items=MIN_ITEMS)


@functools.cache
def first_block_kernels(n_channels: int) -> FirstBlockKernels:
    """Kernels for splats of ``n_channels`` channels, made once."""
    return FirstBlockKernels(n_channels)


def _forward_kernel(n_channels: int) -> Any:
    CHANNELS = wp.constant(n_channels)
    Row = wp.types.vector(length=SPLAT_HEADER + n_channels, dtype=wp.float32)
    Colors = wp.types.matrix(shape=(_PIXELS_EACH, n_channels), dtype=wp.float32)

    @wp.kernel(module="unique", module_options=_OPTIONS)
    def forward(
        first_tile: int,
        width: int,
        top_row: int,
        end_row: int,
        tiles_x: int,
        offsets: wp.array(dtype=int),
        ids: wp.array(dtype=int),
        splats: wp.array(dtype=Row),
        background: wp.array(dtype=float),
        image: wp.array3d(dtype=float),
        transmittance: wp.array2d(dtype=float),
        last: wp.array2d(dtype=int),
    ):
        block, lane = wp.tid()
        tile = first_tile + block
        x = (tile % tiles_x) * _COLUMNS + lane % _COLUMNS
        top = (tile / tiles_x) * _COLUMNS + lane / _COLUMNS
        light = Floats(1.0)
        latest = Ints(-1)
        alive = Bits()
        blended = Colors()
        for q in range(_PIXELS):
            y = top + q * _ROW_STEP
            # Pixels that are not blended count as opaque, so that they do not keep a tile going.
            if x < width and y >= top_row and y < end_row:
                alive[0] = alive[0] | (1 << q)
        begin = offsets[tile]
        end = offsets[tile + 1]
        for batch in range((end - begin + _THREADS - 1) / _THREADS):
            own_alive = alive[0]
            if wp.tile_extract(wp.tile_max(wp.tile(own_alive)), 0) == 0:
                break
            start = begin + batch * _THREADS
            own_row = ids[wp.min(start + lane, end - 1)]
            rows = wp.tile(own_row)
            batch_splats = wp.tile_load_indexed(
                splats, indices=rows, shape=(_THREADS,), axis=0, storage="shared"
            )
            for j in range(wp.min(_THREADS, end - start)):
                dx = float(x) - batch_splats[j, 0]
                if alive[0] != 0 and wp.abs(dx) <= batch_splats[j, 7]:
                    center_y = batch_splats[j, 1]
                    xx = half_square(batch_splats[j, 2], dx)
                    xy = batch_splats[j, 3] * dx
                    yy = batch_splats[j, 4]
                    opacity = batch_splats[j, 5]
                    limit = batch_splats[j, 6]
                    for q in range(_PIXELS):
                        dy = float(top + q * _ROW_STEP) - center_y
                        sigma = xx + xy * dy + half_square(yy, dy)
                        if (alive[0] & (1 << q)) != 0 and sigma >= 0.0 and sigma <= limit:
                            alpha = wp.min(opacity * wp.exp(-sigma), _CAP)
                            if alpha >= _FAINTEST:
                                after = light[q] * (1.0 - alpha)
                                if after < _OPAQUE:
                                    alive[0] = alive[0] & ~(1 << q)
                                else:
                                    weight = alpha * light[q]
                                    for c in range(CHANNELS):
                                        blended[q, c] += weight * batch_splats[j, HEADER + c]
                                    light[q] = after
                                    latest[q] = start + j
        for q in range(_PIXELS):
            y = top + q * _ROW_STEP
            if x < width and y >= top_row and y < end_row:
                transmittance[y - top_row, x] = light[q]
                last[y - top_row, x] = latest[q]
                for c in range(CHANNELS):
                    image[y - top_row, x, c] = blended[q, c] + light[q] * background[c]

    return forward


def _backward_kernel(n_channels: int) -> Any:
    CHANNELS = wp.constant(n_channels)
    Row = wp.types.vector(length=SPLAT_HEADER + n_channels, dtype=wp.float32)
    Colors = wp.types.matrix(shape=(_PIXELS_EACH, n_channels), dtype=wp.float32)
    Sums = wp.types.vector(length=6 + n_channels, dtype=wp.float32)

    @wp.kernel(module="unique", module_options=_OPTIONS)
    def backward(
        first_tile: int,
        width: int,
        top_row: int,
        end_row: int,
        tiles_x: int,
        offsets: wp.array(dtype=int),
        ids: wp.array(dtype=int),
        splats: wp.array(dtype=Row),
        background: wp.array(dtype=float),
        transmittance: wp.array2d(dtype=float),
        last: wp.array2d(dtype=int),
        d_image: wp.array3d(dtype=float),
        d_transmittance: wp.array2d(dtype=float),
        pair_sums: wp.array(dtype=Sums),
    ):
        block, lane = wp.tid()
        tile = first_tile + block
        x = (tile % tiles_x) * _COLUMNS + lane % _COLUMNS
        top = (tile / tiles_x) * _COLUMNS + lane / _COLUMNS
        light = Floats(1.0)
        behind = Floats(0.0)
        latest = Ints(-1)
        d_pixel = Colors()
        own_end = int(-1)
        for q in range(_PIXELS):
            y = top + q * _ROW_STEP
            if x < width and y >= top_row and y < end_row:
                light[q] = transmittance[y - top_row, x]
                latest[q] = last[y - top_row, x]
                own_end = wp.max(own_end, latest[q])
                d_end = d_transmittance[y - top_row, x]
                for c in range(CHANNELS):
                    d_pixel[q, c] = d_image[y - top_row, x, c]
                    d_end += d_pixel[q, c] * background[c]
                behind[q] = light[q] * d_end
        begin = offsets[tile]
        first_place = offsets[first_tile]
        end = wp.max(wp.tile_extract(wp.tile_max(wp.tile(own_end)), 0) + 1, begin)
        # What lies behind the last splat that any pixel blended has no gradient.
        for k in range(end + lane, offsets[tile + 1], _THREADS):
            pair_sums[k - first_place] = Sums()
        for batch in range((end - begin + _THREADS - 1) / _THREADS):
            start = end - 1 - batch * _THREADS
            own_row = ids[wp.max(start - lane, begin)]
            rows = wp.tile(own_row)
            batch_splats = wp.tile_load_indexed(
                splats, indices=rows, shape=(_THREADS,), axis=0, storage="shared"
            )
            for j in range(wp.min(_THREADS, start - begin + 1)):
                k = start - j
                sums = Sums()
                touched = Bits()
                dx = float(x) - batch_splats[j, 0]
                if k <= own_end and wp.abs(dx) <= batch_splats[j, 7]:
                    conic = wp.vec3(batch_splats[j, 2], batch_splats[j, 3], batch_splats[j, 4])
                    xx = half_square(conic[0], dx)
                    moments = wp.vec3()
                    for q in range(_PIXELS):
                        dy = float(top + q * _ROW_STEP) - batch_splats[j, 1]
                        sigma = xx + conic[1] * dx * dy + half_square(conic[2], dy)
                        if k <= latest[q] and sigma >= 0.0 and sigma <= batch_splats[j, 6]:
                            falloff = wp.exp(-sigma)
                            uncapped = batch_splats[j, 5] * falloff
                            alpha = wp.min(uncapped, _CAP)
                            if alpha >= _FAINTEST:
                                touched[0] = 1
                                inverse = 1.0 / (1.0 - alpha)
                                before = light[q] * inverse
                                weight = alpha * before
                                shade = Shade()
                                for c in range(CHANNELS):
                                    shade[0] += d_pixel[q, c] * batch_splats[j, HEADER + c]
                                    sums[6 + c] += weight * d_pixel[q, c]
                                # The cap passes the gradient straight through, as in 3DGS.
                                d_alpha = before * shade[0] - behind[q] * inverse
                                behind[q] += weight * shade[0]
                                light[q] = before
                                d_sigma = uncapped * d_alpha
                                moments[0] += d_sigma
                                moments[1] += d_sigma * dy
                                moments[2] += d_sigma * dy * dy
                                sums[5] += falloff * d_alpha
                    shape = shape_gradients(dx, moments, conic)
                    for c in range(5):
                        sums[c] = shape[c]
                if anyone(touched[0]) == 1:
                    total = wp.tile_sum(wp.tile(sums, preserve_type=True))
                    wp.tile_store(pair_sums, total, offset=(k - first_place,))
                elif lane == 0:
                    pair_sums[k - first_place] = sums

    return backward


def _sum_kernel(n_channels: int) -> Any:
    CHANNELS = wp.constant(n_channels)
    Sums = wp.types.vector(length=6 + n_channels, dtype=wp.float32)

    @wp.kernel(module="unique", module_options={"enable_backward": False})
    def sum_pairs(
        first: int,
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
        i = first + wp.tid()
        begin = offsets[first_tile]
        end = offsets[end_tile]
        total = Sums()
        for pair in range(first_pairs[i], first_pairs[i] + counts[i]):
            place = places[pair]
            if place >= begin and place < end:
                total += pair_sums[place - begin]
        if counts[i] > 0:
            for c in range(2):
                d_means2d[i, c] += total[c]
            for c in range(2, 6):
                d_splats[i, c] += total[c]
            for c in range(CHANNELS):
                d_splats[i, HEADER + c] += total[6 + c]

    return sum_pairs
