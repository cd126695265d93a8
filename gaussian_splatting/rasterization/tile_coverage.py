# SPDX-License-Identifier: Apache-2.0
"""Tiles of its rectangle that a splat reaches: an exact ellipse test, one source for all devices.

A splat is visible where sigma(d) = d^T conic d / 2 of the offset d from its centre is at most its
limit (``projection_kernels``, column 6). That ellipse covers one interval in each row of tiles,
from its leftmost to its rightmost point inside of the row, widened by what rounding can do to the
test of a pixel: no pixel that blends the splat is ever lost.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import warp as wp

from gaussian_splatting.rasterization.projection_kernels import (
    TILE,
    Channels,
    Coefficients,
    Rects,
    by_coefficients,
    project_one,
    view_at,
)
from sugar_utils.warp_arrays import Floats, Floats2d, Ints, Longs, Vec3s, Vec3s2d, Vec4s

# Counting and listing must agree to the last bit, in whatever kernel the test is inlined: no
# product and sum may be contracted into one rounding.
wp.set_module_options(
    {
        "enable_backward": False,
        "fuse_fp": False,
        "cpu_compiler_flags": "-march=native -ffp-contract=off",
    }
)

_SIDE = wp.constant(float(TILE))
_SIDE_INT = wp.constant(TILE)
_FAR = wp.constant(1.0e8)
_ROUNDING = wp.constant(4.0e-6)
"""Relative rounding of sigma per unit of 1 / (1 - correlation^2), several times the worst case."""

_NEEDLE = wp.constant(1.0e4)
"""From this 1 / (1 - correlation^2) on, sigma is too coarse to leave tiles of the box out."""


@wp.struct
class Ellipse:
    """The region where a splat is visible, prepared for rows of tiles; lengths in pixels."""

    covers_rect: int  # 1 where every tile of the rectangle counts as reached; the rest is unset
    x: float  # centre
    y: float
    pad_x: float  # how far a pixel at the rim may lie outside by rounding
    pad_y: float
    slope: float  # x of the middle of a horizontal section, by y from the centre
    half_square: float  # square of half the section through the centre
    shrink: float  # what that square loses per square of y
    extent_y: float  # largest y from the centre
    widest: float  # y from the centre of the rightmost point


@wp.func
def ellipse_of(splats: Floats2d, i: int, rect: wp.vec4i) -> Ellipse:
    """Return the ellipse of splat ``i``, whose rectangle of tiles is ``rect``."""
    e = Ellipse()
    e.covers_rect = 1
    # A box of one row or one column is touched by the ellipse in each of its tiles; of two by two
    # so seldom less than all are touched that finding out costs more than it saves.
    across = rect[1] - rect[0]
    down = rect[3] - rect[2]
    if across < 2 or down < 2 or across * down < 5:
        return e
    xx = splats[i, 2]
    xy = splats[i, 3]
    yy = splats[i, 4]
    det = xx * yy - xy * xy
    if not (xx * yy < _NEEDLE * det):
        return e
    square = 2.0 * splats[i, 6] * (1.0 + _ROUNDING * (xx * yy / det))
    inverse = 1.0 / xx
    e.covers_rect = 0
    e.x = splats[i, 0]
    e.y = splats[i, 1]
    e.pad_x = 0.01 + 4.0e-7 * wp.abs(e.x)
    e.pad_y = 0.01 + 4.0e-7 * wp.abs(e.y)
    e.slope = -xy * inverse
    e.half_square = square * inverse
    e.shrink = det * inverse * inverse
    e.extent_y = wp.sqrt(square * xx / det)
    e.widest = -xy * wp.sqrt(square / (yy * det))
    return e


@wp.func
def covered_tiles(e: Ellipse, rect: wp.vec4i, row: int) -> wp.vec2i:
    """First and past-the-last reached tile of a row of tiles; may be empty."""
    top = float(row) * _SIDE - e.y - e.pad_y
    low = wp.max(top, -e.extent_y)
    high = wp.min(top + (_SIDE - 1.0) + 2.0 * e.pad_y, e.extent_y)
    if low > high:
        return wp.vec2i(0, 0)
    # Ends are extreme where the ellipse is widest; if that is outside the row, at the nearer edge.
    at_right = wp.clamp(e.widest, low, high)
    at_left = wp.clamp(-e.widest, low, high)
    after = wp.max(e.half_square - e.shrink * at_right * at_right, 0.0)
    right = e.slope * at_right + wp.sqrt(after)
    before = wp.max(e.half_square - e.shrink * at_left * at_left, 0.0)
    low_x = e.slope * at_left - wp.sqrt(before)
    # First and last pixel; a cast rounds towards zero, which is down here, and cheap.
    from_x = wp.clamp(e.x + low_x - e.pad_x, 0.0, _FAR)
    to_x = wp.clamp(e.x + right + e.pad_x, -1.0, _FAR)
    first = int(from_x)
    if float(first) < from_x:
        first += 1
    last = int(to_x)
    if to_x < 0.0 or last < first:
        return wp.vec2i(0, 0)
    return wp.vec2i(wp.max(first / _SIDE_INT, rect[0]), wp.min(last / _SIDE_INT + 1, rect[1]))


@wp.func
def n_covered(splats: Floats2d, i: int, rect: wp.vec4i) -> int:
    """Return the number of tiles that splat ``i`` reaches."""
    ellipse = ellipse_of(splats, i, rect)
    if ellipse.covers_rect == 1:
        return (rect[1] - rect[0]) * (rect[3] - rect[2])
    count = int(0)
    for row in range(rect[2], rect[3]):
        tiles = covered_tiles(ellipse, rect, row)
        count += wp.max(tiles[1] - tiles[0], 0)
    return count


@wp.kernel
def count_tiles(first: int, splats: Floats2d, rects: Rects, counts: Ints):
    """Count the tiles that each splat reaches."""
    i = first + wp.tid()
    counts[i] = n_covered(splats, i, rects[i])


@wp.kernel
def project_and_count(
    first: int,
    record: Floats,
    channels: Channels,
    means: Vec3s,
    quats: Vec4s,
    scales: Vec3s,
    opacities: Floats,
    sh_dc: Vec3s2d,
    sh_rest: Coefficients,
    features: Floats2d,
    splats: Floats2d,
    radii: Ints,
    depths: Floats,
    tile_rects: Rects,
    counts: Ints,
):
    """:func:`~.projection_kernels.project_forward` and :func:`count_tiles` in one, for GPUs."""
    i = first + wp.tid()
    project_one(
        i,
        view_at(record),
        channels,
        means,
        quats,
        scales,
        opacities,
        sh_dc,
        sh_rest,
        features,
        splats,
        radii,
        depths,
        tile_rects,
    )
    counts[i] = n_covered(splats, i, tile_rects[i])


PROJECT_AND_COUNT = by_coefficients(project_and_count, "sh_rest")


@wp.kernel
def start_runs(
    first: int,
    order: Longs,
    ends: Longs,
    counts: Ints,
    capacity: int,
    first_intersections: Ints,
    excess: Floats,
):
    """Find the first intersection of each splat, from the ends of runs in the order of depth.

    By how much the last end exceeds the capacity goes to ``excess``.
    """
    k = first + wp.tid()
    splat = order[k]
    start = ends[k] - wp.int64(counts[splat])
    first_intersections[splat] = int(wp.min(start, wp.int64(capacity)))
    if k == order.shape[0] - 1:
        excess[0] = float(ends[k] - wp.int64(capacity))


@wp.kernel
def list_tiles(
    first: int,
    tiles_x: int,
    splats: Floats2d,
    rects: Rects,
    first_intersections: Ints,
    intersection_tiles: Ints,
    owners: Ints,
):
    """Write the tiles of each splat, by row of tiles, from its first intersection on.

    Its index goes to ``owners`` at the same places, unless that is empty. Intersections for which
    there is no room are left out.
    """
    i = first + wp.tid()
    rect = rects[i]
    ellipse = ellipse_of(splats, i, rect)
    place = int(first_intersections[i])
    for row in range(rect[2], rect[3]):
        tiles = wp.vec2i(rect[0], rect[1])
        if ellipse.covers_rect == 0:
            tiles = covered_tiles(ellipse, rect, row)
        for tile in range(tiles[0], tiles[1]):
            if place < intersection_tiles.shape[0]:
                intersection_tiles[place] = row * tiles_x + tile
                if owners.shape[0] > 0:
                    owners[place] = i
            place += 1


@wp.kernel
def place_intersections(
    first: int,
    sorted_intersections: Ints,
    sorted_tiles: Ints,
    owners: Ints,
    places: Ints,
    ids: Ints,
    offsets: Ints,
):
    """Invert a sort: the place of each intersection, the splat at each place, where tiles begin.

    There is one item more than there are intersections, for tiles behind the last one.
    """
    k = first + wp.tid()
    before = int(-1)
    if k > 0:
        before = sorted_tiles[k - 1]
    tile = offsets.shape[0] - 1
    if k < ids.shape[0]:
        tile = sorted_tiles[k]
        intersection = sorted_intersections[k]
        places[intersection] = k
        ids[k] = owners[intersection]
    for begun in range(before + 1, tile + 1):
        offsets[begun] = k
