# SPDX-License-Identifier: Apache-2.0
"""Adam over named parameter groups whose rows come and go, with their moments, while training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam

from gaussian_splatting.optim.adam_kernels import (
    ADAM_BETAS,
    ADAM_EPS,
    MOMENTS,
    AdamStep,
    Stepped,
    in_one_launch,
    step_rounding,
    step_together,
)
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from sugar_utils.random import derive_seed

# What torch.optim.Adam writes of each group, so that it can read our files.
_GROUP_SETTINGS = {
    "betas": ADAM_BETAS, "eps": ADAM_EPS, "weight_decay": 0, "amsgrad": False,
    "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
    "fused": None, "decoupled_weight_decay": False,
}  # fmt: skip


@dataclass
class _Group:
    rate: float
    moment_dtype: torch.dtype
    steps: int = 0
    moments: dict[str, Tensor] | None = None  # by name, as ``value``; None before the first step
    moved: bool = False


class GroupedAdam:
    """One Adam parameter group per named tensor, betas (0.9, 0.999), eps 1e-15."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        learning_rates: Mapping[str, float],
        config: OptimizerConfig = DEFAULT_OPTIMIZER,
        seed: int = 0,
    ) -> None:
        """Start with zero moments."""
        self.config = config
        self.parameters = {
            name: _leaf(value.detach().to(config.value_dtype(name), copy=True))
            for name, value in tensors.items()
        }
        self._groups = {
            name: _Group(learning_rates[name], config.moment_dtype(name)) for name in tensors
        }
        self._seed = seed
        self._unused: set[str] = set()

    def learning_rates(self) -> dict[str, float]:
        return {name: group.rate for name, group in self._groups.items()}

    def set_learning_rate(self, name: str, value: float) -> None:
        self._groups[name].rate = value

    def mark_unused(self, name: str) -> None:
        """Say that a parameter acts on nothing: it steps as with a gradient of zeros."""
        self._unused.add(name)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient or is unused, then drop the gradients."""
        together: list[Stepped] = []
        for name, parameter in self.parameters.items():
            if parameter.grad is None and name not in self._unused:
                continue
            group = self._groups[name]
            group.steps += 1
            if group.moments is None:
                group.moments = {
                    m: torch.zeros_like(parameter, dtype=group.moment_dtype) for m in MOMENTS
                }
            if parameter.grad is None:
                if not group.moved:
                    # Zero moments and a gradient of zeros: only the count goes on.
                    continue
                parameter.grad = torch.zeros_like(parameter)
            group.moved = True
            seed = derive_seed(self._seed, "rounding", name, group.steps)
            step = AdamStep(group.rate, group.steps, seed)
            stepped = Stepped(parameter, parameter.grad, group.moments, step)
            if not stepped.is_float32:
                step_rounding(stepped)
            elif in_one_launch(parameter.device):
                together.append(stepped)
            else:
                _step_by_torch(stepped)
            parameter.grad = None
        step_together(together)
        self._unused.clear()

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self._unused.clear()

    def take_gradients(self) -> dict[str, Tensor]:
        """Gradients by parameter name, where there are any; the parameters have none then."""
        found = self.gradients()
        self.zero_grad()
        return found

    def add_gradients(self, more: Mapping[str, Tensor]) -> None:
        """Add what :meth:`take_gradients` took; it must not be used afterwards."""
        for name, gradient in more.items():
            own = self.parameters[name].grad
            self.parameters[name].grad = gradient if own is None else own.add_(gradient)

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Stored moments by parameter name, for those that made a step."""
        return {n: g.moments for n, g in self._groups.items() if g.moments is not None}

    def keep_rows(self, keep: Tensor) -> None:
        """Keep the rows where ``keep`` is true, moments included. keep: (N,) bool"""
        for name in self.parameters:
            self._swap(name, self.parameters[name].detach()[keep], lambda m: m[keep])

    def append_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Add rows with zero moments to every parameter."""
        for name, new in rows.items():
            old, n = self.parameters[name].detach(), new.shape[0]
            values = torch.cat([old, new.to(old.dtype)])
            self._swap(name, values, lambda m, n=n: torch.cat([m, m.new_zeros(n, *m.shape[1:])]))

    def replace(self, name: str, values: Tensor) -> None:
        """Give one parameter new values and zero moments."""
        dtype = self.config.value_dtype(name)
        self._swap(name, values.detach().to(dtype, copy=True), torch.zeros_like)

    def state_dict(self) -> dict:
        """Adam's state in torch's format, with one named group per tensor."""
        state, groups = {}, []
        for index, (name, group) in enumerate(self._groups.items()):
            if group.moments is not None:
                step = torch.tensor(float(group.steps), device="cpu")
                state[index] = {"step": step, **group.moments}
            groups.append({"lr": group.rate, "name": name, **_GROUP_SETTINGS, "params": [index]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: dict) -> None:
        """Restore a state saved by :meth:`state_dict` (or by torch's Adam), in any format."""
        names = [group.get("name") for group in state["param_groups"]]
        if names != list(self.parameters):
            raise ValueError(f"optimiser groups {names}, expected {list(self.parameters)}")
        for index, (name, group) in enumerate(self._groups.items()):
            saved = state["state"].get(index)
            group.rate = state["param_groups"][index]["lr"]
            group.steps = 0 if saved is None else int(saved["step"])
            group.moments = None if saved is None else self._moments_of(name, saved)
            group.moved = any(bool(m.any()) for m in (group.moments or {}).values())

    def _moments_of(self, name: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameter = self.parameters[name]
        for moment in MOMENTS:
            found, expected = tuple(saved[moment].shape), tuple(parameter.shape)
            if found != expected:
                raise ValueError(f"{moment} of {name} has shape {found}, expected {expected}")
        dtype = self._groups[name].moment_dtype
        return {m: saved[m].to(parameter.device, dtype).contiguous() for m in MOMENTS}

    def _swap(self, name: str, values: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        group = self._groups[name]
        if group.moments is not None:
            group.moments = {n: change(m).contiguous() for n, m in group.moments.items()}
        self.parameters[name] = _leaf(values)
        self._unused.discard(name)


def _leaf(values: Tensor) -> Tensor:
    return values.detach().contiguous().requires_grad_(True)


def _step_by_torch(parameter: Stepped) -> None:
    """The fused kernel of torch; it counts the steps itself, and takes gradients for gapless."""
    value, moments, step = parameter.value, parameter.moments, parameter.step
    before = torch.full((), step.count - 1.0, device=value.device)
    adam(
        [value], [parameter.gradient.contiguous()], [moments["exp_avg"]], [moments["exp_avg_sq"]],
        [], [before], fused=True, amsgrad=False, beta1=ADAM_BETAS[0], beta2=ADAM_BETAS[1],
        lr=step.rate, weight_decay=0.0, eps=ADAM_EPS, maximize=False,
    )  # fmt: skip
