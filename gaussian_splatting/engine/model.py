# SPDX-License-Identifier: Apache-2.0
"""Trainable models of stages: named parameters, their optimiser, and their form in files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from gaussian_splatting.core.cloud import (
    ANTIALIASED,
    CUTOFF,
    NO_CUTOFF,
    GaussianCloud,
    Gaussians,
    finite_logits,
)
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from sugar_utils.errors import UserError

SHOWN_VALUES = {"opacity": torch.sigmoid, "scales": torch.exp}
"""Activations of parameters that are stored before activation, for logs."""

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


_BANDS = (0, 3, 8, 15)  # coefficients of spherical harmonics beyond the first, by degree


class TrainableModel(ABC):
    """Named parameters with their optimiser, and their form in files.

    A stage owns one. Parameters are leaves whose gradients the views of a step add up.
    """

    state_names: ClassVar[dict[str, str]]
    """Parameter to name in a state dict, in the order of the file."""

    group_names: dict[str, str]
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
    def activate(self) -> Gaussians:
        """The Gaussians as they are rendered; gradients reach the parameters."""

    @abstractmethod
    def tensors_of(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of a ``state_dict``, checked."""

    def buffers(self) -> dict[str, Tensor]:
        """Tensors that files hold before the parameters but that are not optimised."""
        return {}

    @property
    def device(self) -> torch.device:
        """Device of all parameters."""
        return next(iter(self.optimizer.leaves.values())).device

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
        state = self.buffers()
        for name, file_name in self.state_names.items():
            state[file_name] = in_float32(parameters[name])
        return {"state_dict": state, "optimizer_state_dict": optimizer_state}

    def restore(self, payload: dict[str, Any]) -> None:
        """Restore :meth:`state`; learning rates stay those of this run.

        Raises:
            UserError: It is the state of another model.
        """
        device = self.device
        rates = self.optimizer.learning_rates()
        config = self.optimizer.config
        tensors = self.tensors_of(payload["state_dict"])
        self.optimizer = GroupedAdam(
            {n: tensors[n].to(device) for n in self.group_names}, rates, config, self._seed
        )
        names = {file_name: name for name, file_name in self.group_names.items()}
        saved = payload["optimizer_state_dict"]
        groups = []
        for group in saved.get("param_groups", ()):
            groups.append({**group, "name": names.get(group["name"], group["name"])})
        try:
            self.optimizer.load_state_dict({"state": saved.get("state"), "param_groups": groups})
        except (ValueError, KeyError) as error:
            raise UserError(f"the checkpoint's optimiser state does not fit: {error}") from error
        # Saved groups bring the rates they were saved with; the flags of this run count.
        for name, rate in rates.items():
            self.optimizer.set_learning_rate(name, rate)


def in_float32(parameter: Tensor) -> Tensor:
    """The values of a parameter in float32, without a gradient."""
    values = parameter.detach()
    return values if values.dtype == torch.float32 else values.cpu().float()


class TrainableCloud(TrainableModel):
    """Free Gaussians as a model."""

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
        self._rendering = cloud.rendering()
        self._rates = rates
        self._extent = extent

    def __len__(self) -> int:
        return len(self.trained_cloud)

    @property
    def cloud(self) -> GaussianCloud:
        """The parameters as a cloud."""
        self.optimizer.catch_up()
        return self.trained_cloud

    @property
    def trained_cloud(self) -> GaussianCloud:
        """The same for a training pass; colours may have deferred updates."""
        return GaussianCloud(**self.optimizer.leaves, **self._rendering)

    def state(self) -> dict[str, Any]:
        """State of a model: parameters, and rendering settings that differ from 3DGS."""
        return {**super().state(), **self._rendering}

    def activate(self) -> Gaussians:
        """The Gaussians as they are rendered."""
        return self.cloud.activate()

    def schedule_position_rate(self, iteration: float) -> None:
        """Set the learning rate of positions for an iteration of the paper's schedule."""
        self.optimizer.set_learning_rate("means", self._rates.position(iteration, self._extent))

    def tensors_of(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of a ``state_dict``, checked."""
        return cloud_from_state(state).tensors()


def check_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ``ValueError`` where a tensor has another shape, or is not floating."""
    for name, shape in shapes.items():
        if name not in state:
            continue
        if tuple(state[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}, expected {shape}")
        if not state[name].is_floating_point():
            raise ValueError(f"{name} is a tensor of {state[name].dtype}")


def count_gaussians(payload: Mapping[str, Any]) -> int:
    """Number of Gaussians in the payload of a checkpoint of any stage."""
    densities = payload["state_dict"].get("all_densities")
    return 0 if densities is None or not densities.dim() else densities.shape[0]


def sh_rest_shape(state: Mapping[str, Tensor], n_gaussians: int) -> tuple[int, ...]:
    """The shape that higher bands of colours must have: as many as a whole degree."""
    rest = state.get(STATE_NAMES["sh_rest"])
    if rest is not None and rest.dim() == 3 and rest.shape[1] in _BANDS:
        return (n_gaussians, rest.shape[1], 3)
    return (n_gaussians, _BANDS[-1], 3)


def check_free_state(state: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` where the tensors of free Gaussians do not fit each other."""
    n = count_gaussians({"state_dict": state})
    shapes = {
        "all_densities": (n, 1),
        "_points": (n, 3),
        "_scales": (n, 3),
        "_quaternions": (n, 4),
        "_sh_coordinates_dc": (n, 1, 3),
        "_sh_coordinates_rest": sh_rest_shape(state, n),
    }
    check_shapes(state, shapes)
    if n == 0:
        raise ValueError("there are no Gaussians")


def check_free_payload(payload: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where a checkpoint is none of a model of free Gaussians."""
    state = payload["state_dict"]
    missing = [name for name in STATE_NAMES.values() if name not in state]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    check_free_state(state)
    groups = payload["optimizer_state_dict"].get("param_groups", ())
    names = [group["name"] for group in groups]
    if payload["optimizer_state_dict"] and names != [*GROUP_NAMES.values()]:
        raise ValueError(f"the optimiser has the groups {', '.join(names)[:100] or 'none'}")


def cloud_from_state(
    state: Mapping[str, Any], kind: str = "model of free Gaussians"
) -> GaussianCloud:
    """Build the Gaussians of a ``state_dict``.

    Raises:
        UserError: Tensors are missing, or do not fit each other; splats end nowhere.
    """
    missing = [name for name in STATE_NAMES.values() if name not in state]
    if missing:
        raise UserError(f"the checkpoint lacks {', '.join(missing)}: not a {kind}")
    tensors = {name: state[file_name] for name, file_name in STATE_NAMES.items()}
    try:
        check_free_state({file_name: state[file_name] for file_name in STATE_NAMES.values()})
    except ValueError as error:
        raise UserError(f"the checkpoint's {error}: not a {kind}") from error
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    floats["opacity_logits"] = finite_logits(floats["opacity_logits"])
    cutoff = state.get(CUTOFF, NO_CUTOFF)
    if not isinstance(cutoff, float) or not cutoff > 0:
        raise UserError(f"the checkpoint's {CUTOFF} {cutoff!r} is no positive number: not a {kind}")
    return GaussianCloud(**floats, antialiased=ANTIALIASED in state, cutoff_deviations=cutoff)
