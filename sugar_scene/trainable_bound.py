# SPDX-License-Identifier: Apache-2.0
"""Mesh-bound Gaussians under optimisation and their form in checkpoint files."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from sugar_scene.mesh_bound import BoundCloud, triangle_layout
from sugar_utils.errors import UserError

FACES = "_surface_mesh_faces"
THICKNESS = "surface_mesh_thickness"
STATE_NAMES = {
    "vertices": "_points",
    "opacity_logits": "all_densities",
    "log_scales": "_scales",
    "rotations": "_quaternions",
    "sh_dc": "_sh_coordinates_dc",
    "sh_rest": "_sh_coordinates_rest",
}
GROUP_NAMES = {
    "vertices": "points",
    "sh_dc": "sh_coordinates_dc",
    "sh_rest": "sh_coordinates_rest",
    "opacity_logits": "all_densities",
    "log_scales": "scales",
    "rotations": "quaternions",
}


class TrainableBoundCloud(TrainableModel):
    """Mesh-bound Gaussians whose faces and thickness are fixed.

    Args:
        rates: Learning rates; that of positions is the vertices'.
        vertex_scale: Spatial scale of the vertex rate in world units.
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
    ) -> None:
        by_name = rates.by_name(0, vertex_scale)
        own_rates = {
            **{name: by_name[name] for name in ("sh_dc", "sh_rest", "opacity_logits")},
            "vertices": by_name["means"],
            "log_scales": by_name["log_scales"],
            "rotations": by_name["quats"],
        }
        tensors = {name: getattr(cloud, name) for name in GROUP_NAMES}
        super().__init__(tensors, own_rates, optimizer, seed)
        # The optimiser has copies of its own; of the start only faces and thickness are kept.
        nothing = cloud.thickness.new_empty(0)
        self._start = replace(cloud, **dict.fromkeys(GROUP_NAMES, nothing))
        self._rates = rates
        self._vertex_scale = vertex_scale

    def __len__(self) -> int:
        return self.optimizer.parameters["opacity_logits"].shape[0]

    @property
    def cloud(self) -> BoundCloud:
        """The current leaf parameters with the fixed mesh topology."""
        return replace(self._start, **self.optimizer.parameters)

    def buffers(self) -> dict[str, Tensor]:
        """Faces and thickness."""
        return {FACES: self._start.faces.int(), THICKNESS: self._start.thickness}

    def visible_rows(self, visible: Tensor) -> dict[str, Tensor]:
        """The visible Gaussians, and the vertices of the triangles they lie on."""
        faces = self._start.faces
        vertices = visible.new_zeros(self.optimizer.parameters["vertices"].shape[0])
        vertices[faces[visible.view(faces.shape[0], -1).any(dim=1)].flatten()] = True
        return {**super().visible_rows(visible), "vertices": vertices}

    def schedule_vertex_rate(self, iteration: float) -> None:
        """Set the vertex learning rate of an (unscaled) iteration."""
        rate = self._rates.position(iteration, self._vertex_scale)
        self.optimizer.set_learning_rate("vertices", rate)

    def tensors_of(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of bound Gaussians on the same mesh topology."""
        saved = bound_cloud_from_state(state)
        if saved.faces.shape != self._start.faces.shape:
            raise UserError(
                f"the checkpoint's mesh has {saved.faces.shape[0]} triangles, this run's "
                f"{self._start.faces.shape[0]}; continue with the mesh it was made with"
            )
        return {name: getattr(saved, name) for name in STATE_NAMES}


def bound_cloud_from_state(state: dict[str, Tensor]) -> BoundCloud:
    """The mesh and its Gaussians of a refined model; no other file is needed."""
    needed = (FACES, THICKNESS, *STATE_NAMES.values())
    missing = [name for name in needed if name not in state]
    if missing:
        raise UserError(f"the checkpoint lacks {', '.join(missing)}: not a refined SuGaR model")
    cloud = BoundCloud(
        **{own: state[file].float().contiguous() for own, file in STATE_NAMES.items()},
        faces=state[FACES].long(),
        thickness=state[THICKNESS].float(),
    )
    n_faces, n = cloud.faces.shape[0], cloud.opacity_logits.shape[0]
    if n_faces == 0 or n % n_faces:
        raise UserError(f"the checkpoint has {n} Gaussians on {n_faces} triangles")
    triangle_layout(cloud.per_triangle)
    return cloud
