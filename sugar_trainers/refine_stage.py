# SPDX-License-Identifier: Apache-2.0
"""The refinement stage: mesh and bound Gaussians optimised together (SuGaR, section 4.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.masking import target_of, without_uncovered
from gaussian_splatting.engine.memory_model import MemoryPlan
from gaussian_splatting.engine.reporting.evaluation import plain_background, render_view
from gaussian_splatting.engine.stage import (
    COLOR,
    LossTerm,
    Stage,
    StepResult,
    acting,
    backpropagate,
    report,
)
from gaussian_splatting.engine.strips import ViewPass
from gaussian_splatting.optim.learned_exposure import Exposures
from gaussian_splatting.rasterization import WARP, Rasterizer, RenderOutput, project
from sugar_scene.bound_kernels import Placement
from sugar_scene.mesh.mesh_normals import PairsOfTriangles, adjacent_face_pairs
from sugar_scene.mesh.triangle_rasterizer import rasterize_triangles
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.trainable_bound import TrainableBoundCloud
from sugar_trainers.multiview_config import MultiviewConfig
from sugar_trainers.refine_config import RefineConfig
from sugar_trainers.terms import comparing_terms
from sugar_trainers.view_comparison import ViewComparer


class RefineStage(Stage):
    """Colour loss and normal consistency on mesh-bound Gaussians.

    Args:
        cloud: Initial state, on the device to train on.
        config: Settings.
        extent: Camera extent in world units.
        export: Writes the refined Gaussians when the run ends; None writes nothing.
        rasterizer: Rendering backend.
        exposures: Those of the photographs, to be learned as well.
        comparer: Compares views with their neighbours; None where that is not wanted.
    """

    name = "refine"

    def __init__(
        self,
        cloud: BoundCloud,
        config: RefineConfig,
        extent: float,
        export: Callable[[BoundCloud], None] | None = None,
        rasterizer: Rasterizer = WARP,
        exposures: Exposures | None = None,
        comparer: ViewComparer | None = None,
    ) -> None:
        self.extent = extent
        self.exposures = exposures
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
        self._comparer = comparer
        # The topology never changes, so what follows from it is found once.
        self._placement = Placement(cloud)
        self._pairs = PairsOfTriangles(adjacent_face_pairs(cloud.faces), len(cloud.vertices))
        self.terms = refine_terms(config, self._pairs)
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
        self, iteration: int, camera: Camera, target: Tensor, view_index: int = 0
    ) -> StepResult:
        """Backpropagate the terms of the image, then those of the mesh."""
        on = acting(self.terms, iteration)
        beside, reach = None, None
        if self._comparer is not None:
            if camera.mask is None or camera.mask.mode != "object":
                # Outside of an object there is nothing, and that is known everywhere.
                target = without_uncovered(target, self._covered(camera))
            with torch.no_grad():
                gaussians = self._placement.activate(self.model.cloud)
            split, reach = self._config.split, self._comparer.reach
            beside = self._comparer.surface_view(
                gaussians, camera, target, split, iteration, view_index
            )
        seen = target_of(
            target,
            plain_background(self._config.white_background, self.model.device),
            camera,
            self.exposures,
            seed=self._config.random_seed,
            iteration=iteration,
            view_index=view_index,
        )
        view = ViewPass(
            lambda: project(
                self._placement.activate(self.model.cloud),
                camera,
                plane_reach=reach,
                sh_degree=self._config.sh_degree(iteration),
            ),
            seen.background,
            self._config.split,
            rasterizer=self._rasterizer,
            pairs=self.pairs,
        )
        images = [
            term.bind(camera, seen.photograph, seen.exposure, seen.inside, beside)
            for term in on["image"]
        ]
        found, _ = view.backpropagate(images)
        found.update(backpropagate(on["model"], self.model.cloud))
        settle = partial(self.collect_exposure, camera.name, seen.exposure)
        return StepResult(report(self.terms, found), view.radii, view.guess, settle)

    def _covered(self, camera: Camera) -> Tensor:
        """Pixels whose rays meet the mesh. (H, W) bool"""
        cloud = self.model.cloud
        return rasterize_triangles(cloud.vertices.detach(), cloud.faces, camera).covered

    def step_statistics(self) -> tuple[Tensor, ...]:
        """Exposure gradients of the step's views."""
        return () if self.exposures is None else self.exposures.step_statistics()

    def apply(self, iteration: int) -> None:
        """One optimiser step."""
        self.model.optimizer.step()
        if self.exposures is not None:
            self.exposures.step(iteration)

    def extra_state(self) -> dict[str, Any]:
        """Exposures."""
        return {} if self.exposures is None else self.exposures.state()

    def restore_extra(self, state: dict[str, Any]) -> None:
        """Exposures, if there were any."""
        if self.exposures is not None:
            self.exposures.restore(state)

    def render(self, camera: Camera, *, geometry: bool) -> RenderOutput:
        """Render at the degree reached."""
        return render_view(
            self._placement.activate(self.model.cloud),
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


def refine_terms(config: RefineConfig, pairs: PairsOfTriangles) -> tuple[LossTerm, ...]:
    """Every term of the stage; ``"model"`` terms are given the :class:`BoundCloud`.

    Args:
        config: Settings.
        pairs: Adjacent triangles of the mesh.
    """
    weight = config.normal_consistency_factor

    def bending(cloud: BoundCloud) -> Tensor:
        return pairs.bending(cloud.vertices)

    consistency = LossTerm("normal_consistency", weight, "model", bending)
    surface = comparing_terms(MultiviewConfig()) if config.refine_surface_terms else ()
    return (COLOR, *surface, *([consistency] if weight > 0 else []))
