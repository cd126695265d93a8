# SPDX-License-Identifier: Apache-2.0
"""How a warp shares a tile: eight blocks of 8 x 4 pixels, each lane one pixel of every block.

Blocks are numbered row by row, and so are lanes within a block. A set of blocks is eight bits.
"""

import warp as wp

from gaussian_splatting.rasterization.view import TILE
from sugar_utils.warp_lanes import WARP_LANES, read_lane

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


@wp.func
def offsets_in_x(first: wp.vec2i, x: float) -> Offsets:
    """From a splat's centre to a lane's pixels in the blocks of a row."""
    d = Offsets()
    for i in range(_ACROSS):
        d[i] = (float(first[0]) + float(i * _PIXELS_ACROSS)) - x
    return d


@wp.func
def offset_in_y(first: wp.vec2i, block: int, y: float) -> float:
    """From a splat's centre to a lane's pixel in a block."""
    return (float(first[1]) + float((block / _ACROSS) * _PIXELS_DOWN)) - y


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
def blocks_that_reach(block_last: int, place: int, lane: int) -> int:
    """Blocks whose last place, kept by the lane of the block's number, is not before ``place``."""
    blocks = int(0)
    for block in range(_BLOCKS):
        if place <= read_lane(block_last, lane, block):
            blocks = blocks | (1 << block)
    return blocks
