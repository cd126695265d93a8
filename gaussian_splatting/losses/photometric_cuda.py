# SPDX-License-Identifier: Apache-2.0
"""The colour loss in kernels for GPUs; on a CPU they run as fibers, for tests.

A thread walks down one column of one colour, ``RUN`` rows at a time, blurs each row across, and
keeps the last eleven results in registers to blur them down. A run starts five rows early. Threads
of a block have neighbouring columns: they read each row together, once, into shared memory. Sums
are one number per run, added up by torch in float64: no atomics, the same bits every time.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAssignmentType=false

import functools

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.losses.color_loss import (
    ColorLoss,
    Comparison,
    CountedRows,
    SavedImages,
)
from gaussian_splatting.losses.ssim_reference import C1, C2, WINDOW_SIZE, gaussian_window
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d
from sugar_utils.warp_launch import known_options, launch_blocks

RUN = 32  # rows of a run; ten more are blurred across for it
BLOCK_DIM = 128  # threads of a block, and columns that it has

wp.set_module_options({"enable_backward": False, "block_dim": BLOCK_DIM})

_COLORS = 3
_RADIUS = WINDOW_SIZE // 2
_NEWEST = wp.constant(WINDOW_SIZE - 1)
_HALF = wp.constant(_RADIUS)
_ROWS = wp.constant(RUN)
_THREADS = wp.constant(BLOCK_DIM)
_C1 = wp.constant(C1)
_C2 = wp.constant(C2)
Window = wp.types.vector(length=WINDOW_SIZE, dtype=wp.float32)
vec5 = wp.types.vector(length=5, dtype=wp.float32)
FiveLines = wp.types.matrix(shape=(5, WINDOW_SIZE), dtype=wp.float32)
ThreeLines = wp.types.matrix(shape=(3, WINDOW_SIZE), dtype=wp.float32)


# A thread that is one row ahead of others writes the other half of the shared memory. It cannot be
# two rows ahead: all threads of the block meet once in each row.
_READ_ROW = f"""
constexpr int MARGIN = {_RADIUS * _COLORS}, SEGMENT = {BLOCK_DIM} + 2 * MARGIN;
#if defined(__CUDA_ARCH__)
__shared__ float rows[2][PLANES][SEGMENT];
#define MEET() __syncthreads()
#else
static float rows[2][PLANES][SEGMENT];
#define MEET() WP_TILE_SYNC()
#endif
const int lane = i % {BLOCK_DIM};
for (int at = lane; at < SEGMENT; at += {BLOCK_DIM}) {{
    const int column = i - lane + at - MARGIN;
    const bool is_inside = y >= 0 && y < height && column >= 0 && column < width;
    for (int m = 0; m < PLANES; m++)
        rows[y & 1][m][at] = is_inside ? planes[m][(size_t)y * width + column] : 0.f;
}}
MEET();
#undef MEET
const auto& row = rows[y & 1];
"""
"""Reads the values of a row that a block's windows cover, zeros outside the image."""

_MOMENTS = f"""
constexpr int PLANES = 2;
const int height = image.shape[0], width = image.shape[1];
const float* planes[PLANES] = {{image.data, target.data}};
{_READ_ROW}
wp::vec_t<5, wp::float32> sums;
for (int k = 0; k < {WINDOW_SIZE}; k++) {{
    const float a = row[0][lane + {_COLORS} * k], b = row[1][lane + {_COLORS} * k];
    const float wa = taps[k] * a, wb = taps[k] * b;
    sums[0] += wa;
    sums[1] += wb;
    sums[2] += wa * a;
    sums[3] += wb * b;
    sums[4] += wa * b;
}}
return sums;
"""

_PARTIALS = f"""
constexpr int PLANES = 3;
const int height = partials.shape[1], width = partials.shape[2];
const float* first = partials.data;
const size_t size = (size_t)height * width;
const float* planes[PLANES] = {{first, first + size, first + 2 * size}};
{_READ_ROW}
wp::vec_t<3, wp::float32> sums;
for (int k = 0; k < {WINDOW_SIZE}; k++)
    for (int m = 0; m < 3; m++) sums[m] += taps[k] * row[m][lane + {_COLORS} * k];
return sums;
"""


@wp.struct
class ColumnSettings:
    """Window of SSIM, counted rows and factors of a comparison."""

    taps: Window
    top_row: int  # first counted row
    end_row: int  # row past the last counted one
    scale: float  # of L1 and SSIM: 1 / number of values
    weight: float  # of 1 - SSIM
    share: float  # one run's part of the counted share of the image


@wp.func_native(_MOMENTS)
def moments_across(image: Floats2d, target: Floats2d, y: int, i: int, taps: Window) -> vec5:
    """Return window averages of x, y, x^2, y^2 and x y along a row; all threads call it."""


@wp.func_native(_PARTIALS)
def partials_across(partials: Floats3d, y: int, i: int, taps: Window) -> wp.vec3:
    """Return window averages of the three derivatives along a row; all threads call it."""


@wp.kernel(**known_options(grid_stride=False))
def compare_columns(
    settings: ColumnSettings,
    image: Floats2d,
    target: Floats2d,
    sums: Floats2d,
    partials: Floats3d,
):
    """Compute a run's part of loss, L1 and SSIM.

    Where ``partials`` has room, also SSIM's derivatives by the blurred x, x^2 and x y.
    """
    block, lane = wp.tid()
    line = image.shape[1]
    n_across = (line + _THREADS - 1) / _THREADS
    i = block % n_across * _THREADS + lane
    start = settings.top_row + block / n_across * _ROWS
    end = wp.min(start + _ROWS, settings.end_row)
    taps = settings.taps
    lines = FiveLines()
    l1 = float(0.0)
    ssim = float(0.0)
    for y in range(start - _HALF, end + _HALF):
        newest = moments_across(image, target, y, i, taps)
        for m in range(5):
            for k in range(_NEWEST):
                lines[m, k] = lines[m, k + 1]
            lines[m, _NEWEST] = newest[m]
        row = y - _HALF
        if row >= start and i < line:
            v = lines * taps
            mx = v[0]
            my = v[1]
            a1 = 2.0 * mx * my + _C1
            a2 = 2.0 * (v[4] - mx * my) + _C2
            b1 = mx * mx + my * my + _C1
            b2 = (v[2] - mx * mx) + (v[3] - my * my) + _C2
            inverse = 1.0 / (b1 * b2)
            s = a1 * a2 * inverse
            l1 += wp.abs(image[row, i] - target[row, i])
            ssim += s
            if partials.shape[2] == line:
                d_var = -s * b1 * inverse
                d_cov = 2.0 * a1 * inverse
                d_mean = 2.0 * (my * a2 * inverse - mx * s * b2 * inverse - mx * d_var)
                partials[0, row, i] = d_mean - my * d_cov
                partials[1, row, i] = d_var
                partials[2, row, i] = d_cov
    if i >= line:
        return
    scale = settings.scale
    weight = settings.weight
    item = block / n_across * line + i
    sums[item, 0] = (1.0 - weight) * (scale * l1) + weight * (settings.share - scale * ssim)
    sums[item, 1] = scale * l1
    sums[item, 2] = scale * ssim


@wp.kernel(**known_options(grid_stride=False))
def differentiate_columns(
    settings: ColumnSettings,
    image: Floats2d,
    target: Floats2d,
    partials: Floats3d,
    weights: Floats,
    gradient: Floats2d,
):
    """Compute dL/dx of a run: L1's sign, and blurs of SSIM's derivatives.

    Rows outside the counted ones are there for the windows of their neighbours.
    """
    block, lane = wp.tid()
    line = image.shape[1]
    n_across = (line + _THREADS - 1) / _THREADS
    i = block % n_across * _THREADS + lane
    start = block / n_across * _ROWS
    end = wp.min(start + _ROWS, image.shape[0])
    taps = settings.taps
    lines = ThreeLines()
    for y in range(start - _HALF, end + _HALF):
        newest = partials_across(partials, y, i, taps)
        for m in range(3):
            for k in range(_NEWEST):
                lines[m, k] = lines[m, k + 1]
            lines[m, _NEWEST] = newest[m]
        row = y - _HALF
        if row >= start and i < line:
            v = lines * taps
            a = image[row, i]
            b = target[row, i]
            sign = float(0.0)
            if row >= settings.top_row and row < settings.end_row:
                if a > b:
                    sign = 1.0
                elif a < b:
                    sign = -1.0
            blurred = v[0] + 2.0 * a * v[1] + b * v[2]
            gradient[row, i] = weights[0] * sign + weights[1] * blurred


@functools.lru_cache(maxsize=64)
def _settings(rows: CountedRows, n_runs: int) -> ColumnSettings:
    """Settings of the kernels; cached because a struct costs the host as much as a launch."""
    settings = ColumnSettings()
    settings.taps = Window(*gaussian_window(torch.float32, "cpu").tolist())
    settings.top_row = rows.top
    settings.end_row = rows.end
    settings.scale = 1.0 / rows.n_values
    settings.weight = rows.weight
    settings.share = rows.share / max(n_runs, 1)
    return settings


def _n_blocks(n_rows: int, line: int) -> int:
    """Number of runs of rows times ``BLOCK_DIM`` columns."""
    return -(-n_rows // RUN) * -(-line // BLOCK_DIM)


def _n_runs(n_rows: int, line: int) -> int:
    return -(-n_rows // RUN) * line


def compare(image: Tensor, target: Tensor, rows: CountedRows, keep_partials: bool) -> Comparison:
    """See :class:`PhotometricKernels`."""
    height = image.shape[0]
    line = _COLORS * image.shape[1]
    x = image.reshape(height, line).contiguous()
    y = target.detach().reshape(height, line).contiguous()
    n_rows = rows.end - rows.top
    # Zero where SSIM is not counted, as beyond the image.
    new_partials = torch.empty if n_rows == height else torch.zeros
    partials = new_partials((3, height, line) if keep_partials else (3, 1, 1), device=image.device)
    n_runs = _n_runs(n_rows, line)
    sums = torch.empty(n_runs, 3, device=image.device)
    arguments = [_settings(rows, n_runs), x, y, sums, partials]
    n_blocks = _n_blocks(n_rows, line)
    launch_blocks(compare_columns, n_blocks, arguments, device=x.device, block_dim=BLOCK_DIM)
    loss = ColorLoss(*sums.sum(dim=0, dtype=torch.float64).float().unbind())
    return Comparison(loss, SavedImages(x, y, partials))


def differentiate(
    shape: torch.Size, rows: CountedRows, weights: Tensor, saved: SavedImages
) -> Tensor:
    """See :class:`PhotometricKernels`."""
    height, line = saved.image.shape
    gradient = torch.empty_like(saved.image)
    settings = _settings(rows, _n_runs(rows.end - rows.top, line))
    arguments = [settings, *saved, weights, gradient]
    n_blocks = _n_blocks(height, line)
    device = gradient.device
    launch_blocks(differentiate_columns, n_blocks, arguments, device=device, block_dim=BLOCK_DIM)
    return gradient.view(shape)
