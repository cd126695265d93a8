# SPDX-License-Identifier: Apache-2.0
"""Options of a refinement, and the mesh with bound Gaussians that it starts from."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from gaussian_splatting.components.exposures import Exposures
from gaussian_splatting.core.cloud import NO_CUTOFF, GaussianCloud
from gaussian_splatting.core.milestones import scaled
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.model import cloud_from_state, count_gaussians
from gaussian_splatting.engine.runner import Messages
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.engine.state_schema import PayloadCheck, payload_check
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.reference_layout import ReferenceCheckpoint
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.shared_flags import (
    Preset,
    checkpoint_interval,
    preset,
    scaled_checkpoint_interval,
)
from sugar_scene import mesh_bound
from sugar_scene.bound_model import check_bound_payload, state_with_background
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.triangle_mesh import read_mesh_ply
from sugar_trainers.initial_colors import background_rows, with_shapes_of_triangles
from sugar_trainers.naming import (
    REFINED_FOLDER,
    REFINED_PLY_FOLDER,
    refined_name,
    stage_folder,
)
from sugar_trainers.refine_stage import build_refine_stage
from sugar_trainers.stage_config import RefineConfig
from sugar_trainers.stage_options import StageContext, TrainingOptions
from sugar_utils.command_text import command_text
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.settings import flag

OPACITY_BEFORE_BACKGROUND = 0.9  # initial one; what is behind the mesh would show through 0.1
TEST_INTERVAL = 7_500  # iterations of the paper's schedule
_alone = partial(flag, group="only train_refined.py")


@dataclass(frozen=True, kw_only=True)
class RefineOptions(TrainingOptions[BoundCloud]):
    """Flags of a refinement."""

    title: ClassVar[str] = "refinement"

    mesh_path: Path = _alone(
        MISSING,
        "coarse mesh (PLY with vertex colours); needed",
        short="-m",
        parse=Path,
        missing=f"pass the coarse mesh that {command_text('mesh')} made",
    )
    output_dir: Path | None = _alone(
        None, "parent of the run's folder; unset: output/refined/<scene>", short="-o", parse=Path
    )
    coarse_model_path: Path | None = _alone(
        None,
        "coarse model (.pt) whose background is kept; unset: that of the checkpoint",
        parse=Path,
        no_effect_when="without --keep_background True",
    )
    ply_dir: Path | None = None  # None for output_dir, or without that output/refined_ply/<scene>
    config: RefineConfig = field(default_factory=RefineConfig)
    checkpoint_interval: int = checkpoint_interval("only train_refined.py")
    preset: Preset = preset("only train_refined.py")
    export_ply: bool = flag(True, "write the refined Gaussians as PLY", group="refinement stage")

    @property
    def reads_tracks(self) -> bool:
        """Neighbouring views are found by the points that photographs observe."""
        return self.config.refine_surface_terms

    @property
    def name(self) -> str:
        """Name of the run's folder, as in the original."""
        weight = self.config.normal_consistency_factor
        return refined_name(self.mesh_path, weight, self.config.gaussians_per_triangle)

    @property
    def directory(self) -> Path:
        """The run's folder."""
        parent = self.output_dir or stage_folder(REFINED_FOLDER, self.scene_path)
        return parent / self.name

    @property
    def result(self) -> Path:
        """The final ``.pt``."""
        return self.directory / f"{self.config.refinement_iterations}.pt"

    @property
    def ply_path(self) -> Path:
        """File of the refined Gaussians."""
        usual = stage_folder(REFINED_PLY_FOLDER, self.scene_path)
        return (self.ply_dir or self.output_dir or usual) / f"{self.name}.ply"

    @property
    def results(self) -> tuple[Path, ...]:
        """The final ``.pt``, and the PLY if one is written."""
        return (self.result, self.ply_path) if self.export_ply else (self.result,)

    @property
    def payload_check(self) -> PayloadCheck:
        """Check of checkpoint contents: a refined model, and the state of components."""
        return payload_check(check_bound_payload, count_gaussians, Exposures.schema)

    @property
    def loop(self) -> LoopConfig:
        """When the loop does what."""
        config = self.config
        last = self.config.refinement_iterations
        test_interval = scaled(TEST_INTERVAL, config.schedule_scale)
        return LoopConfig(
            first=1,
            last=last,
            seed=config.random_seed,
            log_interval=config.log_interval,
            checkpoint_interval=scaled_checkpoint_interval(
                self.checkpoint_interval, config.schedule_scale, last
            ),
            keep_checkpoints=self.run.keep_checkpoints,
            test_iterations=tuple(range(test_interval, last, test_interval)),
        )

    def sources(self) -> dict[str, Any]:
        """Paths of the inputs, for the record of the run."""
        return {**super().sources(), "mesh": self.mesh_path.resolve()}

    def initial(
        self, checkpoint: ReferenceCheckpoint, scene: Scene, messages: Messages
    ) -> tuple[BoundCloud, dict[str, Any]]:
        """Bind Gaussians to the mesh, and keep the background of a coarse model if asked for.

        Raises:
            UserError: The mesh is not there, or cannot be read.
        """
        cloud = self._bound_to_mesh(scene, messages)
        digests = {"mesh": file_digest(self.mesh_path)}
        if not self.config.keep_background:
            return cloud, digests
        path = self.coarse_model_path
        if path is None:
            path = checkpoint.ply_path
            coarse = checkpoint.read_cloud(messages, scene.offset)
        else:
            coarse = cloud_from_state(
                state_with_background(load_payload(path)), "coarse SuGaR model"
            )
        background = self._background(cloud, coarse.to(self.compute.device), scene)
        messages.detail(f"background: {len(background):,} of {len(coarse):,} Gaussians of {path}")
        if len(background):
            cloud = replace(cloud, background=background)
        return cloud, {**digests, "background": file_digest(path)}

    def build(self, model: BoundCloud, config: RefineConfig, context: StageContext) -> Stage:
        """Build the stage."""

        def export(refined: BoundCloud) -> None:
            write_gaussian_ply(self.ply_path, refined.to_gaussians())
            context.console.info(f"refined Gaussians: {self.ply_path}")

        return build_refine_stage(model, config, context, export if self.export_ply else None)

    def _bound_to_mesh(self, scene: Scene, messages: Messages) -> BoundCloud:
        """Read the mesh and bind Gaussians to its triangles."""
        if not self.mesh_path.is_file():
            raise UserError(f"--mesh_path {self.mesh_path}: no such file; pass the coarse mesh PLY")
        mesh = read_mesh_ply(self.mesh_path)
        messages.detail(
            f"{mesh.n_vertices:,} vertices and {mesh.n_faces:,} triangles of {self.mesh_path}"
        )
        device = self.compute.device
        config = self.config
        opacity = mesh_bound.INITIAL_OPACITY
        if config.keep_background:
            opacity = OPACITY_BEFORE_BACKGROUND
        cloud = mesh_bound.bind_to_mesh(
            torch.tensor(mesh.vertices, dtype=torch.float32, device=device),
            torch.tensor(mesh.faces, device=device),
            torch.tensor(mesh.colors, device=device).float() / 255.0,
            config.gaussians_per_triangle,
            scene.extent,
            opacity,
        )
        if config.initial_shapes == "triangles":
            cloud = with_shapes_of_triangles(cloud)
        return replace(cloud, antialiased=config.antialiased)

    def _background(self, cloud: BoundCloud, free: GaussianCloud, scene: Scene) -> GaussianCloud:
        """The background Gaussians, which the mesh does not show; refined ones have no cutoff."""
        rows = background_rows(
            free.activate(),
            cloud.vertices,
            cloud.faces,
            scene.train_cameras,
            self.compute.rasterizer,
        )
        return replace(free.select(rows), cutoff_deviations=NO_CUTOFF)
