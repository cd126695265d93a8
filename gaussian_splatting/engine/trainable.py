# SPDX-License-Identifier: Apache-2.0
"""Free Gaussians under optimisation, and their names in checkpoint files."""

from __future__ import annotations

from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
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


class TrainableCloud(TrainableModel):
    """A free Gaussian cloud under optimisation."""

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
        self._rates = rates
        self._extent = extent

    def __len__(self) -> int:
        return len(self.cloud)

    @property
    def cloud(self) -> GaussianCloud:
        """The current leaf parameters."""
        return GaussianCloud(**self.optimizer.parameters)

    def schedule_position_rate(self, iteration: float) -> None:
        """Set the position learning rate of an (unscaled) absolute iteration."""
        self.optimizer.set_learning_rate("means", self._rates.position(iteration, self._extent))

    def tensors_of(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of a free cloud."""
        return cloud_from_state(state).tensors()


def cloud_from_state(
    state: dict[str, Tensor], kind: str = "model of free Gaussians"
) -> GaussianCloud:
    """The Gaussians of a ``state_dict``.

    Args:
        state: Tensors by their names in files.
        kind: What it should be, for messages.

    Raises:
        UserError: If a tensor is missing or has another shape.
    """
    missing = [name for name in STATE_NAMES.values() if name not in state]
    if missing:
        raise UserError(f"the checkpoint lacks {', '.join(missing)}: not a {kind}")
    cloud = GaussianCloud(**{own: state[file].float() for own, file in STATE_NAMES.items()})
    n = len(cloud)
    shapes = {"means": (n, 3), "opacity_logits": (n, 1), "log_scales": (n, 3), "quats": (n, 4),
              "sh_dc": (n, 1, 3)}  # fmt: skip
    for name, shape in shapes.items():
        found = tuple(getattr(cloud, name).shape)
        if found != shape:
            raise UserError(
                f"the checkpoint's {STATE_NAMES[name]} has shape {found}, expected {shape}: "
                f"not a {kind}"
            )
    return cloud
