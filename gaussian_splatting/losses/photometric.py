# SPDX-License-Identifier: Apache-2.0
"""L1 and SSIM between a render and an image, fused: the colour loss of 3DGS.

One pass over the rows gives L1, SSIM and everything the backward pass needs: in native code on the
CPU, in kernels for any device on a GPU. :mod:`.losses.ssim_reference` is the reference in tests and
serves other types than float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gaussian_splatting.losses import photometric_cpu, photometric_cuda, ssim_reference
from gaussian_splatting.losses.color_loss import (
    ColorGradient,
    ColorLoss,
    CountedRows,
    PhotometricKernels,
    SavedImages,
    gradient_weights,
    loss_weights,
    weighted_color_loss,
)

DSSIM_WEIGHT = 0.2
SSIM_HALO = ssim_reference.WINDOW_SIZE // 2  # rows on each side that the SSIM of a row depends on


class FusedPhotometric(torch.autograd.Function):
    """Image and target, (H, W, 3), counted rows, kernels -> loss, L1 and SSIM."""

    @staticmethod
    def forward(ctx, image: Tensor, target: Tensor, rows: CountedRows, kernels: PhotometricKernels):
        needs_gradient = ctx.needs_input_grad[0]
        comparison = kernels.compare(image.detach(), target, rows, needs_gradient)
        ctx.kernels = kernels
        ctx.shape = image.shape
        ctx.rows = rows
        ctx.save_for_backward(*comparison.saved)
        ctx.set_materialize_grads(False)
        return tuple(comparison.loss)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        saved = SavedImages(*ctx.saved_tensors)
        weights = gradient_weights(gradients, ctx.rows)
        gradient = ctx.kernels.differentiate(ctx.shape, ctx.rows, weights, saved)
        return gradient, None, None, None


def color_terms(
    image: Tensor,
    target: Tensor,
    weight: float,
    *,
    rows: slice | None = None,
    total_rows: int | None = None,
) -> ColorLoss:
    """Return the colour loss, mean absolute error and mean SSIM of an RGB image.

    The results of all strips of an image add up to those of the image.

    Args:
        image: Render. (H, W, 3), differentiable
        target: Image, without gradient. (H, W, 3), values 0 to 1
        weight: Of 1 - SSIM; the rest is that of L1.
        rows: Rows that count; the others are the halo of a strip, at most ``SSIM_HALO`` each side.
        total_rows: Rows of the whole image, to divide by; those that count when None.

    Raises:
        ValueError: The images are not RGB, or of different sizes.
    """
    counted = _counted_rows(image, target, weight, rows, total_rows)
    if image.dtype == torch.float32:
        kernels = _kernels(image.device)
        return ColorLoss(*FusedPhotometric.apply(image, target.float(), counted, kernels))
    top = counted.top
    end = counted.end
    similarity = ssim_reference.ssim_map_reference(image, target)
    l1 = (image - target)[top:end].abs().sum() / counted.n_values
    ssim = similarity[top:end].sum() / counted.n_values
    return ColorLoss(weighted_color_loss(l1, ssim, weight, counted.share), l1, ssim)


def color_gradient(
    image: Tensor,
    target: Tensor,
    weight: float,
    *,
    rows: slice | None = None,
    total_rows: int | None = None,
) -> ColorGradient:
    """Return what :func:`color_terms` does, and the gradient of its loss by the image.

    Autograd has no part in it. Arguments are those of :func:`color_terms`, in float32.
    """
    counted = _counted_rows(image, target, weight, rows, total_rows)
    kernels = _kernels(image.device)
    comparison = kernels.compare(image.detach(), target.float(), counted, True)
    weights = loss_weights(counted, image.device)
    gradient = kernels.differentiate(image.shape, counted, weights, comparison.saved)
    return ColorGradient(comparison.loss, gradient)


def _kernels(device: torch.device) -> PhotometricKernels:
    return photometric_cpu if device.type == "cpu" else photometric_cuda


def _counted_rows(
    image: Tensor, target: Tensor, weight: float, rows: slice | None, total_rows: int | None
) -> CountedRows:
    """Check two images, and describe the rows that count; as of :func:`color_terms`."""
    if image.shape != target.shape or image.shape[-1] != 3:
        raise ValueError(f"images of shape {tuple(image.shape)} and {tuple(target.shape)}")
    if rows is None:
        rows = slice(None)
    top, end, _ = rows.indices(image.shape[0])
    n_rows = end - top if total_rows is None else total_rows
    return CountedRows(
        top=top,
        end=end,
        n_values=3 * image.shape[1] * n_rows,
        weight=weight,
        share=(end - top) / n_rows,
    )
