# SPDX-License-Identifier: Apache-2.0
"""The trainable model of mesh-bound Gaussians, its form in files, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from gaussian_splatting.core.cloud import (
    ANTIALIASED,
    CUTOFF,
    GaussianCloud,
    Gaussians,
    finite_logits,
)
from gaussian_splatting.engine.model import GROUP_NAMES as FREE_GROUP_NAMES
from gaussian_splatting.engine.model import STATE_NAMES as FREE_STATE_NAMES
from gaussian_splatting.engine.model import (
    TrainableModel,
    check_free_state,
    check_shapes,
    cloud_from_state,
    count_gaussians,
    in_float32,
    sh_rest_shape,
)
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from sugar_scene.mesh_bound import (
    BACKGROUND,
    PARAMETERS,
    PREFIX,
    BoundCloud,
    triangle_layout,
)
from sugar_utils.errors import UserError

STATE_NAMES = {
    "vertices": "_points",
    "opacity_logits": "all_densities",
    "log_scales": "_scales",
    "rotations": "_quaternions",
    "sh_dc": "_sh_coordinates_dc",
    "sh_rest": "_sh_coordinates_rest",
}
"""Parameter to name in a state dict, in the order of the file."""

GROUP_NAMES = {name: STATE_NAMES[name].removeprefix("_") for name in PARAMETERS}
"""Parameter to name of the optimiser group, in the order of the file."""

# Names of the triangles and of the thickness in a state dict.
FACES = "_surface_mesh_faces"
THICKNESS = "surface_mesh_thickness"

_BACKGROUND_ITERATION = 15_000  # of the schedule, whose rate the background's positions have


class TrainableBoundCloud(TrainableModel):
    """Mesh-bound Gaussians on fixed faces, and the free ones of a background.

    The refinement stage owns one. ``vertex_scale`` scales the learning rate of vertices, ``extent``
    that of the background's positions, both in world units.
    """

    state_names = STATE_NAMES
    group_names = GROUP_NAMES

    def __init__(
        self,
        cloud: BoundCloud,
        rates: LearningRates,
        vertex_scale: float,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        seed: int = 0,
        extent: float = 1.0,
    ) -> None:
        free_rates = rates.by_name(0, vertex_scale)
        bound_rates = {
            "vertices": free_rates["means"],
            "sh_dc": free_rates["sh_dc"],
            "sh_rest": free_rates["sh_rest"],
            "opacity_logits": free_rates["opacity_logits"],
            "log_scales": free_rates["log_scales"],
            "rotations": free_rates["quats"],
        }
        if cloud.background is not None:
            self.group_names = dict(GROUP_NAMES)
            background_rates = rates.by_name(_BACKGROUND_ITERATION, extent)
            for name, group_name in FREE_GROUP_NAMES.items():
                self.group_names[PREFIX + name] = group_name
                bound_rates[PREFIX + name] = background_rates[name]
        super().__init__(cloud.tensors(), bound_rates, optimizer, seed)
        # The optimiser has copies of the parameters; the rest is kept without them.
        nothing = cloud.thickness.new_empty(0)
        self._fixed = replace(cloud, **dict.fromkeys(PARAMETERS, nothing), background=None)
        self._rates = rates
        self._vertex_scale = vertex_scale

    def __len__(self) -> int:
        return len(self.trained_cloud)

    @property
    def cloud(self) -> BoundCloud:
        """The Gaussians with the optimiser's parameters."""
        self.optimizer.catch_up()
        return self.trained_cloud

    @property
    def trained_cloud(self) -> BoundCloud:
        """The same for a training pass; colours may have deferred updates."""
        parameters = {name: self.optimizer.leaves[name] for name in PARAMETERS}
        return replace(self._fixed, **parameters, background=self._background)

    @property
    def _background(self) -> GaussianCloud | None:
        parameters = self.optimizer.leaves
        if PREFIX + "means" not in parameters:
            return None
        tensors: dict[str, Any] = {name: parameters[PREFIX + name] for name in FREE_GROUP_NAMES}
        return GaussianCloud(**tensors, antialiased=self._fixed.antialiased)

    def buffers(self) -> dict[str, Tensor]:
        """Return the triangles and the thickness, by their names in files."""
        return {FACES: self._fixed.faces.int(), THICKNESS: self._fixed.thickness}

    def activate(self) -> Gaussians:
        """Activate the Gaussians on the mesh, and those of the background."""
        return self.cloud.activate_all()

    def schedule_vertex_rate(self, iteration: float) -> None:
        """Set the learning rate of vertices to that of an iteration."""
        rate = self._rates.position(iteration, self._vertex_scale)
        self.optimizer.set_learning_rate("vertices", rate)

    def state(self) -> dict[str, Any]:
        """Return the state as of every model, with the background under a key of its own.

        Other readers of the files do not look there.
        """
        state = super().state()
        if self._fixed.antialiased:
            state[ANTIALIASED] = True
        background = self._background
        if background is None:
            return state
        bound_state, background_state = _split_optimizer_state(state["optimizer_state_dict"])
        values = {}
        for name, file_name in FREE_STATE_NAMES.items():
            values[file_name] = in_float32(getattr(background, name))
        state["optimizer_state_dict"] = bound_state
        state[BACKGROUND] = {
            "state_dict": values,
            "optimizer_state_dict": background_state,
        }
        return state

    def restore(self, payload: dict[str, Any]) -> None:
        """Restore a state saved by :meth:`state`.

        Raises:
            UserError: Only one of the two has a background, or the state does not fit.
        """
        background = payload.get(BACKGROUND)
        if (background is None) != (self._background is None):
            raise UserError("the checkpoint was made with another --keep_background")
        if background is None:
            super().restore(payload)
            return
        optimizer_state = _joined_optimizer_state(
            payload["optimizer_state_dict"], background["optimizer_state_dict"]
        )
        groups = zip(self.group_names, optimizer_state["param_groups"], strict=True)
        for name, group in groups:
            group["name"] = name
        super().restore(
            {
                "state_dict": state_with_background(payload),
                "optimizer_state_dict": optimizer_state,
            }
        )

    def tensors_of(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return the parameters of bound Gaussians and of the background.

        Raises:
            UserError: The state's mesh has another number of triangles.
        """
        saved = bound_cloud_from_state(state)
        if saved.faces.shape != self._fixed.faces.shape:
            raise UserError(
                f"the checkpoint's mesh has {saved.faces.shape[0]} triangles, this run's "
                f"{self._fixed.faces.shape[0]}; continue with the mesh it was made with"
            )
        return saved.tensors()


def _split_optimizer_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split Adam's state into that of bound Gaussians and that of the background."""
    n = len(GROUP_NAMES)
    groups = state["param_groups"]
    bound_moments = {}
    free_moments = {}
    for index, moments in state["state"].items():
        if index < n:
            bound_moments[index] = moments
        else:
            free_moments[index - n] = moments
    free_groups = [{**group, "params": [i]} for i, group in enumerate(groups[n:])]
    bound_state = {"state": bound_moments, "param_groups": groups[:n]}
    background_state = {"state": free_moments, "param_groups": free_groups}
    return bound_state, background_state


def _joined_optimizer_state(bound: dict[str, Any], free: dict[str, Any]) -> dict[str, Any]:
    """Invert :func:`_split_optimizer_state`."""
    n = len(GROUP_NAMES)
    moments = dict(bound["state"])
    for index, free_moments in free["state"].items():
        moments[n + index] = free_moments
    groups = []
    for index, group in enumerate(bound["param_groups"] + free["param_groups"]):
        groups.append({**group, "params": [index]})
    return {"state": moments, "param_groups": groups}


def state_with_background(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the ``state_dict`` of a ``.pt`` with its background and how it is to be rendered."""
    state = dict(payload["state_dict"])
    for name in (ANTIALIASED, CUTOFF):
        if payload.get(name):
            state[name] = payload[name]
    background = payload.get(BACKGROUND)
    if background is not None:
        state[BACKGROUND] = background["state_dict"]
    return state


def check_bound_state(state: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` where mesh and bound Gaussians do not fit each other."""
    n = count_gaussians({"state_dict": state})
    shapes = {
        "all_densities": (n, 1),
        "_scales": (n, 2),
        "_quaternions": (n, 2),
        "_sh_coordinates_dc": (n, 1, 3),
        "_sh_coordinates_rest": sh_rest_shape(state, n),
    }
    check_shapes(state, shapes)
    if n == 0:
        raise ValueError("there are no Gaussians")
    points = state["_points"]
    faces = state[FACES]
    thickness = state[THICKNESS]
    if points.dim() != 2 or points.shape[1] != 3 or not points.is_floating_point():
        raise ValueError(f"_points has shape {tuple(points.shape)}, expected (V, 3)")
    if faces.is_floating_point() or faces.dim() != 2 or faces.shape[1] != 3 or not len(faces):
        raise ValueError(f"{FACES} is no list of triangles")
    if not 0 <= int(faces.min()) <= int(faces.max()) < len(points):
        raise ValueError(f"{FACES} names vertices that are not there")
    if thickness.numel() != 1 or float(thickness) < 0:
        raise ValueError(f"{THICKNESS} is no thickness")


def _missing_names(state: Mapping[str, object]) -> list[str]:
    """Names of a refined model that a state dict lacks."""
    names = (FACES, THICKNESS, *STATE_NAMES.values())
    return [name for name in names if name not in state]


def check_bound_payload(payload: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where a checkpoint is none of a refined model."""
    state = payload["state_dict"]
    missing = _missing_names(state)
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    check_bound_state(state)
    if payload.get(BACKGROUND) is not None:
        check_free_state(payload[BACKGROUND]["state_dict"])


def bound_cloud_from_state(state: dict[str, Any]) -> BoundCloud:
    """Build the mesh and its Gaussians of a refined model, with its background if it has one.

    Raises:
        UserError: Tensors are missing, or do not fit each other.
    """
    missing = _missing_names(state)
    if missing:
        raise UserError(f"the checkpoint lacks {', '.join(missing)}: not a refined SuGaR model")
    try:
        check_bound_state(state)
    except ValueError as error:
        raise UserError(f"the checkpoint makes no sense ({error}); use an earlier one") from error
    is_antialiased = ANTIALIASED in state
    background = None
    if BACKGROUND in state:
        background = replace(cloud_from_state(state[BACKGROUND]), antialiased=is_antialiased)
    tensors = {}
    for name, file_name in STATE_NAMES.items():
        tensors[name] = state[file_name].float().contiguous()
    tensors["opacity_logits"] = finite_logits(tensors["opacity_logits"])
    cloud = BoundCloud(
        **tensors,
        faces=state[FACES].long(),
        thickness=state[THICKNESS].float(),
        background=background,
        antialiased=is_antialiased,
    )
    n_faces = cloud.faces.shape[0]
    n_gaussians = cloud.opacity_logits.shape[0]
    if n_gaussians % n_faces:
        raise UserError(f"the checkpoint has {n_gaussians} Gaussians on {n_faces} triangles")
    triangle_layout(cloud.per_triangle)
    return cloud
