# SPDX-License-Identifier: Apache-2.0
"""L1 and SSIM between a render and a photograph, fused: the colour loss of 3DGS.

The Gaussian window is separable and both images stay interleaved, so that one pass over the rows
gives L1, SSIM and everything the backward pass needs. :mod:`gaussian_splatting.ssim_reference`
says the same in a few lines of torch; it is the twin in tests and the path on a GPU.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.ssim_reference import WINDOW_SIZE, gaussian_window, ssim_map_reference
from sugar_utils.warp_launch import NATIVE_OPTIONS, launch

wp.set_module_options(NATIVE_OPTIONS)

DSSIM_WEIGHT = 0.2

SSIM_HALO = WINDOW_SIZE // 2
"""Rows on each side that the SSIM of a row depends on."""

_HALO = 16
_BLOCK = 256

_NATIVE = Path(__file__).parent / "native"


def _source(name: str) -> str:
    common = (_NATIVE / "photometric_common.inc").read_text(encoding="utf-8")
    body = (_NATIVE / f"{name}.inc").read_text(encoding="utf-8")
    return body.replace("PHOTOMETRIC_COMMON", common)


@wp.func_native(_source("photometric_forward"))
def _forward_row(
    y: int,
    width: int,
    height: int,
    stride: int,
    keep_partials: int,
    taps_: wp.array(dtype=float),
    image_: wp.array2d(dtype=float),
    target_: wp.array2d(dtype=float),
    sums_: wp.array2d(dtype=float),
    partials_: wp.array3d(dtype=float),
): ...


@wp.kernel
def _forward_rows(
    first: int,
    top_row: int,
    width: int,
    height: int,
    stride: int,
    keep_partials: int,
    taps: wp.array(dtype=float),
    image: wp.array2d(dtype=float),
    target: wp.array2d(dtype=float),
    sums: wp.array2d(dtype=float),
    partials: wp.array3d(dtype=float),
):
    y = top_row + first + wp.tid()
    _forward_row(y, width, height, stride, keep_partials, taps, image, target, sums, partials)


@wp.func_native(_source("photometric_backward"))
def _backward_row(
    y: int,
    top_row: int,
    end_row: int,
    width: int,
    height: int,
    stride: int,
    taps_: wp.array(dtype=float),
    image_: wp.array2d(dtype=float),
    target_: wp.array2d(dtype=float),
    partials_: wp.array3d(dtype=float),
    weights_: wp.array(dtype=float),
    gradient_: wp.array3d(dtype=float),
): ...


@wp.kernel
def _backward_rows(
    first: int,
    top_row: int,
    end_row: int,
    width: int,
    height: int,
    stride: int,
    taps: wp.array(dtype=float),
    image: wp.array2d(dtype=float),
    target: wp.array2d(dtype=float),
    partials: wp.array3d(dtype=float),
    weights: wp.array(dtype=float),
    gradient: wp.array3d(dtype=float),
):
    _backward_row(
        first + wp.tid(), top_row, end_row, width, height, stride, taps, image, target, partials,
        weights, gradient,
    )  # fmt: skip


def _padded(image: Tensor) -> Tensor:
    """Rows as lines of floats, with the zero margins the kernels read into."""
    height, width, _ = image.shape
    blocks = math.ceil(width * 3 / _BLOCK)
    lines = torch.zeros(height, blocks * _BLOCK + 2 * _HALO)
    lines[:, _HALO : _HALO + 3 * width] = image.reshape(height, 3 * width)
    return lines


class _FusedPhotometric(torch.autograd.Function):
    @staticmethod
    def forward(ctx, image: Tensor, target: Tensor, top_row: int, end_row: int, n_values: int):
        height, width, _ = image.shape
        x, y = _padded(image.detach()), _padded(target)
        stride, keep = x.shape[1], ctx.needs_input_grad[0]
        # Zero where SSIM is not counted, as beyond the image.
        partials = torch.zeros(3, height, stride) if keep else torch.zeros(3, 1, 1)
        sums = torch.zeros(height, 2)
        taps = gaussian_window(torch.float32)
        launch(
            _forward_rows,
            end_row - top_row,
            [top_row, width, height, stride, int(keep), taps, x, y, sums, partials],
            device=x.device,
        )
        ctx.size, ctx.counted, ctx.n_values = (width, height, stride), (top_row, end_row), n_values
        ctx.save_for_backward(x, y, partials, taps)
        l1, ssim = (sums.double().sum(dim=0) / n_values).float()
        return l1, ssim

    @staticmethod
    def backward(ctx, d_l1: Tensor, d_ssim: Tensor):
        x, y, partials, taps = ctx.saved_tensors
        width, height, stride = ctx.size
        weights = torch.stack([d_l1, d_ssim]) / ctx.n_values
        gradient = torch.empty(height, width, 3)
        launch(
            _backward_rows,
            height,
            [*ctx.counted, width, height, stride, taps, x, y, partials, weights, gradient],
            device=x.device,
        )
        return gradient, None, None, None, None


def l1_and_ssim(
    image: Tensor, target: Tensor, *, rows: slice | None = None, total_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Mean absolute error and mean SSIM of an RGB image.

    SSIM as in 3DGS: 11 x 11 Gaussian window with sigma 1.5, per channel, zero padding,
    C1 = 1e-4, C2 = 9e-4, averaged over all pixels and channels.

    Args:
        image: Render. (H, W, 3), differentiable
        target: Photograph, without gradient. (H, W, 3), values 0 to 1
        rows: Rows that count; the others are only neighbours of those. For a strip of an image
            with a halo of ``SSIM_HALO`` rows on each side that continues.
        total_rows: Rows of the whole image, to divide by; those that count when None.

    Returns:
        ``(l1, ssim)`` scalars. Those of all strips of an image add up to those of the image.
    """
    if image.shape != target.shape or image.shape[-1] != 3:
        raise ValueError(f"images of shape {tuple(image.shape)} and {tuple(target.shape)}")
    top, end, _ = (rows or slice(None)).indices(image.shape[0])
    n_values = 3 * image.shape[1] * (end - top if total_rows is None else total_rows)
    if image.device.type == "cpu" and image.dtype == torch.float32:
        return _FusedPhotometric.apply(image, target.float(), top, end, n_values)
    l1 = (image - target)[top:end].abs().sum() / n_values
    return l1, ssim_map_reference(image, target)[top:end].sum() / n_values


def color_loss(
    image: Tensor, target: Tensor, *, rows: slice | None = None, total_rows: int | None = None
) -> Tensor:
    """0.8 L1 + 0.2 (1 - SSIM), the photometric loss of 3DGS (Kerbl et al. 2023, equation 7).

    Arguments as of :func:`l1_and_ssim`; of a strip, its share of the loss of the image.
    """
    l1, ssim = l1_and_ssim(image, target, rows=rows, total_rows=total_rows)
    top, end, _ = (rows or slice(None)).indices(image.shape[0])
    share = 1.0 if total_rows is None else (end - top) / total_rows
    return weighted_color_loss(l1, ssim, DSSIM_WEIGHT, share)


def weighted_color_loss(l1: Tensor, ssim: Tensor, weight: float, share: float = 1.0) -> Tensor:
    """(1 - weight) L1 + weight (share - SSIM), for the ``share`` of an image that was counted."""
    return (1.0 - weight) * l1 + weight * (share - ssim)
