# SPDX-License-Identifier: Apache-2.0
"""The refinement stage: mesh and bound Gaussians optimised together (SuGaR, section 4.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.memory_model import MemoryPlan
from gaussian_splatting.engine.rendering import plain_background, render_view
from gaussian_splatting.engine.stage import Stage, StepResult
from gaussian_splatting.engine.strips import ViewPass, color_term
from gaussian_splatting.rasterization import WARP, Rasterizer, RenderOutput, project
from sugar_scene.mesh.mesh_normals import adjacent_face_pairs, normal_consistency
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.trainable_bound import TrainableBoundCloud
from sugar_trainers.refine_config import RefineConfig


class RefineStage(Stage):
    """Colour loss and normal consistency on mesh-bound Gaussians.

    Args:
        cloud: Initial state, on the device to train on.
        config: Settings.
        extent: Camera extent in world units.
        export: Writes the refined Gaussians when the run ends; None writes nothing.
        rasterizer: Who blends.
    """

    name = "refine"

    def __init__(
        self,
        cloud: BoundCloud,
        config: RefineConfig,
        extent: float,
        export: Callable[[BoundCloud], None] | None = None,
        rasterizer: Rasterizer = WARP,
    ) -> None:
        self.extent = extent
        self.model = TrainableBoundCloud(
            cloud,
            config.rates,
            config.vertex_rate_scale(extent),
            config.optimizer,
            config.random_seed,
        )
        self._config = config
        self._export = export
        self._rasterizer = rasterizer
        # The topology never changes, so the pairs are found once.
        self._pairs = adjacent_face_pairs(cloud.faces)
        self._iteration = 0

    @property
    def memory_plan(self) -> MemoryPlan:
        """Strips of the image."""
        return MemoryPlan(self._config.split)

    @memory_plan.setter
    def memory_plan(self, plan: MemoryPlan) -> None:
        self._config = replace(self._config, split=plan.split)

    def phase(self, iteration: int) -> str:
        """One phase only."""
        return "refine"

    def begin(self, iteration: int) -> None:
        """Learning rate and colour degree."""
        self._iteration = iteration
        self.model.schedule_vertex_rate(iteration / self._config.schedule_scale)

    def accumulate(
        self, iteration: int, camera: Camera, target: Tensor, slot: int = 0
    ) -> StepResult:
        """Backpropagate the colour loss, then the normal consistency."""
        view = ViewPass(
            lambda: project(
                self.model.cloud.activate(), camera, sh_degree=self._config.sh_degree(iteration)
            ),
            plain_background(self._config.white_background, self.model.device),
            self._config.split,
            rasterizer=self._rasterizer,
        )
        terms, _ = view.backpropagate([color_term(target)])
        loss = terms["color"]
        if self._config.normal_consistency_factor > 0:
            bending = normal_consistency(self.model.cloud.vertices, self._pairs)
            (self._config.normal_consistency_factor * bending).backward()
            terms["normal_consistency"] = bending.detach()
            loss = loss + self._config.normal_consistency_factor * bending.detach()
        return StepResult({"loss": loss, **terms}, view.radii)

    def apply(self, iteration: int) -> None:
        """One optimiser step."""
        self.model.optimizer.step()

    def render(self, camera: Camera, *, geometry: bool) -> RenderOutput:
        """Render at the degree reached."""
        return render_view(
            self.model.cloud.activate(),
            camera,
            white=self._config.white_background,
            geometry=geometry,
            sh_degree=self._config.sh_degree(max(1, self._iteration)),
            rasterizer=self._rasterizer,
        )

    def export(self, iteration: int) -> None:
        """Write the refined Gaussians for other programs."""
        if self._export is not None:
            self._export(self.model.cloud)
