# SPDX-License-Identifier: Apache-2.0
"""A training of some steps on some Gaussians, which checks of a GPU make in two ways."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.random import generator
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.loss_terms import acting, color_term, report
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.stage import Stage, StepResources
from gaussian_splatting.engine.step_runner import StepRunner
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.rasterization import project
from gaussian_splatting.rasterization.projection import IntersectionPrediction

N_GAUSSIANS = 200
WIDTH = 40
HEIGHT = 32
EXTENT = 3.0
N_STEPS = 8


class CheckFailed(Exception):
    """A GPU does not do what is checked."""


class SmallStage(Stage[TrainableCloud, "SmallStage"]):
    """Gaussians that learn the colours of one image; it is its own settings."""

    name = "check"
    white_background = False
    random_seed = 0
    extent = EXTENT
    terms = (color_term(0.2),)
    memory_plan = MemoryPlan()

    def __init__(self, device: torch.device, optimizer: OptimizerConfig) -> None:
        draws = generator(0, "check")
        n = N_GAUSSIANS

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draws, device="cpu")

        means = normal(n, 3)
        means[:, 2] += 4.0
        cloud = GaussianCloud(
            means=means.to(device),
            sh_dc=normal(n, 1, 3).to(device),
            sh_rest=0.1 * normal(n, 15, 3).to(device),
            opacity_logits=normal(n, 1).to(device),
            log_scales=(0.3 * normal(n, 3) - 2.0).to(device),
            quats=normal(n, 4).to(device),
        )
        self.model = TrainableCloud(cloud, LearningRates(), EXTENT, optimizer)
        self._config = self

    def phase(self, iteration: int) -> str:
        """There is one phase."""
        return "check"

    def train_on(self, view: TrainingView, resources: StepResources) -> ViewResult:
        """Backpropagate the colour loss."""
        activated = self.model.trained_cloud.activate(graph=False)
        gaussians = self.collecting(activated, view, resources)
        projection = project(gaussians, view.camera, graph=False)
        view_pass = self.view_pass(projection, view, resources)
        terms = acting(self.terms, view.iteration)["image"]
        values, d_means2d = view_pass.backpropagate(terms)
        figures = report(terms, values)
        return ViewResult(view, figures, view_pass.radii, d_means2d, view_pass.predictions)


class SmallTraining:
    """A stage after some steps, and the result of the last one."""

    def __init__(
        self,
        device: torch.device,
        runner: StepRunner,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
    ) -> None:
        self._stage = SmallStage(device, optimizer)
        self._runner = runner
        intersections = IntersectionPrediction()
        self._resources = StepResources(MemoryPlan(), intersections, is_only_view=True)
        draws = generator(0, "check", "image")
        size = (HEIGHT, WIDTH, 3)
        image = torch.randint(0, 255, size, generator=draws, dtype=torch.uint8, device="cpu")
        self._image = image.to(device)
        self._n_steps = 0

    def train(self) -> ViewResult:
        """Make some steps; return the result of the last one."""
        for _ in range(N_STEPS):
            self._n_steps += 1
            view = TrainingView(_camera(), self._image, self._n_steps)
            result = self._runner.run(self._stage, view, self._resources)
            for guess in result.predicted:
                if guess.excess is not None:
                    guess.record(float(guess.excess))
            self._stage.apply(self._n_steps)
        return result

    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return self._stage.model.optimizer.parameters


@functools.cache
def _camera() -> Camera:
    """The one camera; what is predicted of a view goes by its name."""
    return Camera(
        "check",
        WIDTH,
        HEIGHT,
        fx=40.0,
        fy=40.0,
        cx=WIDTH / 2,
        cy=HEIGHT / 2,
        rotation=np.eye(3),
        translation=np.zeros(3),
    )


def require_equal(found: SmallTraining, expected: SmallTraining) -> None:
    """Compare two trainings.

    Raises:
        CheckFailed: A parameter differs in some bits.
    """
    others = expected.parameters()
    for name, values in found.parameters().items():
        if not torch.equal(values, others[name]):
            raise CheckFailed(f"{name} differ from those of an ordinary training")
