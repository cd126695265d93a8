# SPDX-License-Identifier: Apache-2.0
"""How a warp shares a tile: eight blocks of 8 x 4 pixels, each lane one pixel of every block.

Blocks are numbered row by row, and so are lanes within a block. A set of blocks is eight bits.
"""

import warp as wp

from gaussian_splatting.rasterization.view import TILE
from sugar_utils.warp_lanes import WARP_LANES, max_over_lanes, read_lane

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
    """The quadratic form d^T conic d of a splat, as far as it is known for a lane's two columns.

    Attributes:
        dx: From the centre to the lane's pixels.
        xx: Their part of the form.
        xy: Its slope in dy there.
        yy: Its curvature.
        first_y: Row of the lane's pixel in the first block.
        y: Of the centre.
    """

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
