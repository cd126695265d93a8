# SPDX-License-Identifier: Apache-2.0
"""Adam over named parameter groups: their gradients, and its step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace as with_fields
from typing import NamedTuple

import torch
from torch import Tensor

from gaussian_splatting.core import color_gradients
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.color_gradients import ColorGradient
from gaussian_splatting.core.random import derive_seed
from gaussian_splatting.core.spherical_harmonics import SH_C0
from gaussian_splatting.optim.adam_state import BANDS, AdamState
from gaussian_splatting.optim.adam_steps import (
    ParameterState,
    StepInputs,
    Stepped,
    in_one_launch,
    step_alone,
    step_numbers,
    step_together,
)
from gaussian_splatting.optim.band_steps import step_bands
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.rasterization.coefficient_gradients import coefficient_gradients
from sugar_utils.device import upload

BASE = "sh_dc"  # colours of band 0


class Gradients(NamedTuple):
    """All gradients of a step that were taken from the parameters."""

    dense: dict[str, Tensor]  # by parameter
    of_colors: tuple[ColorGradient, ...]  # of ``sh_dc`` and ``sh_rest``, as factors
    unused: frozenset[str]  # parameters that step as with a gradient of zeros


class GroupedAdam(AdamState):
    """Adam with one parameter group per named tensor, betas (0.9, 0.999), eps 1e-15.

    Attributes:
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
        super().__init__(tensors, learning_rates, config)
        self._seed = seed
        self._unused: set[str] = set()
        self.color_gradients: list[ColorGradient] = []
        self._may_always: Tensor | None = None  # true, on the device. (1,) bool
        self.is_made = False
        self._last_stepped: list[str] = []

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

    def mark_unused(self, name: str) -> None:
        """Let a parameter that acts on nothing step as with a gradient of zeros."""
        self._unused.add(name)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient or is unused, then drop the gradients."""
        names = self.stepping()
        with_gradients = [name for name in names if self._has_gradient(name)]
        may_wait = self.steps_by_factors()
        if not self.is_made:
            self.make_moments(names)
            self.update(names, self.next_inputs() if in_one_launch(self.device) else None)
        self._count(names, 1)
        if may_wait and self._late is not None:
            self._late.count_step()
        for name in with_gradients:
            self.groups[name].moved = True
        self.zero_grad()

    def steps_by_factors(self) -> bool:
        """Whether the bands have the gradient of one view, as factors, and no other."""
        return len(self.color_gradients) == 1 and self.leaves[BANDS].grad is None

    def uncount_step(self) -> None:
        """Forget the last step, which changed nothing on the device."""
        self._count(self._last_stepped, -1)

    def _count(self, names: list[str], steps: int) -> None:
        self._last_stepped = names
        for name in names:
            self.groups[name].steps += steps

    def stepping(self) -> list[str]:
        """Names of the parameters that the next step concerns."""
        return [n for n in self.leaves if self._has_gradient(n) or n in self._unused]

    def next_numbers(self) -> Tensor:
        """Rates and counts of the next step, a row for each parameter; see ``step_numbers``."""
        steps = []
        for name, group in self.groups.items():
            steps.append((group.rate, group.steps + 1, self._rounding_seed(name)))
        return step_numbers(steps)

    def next_inputs(self) -> StepInputs:
        """Send :meth:`next_numbers` to the device."""
        if self._may_always is None:
            self._may_always = torch.ones(1, dtype=torch.bool, device=self.device)
        return StepInputs(upload(self.next_numbers(), self.device), self._may_always)

    def update(self, names: Sequence[str], inputs: StepInputs | None) -> None:
        """Change values and moments, and drop the gradients; see :meth:`next_inputs`."""
        if not self.steps_by_factors():
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
        by_factors = self.steps_by_factors()
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

    def _has_gradient(self, name: str) -> bool:
        is_color = name in (BASE, BANDS)
        return self.leaves[name].grad is not None or (is_color and bool(self.color_gradients))

    def _gradient_to_step(self, name: str) -> Tensor | None:
        """The gradient of a parameter, zeros if it is unused; None if nothing changes by it."""
        parameter = self.leaves[name]
        if parameter.grad is not None:
            return parameter.grad
        if name not in self._unused or not self.groups[name].moved:
            # Stepped by factors already; or the moments and the gradient are zeros.
            return None
        return torch.zeros_like(parameter)

    def _next_state(self, name: str, inputs: StepInputs | None) -> ParameterState:
        """A parameter with the arguments of its next step."""
        group = self.groups[name]
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
        group = self.groups[name]
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

    def _swap(self, name: str, values: Tensor, moments: dict[str, Tensor]) -> None:
        """Replace the values of a parameter, which is not unused any more."""
        super()._swap(name, values, moments)
        self._unused.discard(name)
