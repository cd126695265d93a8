# SPDX-License-Identifier: Apache-2.0
"""A training stage: a model, a table of loss terms and a list of components."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from gaussian_splatting import rasterization
from gaussian_splatting.core.cloud import MAX_SH_DEGREE, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import Component, IterationRules, ViewResult
from gaussian_splatting.engine.guard import StepNumbers
from gaussian_splatting.engine.loss_terms import LossTerm
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.engine.strips import ViewPass
from gaussian_splatting.engine.training_views import TrainingView, composited_view
from gaussian_splatting.rasterization.projection import IntersectionPrediction


class StageConfig(Protocol):
    """Settings that every stage has."""

    @property
    def white_background(self) -> bool:
        """Whether the background is white instead of black."""
        ...

    @property
    def random_seed(self) -> int:
        """Seed of all draws of the stage."""
        ...


@dataclass(frozen=True)
class StepResources:
    """Resources of a step; the result depends on them by rounding only."""

    memory: MemoryPlan
    # Numbers of tile intersections at earlier visits; None: the host waits for the number.
    intersections: IntersectionPrediction | None = None
    is_only_view: bool = False  # whether the step has no other view, in any process
    n_views_here: int = 1  # views of the step that this process is trained on


Model = TypeVar("Model", bound=TrainableModel, covariant=True)
Config = TypeVar("Config", bound=StageConfig, covariant=True)


class FurtherImages(Protocol):
    """Photographs that views need besides their own; the stepper has them read ahead."""

    def prefetch(self, camera: Camera, iteration: int, view_index: int) -> None:
        """Have what a view needs decoded in the background."""
        ...

    def send_ahead(self, camera: Camera, iteration: int, view_index: int) -> None:
        """Begin to send what a view needs to the device."""
        ...


class Stage(ABC, Generic[Model, Config]):
    """One optimisation, step by step; the loop and the stepper of the engine call it.

    What is not abstract serves a stage that renders its model as it is. Subclasses set the
    attributes.
    """

    name: str
    model: Model
    terms: Sequence[LossTerm]
    components: Sequence[Component] = ()
    extent: float  # camera extent in world units
    memory_plan: MemoryPlan  # to begin with
    further_images: FurtherImages | None = None
    _config: Config
    _rasterizer: rasterization.Rasterizer = rasterization.WARP

    @abstractmethod
    def phase(self, iteration: int) -> str:
        """Name of the part of the schedule an iteration belongs to; memory is reported by it."""

    def begin(self, iteration: int) -> None:
        """Update rates, Gaussians and neighbours before rendering.

        Whatever adds, removes or resets Gaussians belongs here and not into :meth:`apply`: after
        a step the loop measures, exports and saves the model, which has to be the one that was
        trained.
        """
        for component in self.components:
            component.begin(iteration)

    def rules(self, iteration: int) -> IterationRules:
        """Return what is known of an iteration before it begins."""
        return IterationRules.all_of([c.rules(iteration) for c in self.components])

    def accumulate(self, view: TrainingView, resources: StepResources | None = None) -> ViewResult:
        """Evaluate all loss terms of one view and add their gradients to the parameters.

        Nothing else changes: when memory runs out in it, or a prediction in it was wrong, gradients
        are dropped and it is called again. The rest follows in :meth:`commit`.

        Args:
            view: With its photograph as the image store gives it.
        """
        return self.train_on(self.prepare(view), resources or StepResources(self.memory_plan))

    def prepare(self, view: TrainingView) -> TrainingView:
        """Complete a view by the components' changes and by the host's random draws."""
        for component in self.components:
            view = component.before_view(view)
        return view

    @abstractmethod
    def train_on(self, view: TrainingView, resources: StepResources) -> ViewResult:
        """Render a view that was prepared, and backpropagate all its terms."""

    def variant(self, view: TrainingView) -> Hashable | None:
        """Return what :meth:`train_on` does besides what follows from the tensors of the view.

        For two views of one variant, whose tensors have the same sizes, it does the same
        operations. None where the host takes part in them, as by counting.
        """
        active = tuple(term.name for term in self.terms if term.active(view.iteration))
        return self.sh_degree(view.iteration), active

    def sh_degree(self, iteration: int) -> int:
        """Degree of the spherical harmonics that an iteration trains."""
        return MAX_SH_DEGREE

    @property
    def needs_numbers(self) -> bool:
        """Whether a component needs the numbers of a view before the next one begins."""
        return any(component.needs_numbers for component in self.components)

    def commit(self, result: ViewResult) -> None:
        """Pass the result of a view with finite numbers to the components."""
        for component in self.components:
            component.after_view(result, self.model)

    def note(self, result: ViewResult) -> None:  # noqa: B027
        """Take note of a view whose numbers the host has read; they are good."""

    def step_statistics(self) -> list[Tensor]:
        """Sums over the views of this step besides gradients; processes add them up in place."""
        return [tensor for component in self.components for tensor in component.statistics()]

    def apply(self, iteration: int) -> None:
        """Make the optimiser step."""
        self.model.optimizer.drop_gradients(self.rules(iteration).frozen)
        self.model.optimizer.step()
        for component in self.components:
            component.after_step(iteration)

    def keep_rows(self, rows: Tensor) -> None:
        """Remove all other Gaussians from the model and the state of components. (N,)"""
        self.model.optimizer.keep_rows(rows)
        for component in self.components:
            component.keep_rows(rows)

    def collecting(
        self, gaussians: Gaussians, view: TrainingView, resources: StepResources
    ) -> Gaussians:
        """Let a pass over activated Gaussians leave the gradients of a view in the parameters.

        Those of colours may stay factors until the optimiser forms them: where they are those of
        one view, and only the optimiser reads them.
        """
        only_steps = resources.is_only_view and not view.gradients_are_read
        return self.model.optimizer.collecting(gaussians, as_factors=only_steps)

    def gaussians(self) -> Gaussians:
        """The model as it is rendered."""
        return self.model.activate()

    def rendered_degree(self) -> int:
        """Degree of the spherical harmonics in evaluations."""
        return MAX_SH_DEGREE

    def background(self, view: TrainingView) -> Tensor:
        """Colour behind the Gaussians of a view in training. (3,)"""
        return rasterization.plain_background(self._config.white_background, self.model.device)

    def composited(self, view: TrainingView) -> TrainingView:
        """The view on its background, as its loss terms see it."""
        return composited_view(view, self.background(view), self._config.random_seed)

    def view_pass(
        self,
        projection: rasterization.Projection,
        view: TrainingView,
        resources: StepResources,
        *,
        farthest_depth_behind: bool = False,
    ) -> ViewPass:
        """Prepare to blend and to backpropagate a projected view; see :class:`ViewPass`."""
        return ViewPass(
            projection,
            view,
            resources.memory.split,
            farthest_depth_behind=farthest_depth_behind,
            rasterizer=self._rasterizer,
            intersections=resources.intersections,
        )

    def with_features(
        self, view: TrainingView, gaussians: Gaussians
    ) -> tuple[TrainingView, Tensor | None]:
        """Collect the values that components blend; the view stores their columns."""
        columns: dict[str, slice] = {}
        blocks = []
        start = 0
        for added in view.added:
            if added.features is not None:
                values = added.features(gaussians, view.camera)
                columns[added.name] = slice(start, start + values.shape[1])
                start += values.shape[1]
                blocks.append(values)
        if not blocks:
            return view, None
        features = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        return replace(view, feature_columns=columns), features

    def all_terms(self, view: TrainingView) -> list[LossTerm]:
        """Loss terms of the stage and of the components for this view."""
        return [*self.terms, *(term for added in view.added for term in added.terms)]

    def render(self, camera: Camera, *, geometry: bool) -> rasterization.RenderOutput:
        """Render for evaluation, without gradients; ``geometry`` asks for depth and normals."""
        return rasterization.render_view(
            self.gaussians(),
            camera,
            white=self._config.white_background,
            geometry=geometry,
            sh_degree=self.rendered_degree(),
            rasterizer=self._rasterizer,
        )

    @property
    def rasterizer(self) -> rasterization.Rasterizer:
        """What blends the views."""
        return self._rasterizer

    @property
    def changes_exposure(self) -> bool:
        """Whether photographs are compared after a correction of their exposure."""
        return any(component.changes_exposure for component in self.components)

    @property
    def fits_held_out_poses(self) -> bool:
        """Whether held-out views are measured at fitted poses, too."""
        return any(component.fits_held_out_poses for component in self.components)

    def fitted_pose(self, camera: Camera, photograph: Tensor) -> Camera:
        """A held-out camera, moved to where its photograph fits best where poses are learned."""
        return camera

    def view_metrics(self, camera: Camera, output: rasterization.RenderOutput) -> dict[str, float]:
        """Further figures of an evaluated view, rendered with geometry."""
        figures: dict[str, float] = {}
        for component in self.components:
            figures |= component.view_figures(camera, output)
        return figures

    def view_maps(self, camera: Camera) -> dict[str, Tensor]:
        """Further pictures of an evaluated view by name, (H, W, 3) uint8 on the CPU."""
        return {}

    def calibrated(self, camera: Camera) -> Camera:
        """A training camera as the components have learned it."""
        view = TrainingView(camera, None)
        for component in self.components:
            view = component.before_view(view)
        return view.camera

    def excluded_views(self) -> dict[str, str]:
        """Training views that are not to be shown any more: name to reason."""
        excluded: dict[str, str] = {}
        for component in self.components:
            excluded |= component.excluded_views()
        return excluded

    def extra_state(self) -> dict[str, Any]:
        """Return the state for resuming beyond parameters and moments: tensors and primitives."""
        state: dict[str, Any] = {}
        for component in self.components:
            state |= component.state()
        return state

    def restore_extra(self, state: Mapping[str, Any]) -> None:
        """Take :meth:`extra_state` back; parameters and moments are restored already."""
        for component in self.components:
            component.load_state(state)

    def export(self, iteration: int) -> None:  # noqa: B027
        """Write files for other programs at the iterations of export."""


def numbers_to_check(stage: Stage, result: ViewResult) -> StepNumbers:
    """Collect the numbers of a view that are checked before the optimiser's step."""
    optimizer = stage.model.optimizer
    return StepNumbers(
        losses=result.terms,
        gradients=optimizer.gradients_to_check(),
        parameters=optimizer.resident,
        extent=stage.extent,
        radii=result.radii,
        predicted=result.predicted,
    )
