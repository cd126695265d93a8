# SPDX-License-Identifier: Apache-2.0
"""Adam over named parameter groups whose rows are added and removed, with their moments."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gaussian_splatting.core import color_gradients
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.color_gradients import ColorGradient
from gaussian_splatting.core.random import derive_seed
from gaussian_splatting.core.spherical_harmonics import SH_C0
from gaussian_splatting.optim.adam_steps import (
    ADAM_BETAS,
    ADAM_EPS,
    MOMENTS,
    ParameterState,
    StepInputs,
    Stepped,
    in_one_launch,
    step_alone,
    step_numbers,
    step_together,
)
from gaussian_splatting.optim.band_steps import step_bands
from gaussian_splatting.optim.late_bands import LateBands
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.optim.row_storage import DeviceRows, HostRows, RowStorage
from gaussian_splatting.rasterization.coefficient_gradients import coefficient_gradients
from sugar_utils.device import upload

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


BASE = "sh_dc"  # colours of band 0, and those of the bands above
BANDS = "sh_rest"
_DEVICE_ROWS = DeviceRows()
_HOST_ROWS = HostRows()


class Gradients(NamedTuple):
    """All gradients of a step that were taken from the parameters."""

    dense: dict[str, Tensor]  # by parameter
    of_colors: tuple[ColorGradient, ...]  # of ``sh_dc`` and ``sh_rest``, as factors
    unused: frozenset[str]  # parameters that step as with a gradient of zeros


@dataclass
class _Group:
    """State of one parameter."""

    rate: float  # learning rate
    moment_dtype: torch.dtype
    storage: RowStorage = _DEVICE_ROWS
    steps: int = 0
    moments: dict[str, Tensor] | None = None  # by name, as ``value``; None before the first step
    moved: bool = False  # whether any step had a gradient


class GroupedAdam:
    """Adam with one parameter group per named tensor, betas (0.9, 0.999), eps 1e-15.

    It owns the parameters, whose rows a model adds and removes through it.

    Attributes:
        leaves: The parameters by name; steps of the bands above the first may be missing, where
            those lie on the host, see :mod:`gaussian_splatting.optim.late_bands`.
        color_gradients: Where passes may leave the gradients of ``sh_dc`` and ``sh_rest`` as
            factors; they count as long as they stay here.
        is_made: Whether the next step was made with the pass, and has to be counted only.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        learning_rates: Mapping[str, float],
        config: OptimizerConfig = DEFAULT_OPTIMIZER,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.leaves: dict[str, Tensor] = {}
        self._groups: dict[str, _Group] = {}
        for name, value in tensors.items():
            is_on_host = config.lies_on_host(name, tensors)
            storage = _HOST_ROWS if is_on_host else _DEVICE_ROWS
            copy = storage.copied(value, config.value_dtype(name), value.device)
            self.leaves[name] = copy.requires_grad_(True)
            self._groups[name] = _Group(learning_rates[name], config.moment_dtype(name), storage)
        self._late: LateBands | None = None
        self._seed = seed
        self._unused: set[str] = set()
        self.color_gradients: list[ColorGradient] = []
        self._may_always: Tensor | None = None  # one, on the device. (1,) int32
        self.is_made = False

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
    def has_late_steps(self) -> bool:
        """Whether steps of bands may wait."""
        return self._is_on_host(BANDS)

    @property
    def late_bands(self) -> LateBands | None:
        """The bands whose steps wait; None where none may."""
        moments = self._groups[BANDS].moments if self.has_late_steps else None
        if self._late is None and moments is not None:
            self._late = LateBands(self.leaves[BANDS], moments)
        return self._late

    def catch_up(self) -> None:
        """Make all steps that wait."""
        if self._late is not None:
            self._late.catch_up()

    def collecting(self, gaussians: Gaussians, *, as_factors: bool) -> Gaussians:
        """Let a pass over activated Gaussians leave its gradients here.

        Those of colours may be factors where there are many Gaussians. Only such a pass may read
        colours that lack steps.
        """
        if not as_factors or len(gaussians) < color_gradients.MIN_FACTORED:
            self.catch_up()
            return gaussians
        return with_fields(
            gaussians, color_gradients=self.color_gradients, late_bands=self.late_bands
        )

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates by parameter name."""
        return {name: group.rate for name, group in self._groups.items()}

    def set_learning_rate(self, name: str, value: float) -> None:
        """Change the learning rate of one parameter."""
        self._groups[name].rate = value

    def mark_unused(self, name: str) -> None:
        """Let a parameter that acts on nothing step as with a gradient of zeros."""
        self._unused.add(name)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient or is unused, then drop the gradients."""
        names = self.stepping()
        with_gradients = [name for name in names if self._has_gradient(name)]
        if not self.is_made:
            self._make_moments(names)
            self.update(names, self.next_inputs() if in_one_launch(self._device) else None)
        for name in names:
            self._groups[name].steps += 1
        for name in with_gradients:
            self._groups[name].moved = True
        self.zero_grad()

    def stepping(self) -> list[str]:
        """Names of the parameters that the next step concerns."""
        return [n for n in self.leaves if self._has_gradient(n) or n in self._unused]

    def has_moments(self, names: Sequence[str]) -> bool:
        """Whether parameters have moments, which their first step makes."""
        return all(self._groups[name].moments is not None for name in names)

    def moment_facts(self) -> list[Hashable]:
        """Return which parameters moved, and where their moments lie."""
        facts: list[Hashable] = []
        for group in self._groups.values():
            moments = group.moments or {}
            addresses = tuple(moment.data_ptr() for moment in moments.values())
            facts.append((group.moved, addresses))
        return facts

    def next_inputs(self) -> StepInputs:
        """Rates and counts of the next step on the device, a row for each parameter."""
        steps = []
        for name, group in self._groups.items():
            steps.append((group.rate, group.steps + 1, self._rounding_seed(name)))
        if self._may_always is None:
            self._may_always = torch.ones(1, dtype=torch.int32, device=self._device)
        return StepInputs(upload(step_numbers(steps), self._device), self._may_always)

    def update(self, names: Sequence[str], inputs: StepInputs | None) -> None:
        """Change values and moments, and drop the gradients; see :meth:`next_inputs`."""
        if not self._steps_by_factors():
            self.catch_up()
        # First: the directions, in which the view saw the Gaussians, follow from their centres.
        self._use_color_gradients(inputs)
        fused: list[Stepped] = []
        for name in names:
            gradient = self._gradient_to_step(name)
            if gradient is None:
                continue
            stepped = Stepped(self._next_state(name, inputs), gradient)
            if in_one_launch(gradient.device) and not stepped.state.is_rounded:
                fused.append(stepped)
            else:
                step_alone(stepped)
            self.leaves[name].grad = None
        step_together(fused)

    def _use_color_gradients(self, inputs: StepInputs | None) -> None:
        """Step the bands by the factors of their gradient; form the gradient of the base colours.

        Where there are other gradients, too, those of the bands are formed and added to them.
        """
        by_factors = self._steps_by_factors()
        late = self.late_bands if by_factors else None
        for gradient in self.color_gradients:
            if late is not None:
                late.step(self._next_state(BANDS, inputs), gradient)
            elif by_factors:
                step_bands(self._next_state(BANDS, inputs), gradient)
            else:
                rows = slice(0, len(gradient.colors))
                bands = self.leaves[BANDS]
                self.add_gradients({BANDS: coefficient_gradients(gradient, rows, bands.detach())})
            self.add_gradients({BASE: (gradient.colors * SH_C0)[:, None]})
        self.color_gradients.clear()

    def _steps_by_factors(self) -> bool:
        """Whether the bands have the gradient of one view, as factors, and no other."""
        return len(self.color_gradients) == 1 and self.leaves[BANDS].grad is None

    def _is_on_host(self, name: str) -> bool:
        return name in self._groups and self._groups[name].storage is _HOST_ROWS

    @property
    def _device(self) -> torch.device:
        return next(iter(self.leaves.values())).device

    def _has_gradient(self, name: str) -> bool:
        is_color = name in (BASE, BANDS)
        return self.leaves[name].grad is not None or (is_color and bool(self.color_gradients))

    def _gradient_to_step(self, name: str) -> Tensor | None:
        """The gradient of a parameter, zeros if it is unused; None if nothing changes by it."""
        parameter = self.leaves[name]
        if parameter.grad is not None:
            return parameter.grad
        if name not in self._unused or not self._groups[name].moved:
            # Stepped by factors already; or the moments and the gradient are zeros.
            return None
        return torch.zeros_like(parameter)

    def _make_moments(self, names: Sequence[str]) -> None:
        for name in names:
            parameter = self.leaves[name]
            group = self._groups[name]
            if group.moments is None:
                group.moments = {}
                for moment in MOMENTS:
                    zeros = group.storage.zeros_like(parameter.detach(), group.moment_dtype)
                    group.moments[moment] = zeros

    def _next_state(self, name: str, inputs: StepInputs | None) -> ParameterState:
        """A parameter with the arguments of its next step."""
        group = self._groups[name]
        assert group.moments is not None, f"{name} has no moments"
        seed = 0
        on_device = None
        if inputs is None:
            seed = self._rounding_seed(name)
        else:
            row = list(self.leaves).index(name)
            on_device = inputs._replace(numbers=inputs.numbers[row])
        return ParameterState(
            value=self.leaves[name],
            moments=group.moments,
            rate=group.rate,
            count=group.steps + 1,
            seed=seed,
            on_device=on_device,
        )

    def _rounding_seed(self, name: str) -> int:
        """Seed of the next step's stochastic rounding; 0 for a parameter that is not rounded."""
        group = self._groups[name]
        types = {self.config.value_dtype(name), group.moment_dtype}
        if types == {torch.float32}:
            return 0
        return derive_seed(self._seed, "rounding", name, group.steps + 1)

    def zero_grad(self) -> None:
        """Drop all gradients, and forget which parameters were unused."""
        for parameter in self.leaves.values():
            parameter.grad = None
        self.color_gradients.clear()
        self._unused.clear()
        self.is_made = False

    def drop_gradients(self, names: Collection[str]) -> None:
        """Exclude parameters from the next step; colours only together with all others."""
        if self.leaves.keys() <= set(names):
            self.zero_grad()
            return
        for name in names:
            self.leaves[name].grad = None
            self._unused.discard(name)

    def put_gradients(self, gradients: Gradients) -> None:
        """Set gradients that were taken, in place of those that there are."""
        self.zero_grad()
        for name, gradient in gradients.dense.items():
            self.leaves[name].grad = gradient
        self.color_gradients += gradients.of_colors
        self._unused.update(gradients.unused)

    def take_gradients(self) -> Gradients:
        """Return all gradients, and drop them."""
        gradients = Gradients(
            self.gradients(), tuple(self.color_gradients), frozenset(self._unused)
        )
        self.zero_grad()
        return gradients

    def add_gradients(self, more: Mapping[str, Tensor]) -> None:
        """Add gradients by name, which must not be used afterwards."""
        for name, gradient in more.items():
            parameter = self.leaves[name]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad = parameter.grad.add_(gradient)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by parameter name, where there are any and none are factors."""
        gradients = {}
        for name, parameter in self.leaves.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        return gradients

    def gradients_to_check(self) -> dict[str, Tensor]:
        """Return tensors that are finite only if all gradients are, by parameter name."""
        tensors = self.gradients()
        for gradient in self.color_gradients:
            earlier = tensors.get(BASE)
            # A sum is finite only if its terms are.
            tensors[BASE] = (
                gradient.colors if earlier is None else gradient.colors + earlier.view(-1, 3)
            )
        return tensors

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments by parameter name, where there are any."""
        self.catch_up()
        moments = {}
        for name, group in self._groups.items():
            if group.moments is not None:
                moments[name] = group.moments
        return moments

    def keep_rows(self, keep: Tensor) -> None:
        """Keep the rows where ``keep`` is true, moments included. keep: (N,) bool"""
        for name, values in list(self.parameters.items()):
            group = self._groups[name]
            moments = group.moments or {}
            chosen = {n: group.storage.selected(moment, keep) for n, moment in moments.items()}
            self._swap(name, group.storage.selected(values, keep), chosen)

    def append_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Add rows with zero moments to every parameter."""
        parameters = self.parameters
        for name, new in rows.items():
            group = self._groups[name]
            longer = {}
            for moment_name, moment in (group.moments or {}).items():
                zeros = moment.new_zeros(new.shape)
                longer[moment_name] = group.storage.extended(moment, zeros)
            self._swap(name, group.storage.extended(parameters[name], new), longer)

    def replace(self, name: str, values: Tensor) -> None:
        """Give one parameter new values and zero moments."""
        self.catch_up()
        group = self._groups[name]
        copy = group.storage.copied(values, self.config.value_dtype(name), self._device)
        zeros = {}
        for moment_name in group.moments or {}:
            zeros[moment_name] = group.storage.zeros_like(copy, group.moment_dtype)
        self._swap(name, copy, zeros)

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state in torch's format, with one named group per tensor."""
        self.catch_up()
        state: dict[int, dict[str, Tensor]] = {}
        groups = []
        for index, (name, group) in enumerate(self._groups.items()):
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
        for index, (name, group) in enumerate(self._groups.items()):
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
        group = self._groups[name]
        moments = {}
        for moment in MOMENTS:
            moments[moment] = group.storage.copied(
                saved[moment], group.moment_dtype, parameter.device
            )
        return moments

    def _swap(self, name: str, values: Tensor, moments: dict[str, Tensor]) -> None:
        """Replace the values of a parameter, and its moments if it has any."""
        group = self._groups[name]
        if group.moments is not None:
            group.moments = moments
        if self._is_on_host(name):
            # Of other rows; all steps were made.
            self._late = None
        self.leaves[name] = values.requires_grad_(True)
        self._unused.discard(name)
