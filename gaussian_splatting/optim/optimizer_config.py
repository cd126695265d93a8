# SPDX-License-Identifier: Apache-2.0
"""Settings of the optimiser: storage of values and moments, and views per step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from gaussian_splatting.shared_flags import optional_boolean
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_int
from sugar_utils.settings import flag
from sugar_utils.torchrun import Launch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

StateFormat = Literal["fp32", "bf16"]
STATE_FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16")

BFLOAT16_VALUES = ("sh_rest",)
"""Endings of names of parameters for which 8 bits of mantissa are enough: an error of 0.4 % in the
view dependence of a colour. Positions, sizes, rotations, opacities and base colours need more."""


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

    # Whether colour bands 1 to 3 and their moments lie on the host; no bit depends on it.
    bands_on_host: bool = False

    @classmethod
    def from_flags(cls, **flags: Any) -> OptimizerConfig:
        """Return the settings for the processes that torchrun started.

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
        """Return the type in which a parameter is stored."""
        return torch.bfloat16 if self._is_half(name) else torch.float32

    def moment_dtype(self, name: str) -> torch.dtype:
        """Return the type in which a parameter's moments are stored."""
        half = self.optimizer_state == "bf16" or self._is_half(name)
        return torch.bfloat16 if half else torch.float32

    def lies_on_host(self, name: str, names: Collection[str]) -> bool:
        """Return whether a parameter among others lies on the host.

        Bands of Gaussians that are joined with those of a background do not: the joined ones lie on
        the device.
        """
        bands = [other for other in names if other.endswith(BFLOAT16_VALUES)]
        return self.bands_on_host and bands == [name]

    def identity(self) -> dict[str, object]:
        """Return the settings that differ from the defaults, by the names of their flags."""
        identity: dict[str, object] = {}
        if self.optimizer_state != "fp32":
            identity["optimizer_state"] = self.optimizer_state
        if self.use_bfloat16:
            identity["use_bfloat16"] = self.use_bfloat16
        if self.views_per_step != 1:
            identity["views_per_step"] = self.views_per_step
        return identity

    def _is_half(self, name: str) -> bool:
        return self.use_bfloat16 and name.endswith(BFLOAT16_VALUES)


DEFAULT_OPTIMIZER = OptimizerConfig()


def fields_without(config: DataclassInstance, *names: str) -> dict[str, Any]:
    """Return the fields of a dataclass, without some, as a dictionary."""
    return {name: value for name, value in asdict(config).items() if name not in names}


def stage_identity(config: Any, *without: str) -> dict[str, Any]:
    """Return the settings of a stage that decide its result, as JSON values."""
    values = fields_without(config, "split", "records", "optimizer", "exposure", *without)
    return {**values, **config.exposure.identity(), **config.optimizer.identity()}
