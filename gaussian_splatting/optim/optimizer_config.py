# SPDX-License-Identifier: Apache-2.0
"""How an optimiser stores what it keeps, and after how many views it steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from gaussian_splatting.shared_flags import optional_boolean
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_int
from sugar_utils.settings import flag
from sugar_utils.torchrun import Launch

StateFormat = Literal["fp32", "bf16"]
STATE_FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16")

BFLOAT16_VALUES = ("sh_rest",)
"""Endings of names of parameters that stand 8 bits of mantissa: an error of 0.4 % in a colour's
dependence on the direction. Positions, sizes, rotations, opacities and base colours do not."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Storage of values and moments; bfloat16 rounds stochastically."""

    optimizer_state: StateFormat = flag(
        "fp32",
        "Adam's moments in fp32 or bf16 (8 or 4 bytes per value), which is rounded stochastically",
        group="memory",
        choices=STATE_FORMATS,
    )
    use_bfloat16: bool = optional_boolean(
        False,
        "store colour bands 1 to 3, their gradients and moments in bfloat16; everything "
        "else, and all arithmetic, stays float32",
    )
    views_per_step: int = flag(
        1,
        "views whose gradients are averaged in one step, a multiple of the number of processes; "
        "unset: one for each process",
        group="run",
        parse=positive_int,
        unset=True,
    )

    @classmethod
    def from_flags(cls, **flags: Any) -> OptimizerConfig:
        """The settings for the processes that torchrun started."""
        size = Launch.read().size
        views = flags.setdefault("views_per_step", size)
        if views % size != 0:
            raise UserError(
                f"--views_per_step {views}: {size} processes cannot share them evenly; give a "
                f"multiple of {size}"
            )
        return cls(**flags)

    def value_dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if self._is_half(name) else torch.float32

    def moment_dtype(self, name: str) -> torch.dtype:
        half = self.optimizer_state == "bf16" or self._is_half(name)
        return torch.bfloat16 if half else torch.float32

    def identity(self) -> dict[str, Any]:
        """The settings that are not the usual ones, by the names of their flags."""
        values = {"optimizer_state": self.optimizer_state, "use_bfloat16": self.use_bfloat16}
        given = {name: value for name, value in values.items() if value not in ("fp32", False)}
        views = self.views_per_step
        return given if views == 1 else {**given, "views_per_step": views}

    def _is_half(self, name: str) -> bool:
        return self.use_bfloat16 and name.endswith(BFLOAT16_VALUES)


DEFAULT_OPTIMIZER = OptimizerConfig()


def fields_without(config: Any, *names: str) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name not in names}


def stage_identity(config: Any, *without: str) -> dict[str, Any]:
    """The settings of a stage that decide its result, as JSON values."""
    values = fields_without(config, "split", "optimizer", "exposure", *without)
    return {**values, **config.exposure.identity(), **config.optimizer.identity()}
