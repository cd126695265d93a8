# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint must hold: types, shapes that belong together, finite numbers.

Checksums tell that a file is what somebody wrote, not that it makes sense. The files of free
Gaussians and of mesh-bound ones are told apart by the faces of the mesh. What is not known by name
is let through: tools may keep more in a file than training needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gaussian_splatting.engine.trainable import GROUP_NAMES, STATE_NAMES
from gaussian_splatting.optim.learned_exposure import KEY as EXPOSURE_KEY
from gaussian_splatting.optim.moments import MOMENTS, SCALES
from sugar_utils.errors import UserError
from sugar_utils.schemas import MAX_DEPTH, Count, is_deeper

FACES, THICKNESS = "_surface_mesh_faces", "surface_mesh_thickness"
_BANDS = (0, 3, 8, 15)
_FAULTS = (msgspec.ValidationError, ValueError, AttributeError, TypeError)
"""The last two where a tensor stands in for a container and answers to half of its methods."""


class _Resume(msgspec.Struct):
    settings: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    stage: dict[str, Tensor] = {}
    left_out_views: dict[str, str] = {}


class _Payload(msgspec.Struct):
    state_dict: dict[str, Tensor]
    train_losses: list[float]
    epoch: Count
    iteration: Count
    optimizer_state_dict: dict[str, Any]
    resume: _Resume | None = None


class _Group(msgspec.Struct):
    name: str
    lr: float
    params: list[int]


class _Optimizer(msgspec.Struct):
    """Adam's state; empty in files that only keep a model."""

    state: dict[int, dict[str, Any]]
    param_groups: list[_Group]


def check_payload(path: Path, payload: Any) -> None:
    """Check that a checkpoint makes sense.

    Args:
        path: Its file, for the message.
        payload: What the file holds.

    Raises:
        UserError: It does not; the message tells what is wrong.
    """
    try:
        found = msgspec.convert(payload, _Payload)
        _check_model(found.state_dict)
        if found.optimizer_state_dict:
            optimizer = msgspec.convert(found.optimizer_state_dict, _Optimizer)
            _check_optimizer(optimizer, found.state_dict)
        if found.resume is not None:
            _check_resume(found.resume, payload["resume"], found.state_dict)
    except _FAULTS as error:
        reason = " ".join(str(error).replace("`", "").split())
        raise UserError(
            f"{path}: the checkpoint makes no sense ({reason}); use an earlier one"
        ) from error


def _check_model(state: Mapping[str, Tensor]) -> None:
    """Names that are there have the shapes that the names stand for."""
    for name, tensor in state.items():
        _check_dense(name, tensor, floating=name != FACES)
    if "all_densities" not in state:
        return
    densities = state["all_densities"]
    n, bound = densities.shape[0] if densities.dim() else 0, FACES in state
    shapes: dict[str, tuple[int, ...]] = {
        "all_densities": (n, 1),
        "_scales": (n, 2 if bound else 3),
        "_quaternions": (n, 2 if bound else 4),
        "_sh_coordinates_dc": (n, 1, 3),
    }
    points = state.get("_points")
    if points is not None:
        shapes["_points"] = (points.shape[0] if bound and points.dim() else n, 3)
    rest = state.get("_sh_coordinates_rest")
    if rest is not None:
        bands = rest.shape[1] if rest.dim() == 3 and rest.shape[1] in _BANDS else _BANDS[-1]
        shapes["_sh_coordinates_rest"] = (n, bands, 3)
    for name, shape in shapes.items():
        if name in state and tuple(state[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}, expected {shape}")
    if n == 0:
        raise ValueError("there are no Gaussians")
    if bound and points is not None:
        _check_mesh(state, points.shape[0])


def _check_mesh(state: Mapping[str, Tensor], n_vertices: int) -> None:
    faces, thickness = state[FACES], state.get(THICKNESS)
    if faces.is_floating_point() or faces.dim() != 2 or faces.shape[1] != 3 or not len(faces):
        raise ValueError(f"{FACES} is no list of triangles")
    if not 0 <= int(faces.min()) <= int(faces.max()) < n_vertices:
        raise ValueError(f"{FACES} names vertices that are not there")
    if thickness is not None and (thickness.numel() != 1 or float(thickness) < 0):
        raise ValueError(f"{THICKNESS} is no thickness")


def _check_optimizer(optimizer: _Optimizer, state: Mapping[str, Tensor]) -> None:
    names = [group.name for group in optimizer.param_groups]
    if all(name in state for name in STATE_NAMES.values()) and names != [*GROUP_NAMES.values()]:
        raise ValueError(f"the optimiser has the groups {', '.join(names)[:100] or 'of nobody'}")
    for index, group in enumerate(optimizer.param_groups):
        parameter = state.get(f"_{group.name}", state.get(group.name))
        if parameter is None or group.params != [index]:
            raise ValueError(f"group {group.name} of the optimiser belongs to no parameter")
        if index in optimizer.state:
            _check_moments(group.name, optimizer.state[index], parameter)
    if any(index not in range(len(names)) for index in optimizer.state):
        raise ValueError("the optimiser has moments of no parameter")


def _check_moments(name: str, saved: Mapping[str, Any], parameter: Tensor) -> None:
    step = saved.get("step")
    if isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex():
        step = step.item()
    # NaN is not between any two numbers.
    if isinstance(step, bool) or not isinstance(step, int | float) or not 0 <= step < 2**31:
        raise ValueError(f"step of {name} is no number of steps")
    shapes = dict.fromkeys(MOMENTS, parameter.shape) | dict.fromkeys(SCALES, parameter.shape[:1])
    for moment, shape in shapes.items():
        value = saved.get(moment)
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.shape != shape:
            raise ValueError(f"{moment} of {name} has not the shape {tuple(shape)}")
        _check_dense(f"{moment} of {name}", value, floating=True)
        if moment != MOMENTS[0] and bool((value < 0).any()):
            raise ValueError(f"{moment} of {name} is negative")
    if sum(moment in saved for moment in SCALES) == 1:
        raise ValueError(f"moments of {name} have one scale without the other")


def _check_resume(resume: _Resume, raw: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    plain = [raw.get(name) for name in ("settings", "inputs", "sources")]
    if is_deeper(plain, MAX_DEPTH) or not _is_plain(plain):
        raise ValueError("settings are no plain values")
    for name, tensor in resume.stage.items():
        _check_dense(f"{name} of the stage", tensor, floating=name != "neighbors")
        if name.startswith(EXPOSURE_KEY) and tuple(tensor.shape) != (3, 2, 3):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected (3, 2, 3)")
    if "all_densities" not in state:
        return
    n = state["all_densities"].shape[0]
    statistics = [resume.stage[name] for name in ("gradient_sum", "views") if name in resume.stage]
    if statistics and any(t.shape != (n,) or bool((t < 0).any()) for t in statistics):
        raise ValueError(f"statistics of the stage are not those of {n} Gaussians")
    if len(statistics) == 1:
        raise ValueError("statistics of the stage are incomplete")
    footprints = resume.stage.get("footprints")
    if footprints is not None and (footprints.shape != (n, 3) or bool((footprints < 0).any())):
        raise ValueError(f"footprints of the stage are not those of {n} Gaussians")
    if "gaussian_budget" in resume.stage and resume.stage["gaussian_budget"].shape != (2,):
        raise ValueError("the budget of the stage is not of two numbers")
    neighbors = resume.stage.get("neighbors")
    if neighbors is not None and not _are_rows(neighbors, n):
        raise ValueError(f"neighbors of the stage are not those of {n} Gaussians")


def _are_rows(neighbors: Tensor, n: int) -> bool:
    """Whether (N, K) numbers are rows of N Gaussians."""
    if neighbors.dtype != torch.int32 or neighbors.dim() != 2 or neighbors.shape[0] != n:
        return False
    return bool(neighbors.numel()) and 0 <= int(neighbors.min()) <= int(neighbors.max()) < n


def _check_dense(name: str, tensor: Tensor, *, floating: bool) -> None:
    """Plain memory, a type of number that can be computed with, no NaN and no infinity."""
    odd = tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized
    if odd or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} is a tensor of {tensor.dtype}, {tensor.layout}")
    if floating and not tensor.is_floating_point():
        raise ValueError(f"{name} is a tensor of {tensor.dtype}")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} has values of NaN or infinity")


def _is_plain(value: Any) -> bool:
    """Whether it is what JSON can say."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
