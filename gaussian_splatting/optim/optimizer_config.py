# SPDX-License-Identifier: Apache-2.0
"""How an optimiser stores what it keeps, which rows it steps, and after how many views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

StateFormat = Literal["fp32", "bf16", "8bit"]
STATE_FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16", "8bit")

BFLOAT16_VALUES = frozenset({"sh_rest"})
"""Parameters that stand 8 bits of mantissa: an error of 0.4 % in a colour's dependence on the
direction. Positions, sizes, rotations, opacities and base colours do not."""

MIN_BLOCK = 16
"""Least number of values that share a scale; with fewer the scale costs what 8 bits save."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Storage of values and moments.

    Attributes:
        state: Moments in float32, bfloat16, or 8 bits with one scale per Gaussian and parameter.
            8 bits serve parameters of at least 16 values per Gaussian (the bands 1 to 3 of the
            colours, three quarters of all values); the others are in bfloat16 then.
        bfloat16: Store bands 1 to 3 of the colours, their gradients and their moments in bfloat16.
        sparse: Step only the Gaussians that the views of the step show; values and moments of the
            others stay as they are.
        views_per_step: Views whose gradients are averaged in one step.
    """

    state: StateFormat = "fp32"
    bfloat16: bool = False
    sparse: bool = False
    views_per_step: int = 1

    def value_dtype(self, name: str) -> torch.dtype:
        """Type in which a parameter is stored."""
        return torch.bfloat16 if self._is_half(name) else torch.float32

    def state_format(self, name: str, width: int) -> StateFormat:
        """Format of a parameter's moments.

        Args:
            name: The parameter.
            width: Values per row.
        """
        if self.state == "8bit" and width < MIN_BLOCK:
            return "bf16"
        if self.state == "fp32" and self._is_half(name):
            return "bf16"
        return self.state

    def identity(self) -> dict[str, Any]:
        """The settings that are not the usual ones, by the names of their flags.

        What is usual is left out, so that runs of earlier versions can be continued.
        """
        values = {
            "optimizer_state": self.state,
            "use_bfloat16": self.bfloat16,
            "sparse_adam": self.sparse,
        }
        given = {name: value for name, value in values.items() if value not in ("fp32", False)}
        views = self.views_per_step
        return given if views == 1 else {**given, "views_per_step": views}

    def _is_half(self, name: str) -> bool:
        return self.bfloat16 and name in BFLOAT16_VALUES


DEFAULT_OPTIMIZER = OptimizerConfig()
