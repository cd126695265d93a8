# SPDX-License-Identifier: Apache-2.0
"""Sums per Gaussian over the views between two rounds of densification."""

from __future__ import annotations

import torch
from torch import Tensor


class ViewSums:
    """Sums of (N, width) columns over views.

    The views of a step have a sum of their own first: the total depends on no order of processes.
    """

    def __init__(self, n: int, width: int, device: torch.device) -> None:
        self.total = torch.zeros(n, width, device=device)
        self._step: Tensor | None = None

    def add(self, columns: Tensor) -> None:
        """Add a view of this step. (N, width)"""
        if self._step is None:
            self._step = columns
        else:
            self._step.add_(columns)

    def statistics(self) -> tuple[Tensor, ...]:
        """Sums of this step, which the processes of a run add up before it is counted."""
        return () if self._step is None else (self._step,)

    def count_step(self) -> None:
        """Add the views of this step to the total."""
        if self._step is not None:
            self.total += self._step
            self._step = None

    def keep_rows(self, rows: Tensor) -> None:
        """Keep the rows of the Gaussians that stay in the model. (N,) bool"""
        self.total = self.total[rows]

    def restart(self, n: int) -> None:
        """Forget all sums; there are N Gaussians now."""
        self.total = self.total.new_zeros(n, self.total.shape[1])
