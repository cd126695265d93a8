# SPDX-License-Identifier: Apache-2.0
"""Cutting an autograd graph, and sending gradients on through the cut.

Each loss term is differentiated down to the cut as soon as it is known, and its graph is freed.
The gradients add up in the leaves at the cut; the shared half runs backward once with their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sugar_utils.device import constants


def cut(tensor: Tensor) -> Tensor:
    """Return a leaf with the values of ``tensor`` that collects gradients for it."""
    return tensor.detach().requires_grad_(True)


def backpropagate_weighted(values: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Backpropagate the weighted sum of scalars; the sum itself is never formed."""
    factors = constants(tuple(map(float, weights)), values[0].device)
    gradients = [factor.to(value) for value, factor in zip(values, factors, strict=True)]
    torch.autograd.backward(list(values), gradients)
