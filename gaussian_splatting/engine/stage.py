# SPDX-License-Identifier: Apache-2.0
"""What a training stage is: the thing that is optimised and the terms that pull at it.

A stage never owns a loop; :class:`gaussian_splatting.engine.loop.Trainer` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.memory_model import MemoryPlan
from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.engine.poses import PoseRefinement
from gaussian_splatting.optim.learned_exposure import Exposures
from gaussian_splatting.rasterization import RenderOutput
from gaussian_splatting.rasterization.pair_forecast import PairForecast, PairGuess


@dataclass(frozen=True)
class StepResult:
    """What one view said.

    Attributes:
        terms: Detached scalars: each active term unweighted, their weighted sum as ``"loss"``.
        radii: Screen radii, 0 for Gaussians the view did not see. (N,) int32
        guess: What was taken for the number of pairs of the view, to be settled by the checks.
        settle: What else the view changes; called when its numbers were found to be good.
    """

    terms: dict[str, Tensor]
    radii: Tensor
    guess: PairGuess | None = None
    settle: Callable[[], None] = lambda: None


class Stage(ABC):
    """One optimisation, step by step; what is not abstract does nothing unless it is overridden.

    Attributes:
        name: What the console calls it, for example ``"coarse dn_consistency"``.
        model: The Gaussians and their optimiser.
        extent: Camera extent in world units.
        memory_plan: How a step saves memory; the loop may change it between two steps.
        poses: Poses that are learned beside the model; None where they are taken as they are.
        exposures: Those of the photographs, where the stage learns them.
        pairs: Numbers of pairs of the views, by which a step need not wait for them.
    """

    name: str
    model: TrainableModel
    extent: float
    memory_plan: MemoryPlan
    poses: PoseRefinement | None = None
    exposures: Exposures | None = None
    pairs: PairForecast | None = None

    @abstractmethod
    def phase(self, iteration: int) -> str:
        """Name of the part of the schedule an iteration belongs to; memory is reported by it."""

    @abstractmethod
    def begin(self, iteration: int) -> None:
        """Set learning rates, prune, refresh neighbours: all that comes before rendering."""

    def view_scale(self, iteration: int) -> float:
        """Size of the images of an iteration, as a share of the full width and height."""
        return 1.0

    @abstractmethod
    def accumulate(
        self, iteration: int, camera: Camera, target: Tensor, view_index: int = 0
    ) -> StepResult:
        """Evaluate all loss terms of one view and add their gradients to the parameters.

        When memory runs out in it, or a guess in it was wrong, gradients are dropped and it is
        called again; so it changes nothing else, but leaves that to ``StepResult.settle``.

        Args:
            iteration: Absolute iteration.
            camera: The view.
            target: Its photograph. (H, W, 3) uint8, or float32 in [0, 1]
            view_index: Number of the view in its step; random draws depend on it.
        """

    def collect_exposure(self, photograph: str, leaf: Tensor | None) -> None:
        """Add the gradient of a photograph's exposure to the step's, where exposures are learned.

        Part of ``StepResult.settle``; ``leaf`` is what the view's terms read.
        """
        if self.exposures is not None:
            self.exposures.collect(photograph, leaf)

    def step_statistics(self) -> Sequence[Tensor]:
        """What the views of this step added up besides gradients, and :meth:`apply` reads.

        Where processes share the views, each tensor becomes its sum over them, in place.
        """
        return ()

    @abstractmethod
    def apply(self, iteration: int) -> None:
        """Change the parameters: densification where there is any, then the optimiser step."""

    @abstractmethod
    def render(self, camera: Camera, *, geometry: bool) -> RenderOutput:
        """Render for evaluation, without gradients; ``geometry`` asks for depth and normals."""

    def fitted_pose(self, camera: Camera, photograph: Tensor) -> Camera:
        """A held-out camera, moved to where its photograph fits best where poses are learned.

        Args:
            camera: The view in its known pose.
            photograph: What it took. (H, W, 3) uint8, or (H, W, 4) with a mask
        """
        return camera

    def view_metrics(self, camera: Camera, output: RenderOutput) -> dict[str, float]:
        """Further figures of an evaluated view, rendered with geometry."""
        return {}

    def view_maps(self, camera: Camera) -> dict[str, Tensor]:
        """Further pictures of an evaluated view by name, (H, W, 3) uint8 on the CPU."""
        return {}

    def extra_state(self) -> dict[str, Any]:
        """What resuming needs beyond parameters and moments; tensors and primitives."""
        return {}

    def restore_extra(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take :meth:`extra_state` back; parameters and moments are restored already."""

    def export(self, iteration: int) -> None:  # noqa: B027
        """Write what other programs read, at the iterations the loop was told to export."""
