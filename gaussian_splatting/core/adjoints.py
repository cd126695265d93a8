# SPDX-License-Identifier: Apache-2.0
"""Gradients computed outside of autograd, accumulated into leaves or passed into graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send_back(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to leaves, and backpropagate the others through their graphs.

    Autograd would do the same, at the cost of one more launch for each leaf.

    Args:
        tensors: Those that need no gradient are passed over.
        gradients: None for a tensor without one; they must not be used afterwards.
    """
    reached: list[Tensor] = []
    gradients_of_reached: list[Tensor] = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is None or not tensor.requires_grad:
            continue
        gradient = gradient.to(tensor.dtype)
        if not tensor.is_leaf:
            reached.append(tensor)
            gradients_of_reached.append(gradient)
        elif tensor.grad is None:
            tensor.grad = gradient
        else:
            tensor.grad += gradient
    if reached:
        torch.autograd.backward(reached, gradients_of_reached)
