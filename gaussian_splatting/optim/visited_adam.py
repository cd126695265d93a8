# SPDX-License-Identifier: Apache-2.0
"""Adam on what is learned of each photograph, which a run shows once in an epoch.

Plain Adam would go on for a photograph that is not seen, by what it remembers, and forget how
large its gradients were. Here each row counts its own steps and stays where it is between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BETAS = (0.9, 0.99)
"""The second is short: a photograph is seen some hundred times."""

_EPSILON = 1e-15


def rate_at(rate: float, final_share: float, start: int, last: int, iteration: int) -> float:
    """Learning rate of an iteration: log-linear from ``rate`` at ``start`` to its share at the end.

    Args:
        rate: Learning rate to begin with.
        final_share: Share of it that is left at ``last``.
        start: Iteration up to which it does not fall.
        last: Last iteration of the run.
        iteration: The iteration.
    """
    progress = (iteration - start) / max(1, last - start)
    return rate * final_share ** min(max(progress, 0.0), 1.0)


class VisitedAdam:
    """Moments and counts of V rows of any shape, and the gradient of the step to come.

    Args:
        shape: (V, ...)
        dtype: Of the values.
        device: Where they are.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.first, self.second, self.steps = zeros(*shape), zeros(*shape), zeros(shape[0])
        self.gradient = zeros(*shape)

    def direction(self) -> Tensor:
        """Take the gradient: what to subtract of the rows, per unit of learning rate. (V, ...)

        Rows without a gradient get zeros. The gradient is zero afterwards.
        """
        wide = (-1,) + (1,) * (self.gradient.dim() - 1)
        seen = self.gradient.flatten(1).abs().sum(dim=1) > 0
        self.steps += seen
        n, seen = self.steps.clamp_min(1).view(wide), seen.view(wide)
        first = self.first.lerp(self.gradient, 1 - BETAS[0])
        second = self.second.lerp(self.gradient.square(), 1 - BETAS[1])
        self.first = torch.where(seen, first, self.first)
        self.second = torch.where(seen, second, self.second)
        self.gradient.zero_()
        unbiased = (second / (1 - BETAS[1] ** n)).sqrt() + _EPSILON
        return torch.where(seen, first / (1 - BETAS[0] ** n) / unbiased, 0.0)
