# SPDX-License-Identifier: Apache-2.0
"""Values and moments of named parameters, whose rows are added and removed together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.optim.adam_steps import ADAM_BETAS, ADAM_EPS, MOMENTS
from gaussian_splatting.optim.late_bands import LateBands
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.optim.row_storage import DeviceRows, HostRows, RowStorage

# Settings that torch.optim.Adam saves with each group, so that it can read our files.
_GROUP_SETTINGS = {
    "betas": ADAM_BETAS,
    "eps": ADAM_EPS,
    "weight_decay": 0,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": False,
}
BANDS = "sh_rest"  # colours of the bands above the first
_DEVICE_ROWS = DeviceRows()
_HOST_ROWS = HostRows()


@dataclass
class GroupState:
    """State of one parameter."""

    rate: float  # learning rate
    moment_dtype: torch.dtype
    storage: RowStorage = _DEVICE_ROWS
    steps: int = 0
    moments: dict[str, Tensor] | None = None  # by name, as ``value``; None before the first step
    moved: bool = False  # whether any step had a gradient


class AdamState:
    """What Adam keeps of its parameters: values, moments, rates, and numbers of steps.

    A model adds and removes rows through it, and files hold it in torch's format.

    Attributes:
        leaves: The parameters by name; steps of the bands above the first may be missing, where
            those lie on the host, see :mod:`gaussian_splatting.optim.late_bands`.
        groups: State of each parameter.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        learning_rates: Mapping[str, float],
        config: OptimizerConfig,
    ) -> None:
        self.config = config
        self.leaves: dict[str, Tensor] = {}
        self.groups: dict[str, GroupState] = {}
        for name, value in tensors.items():
            is_on_host = config.lies_on_host(name, tensors)
            storage = _HOST_ROWS if is_on_host else _DEVICE_ROWS
            copy = storage.copied(value, config.value_dtype(name), value.device)
            self.leaves[name] = copy.requires_grad_(True)
            self.groups[name] = GroupState(learning_rates[name], config.moment_dtype(name), storage)
        self._late: LateBands | None = None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name, up to date."""
        self.catch_up()
        return self.leaves

    @property
    def resident(self) -> dict[str, Tensor]:
        """The parameters that lie on the device, by name."""
        resident = {}
        for name, parameter in self.leaves.items():
            if not self._is_on_host(name):
                resident[name] = parameter
        return resident

    @property
    def late_bands(self) -> LateBands | None:
        """The bands whose steps wait; None where none may."""
        moments = self.groups[BANDS].moments if self._is_on_host(BANDS) else None
        if self._late is None and moments is not None:
            self._late = LateBands(self.leaves[BANDS], moments)
        return self._late

    def catch_up(self) -> None:
        """Make all steps that wait."""
        if self._late is not None:
            self._late.catch_up()

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates by parameter name."""
        return {name: group.rate for name, group in self.groups.items()}

    def set_learning_rate(self, name: str, value: float) -> None:
        """Change the learning rate of one parameter."""
        self.groups[name].rate = value

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments by parameter name, where there are any."""
        self.catch_up()
        moments = {}
        for name, group in self.groups.items():
            if group.moments is not None:
                moments[name] = group.moments
        return moments

    def has_moments(self, names: Sequence[str]) -> bool:
        """Whether parameters have moments, which their first step makes."""
        return all(self.groups[name].moments is not None for name in names)

    def moment_facts(self) -> list[Hashable]:
        """Return which parameters moved, where their moments lie, and which steps may wait."""
        facts: list[Hashable] = [self.late_bands]
        for group in self.groups.values():
            moments = group.moments or {}
            addresses = tuple(moment.data_ptr() for moment in moments.values())
            facts.append((group.moved, addresses))
        return facts

    def make_moments(self, names: Sequence[str]) -> None:
        """Make the moments of parameters that have none, of zeros."""
        for name in names:
            parameter = self.leaves[name]
            group = self.groups[name]
            if group.moments is None:
                group.moments = {}
                for moment in MOMENTS:
                    zeros = group.storage.zeros_like(parameter.detach(), group.moment_dtype)
                    group.moments[moment] = zeros

    def keep_rows(self, keep: Tensor) -> None:
        """Keep the rows where ``keep`` is true, moments included. keep: (N,) bool"""
        for name, values in list(self.parameters.items()):
            group = self.groups[name]
            moments = group.moments or {}
            chosen = {n: group.storage.selected(moment, keep) for n, moment in moments.items()}
            self._swap(name, group.storage.selected(values, keep), chosen)

    def append_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Add rows with zero moments to every parameter."""
        parameters = self.parameters
        for name, new in rows.items():
            group = self.groups[name]
            longer = {}
            for moment_name, moment in (group.moments or {}).items():
                zeros = moment.new_zeros(new.shape)
                longer[moment_name] = group.storage.extended(moment, zeros)
            self._swap(name, group.storage.extended(parameters[name], new), longer)

    def replace(self, name: str, values: Tensor) -> None:
        """Give one parameter new values and zero moments."""
        self.catch_up()
        group = self.groups[name]
        copy = group.storage.copied(values, self.config.value_dtype(name), self.device)
        zeros = {}
        for moment_name in group.moments or {}:
            zeros[moment_name] = group.storage.zeros_like(copy, group.moment_dtype)
        self._swap(name, copy, zeros)

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state in torch's format, with one named group per tensor."""
        self.catch_up()
        state: dict[int, dict[str, Tensor]] = {}
        groups = []
        for index, (name, group) in enumerate(self.groups.items()):
            if group.moments is not None:
                step = torch.tensor(float(group.steps), device="cpu")
                state[index] = {"step": step, **group.moments}
            groups.append({"lr": group.rate, "name": name, **_GROUP_SETTINGS, "params": [index]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state saved by :meth:`state_dict` (or by torch's Adam), in any number type.

        Raises:
            ValueError: Names or shapes are not those of the parameters.
        """
        names = [group.get("name") for group in state["param_groups"]]
        if names != list(self.leaves):
            raise ValueError(f"optimiser groups {names}, expected {list(self.leaves)}")
        self._late = None
        for index, (name, group) in enumerate(self.groups.items()):
            saved = state["state"].get(index)
            group.rate = state["param_groups"][index]["lr"]
            if saved is None:
                group.steps = 0
                group.moments = None
                group.moved = False
            else:
                group.steps = int(saved["step"])
                group.moments = self._moments_of(name, saved)
                group.moved = any(bool(moment.any()) for moment in group.moments.values())

    def _moments_of(self, name: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameter = self.leaves[name]
        for moment in MOMENTS:
            shape = tuple(saved[moment].shape)
            expected = tuple(parameter.shape)
            if shape != expected:
                raise ValueError(f"{moment} of {name} has shape {shape}, expected {expected}")
        group = self.groups[name]
        moments = {}
        for moment in MOMENTS:
            moments[moment] = group.storage.copied(
                saved[moment], group.moment_dtype, parameter.device
            )
        return moments

    def _swap(self, name: str, values: Tensor, moments: dict[str, Tensor]) -> None:
        """Replace the values of a parameter, and its moments if it has any."""
        group = self.groups[name]
        if group.moments is not None:
            group.moments = moments
        if self._is_on_host(name):
            # Of other rows; all steps were made.
            self._late = None
        self.leaves[name] = values.requires_grad_(True)

    def _is_on_host(self, name: str) -> bool:
        return name in self.groups and self.groups[name].storage is _HOST_ROWS

    @property
    def device(self) -> torch.device:
        """Device of all parameters."""
        return next(iter(self.leaves.values())).device
