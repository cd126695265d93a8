# SPDX-License-Identifier: Apache-2.0
"""Cutting a graph in two, so that loss terms can be backpropagated one at a time.

All terms share the expensive first half (activation, rasterizer). Each is differentiated down to
the cut as soon as it is known and its own graph is freed; the gradients meet in the leaves at the
cut, and the shared half runs backward once with their sum. The result is that of one backward
pass over the sum of all terms, the peak memory that of the largest term.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sugar_utils.device import constants


def cut(tensor: Tensor) -> Tensor:
    """A leaf with the values of ``tensor`` that collects gradients for it."""
    return tensor.detach().requires_grad_(True)


def backpropagate_weighted(values: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Backpropagate the weighted sum of scalars, which nobody asks for itself.

    The weights are the gradients to begin with: no sum is formed, and none differentiated.
    """
    chosen = constants(tuple(map(float, weights)), values[0].device)
    torch.autograd.backward(list(values), [w.to(v) for v, w in zip(values, chosen, strict=True)])


def backward_through(tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Send the gradients collected by ``leaves`` on through the tensors they were cut from.

    A tensor that is its own leaf has its gradient already.
    """
    pairs = [
        (tensor, leaf.grad)
        for tensor, leaf in zip(tensors, leaves, strict=True)
        if leaf is not tensor and leaf.grad is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
