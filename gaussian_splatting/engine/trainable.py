# SPDX-License-Identifier: Apache-2.0
"""Gaussians under optimisation and their form in checkpoint files.

The names in files are those of SuGaR's ``.pt`` files, so that its tools can read ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.optimizer import GroupedAdam
from gaussian_splatting.schedule import LearningRates
from sugar_utils.errors import UserError

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
    "means": "points",
    "sh_dc": "sh_coordinates_dc",
    "sh_rest": "sh_coordinates_rest",
    "opacity_logits": "all_densities",
    "log_scales": "scales",
    "quats": "quaternions",
}
"""Attribute to name of the optimiser group, in the order of the file."""


class TrainableCloud:
    """A Gaussian cloud whose parameters an optimiser owns.

    Attributes:
        optimizer: Adam with one group per parameter.
    """

    def __init__(self, cloud: GaussianCloud, rates: LearningRates, extent: float) -> None:
        """Start optimising a copy of ``cloud``; ``extent`` scales the position rate."""
        self._rates = rates
        self._extent = extent
        self.optimizer = GroupedAdam(cloud.detached().tensors(), rates.by_name(0, extent))

    @property
    def cloud(self) -> GaussianCloud:
        """The current leaf parameters."""
        return GaussianCloud(**self.optimizer.parameters)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.optimizer.parameters["means"].device

    def __len__(self) -> int:
        return len(self.cloud)

    def schedule_position_rate(self, iteration: float) -> None:
        """Set the position learning rate of an (unscaled) absolute iteration."""
        self.optimizer.set_learning_rate("means", self._rates.position(iteration, self._extent))

    def state(self) -> dict[str, Any]:
        """``state_dict`` and ``optimizer_state_dict`` as files hold them."""
        optimizer_state = self.optimizer.state_dict()
        for group in optimizer_state["param_groups"]:
            group["name"] = GROUP_NAMES[group["name"]]
        parameters = self.optimizer.parameters
        return {
            "state_dict": {file: parameters[own].detach() for own, file in STATE_NAMES.items()},
            "optimizer_state_dict": optimizer_state,
        }

    def restore(self, payload: dict[str, Any]) -> None:
        """Take parameters, moments and step counts from a checkpoint.

        Raises:
            UserError: If the checkpoint is not of a free Gaussian cloud.
        """
        cloud = cloud_from_state(payload["state_dict"]).to(self.device)
        rates = self.optimizer.learning_rates()
        self.optimizer = GroupedAdam(cloud.tensors(), rates)
        own_names = {file: own for own, file in GROUP_NAMES.items()}
        saved = payload["optimizer_state_dict"]
        groups = [
            {**group, "name": own_names.get(group["name"], group["name"])}
            for group in saved["param_groups"]
        ]
        try:
            self.optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
        except (ValueError, KeyError) as error:
            raise UserError(f"the checkpoint's optimiser state does not fit: {error}") from error
        # Saved groups bring the rates they were saved with; the flags of this run count.
        for name, rate in rates.items():
            self.optimizer.set_learning_rate(name, rate)


def cloud_from_state(state: dict[str, Tensor]) -> GaussianCloud:
    """The Gaussians of a ``state_dict``.

    Raises:
        UserError: If a tensor is missing or has another shape.
    """
    missing = [name for name in STATE_NAMES.values() if name not in state]
    if missing:
        raise UserError(f"the checkpoint lacks {', '.join(missing)}: not a coarse SuGaR model")
    cloud = GaussianCloud(**{own: state[file].float() for own, file in STATE_NAMES.items()})
    n = len(cloud)
    shapes = {"means": (n, 3), "opacity_logits": (n, 1), "log_scales": (n, 3), "quats": (n, 4),
              "sh_dc": (n, 1, 3)}  # fmt: skip
    for name, shape in shapes.items():
        found = tuple(getattr(cloud, name).shape)
        if found != shape:
            raise UserError(
                f"the checkpoint's {STATE_NAMES[name]} has shape {found}, expected {shape}: "
                "not a coarse SuGaR model"
            )
    return cloud
