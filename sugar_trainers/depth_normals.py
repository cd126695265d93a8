# SPDX-License-Identifier: Apache-2.0
"""Depth-normal consistency fused: one kernel each way, for CPU and CUDA.

Nothing of the image's size is stored beside the gradients: the backward pass computes the normals
of the depth map again. A thread walks down one column, ``RUN`` rows at a time.

With a pixel's neighbours below, above, right and left at depths b, a, r, l, and its own ray
(X, Y, 1), the cross product of the two differences of unprojected points is

    p = (b + a) (r - l) / fy,   q = (b - a) (r + l) / fx,
    (p, q, -(X p + Y q + (b + a) (r + l) / (fx fy))).

Written so, no large terms cancel. Sums are one number per run, added up by torch in float64: no
atomics, the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
import warp as wp
from torch import Tensor
from torch.autograd.function import once_differentiable

from gaussian_splatting.rasterization.render import NORMAL_EPS
from sugar_trainers.losses import MIN_SQUARED_CROSS
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d
from sugar_utils.warp_launch import FUSED_OPTIONS, launch

wp.set_module_options(FUSED_OPTIONS)

RUN = 16  # rows of a run; two more are looked at for it

_ROWS = wp.constant(RUN)
_MIN_ITEMS = 512

vec7 = wp.types.vector(length=7, dtype=wp.float32)


@wp.struct
class DepthMap:
    """What turns depths into points, and which pixels count."""

    step_x: float  # 1 / fx
    step_y: float  # 1 / fy
    cx: float  # pixels from the left edge
    cy: float  # pixels from the top edge of this map
    top: int
    end: int  # exclusive
    masked: int  # 1 where counted applies


# Functions that are long and called more than once take numbers, not maps: a compiler that does not
# inline them would copy the descriptions of the maps at every call.


@wp.func
def counts(x: int, y: int, shape: DepthMap, counted: wp.array2d(dtype=wp.uint8)) -> bool:
    return y >= shape.top and y < shape.end and (shape.masked == 0 or counted[y, x] != wp.uint8(0))


@wp.func
def is_inner(x: int, y: int, depth: Floats2d) -> bool:
    return x > 0 and y > 0 and x < depth.shape[1] - 1 and y < depth.shape[0] - 1


@wp.func
def sums_around(x: int, y: int, depth: Floats2d) -> wp.vec4:
    """b - a, b + a, r - l and r + l."""
    below = depth[y + 1, x]
    above = depth[y - 1, x]
    right = depth[y, x + 1]
    left = depth[y, x - 1]
    return wp.vec4(below - above, below + above, right - left, right + left)


@wp.func
def ray_of(x: int, y: int, shape: DepthMap) -> wp.vec2:
    return wp.vec2((float(x) - shape.cx) * shape.step_x, (float(y) - shape.cy) * shape.step_y)


@wp.func
def normal_of(x: int, y: int, normal_xy: Floats3d) -> wp.vec3:
    """The rendered normal, as ``complete_normals`` makes it."""
    nx = normal_xy[y, x, 0]
    ny = normal_xy[y, x, 1]
    return wp.vec3(nx, ny, -wp.sqrt(wp.max(1.0 - (nx * nx + ny * ny), wp.static(NORMAL_EPS))))


@wp.func
def cross_of(d: wp.vec4, ray: wp.vec2, step_x: float, step_y: float) -> wp.vec3:
    p = d[1] * d[2] * step_y
    q = d[0] * d[3] * step_x
    return wp.vec3(p, q, -(ray[0] * p + ray[1] * q + d[1] * d[3] * (step_x * step_y)))


@wp.func
def pull_of(d: wp.vec4, ray: wp.vec2, step_x: float, step_y: float, normal: wp.vec3) -> vec7:
    """What a pixel's 1 - N . n says to the depths below, above, right and left of it, and n."""
    cross = cross_of(d, ray, step_x, step_y)
    square = wp.dot(cross, cross)
    if not (square > wp.static(MIN_SQUARED_CROSS)):
        return vec7()
    inverse = 1.0 / wp.sqrt(square)
    unit = cross * inverse
    g = (unit * wp.dot(normal, unit) - normal) * inverse
    # By p, q, and the product that stands with neither.
    g_p = (g[0] - ray[0] * g[2]) * step_y
    g_q = (g[1] - ray[1] * g[2]) * step_x
    g_r = -g[2] * (step_x * step_y)
    column_minus = d[3] * g_q
    column_plus = d[2] * g_p + d[3] * g_r
    row_minus = d[1] * g_p
    row_plus = d[0] * g_q + d[1] * g_r
    return vec7(
        column_plus + column_minus, column_plus - column_minus, row_plus + row_minus,
        row_plus - row_minus, unit[0], unit[1], unit[2],
    )  # fmt: skip


@wp.kernel
def add_up_errors(
    first: int, shape: DepthMap, counted: wp.array2d(dtype=wp.uint8), depth: Floats2d,
    normal_xy: Floats3d, sums: Floats,
):  # fmt: skip
    """Sum of 1 - N . n over a run; pixels without a normal of the depth map count 1."""
    item = first + wp.tid()
    x = item % depth.shape[1]
    start = shape.top + item / depth.shape[1] * _ROWS
    total = float(0.0)
    for y in range(start, wp.min(start + _ROWS, shape.end)):
        if counts(x, y, shape, counted):
            error = float(1.0)
            if is_inner(x, y, depth):
                ray = ray_of(x, y, shape)
                cross = cross_of(sums_around(x, y, depth), ray, shape.step_x, shape.step_y)
                square = wp.dot(cross, cross)
                if square > wp.static(MIN_SQUARED_CROSS):
                    error -= wp.dot(normal_of(x, y, normal_xy), cross) / wp.sqrt(square)
            total += error
    sums[item] = total


@wp.kernel
def differentiate_errors(
    first: int, shape: DepthMap, counted: wp.array2d(dtype=wp.uint8), depth: Floats2d,
    normal_xy: Floats3d, weight: Floats, d_depth: Floats2d, d_normal_xy: Floats3d,
):  # fmt: skip
    """Gradients of a run: a depth collects what the errors of its four neighbours say."""
    item = first + wp.tid()
    x = item % depth.shape[1]
    start = item / depth.shape[1] * _ROWS
    end = wp.min(start + _ROWS, depth.shape[0])
    w = weight[0]
    above = vec7()
    here = vec7()
    # The pixel below is looked at in each turn; two turns come before the first row.
    for y in range(start - 2, end):
        below = vec7()
        if is_inner(x, y + 1, depth) and counts(x, y + 1, shape, counted):
            below = pull_of(
                sums_around(x, y + 1, depth), ray_of(x, y + 1, shape), shape.step_x, shape.step_y,
                normal_of(x, y + 1, normal_xy),
            )  # fmt: skip
        if y >= start:
            beside = float(0.0)
            for side in range(-1, 2, 2):
                if is_inner(x + side, y, depth) and counts(x + side, y, shape, counted):
                    pull = pull_of(
                        sums_around(x + side, y, depth), ray_of(x + side, y, shape),
                        shape.step_x, shape.step_y, normal_of(x + side, y, normal_xy),
                    )  # fmt: skip
                    beside += pull[2 + (side + 1) / 2]
            d_depth[y, x] = w * ((above[0] + below[1]) + beside)
            n = normal_of(x, y, normal_xy)
            # The third component follows from the others, but where it is held at its smallest.
            bent = float(0.0)
            if 1.0 - (n[0] * n[0] + n[1] * n[1]) >= wp.static(NORMAL_EPS):
                bent = here[6] / n[2]
            d_normal_xy[y, x, 0] = w * (bent * n[0] - here[4])
            d_normal_xy[y, x, 1] = w * (bent * n[1] - here[5])
        above = here
        here = below


class _Consistency(torch.autograd.Function):
    """Depth, x and y of normals, divisor, :class:`DepthMap`, what counts -> mean error."""

    @staticmethod
    def forward(ctx, depth: Tensor, normal_xy: Tensor, total: int | Tensor, shape: Any,
                counted: Tensor):  # fmt: skip
        n_runs = -(-(shape.end - shape.top) // RUN) * depth.shape[1]
        sums = torch.empty(n_runs, device=depth.device)
        maps = [shape, counted, depth.detach(), normal_xy.detach()]
        launch(add_up_errors, n_runs, [*maps, sums], device=depth.device, min_items=_MIN_ITEMS)
        ctx.shape, ctx.total = shape, total
        ctx.save_for_backward(depth, normal_xy, counted)
        return (sums.sum(dtype=torch.float64) / total).float()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor):
        depth, normal_xy, counted = ctx.saved_tensors
        height, width = depth.shape
        d_depth = torch.empty(height, width, device=depth.device)
        d_normal_xy = torch.empty(height, width, 2, device=depth.device)
        weight, n_runs = (d_loss / ctx.total).reshape(1), -(-height // RUN) * width
        arguments = [ctx.shape, counted, depth, normal_xy, weight, d_depth, d_normal_xy]
        launch(differentiate_errors, n_runs, arguments, device=depth.device, min_items=_MIN_ITEMS)
        return d_depth, d_normal_xy, None, None, None


def fused_depth_normal_consistency(
    depth: Tensor, normal_xy: Tensor, fx: float, fy: float, cx: float, cy: float, *,
    rows: slice | None = None, total: int | Tensor | None = None, counted: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mean of 1 - N . n_D over all pixels, n_D the normals of the depth map.

    The border and empty pixels count with the constant 1.

    Args:
        depth: May be a column of wider pixels. (H, W) float32, world units
        normal_xy: Blended x and y of the normals in camera axes, likewise, which
            ``complete_normals`` makes unit normals towards the camera. (H, W, 2) float32
        fx, fy, cx, cy: In pixels, from the top left edge of this map.
        rows: Rows that count; strips continue one row beyond them as a halo.
        total: Divisor; the number of pixels in those rows when None.
        counted: Pixels that count; None for all. (H, W) bool
    """
    top, end, _ = (rows or slice(None)).indices(depth.shape[0])
    shape = DepthMap()
    shape.step_x, shape.step_y, shape.cx, shape.cy = 1.0 / fx, 1.0 / fy, cx, cy
    shape.top, shape.end, shape.masked = top, end, int(counted is not None)
    if counted is None:
        counted = torch.empty((0, 0), dtype=torch.uint8, device=depth.device)
    if total is None:
        total = max((end - top) * depth.shape[1], 1)
    return _Consistency.apply(depth, normal_xy, total, shape, counted.view(torch.uint8))
