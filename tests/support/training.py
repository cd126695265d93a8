# SPDX-License-Identifier: Apache-2.0
"""Single views of a stage, without a loop around it."""

from __future__ import annotations

from torch import Tensor

from gaussian_splatting.components.densification import Region
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.engine.training_views import TrainingView


def accumulate(
    stage: Stage, iteration: int, camera: Camera, photograph: Tensor, index: int = 0
) -> ViewResult:
    """Add the gradients of a view to the parameters."""
    return stage.accumulate(TrainingView(camera, photograph, iteration, index))


def learn(
    stage: Stage, iteration: int, camera: Camera, photograph: Tensor, index: int = 0
) -> ViewResult:
    """Add the gradients of a view, and let components take note of it."""
    result = accumulate(stage, iteration, camera, photograph, index)
    stage.commit(result)
    return result


def everywhere(extent: float) -> Region:
    """A region without bounds around cameras of an extent."""
    return Region(extent)


def parameters_and_moments(stage: Stage) -> dict[str, Tensor]:
    """All numbers that the optimiser changes, by name."""
    optimizer = stage.model.optimizer
    state = {name: p.detach() for name, p in optimizer.parameters.items()}
    for name, moments in optimizer.moments().items():
        state |= {f"{name} {moment}": values for moment, values in moments.items()}
    return state
