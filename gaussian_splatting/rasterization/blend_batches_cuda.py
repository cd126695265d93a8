# SPDX-License-Identifier: Apache-2.0
"""Batches of splats in the shared memory of a warp, for the kernels in ``blend_cuda``.

A warp holds two batches in shared memory. Neighbouring lanes copy neighbouring parts of a row, 16
bytes each where rows are whole multiples of that, straight into shared memory (``cp.async``, from
compute capability 8.0 on). Rows begin at multiples of 16 bytes, so that a lane reads four floats.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportReturnType=false, reportArgumentType=false

import functools
from typing import NamedTuple

import warp as wp

from gaussian_splatting.rasterization.projection_kernels import SPLAT_HEADER
from sugar_utils.warp_math import WARP_LANES

_COPY = """
#if defined(__CUDA_ARCH__)
typedef BATCH_PIECE Piece;
char* target = (char*)batches + (size_t)buffer * WARP_LANES * BATCH_PITCH;
const char* source = (const char*)splats.data;
#pragma unroll
for (int step = 0; step < BATCH_TEAM; step++) {
    const int row = lane / BATCH_TEAM + step * (WARP_LANES / BATCH_TEAM);
    const size_t id = (size_t)__shfl_sync(0xffffffffu, own_id, row);
    const Piece* from = (const Piece*)(source + id * BATCH_ROW);
    Piece* to = (Piece*)(target + row * BATCH_PITCH);
    #pragma unroll
    for (int first = 0; first < BATCH_PIECES; first += BATCH_TEAM) {
        const int k = first + lane % BATCH_TEAM;
        if (k >= BATCH_PIECES) continue;
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
            :: "r"((unsigned)__cvta_generic_to_shared(to + k)), "l"(from + k), "n"(sizeof(Piece))
            : "memory");
#else
        to[k] = from[k];
#endif
    }
}
#else
float* to = (float*)batches + (buffer * WARP_LANES + lane) * (BATCH_PITCH / 4);
for (int c = 0; c < BATCH_ROW / 4; c++) to[c] = splats.data[own_id][c];
#endif
"""
_WAIT = """
#if defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ >= 800
asm volatile("cp.async.wait_all;" ::: "memory");
#endif
__syncwarp();
#else
WP_TILE_SYNC();
#endif
"""
_OPEN = """
#if defined(__CUDA_ARCH__)
__shared__ float4 rows[2 * WP_TILE_BLOCK_DIM * (BATCH_PITCH / 16)];
return (wp::uint64)(rows + 2 * (threadIdx.x / WARP_LANES) * WARP_LANES * (BATCH_PITCH / 16));
#else
static float4 rows[2 * WARP_LANES * (BATCH_PITCH / 16)];
return (wp::uint64)rows;
#endif
"""
_READ = """
const float4* from = (const float4*)batches + (buffer * WARP_LANES + row) * (BATCH_PITCH / 16);
wp::vec_t<BATCH_PITCH / 4, float> values;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
for (int i = 0; i < BATCH_PITCH / 16; i++) {
    const float4 four = from[i];
    values[4 * i] = four.x;
    values[4 * i + 1] = four.y;
    values[4 * i + 2] = four.z;
    values[4 * i + 3] = four.w;
}
return values;
"""


class BatchFunctions(NamedTuple):
    """Warp functions of a warp's two batches in shared memory; ``batches`` is their address."""

    open: wp.Function  # () -> batches
    copy: wp.Function  # (batches, buffer, lane, own_id, splats): begins to copy 32 splats
    wait: wp.Function  # (): waits for all copies
    read: wp.Function  # (batches, buffer, row) -> one splat


@functools.cache
def batch_functions(n_channels: int) -> BatchFunctions:
    """Return the functions for splats of some channels, for kernels with warps as blocks."""
    floats = SPLAT_HEADER + n_channels
    pitch = -(-floats // 4) * 4
    Row = wp.types.vector(length=floats, dtype=wp.float32)
    Padded = wp.types.vector(length=pitch, dtype=wp.float32)
    pieces = floats // 4 if pitch == floats else floats
    # Lanes that copy one row: as many as it has pieces, rounded up to a power of two.
    team = 8 if pieces > 16 else 1 << (pieces - 1).bit_length()
    constants = {
        "WARP_LANES": WARP_LANES,
        "BATCH_PITCH": 4 * pitch,
        "BATCH_ROW": 4 * floats,
        "BATCH_PIECES": pieces,
        "BATCH_TEAM": team,
        "BATCH_PIECE": "float4" if pitch == floats else "float",
    }

    def of_width(snippet: str) -> str:
        # Names that begin with another one come before it.
        for name in sorted(constants, key=len, reverse=True):
            snippet = snippet.replace(name, str(constants[name]))
        return snippet

    @wp.func_native(of_width(_OPEN))
    def open_batches() -> wp.uint64: ...

    @wp.func_native(of_width(_COPY))
    def copy_batch(
        batches: wp.uint64,
        buffer: int,
        lane: int,
        own_id: int,
        splats: wp.array(dtype=Row),
    ): ...

    @wp.func_native(of_width(_WAIT))
    def wait_for_batch(): ...

    @wp.func_native(of_width(_READ))
    def read_splat(batches: wp.uint64, buffer: int, row: int) -> Padded: ...

    return BatchFunctions(open_batches, copy_batch, wait_for_batch, read_splat)
