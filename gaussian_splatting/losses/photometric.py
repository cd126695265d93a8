# SPDX-License-Identifier: Apache-2.0
"""L1 and SSIM between a render and a photograph, fused: the colour loss of 3DGS.

One pass over the rows gives L1, SSIM and everything the backward pass needs: in native code on the
CPU, in kernels for any device on a GPU. :mod:`.losses.ssim_reference` is the twin in tests and the
path of other types than float32.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from gaussian_splatting.losses import photometric_cpu, photometric_cuda, ssim_reference

DSSIM_WEIGHT = 0.2
SSIM_HALO = ssim_reference.WINDOW_SIZE // 2  # rows on each side that the SSIM of a row depends on


class FusedPhotometric(torch.autograd.Function):
    """Image, target, rows that count, divisor, weight and share of the colour loss, kernels -> the
    loss, L1 and SSIM."""

    @staticmethod
    def forward(
        ctx,
        image: Tensor,
        target: Tensor,
        rows: slice,
        n_values: int,
        weight: float,
        share: float,
        kernels: ModuleType,
    ):
        keep = ctx.needs_input_grad[0]
        factors = (n_values, weight, share)
        losses, kept = kernels.compare(image.detach(), target, rows, keep, *factors)
        ctx.kernels = kernels
        ctx.where = (image.shape, rows)
        ctx.factors = (weight, n_values)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        return losses

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        weights = ssim_reference.gradient_weights(gradients, *ctx.factors)
        gradient = ctx.kernels.differentiate(*ctx.where, weights, *ctx.saved_tensors)
        return (gradient, *[None] * 6)


def color_terms(
    image: Tensor,
    target: Tensor,
    weight: float,
    *,
    rows: slice | None = None,
    total_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Colour loss, mean absolute error and mean SSIM of an RGB image.

    Args:
        image: Render. (H, W, 3), differentiable
        target: Photograph, without gradient. (H, W, 3), values 0 to 1
        weight: Of 1 - SSIM; the rest is that of L1.
        rows: Rows that count; the others are the halo of a strip, at most ``SSIM_HALO`` each side.
        total_rows: Rows of the whole image, to divide by; those that count when None.

    Returns:
        ``(loss, l1, ssim)`` scalars. Those of all strips of an image add up to those of the image.
    """
    if image.shape != target.shape or image.shape[-1] != 3:
        raise ValueError(f"images of shape {tuple(image.shape)} and {tuple(target.shape)}")
    top, end, _ = (rows or slice(None)).indices(image.shape[0])
    n_rows = end - top if total_rows is None else total_rows
    n_values = 3 * image.shape[1] * n_rows
    share = (end - top) / n_rows
    if image.dtype == torch.float32:
        kernels = photometric_cpu if image.device.type == "cpu" else photometric_cuda
        factors = n_values, weight, share
        return FusedPhotometric.apply(image, target.float(), slice(top, end), *factors, kernels)
    l1 = (image - target)[top:end].abs().sum() / n_values
    ssim = ssim_reference.ssim_map_reference(image, target)[top:end].sum() / n_values
    return ssim_reference.weighted_color_loss(l1, ssim, weight, share), l1, ssim
