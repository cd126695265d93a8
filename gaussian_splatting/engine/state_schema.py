# SPDX-License-Identifier: Apache-2.0
"""Requirements on the tensors of a checkpoint, declared by those who read them.

:mod:`.checkpoint` checks what all checkpoints have in common. A model declares the shapes of its
tensors, and a component those of its state; :func:`payload_check` puts them together for a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

PayloadCheck = Callable[[Mapping[str, Any]], None]
"""Checks the payload of a checkpoint; raises ``ValueError`` with the fault."""

N = "N"
ANY = "any"


@dataclass(frozen=True)
class StateRule:
    """Requirements on a tensor in the state of a component; it may be missing."""

    name: str  # of the tensor, or what the names of several begin with
    shape: tuple[int | Literal["N", "any"], ...]  # ``N`` stands for the number of Gaussians
    is_rows: bool = False  # whether it holds rows of Gaussians, int32, instead of floats
    not_negative: bool = False
    needs: str | None = None  # name of a tensor that is there as well

    def check(self, name: str, tensor: Tensor, n_gaussians: int) -> None:
        """Raise ``ValueError`` where the tensor is not as declared."""
        expected = tuple(n_gaussians if size == N else size for size in self.shape)
        sizes = tuple(tensor.shape)
        fits = len(sizes) == len(expected) and all(
            want in (ANY, size) for want, size in zip(expected, sizes, strict=True)
        )
        if not fits:
            raise ValueError(f"{name} of the stage has shape {sizes}, expected {expected}")
        if not self.is_rows and not tensor.is_floating_point():
            raise ValueError(f"{name} of the stage is a tensor of {tensor.dtype}")
        if self.is_rows and not _are_rows(tensor, n_gaussians):
            raise ValueError(f"{name} of the stage names other rows than {n_gaussians} Gaussians")
        if self.not_negative and bool((tensor < 0).any()):
            raise ValueError(f"{name} of the stage has negative values")


def payload_check(
    check_model: PayloadCheck, count: Callable[[Mapping[str, Any]], int], rules: Iterable[StateRule]
) -> PayloadCheck:
    """Combine the check of a model with that of the components beside it.

    Args:
        count: Number of Gaussians in a payload that ``check_model`` accepts.
    """
    rules = tuple(rules)

    def check(payload: Mapping[str, Any]) -> None:
        check_model(payload)
        resume = payload.get("resume") or {}
        _check_state(resume.get("stage", {}), rules, count(payload))

    return check


def _check_state(state: Mapping[str, Tensor], rules: Iterable[StateRule], n_gaussians: int) -> None:
    for rule in rules:
        for name, tensor in state.items():
            if name == rule.name or (rule.name.endswith(" ") and name.startswith(rule.name)):
                rule.check(name, tensor, n_gaussians)
                if rule.needs is not None and rule.needs not in state:
                    raise ValueError(f"{name} of the stage is there without {rule.needs}")


def _are_rows(tensor: Tensor, n_gaussians: int) -> bool:
    if tensor.dtype != torch.int32 or not tensor.numel():
        return False
    return int(tensor.min()) >= 0 and int(tensor.max()) < n_gaussians
