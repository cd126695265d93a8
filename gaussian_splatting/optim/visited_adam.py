# SPDX-License-Identifier: Apache-2.0
"""Adam with sparse gradients: each row counts its own steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BETAS = (0.9, 0.99)  # the second is short: a view is visited some hundred times
_EPSILON = 1e-15


def rate_at(rate: float, final_share: float, start: int, last: int, iteration: int) -> float:
    """Return the rate of an iteration: log-linear to ``final_share`` of ``rate`` at ``last``."""
    progress = (iteration - start) / max(1, last - start)
    return rate * final_share ** min(max(progress, 0.0), 1.0)


class VisitedAdam:
    """Moments and step counts of V rows of any shape (V, ...), and their collected gradient.

    Its owner adds to ``gradient`` while views are trained on and subtracts a multiple of
    :meth:`direction` from the values once a step.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.first = torch.zeros(*shape, dtype=dtype, device=device)
        self.second = torch.zeros(*shape, dtype=dtype, device=device)
        self.steps = torch.zeros(shape[0], dtype=dtype, device=device)
        self.gradient = torch.zeros(*shape, dtype=dtype, device=device)

    def direction(self) -> Tensor:
        """Consume the gradient; return what to subtract per unit of learning rate. (V, ...)"""
        row_shape = (-1,) + (1,) * (self.gradient.dim() - 1)
        has_gradient = self.gradient.flatten(1).abs().sum(dim=1) > 0
        self.steps += has_gradient
        n_steps = self.steps.clamp_min(1).view(row_shape)
        has_gradient = has_gradient.view(row_shape)
        first = self.first.lerp(self.gradient, 1 - BETAS[0])
        second = self.second.lerp(self.gradient.square(), 1 - BETAS[1])
        self.first = torch.where(has_gradient, first, self.first)
        self.second = torch.where(has_gradient, second, self.second)
        self.gradient.zero_()
        deviation = (second / (1 - BETAS[1] ** n_steps)).sqrt() + _EPSILON
        direction = first / (1 - BETAS[0] ** n_steps) / deviation
        return torch.where(has_gradient, direction, 0.0)
