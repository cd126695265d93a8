# SPDX-License-Identifier: Apache-2.0
"""The colour loss on the CPU: C++ bodies in ``native/``, one row per work item."""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.losses.ssim_reference import gaussian_window, weighted_color_loss
from sugar_utils import warp_launch
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d
from sugar_utils.warp_launch import launch, native_kernel, native_source

wp.set_module_options(warp_launch.NATIVE_OPTIONS)

_HALO = 16
_BLOCK = 256


def _source(name: str) -> str:
    common = warp_launch.SIMD_SOURCE + native_source(__file__, "photometric_common")
    return native_source(__file__, name).replace("PHOTOMETRIC_COMMON", common)


@native_kernel(_source("photometric_forward"))
def _forward_rows(
    item: int,
    top_row: int,
    width: int,
    height: int,
    stride: int,
    keep_partials: int,
    taps_: Floats,
    image_: Floats2d,
    target_: Floats2d,
    sums_: Floats2d,
    partials_: Floats3d,
): ...


@native_kernel(_source("photometric_backward"))
def _backward_rows(
    y: int,
    top_row: int,
    end_row: int,
    width: int,
    height: int,
    stride: int,
    taps_: Floats,
    image_: Floats2d,
    target_: Floats2d,
    partials_: Floats3d,
    weights_: Floats,
    gradient_: Floats3d,
): ...


def _padded(image: Tensor) -> Tensor:
    height, width, _ = image.shape
    blocks = math.ceil(width * 3 / _BLOCK)
    lines = torch.zeros(height, blocks * _BLOCK + 2 * _HALO, device=image.device)
    lines[:, _HALO : _HALO + 3 * width] = image.reshape(height, 3 * width)
    return lines


def compare(
    image: Tensor,
    target: Tensor,
    rows: slice,
    keep: bool,
    n_values: int,
    weight: float,
    share: float,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Loss, L1 and SSIM of some rows, and what :func:`differentiate` takes, if it is kept."""
    height, width, _ = image.shape
    x = _padded(image)
    y = _padded(target)
    stride = x.shape[1]
    # Zero where SSIM is not counted, as beyond the image.
    partials = x.new_zeros((3, height, stride) if keep else (3, 1, 1))
    sums = x.new_zeros(height, 2)
    taps = gaussian_window(torch.float32, x.device)
    arguments = [rows.start, width, height, stride, int(keep), taps, x, y, sums, partials]
    launch(_forward_rows, rows.stop - rows.start, arguments)
    l1, ssim = sums.double().sum(dim=0) / n_values
    loss = weighted_color_loss(l1, ssim, weight, share)
    return (loss.float(), l1.float(), ssim.float()), (x, y, partials)


def differentiate(
    shape: torch.Size, rows: slice, weights: Tensor, x: Tensor, y: Tensor, partials: Tensor
) -> Tensor:
    """Gradient of the image. weights: as of ``gradient_weights``; (H, W, 3)"""
    height, width, _ = shape
    gradient = x.new_empty(shape)
    taps = gaussian_window(torch.float32, x.device)
    size = width, height, x.shape[1]
    arguments = [rows.start, rows.stop, *size, taps, x, y, partials, weights, gradient]
    launch(_backward_rows, height, arguments)
    return gradient
