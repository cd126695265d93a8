# SPDX-License-Identifier: Apache-2.0
"""The colour loss on the CPU: C++ bodies in ``native/``, one row per work item."""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import math

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.losses.color_loss import (
    ColorLoss,
    Comparison,
    CountedRows,
    SavedImages,
    weighted_color_loss,
)
from gaussian_splatting.losses.ssim_reference import gaussian_window
from sugar_utils import warp_launch
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d
from sugar_utils.warp_launch import launch, native_kernel, native_source

wp.set_module_options(warp_launch.NATIVE_OPTIONS)

_HALO = 16  # zero floats on each side of a row
_BLOCK = 256  # floats of a row that are worked on together


def _source(name: str) -> str:
    weights = gaussian_window(torch.float32, "cpu").tolist()
    taps = ", ".join(f"{weight!r}f" for weight in weights)
    common = native_source(__file__, "photometric_common").replace("GAUSSIAN_WINDOW", taps)
    body = native_source(__file__, name)
    return body.replace("PHOTOMETRIC_COMMON", warp_launch.SIMD_SOURCE + common)


@native_kernel(_source("photometric_forward"))
def _forward_rows(
    item: int,
    top_row: int,
    width: int,
    image_: Floats2d,
    target_: Floats2d,
    sums_: Floats2d,
    partials_: Floats3d,
):
    """Sums of one row; its derivatives where ``partials_`` has room for them."""


@native_kernel(_source("photometric_backward"))
def _backward_rows(
    y: int,
    counted: wp.vec2i,
    image_: Floats2d,
    target_: Floats2d,
    partials_: Floats3d,
    weights_: Floats,
    gradient_: Floats3d,
):
    """Gradient of one row; ``counted`` is the first and the past-the-last counted row."""


def _padded(image: Tensor) -> Tensor:
    """Rows as lines of whole blocks between zeros. (H, W, 3) -> (H, stride)"""
    height, width, _ = image.shape
    blocks = math.ceil(width * 3 / _BLOCK)
    lines = torch.zeros(height, blocks * _BLOCK + 2 * _HALO, device=image.device)
    lines[:, _HALO : _HALO + 3 * width] = image.reshape(height, 3 * width)
    return lines


def compare(image: Tensor, target: Tensor, rows: CountedRows, keep_partials: bool) -> Comparison:
    """See :class:`PhotometricKernels`."""
    height, width, _ = image.shape
    x = _padded(image)
    y = _padded(target)
    # Zero where SSIM is not counted, as beyond the image.
    partials = x.new_zeros((3, height, x.shape[1]) if keep_partials else (3, 1, 1))
    sums = x.new_zeros(height, 2)
    arguments = [rows.top, width, x, y, sums, partials]
    launch(_forward_rows, rows.end - rows.top, arguments)
    l1, ssim = sums.double().sum(dim=0) / rows.n_values
    total = weighted_color_loss(l1, ssim, rows.weight, rows.share)
    loss = ColorLoss(total.float(), l1.float(), ssim.float())
    return Comparison(loss, SavedImages(x, y, partials))


def differentiate(
    shape: torch.Size, rows: CountedRows, weights: Tensor, saved: SavedImages
) -> Tensor:
    """See :class:`PhotometricKernels`."""
    gradient = saved.image.new_empty(shape)
    counted = wp.vec2i(rows.top, rows.end)
    arguments = [counted, *saved, weights, gradient]
    launch(_backward_rows, shape[0], arguments)
    return gradient
