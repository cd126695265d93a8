# SPDX-License-Identifier: Apache-2.0
"""How an optimiser stores what it keeps, which rows it steps, and after how many views."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from gaussian_splatting.shared_flags import optional_boolean
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_int
from sugar_utils.settings import flag
from sugar_utils.torchrun import Launch

StateFormat = Literal["fp32", "bf16", "8bit"]
STATE_FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16", "8bit")

BFLOAT16_VALUES = ("sh_rest",)
"""Endings of names of parameters that stand 8 bits of mantissa: an error of 0.4 % in a colour's
dependence on the direction. Positions, sizes, rotations, opacities and base colours do not."""

MIN_BLOCK = 16  # fewest values that share a scale: below, it costs what 8 bits save


@dataclass(frozen=True)
class OptimizerConfig:
    """Storage of values and moments.

    Moments in 8 bits serve parameters of at least 16 values per Gaussian (the bands 1 to 3 of the
    colours, three quarters of all values); the others are in bfloat16 then. bfloat16 and 8 bits
    round stochastically.
    """

    optimizer_state: StateFormat = flag(
        "fp32", "Adam's moments in fp32, bf16 or 8bit (8, 4, about 2.5 bytes per value), rounded "
        "stochastically; 8bit acts on colour bands 1 to 3, the rest is bf16 then",
        group="memory", choices=STATE_FORMATS,
    )  # fmt: skip
    use_bfloat16: bool = optional_boolean(
        False, "store colour bands 1 to 3, their gradients and moments in bfloat16; everything "
        "else, and all arithmetic, stays float32",
    )  # fmt: skip
    sparse_adam: bool = optional_boolean(
        False, "step only the Gaussians that the views of a step show; values and moments of the "
        "others stay as they are",
    )  # fmt: skip
    views_per_step: int = flag(
        1, "views whose gradients are averaged in one step, a multiple of the number of processes; "
        "unset: one for each process", group="run", parse=positive_int, unset=True,
    )  # fmt: skip

    @classmethod
    def from_flags(cls, **flags: Any) -> OptimizerConfig:
        """The settings for the processes that torchrun started.

        Raises:
            UserError: The processes cannot share the views of a step evenly.
        """
        size = Launch.read().size
        views = flags.setdefault("views_per_step", size)
        if views % size != 0:
            raise UserError(
                f"--views_per_step {views}: {size} processes cannot share them evenly; give a "
                f"multiple of {size}"
            )
        return cls(**flags)

    def value_dtype(self, name: str) -> torch.dtype:
        """Type in which a parameter is stored."""
        return torch.bfloat16 if self._is_half(name) else torch.float32

    def state_format(self, name: str, width: int) -> StateFormat:
        """Format of a parameter's moments. width: values per row"""
        if self.optimizer_state == "8bit" and width < MIN_BLOCK:
            return "bf16"
        if self.optimizer_state == "fp32" and self._is_half(name):
            return "bf16"
        return self.optimizer_state

    def identity(self) -> dict[str, Any]:
        """The settings that are not the usual ones, by the names of their flags."""
        values = {
            "optimizer_state": self.optimizer_state,
            "use_bfloat16": self.use_bfloat16,
            "sparse_adam": self.sparse_adam,
        }
        given = {name: value for name, value in values.items() if value not in ("fp32", False)}
        views = self.views_per_step
        return given if views == 1 else {**given, "views_per_step": views}

    def _is_half(self, name: str) -> bool:
        return self.use_bfloat16 and name.endswith(BFLOAT16_VALUES)


DEFAULT_OPTIMIZER = OptimizerConfig()


def fields_without(config: Any, *names: str) -> dict[str, Any]:
    """All fields of a dataclass but these, as JSON values."""
    return {name: value for name, value in asdict(config).items() if name not in names}


def stage_identity(config: Any, *without: str) -> dict[str, Any]:
    """The settings of a stage that decide its result, as JSON values."""
    values = fields_without(config, "split", "optimizer", "exposure", *without)
    return {**values, **config.exposure.identity(), **config.optimizer.identity()}
