# SPDX-License-Identifier: Apache-2.0
"""The vanilla 3DGS stage (Kerbl et al. 2023): colour loss only, with adaptive density."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gaussian_splatting.components.densification import Densification, GrowthLimits, Region
from gaussian_splatting.components.growing_resolution import GrowingResolution
from gaussian_splatting.components.poses import fitted_pose
from gaussian_splatting.components.pruning_scores import PruningScores
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.random import draw_labels, generator
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import Component, ViewResult
from gaussian_splatting.engine.loss_terms import acting, color_term, report
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.stage import Stage, StepResources
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.rasterization import WARP, Rasterizer, plain_background, project
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_utils.device import upload

RECOVERY = 1 / 3  # time that opacities take to come back after a reset, in its interval


@dataclass(frozen=True)
class VanillaSchedule:
    """When densification of the vanilla stage changes the population."""

    config: VanillaConfig

    def collects(self, iteration: int) -> bool:
        """Whether views of an iteration count for the next round."""
        return iteration < self.config.densification.densify_until_iter

    def round_due(self, iteration: int) -> bool:
        """Whether a round follows an iteration."""
        return self.config.densification.due(iteration)

    def reset_due(self, iteration: int) -> bool:
        """Whether a reset of opacities follows; on white there is an early one, as in 3DGS.

        None does where the opacities would not come back before the end.
        """
        rules = self.config.densification
        is_white_reset = self.config.white_background and iteration == rules.densify_from_iter
        n_left = self.config.iterations - iteration
        comes_back = n_left >= RECOVERY * rules.opacity_reset_interval
        return comes_back and (rules.reset_due(iteration) or is_white_reset)

    def is_last(self, iteration: int) -> bool:
        """Whether an iteration makes no step; as in 3DGS the last one makes none."""
        return iteration == self.config.iterations

    def removes_large(self, iteration: int) -> bool:
        """Whether a round removes large Gaussians, which it does after the first reset."""
        return iteration > self.config.densification.opacity_reset_interval


class VanillaStage(Stage[TrainableCloud, VanillaConfig]):
    """Colour loss, densification, pruning and opacity reset.

    Args:
        export: Writes the model of an iteration.
        region: Where Gaussians may be.
        components: Components beside the model, besides densification; that of growing images
            limits the number of Gaussians, too.
    """

    name = "vanilla"

    def __init__(
        self,
        cloud: GaussianCloud,
        config: VanillaConfig,
        region: Region,
        export: Callable[[int, VanillaStage], object],
        rasterizer: Rasterizer = WARP,
        components: Iterable[Component] = (),
    ) -> None:
        self.extent = region.extent
        self.model = TrainableCloud(
            cloud, config.rates, region.extent, config.optimizer, config.random_seed
        )
        self.terms = (color_term(config.lambda_dssim),)
        self.memory_plan = MemoryPlan(config.split)
        self._config = config
        self._export = export
        self._rasterizer = rasterizer
        self.components = list(components)
        self.components += self._population_components(region)

    def phase(self, iteration: int) -> str:
        """Gaussians grow in number, then are refined."""
        return "densify" if iteration < self._config.densification.densify_until_iter else "refine"

    def begin(self, iteration: int) -> None:
        """Change the population where that is due, and set the rate of positions."""
        super().begin(iteration)
        self.model.schedule_position_rate(iteration)

    def train_on(self, view: TrainingView, resources: StepResources) -> ViewResult:
        """Backpropagate the colour loss, and terms of components."""
        degree = self.sh_degree(view.iteration)
        activated = self.model.trained_cloud.activate(graph=False)
        gaussians = self.collecting(activated, view, resources)
        if degree == 0:
            # Three quarters of all values rest until colours depend on the direction.
            self.model.optimizer.mark_unused("sh_rest")
            gaussians = gaussians.without_bands()
        view, features = self.with_features(view, gaussians)
        # Without a name of its own: it is freed before the gradients of the model are made.
        view_pass = self.view_pass(
            project(gaussians, view.camera, sh_degree=degree, features=features, graph=False),
            view,
            resources,
        )
        terms = acting(self.all_terms(view), view.iteration)["image"]
        values, d_means2d = view_pass.backpropagate(terms)
        figures = report(terms, values)
        return ViewResult(view, figures, view_pass.radii, d_means2d, view_pass.predictions)

    def prepare(self, view: TrainingView) -> TrainingView:
        """Complete a view, and put it on its background."""
        return self.composited(super().prepare(view))

    def sh_degree(self, iteration: int) -> int:
        """Degree of the spherical harmonics, which grows with the iterations."""
        return min(self._config.sh_degree, iteration // self._config.sh_interval)

    def rendered_degree(self) -> int:
        """The highest degree that is trained."""
        return self._config.sh_degree

    def fitted_pose(self, camera: Camera, photograph: Tensor) -> Camera:
        """A held-out camera, moved to where its photograph fits best where poses are learned."""
        background = plain_background(self._config.white_background, self.model.device)
        return fitted_pose(
            self.gaussians(),
            camera,
            photograph.to(background.device),
            self.extent,
            background,
            exposed=self.changes_exposure,
            rasterizer=self._rasterizer,
        )

    def background(self, view: TrainingView) -> Tensor:
        """Colour behind the Gaussians: black or white, or a random one. (3,)"""
        if not self._config.random_background:
            return super().background(view)
        labels = draw_labels(view.iteration, view.index)
        rng = generator(self._config.random_seed, "background", *labels)
        return upload(torch.rand(3, generator=rng, device="cpu"), self.model.device)

    def export(self, iteration: int) -> None:
        """Write the model."""
        self._export(iteration, self)

    def _population_components(self, region: Region) -> list[Component]:
        """Densification, and the scores that restrict it."""
        config = self._config
        allowed = None
        for component in self.components:
            if isinstance(component, GrowingResolution):
                allowed = component.allowed
        scores = None
        if config.scores:
            scores = PruningScores(
                len(self.model),
                self.model.device,
                config.scoring,
                config.densification,
                config.densifies_until,
                config.optimizer.views_per_step,
            )
        densification = Densification(
            self.model,
            config.densification,
            VanillaSchedule(config),
            region,
            config.random_seed,
            GrowthLimits(scores, allowed),
        )
        return [densification] if scores is None else [densification, scores]
