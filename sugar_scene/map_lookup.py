# SPDX-License-Identifier: Apache-2.0
"""Reading a map between its pixels, with a gradient that no order of additions can change.

Many samples fall on one pixel. Added as floats, in whatever order the threads of a GPU come to it,
their gradients differ from run to run in the last bits; as integers they do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BITS = 36
"""Of the largest gradient as an integer: 2^26 of them fit into 63 bits."""


def bilinear(values: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Read a map at points of the image, bilinearly, clamped at the border.

    Args:
        values: (H, W) float
        u: Columns in pixels, 0.5 in the middle of the first one. (S,)
        v: Rows likewise. (S,)

    Returns:
        (S,). Gradients reach the map, with the same bits in every run on every device, and the
        points, where they are not clamped.
    """
    height, width = values.shape
    x = (u - 0.5).clamp(0, width - 1)
    y = (v - 0.5).clamp(0, height - 1)
    # A point that is not a number reads NaN; its index must be one of the map all the same.
    left, top = x.detach().floor().nan_to_num(0.0), y.detach().floor().nan_to_num(0.0)
    a, b = x - left, y - top
    column, row = left.long(), top.long()
    right, below = (column + 1).clamp_max(width - 1), (row + 1).clamp_max(height - 1)
    corners = torch.stack([row * width, row * width, below * width, below * width])
    corners += torch.stack([column, right, column, right])
    weights = torch.stack([(1 - a) * (1 - b), a * (1 - b), (1 - a) * b, a * b])
    return (_Gather.apply(values.reshape(-1), corners) * weights).sum(dim=0)


class _Gather(torch.autograd.Function):
    """Elements of a vector, by index of any shape."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.n_values = values.shape[0]
        return values[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return ordered_sum(gradient.reshape(-1), index.reshape(-1), ctx.n_values), None


def ordered_sum(values: Tensor, index: Tensor, n_places: int) -> Tensor:
    """Add values to places, with the same bits for any order of additions.

    They are added as integers, multiples of 2^-36 of the power of two above the largest of them.

    Args:
        values: (M,) float, M at most 2^26
        index: Place of each. (M,) int64
        n_places: P.

    Returns:
        (P,) of the values' type; NaN if any value is not finite.
    """
    if values.numel() == 0:
        return values.new_zeros(n_places)
    largest = values.abs().max().double()
    scale = torch.exp2((_BITS - torch.frexp(largest).exponent).double())
    whole = (values.double() * scale).round().to(torch.int64)
    sums = torch.zeros(n_places, dtype=torch.int64, device=values.device)
    sums.index_add_(0, index, whole)
    result = sums.double() / scale
    return torch.where(largest.isfinite(), result, torch.nan).to(values.dtype)
