# SPDX-License-Identifier: Apache-2.0
"""Adam over named parameter groups whose rows come and go while training.

Adding and removing Gaussians has to change parameters and moments together; this is the only
place that does it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ADAM_EPS = 1e-15
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Implementation choices of this machine, not part of a checkpoint's meaning.
_PORTABLE = {"fused": None, "foreach": None}


class GroupedAdam:
    """One Adam parameter group per named tensor, betas (0.9, 0.999), eps 1e-15.

    Attributes:
        parameters: Current leaf tensors by name, in checkpoint order.
    """

    def __init__(self, tensors: Mapping[str, Tensor], learning_rates: Mapping[str, float]) -> None:
        """Start with zero moments.

        Args:
            tensors: Initial values; copied into new leaf tensors.
            learning_rates: Rate of each name.
        """
        self.parameters = {name: _leaf(value.clone()) for name, value in tensors.items()}
        groups = [
            {"params": [p], "lr": learning_rates[name], "name": name}
            for name, p in self.parameters.items()
        ]
        self._adam = torch.optim.Adam(groups, lr=0.0, eps=ADAM_EPS, fused=True)

    def learning_rates(self) -> dict[str, float]:
        """Current rate of each group."""
        return {group["name"]: group["lr"] for group in self._adam.param_groups}

    def set_learning_rate(self, name: str, value: float) -> None:
        """Change the rate of one group."""
        self._group(name)["lr"] = value

    def step(self) -> None:
        """Update every parameter that has a gradient, then drop the gradients."""
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._adam.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by parameter name, where there are any."""
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}

    def keep_rows(self, keep: Tensor) -> None:
        """Keep the rows where ``keep`` is true, moments included. keep: (N,) bool"""
        for name in self.parameters:
            self._swap(name, self.parameters[name].detach()[keep], lambda m: m[keep])

    def append_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Add rows with zero moments to every parameter."""
        for name, new in rows.items():
            old = self.parameters[name].detach()
            self._swap(
                name,
                torch.cat([old, new]),
                lambda m, new=new: torch.cat([m, torch.zeros_like(new)]),
            )

    def replace(self, name: str, values: Tensor) -> None:
        """Give one parameter new values and zero moments."""
        self._swap(name, values.detach().clone(), torch.zeros_like)

    def state_dict(self) -> dict:
        """Adam's state in torch's format, with one named group per tensor."""
        state = self._adam.state_dict()
        for group in state["param_groups"]:
            group.update(_PORTABLE)
        return state

    def load_state_dict(self, state: dict) -> None:
        """Restore a state saved by :meth:`state_dict` (or by the original SuGaR).

        Raises:
            ValueError: If the groups are not the ones of this optimiser.
        """
        names = [group.get("name") for group in state["param_groups"]]
        if names != list(self.parameters):
            raise ValueError(f"optimiser groups {names}, expected {list(self.parameters)}")
        groups = [
            {**saved, "fused": own["fused"], "foreach": own["foreach"]}
            for saved, own in zip(state["param_groups"], self._adam.param_groups, strict=True)
        ]
        self._adam.load_state_dict({"state": state["state"], "param_groups": groups})

    def _group(self, name: str) -> dict:
        return next(g for g in self._adam.param_groups if g["name"] == name)

    def _swap(self, name: str, values: Tensor, change_moment) -> None:
        """Put a new leaf in place of a parameter; its gradient is gone, its step count stays."""
        old, new = self.parameters[name], _leaf(values)
        state = self._adam.state.pop(old, None)
        if state:
            for moment in _MOMENTS:
                state[moment] = change_moment(state[moment]).contiguous()
            self._adam.state[new] = state
        self._group(name)["params"] = [new]
        self.parameters[name] = new


def _leaf(values: Tensor) -> Tensor:
    return values.detach().contiguous().requires_grad_(True)
