# SPDX-License-Identifier: Apache-2.0
"""How a warp shares a tile: blocks of 8 x 4 pixels, and splats in batches of 32.

Blocks are numbered row by row, and so are lanes within a block. A set of blocks is eight bits.

A warp holds two batches in shared memory. Neighbouring lanes copy neighbouring parts of a row, 16
bytes each where rows are whole multiples of that, straight into shared memory (``cp.async``, from
compute capability 8.0 on): no lane waits for it and no register is taken. Rows begin at multiples
of 16 bytes there, so that a lane reads four floats at once.
"""

import functools
from types import SimpleNamespace

import warp as wp

from gaussian_splatting.rasterization.projection_kernels import SPLAT_HEADER
from gaussian_splatting.rasterization.view import TILE
from sugar_utils.warp_math import WARP_LANES, max_over_lanes, read_lane

_WIDTH = 8
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


@wp.func
def tile_corner(tile: int, tiles_x: int) -> wp.vec2i:
    """First pixel of a tile."""
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
    """The quadratic form d^T conic d of a splat, as far as it is known for a lane's two columns."""

    dx: Offsets
    xx: Offsets
    xy: Offsets
    yy: float
    first_y: float
    y: float


@wp.func
def form_of(first: wp.vec2i, x: float, y: float, conic: wp.vec3) -> Form:
    """The form of a splat, from its centre and conic."""
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
    """From a splat's centre to a lane's pixel in a block."""
    return (form.first_y + float((block / _ACROSS) * _PIXELS_DOWN)) - form.y


@wp.func
def form_at(form: Form, block: int, dy: float) -> float:
    """The value of the form at a lane's pixel in a block, twice the exponent."""
    return form.xx[block % _ACROSS] + dy * (form.xy[block % _ACROSS] + form.yy * dy)


@wp.func
def touched_blocks(corner: wp.vec2i, x: float, y: float, reach_x: float, reach_y: float) -> int:
    """Blocks that hold a pixel inside a splat's box."""
    across = int(0)
    for i in range(_ACROSS):
        near = float(corner[0] + i * _PIXELS_ACROSS)
        if wp.max(near - x, x - (near + _TO_LAST_COLUMN)) <= reach_x:
            across = across | (1 << i)
    blocks = int(0)
    for i in range(_DOWN):
        near = float(corner[1] + i * _PIXELS_DOWN)
        if wp.max(near - y, y - (near + _TO_LAST_ROW)) <= reach_y:
            blocks = blocks | (across << (i * _ACROSS))
    return blocks


@wp.func
def last_of_blocks(latest: Places, lane: int) -> int:
    """The largest place of any lane in each block, kept by the lane of the block's number."""
    kept = int(-1)
    for block in range(_BLOCKS):
        largest = max_over_lanes(latest[block], lane)
        if lane == block:
            kept = largest
    return kept


@wp.func
def blocks_that_reach(kept: int, place: int, lane: int) -> int:
    """Blocks whose last place, from :func:`last_of_blocks`, is not before ``place``."""
    blocks = int(0)
    for block in range(_BLOCKS):
        if place <= read_lane(kept, lane, block):
            blocks = blocks | (1 << block)
    return blocks


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


@functools.cache
def batch_functions(n_channels: int) -> SimpleNamespace:
    """Warp functions for splats of ``n_channels`` channels, for kernels with warps as blocks."""
    floats = SPLAT_HEADER + n_channels
    pitch = -(-floats // 4) * 4
    Row = wp.types.vector(length=floats, dtype=wp.float32)
    Padded = wp.types.vector(length=pitch, dtype=wp.float32)
    pieces = floats // 4 if pitch == floats else floats
    # Lanes that copy one row: as many as it has pieces, rounded up to a power of two.
    team = 8 if pieces > 16 else 1 << (pieces - 1).bit_length()
    constants = {
        "WARP_LANES": str(WARP_LANES),
        "BATCH_PITCH": str(4 * pitch),
        "BATCH_ROW": str(4 * floats),
        "BATCH_PIECES": str(pieces),
        "BATCH_TEAM": str(team),
        "BATCH_PIECE": "float4" if pitch == floats else "float",
    }

    def of_width(snippet: str) -> str:
        for name in sorted(constants, key=len, reverse=True):
            snippet = snippet.replace(name, constants[name])
        return snippet

    @wp.func_native(of_width(_OPEN))
    def open_batches() -> wp.uint64: ...

    @wp.func_native(of_width(_COPY))
    def copy_batch(
        batches: wp.uint64, buffer: int, lane: int, own_id: int, splats: wp.array(dtype=Row)
    ): ...

    @wp.func_native(of_width(_WAIT))
    def wait_for_batch(): ...

    @wp.func_native(of_width(_READ))
    def read_splat(batches: wp.uint64, buffer: int, row: int) -> Padded: ...

    return SimpleNamespace(open=open_batches, copy=copy_batch, wait=wait_for_batch, read=read_splat)
