# SPDX-License-Identifier: Apache-2.0
"""The colour loss on the CPU: C++ bodies in ``native/``, one row per work item."""

from __future__ import annotations

import math

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.losses.ssim_reference import (
    gaussian_window,
    gradient_weights,
    weighted_color_loss,
)
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d
from sugar_utils.warp_launch import (
    NATIVE_OPTIONS,
    SIMD_SOURCE,
    launch,
    native_kernel,
    native_source,
)

wp.set_module_options(NATIVE_OPTIONS)

_HALO = 16
_BLOCK = 256


def _source(name: str) -> str:
    common = SIMD_SOURCE + native_source(__file__, "photometric_common")
    return native_source(__file__, name).replace("PHOTOMETRIC_COMMON", common)


@native_kernel(_source("photometric_forward"))
def _forward_rows(
    item: int, top_row: int, width: int, height: int, stride: int, keep_partials: int,
    taps_: Floats, image_: Floats2d, target_: Floats2d, sums_: Floats2d, partials_: Floats3d,
): ...  # fmt: skip


@native_kernel(_source("photometric_backward"))
def _backward_rows(
    y: int, top_row: int, end_row: int, width: int, height: int, stride: int, taps_: Floats,
    image_: Floats2d, target_: Floats2d, partials_: Floats3d, weights_: Floats, gradient_: Floats3d,
): ...  # fmt: skip


def _padded(image: Tensor) -> Tensor:
    height, width, _ = image.shape
    blocks = math.ceil(width * 3 / _BLOCK)
    lines = torch.zeros(height, blocks * _BLOCK + 2 * _HALO, device=image.device)
    lines[:, _HALO : _HALO + 3 * width] = image.reshape(height, 3 * width)
    return lines


class NativePhotometric(torch.autograd.Function):
    """Image, target, first and past-the-last counted row, divisor, weight and share of the colour
    loss -> the loss, L1 and SSIM."""

    @staticmethod
    def forward(ctx, image: Tensor, target: Tensor, top_row: int, end_row: int, n_values: int,
                weight: float, share: float):  # fmt: skip
        height, width, _ = image.shape
        x, y = _padded(image.detach()), _padded(target)
        stride, keep = x.shape[1], ctx.needs_input_grad[0]
        # Zero where SSIM is not counted, as beyond the image.
        partials = x.new_zeros((3, height, stride) if keep else (3, 1, 1))
        sums = x.new_zeros(height, 2)
        taps = gaussian_window(torch.float32, x.device)
        launch(
            _forward_rows,
            end_row - top_row,
            [top_row, width, height, stride, int(keep), taps, x, y, sums, partials],
        )
        ctx.size, ctx.counted = (width, height, stride), (top_row, end_row)
        ctx.n_values, ctx.weight = n_values, weight
        ctx.save_for_backward(x, y, partials, taps)
        ctx.set_materialize_grads(False)
        l1, ssim = sums.double().sum(dim=0) / n_values
        return weighted_color_loss(l1, ssim, weight, share).float(), l1.float(), ssim.float()

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        x, y, partials, taps = ctx.saved_tensors
        width, height, stride = ctx.size
        weights = gradient_weights(gradients, ctx.weight, ctx.n_values)
        gradient = x.new_empty(height, width, 3)
        launch(
            _backward_rows,
            height,
            [*ctx.counted, width, height, stride, taps, x, y, partials, weights, gradient],
        )
        return (gradient, *[None] * 6)
