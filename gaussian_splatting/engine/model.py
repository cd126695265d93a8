# SPDX-License-Identifier: Apache-2.0
"""What every stage optimises: named parameters, their optimiser, and their form in files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from gaussian_splatting.cloud import ANTIALIASED, GaussianCloud, finite_logits
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from sugar_utils.errors import UserError

SHOWN_VALUES = {"opacity": torch.sigmoid, "scales": torch.exp}
"""What makes the values to show of those parameters that are stored otherwise."""

STATE_NAMES = {
    "means": "_points",
    "opacity_logits": "all_densities",
    "log_scales": "_scales",
    "quats": "_quaternions",
    "sh_dc": "_sh_coordinates_dc",
    "sh_rest": "_sh_coordinates_rest",
}
"""Attribute to name in a state dict, in the order of the file."""
GROUP_NAMES = {
    name: STATE_NAMES[name].removeprefix("_")
    for name in ("means", "sh_dc", "sh_rest", "opacity_logits", "log_scales", "quats")
}
"""Attribute to name of the optimiser group, in the order of the file."""


class TrainableModel(ABC):
    state_names: ClassVar[dict[str, str]]
    """Parameter to name in a state dict, in the order of the file."""

    group_names: ClassVar[dict[str, str]]
    """Parameter to name of the optimiser group, in the order of the file."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        rates: Mapping[str, float],
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        seed: int = 0,
    ) -> None:
        """Start optimising copies of ``tensors`` with zero moments."""
        self._seed = seed
        self.optimizer = GroupedAdam(tensors, rates, optimizer, seed)

    @abstractmethod
    def __len__(self) -> int:
        """Number of Gaussians."""

    @abstractmethod
    def tensors_of(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of a ``state_dict``, checked."""

    def buffers(self) -> dict[str, Tensor]:
        """Tensors that files hold before the parameters but that are not optimised."""
        return {}

    @property
    def device(self) -> torch.device:
        return next(iter(self.optimizer.parameters.values())).device

    def distributions(self) -> dict[str, Tensor]:
        """Parameters themselves, not converted copies, by the name of what histograms show."""
        values = {name: p.detach() for name, p in self.optimizer.parameters.items()}
        values["opacity"] = values.pop("opacity_logits")
        values["scales"] = values.pop("log_scales")
        return values

    def state(self) -> dict[str, Any]:
        """``state_dict`` and ``optimizer_state_dict`` as files hold them, parameters as float32."""
        optimizer_state = self.optimizer.state_dict()
        for group in optimizer_state["param_groups"]:
            group["name"] = self.group_names[group["name"]]
        parameters = self.optimizer.parameters
        own = {file: in_float32(parameters[name]) for name, file in self.state_names.items()}
        return {"state_dict": {**self.buffers(), **own}, "optimizer_state_dict": optimizer_state}

    def restore(self, payload: dict[str, Any]) -> None:
        device = self.device
        rates = self.optimizer.learning_rates()
        config = self.optimizer.config
        tensors = self.tensors_of(payload["state_dict"])
        self.optimizer = GroupedAdam(
            {n: tensors[n].to(device) for n in self.group_names}, rates, config, self._seed
        )
        own_names = {file: own for own, file in self.group_names.items()}
        saved = payload["optimizer_state_dict"]
        groups = [
            {**group, "name": own_names.get(group["name"], group["name"])}
            for group in saved.get("param_groups", ())
        ]
        try:
            self.optimizer.load_state_dict({"state": saved.get("state"), "param_groups": groups})
        except (ValueError, KeyError) as error:
            raise UserError(f"the checkpoint's optimiser state does not fit: {error}") from error
        # Saved groups bring the rates they were saved with; the flags of this run count.
        for name, rate in rates.items():
            self.optimizer.set_learning_rate(name, rate)


def in_float32(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    return values if values.dtype == torch.float32 else values.cpu().float()


class TrainableCloud(TrainableModel):
    state_names = STATE_NAMES
    group_names = GROUP_NAMES

    def __init__(
        self,
        cloud: GaussianCloud,
        rates: LearningRates,
        extent: float,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        seed: int = 0,
    ) -> None:
        """Start optimising a copy of ``cloud``; ``extent`` scales the position rate."""
        super().__init__(cloud.detached().tensors(), rates.by_name(0, extent), optimizer, seed)
        self._antialiased = cloud.antialiased
        self._rates = rates
        self._extent = extent

    def __len__(self) -> int:
        return len(self.cloud)

    @property
    def cloud(self) -> GaussianCloud:
        return GaussianCloud(**self.optimizer.parameters, antialiased=self._antialiased)

    def state(self) -> dict[str, Any]:
        """The state of every model, with a key beside the parameters if it is antialiased."""
        antialiased = {ANTIALIASED: True} if self._antialiased else {}
        return {**super().state(), **antialiased}

    def schedule_position_rate(self, iteration: float) -> None:
        self.optimizer.set_learning_rate("means", self._rates.position(iteration, self._extent))

    def tensors_of(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return cloud_from_state(state).tensors()


def cloud_from_state(
    state: dict[str, Tensor], kind: str = "model of free Gaussians"
) -> GaussianCloud:
    missing = [name for name in STATE_NAMES.values() if name not in state]
    if missing:
        raise UserError(f"the checkpoint lacks {', '.join(missing)}: not a {kind}")
    tensors = {own: state[file].float() for own, file in STATE_NAMES.items()}
    tensors["opacity_logits"] = finite_logits(tensors["opacity_logits"])
    cloud = GaussianCloud(**tensors, antialiased=ANTIALIASED in state)
    shapes = {
        "means": (3,),
        "opacity_logits": (1,),
        "log_scales": (3,),
        "quats": (4,),
        "sh_dc": (1, 3),
    }
    for name, width in shapes.items():
        found = tuple(getattr(cloud, name).shape)
        shape = (len(cloud), *width)
        if found != shape:
            raise UserError(
                f"the checkpoint's {STATE_NAMES[name]} has shape {found}, expected {shape}: "
                f"not a {kind}"
            )
    return cloud
