# SPDX-License-Identifier: Apache-2.0
"""The protocol of components: features that a stage learns or runs with its model.

A stage is a model, a table of loss terms and a list of components. The engine calls each component
in the order of the list and knows none of them by name. An iteration calls::

    begin(iteration)
    for each view:
        before_view(view)             may be called again, where a view is repeated
        features(gaussians, camera), terms(view)
        after_view(result, model)     only when all numbers of the view are good
    statistics()                      summed over the processes of a run
    before_step(iteration), the optimiser's step, after_step(iteration)

and a checkpoint calls ``state`` or ``load_state``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.loss_terms import LossTerm
from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.engine.state_schema import StateRule
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.rasterization import RenderOutput
from gaussian_splatting.rasterization.projection import PredictedCount
from sugar_utils.console import Console
from sugar_utils.process_group import ProcessGroup


@dataclass(frozen=True)
class ViewResult:
    """Results of one view of a step; gradients are in the parameters."""

    view: TrainingView
    # Detached scalars: each active term unweighted, their weighted sum as ``"loss"``.
    terms: dict[str, Tensor]
    radii: Tensor  # screen radii, 0 for Gaussians the view did not see, (N,) int32
    d_means2d: Tensor | None = None  # gradient of the projected centres, (N, 2) per pixel
    # What was taken for numbers that only the device knows: of tile intersections, of this and of
    # other views, and of Gaussians that may be sampled.
    predicted: Sequence[PredictedCount] = ()
    visible_rows: Tensor | None = None  # ``radii > 0`` where a stage knows it already, (N,) bool
    # The numbers to check, where the step is made already; see ``guard.probes_of``. (n,)
    probes: Tensor | None = None

    @functools.cached_property
    def visible(self) -> Tensor:
        """Gaussians that the view shows. (N,) bool"""
        return self.radii > 0 if self.visible_rows is None else self.visible_rows


class Figure(NamedTuple):
    """A number that a component adds to an evaluation."""

    tag: str  # of the curve in TensorBoard: ``Group/name``
    value: float


class Component:
    """Base of all components: every hook does nothing."""

    name: str
    schema: ClassVar[tuple[StateRule, ...]] = ()  # of the tensors of its state
    # Whether photographs are expected to differ from renders by a gain and an offset per channel.
    changes_exposure: bool = False
    # Whether held-out views are also measured from the pose in which they fit best.
    fits_held_out_poses: bool = False
    # Whether ``after_view`` reads gradients or values of the model: gradients are not kept as
    # factors then, and values not stepped before.
    reads_gradients: bool = False

    def begin(self, iteration: int) -> None:
        """Update state before the views of an iteration, such as the set of Gaussians."""

    def view_scale(self, iteration: int) -> float:
        """Size of the images of an iteration, as a share of the full width and height."""
        return 1.0

    def before_view(self, view: TrainingView) -> TrainingView:
        """Return the view with this component's changes, such as a pose or an exposure."""
        return view

    def features(self, gaussians: Gaussians, view: TrainingView) -> Tensor | None:
        """Values to blend for terms of this component. (N, f) or None

        A term finds them as ``ImageStrip.feature(name)``.
        """
        return None

    def terms(self, view: TrainingView) -> Sequence[LossTerm]:
        """Additional loss terms of the view; terms of images only."""
        return ()

    def adds_nothing(self, iteration: int) -> bool:
        """Whether views of an iteration get no features and no terms of this component.

        A pass over such a view is the same for every view, and may be recorded.
        """
        adds_features = type(self).features is not Component.features
        return not adds_features and type(self).terms is Component.terms

    def after_view(self, result: ViewResult, model: TrainableModel) -> None:
        """Record the result of a view with finite numbers."""

    def changes_step(self, iteration: int) -> bool:
        """Whether ``before_step`` changes the optimiser's step in an iteration.

        Otherwise the step may belong to the recorded pass, and be made before ``after_view``.
        """
        return type(self).before_step is not Component.before_step

    def statistics(self) -> Sequence[Tensor]:
        """Sums over the views of this step besides gradients; processes add them up in place."""
        return ()

    def before_step(self, iteration: int) -> None:
        """Drop gradients that the optimiser must not see."""

    def after_step(self, iteration: int) -> None:
        """Make a step of its own."""

    def keep_rows(self, rows: Tensor) -> None:
        """Keep the rows of the Gaussians that stay in the model. (N,) bool"""

    def calibrated(self, camera: Camera) -> Camera:
        """Return a training camera as this component has learned it."""
        return camera

    def excluded_views(self) -> Mapping[str, str]:
        """Training views that are not to be shown any more: name to reason."""
        return {}

    def figures(self) -> Sequence[Figure]:
        """Numbers that say how far it has come."""
        return ()

    def summary(self) -> str | None:
        """One line for the console about these numbers."""
        return None

    def view_figures(self, camera: Camera, output: RenderOutput) -> dict[str, float]:
        """Numbers of an evaluated view, rendered with geometry."""
        return {}

    def after_iteration(self, context: IterationContext) -> None:
        """Look at the model after a step; all processes of a run come here together."""

    def state(self) -> dict[str, Any]:
        """Return the state for resuming: tensors and primitives, with names of its own."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take :meth:`state` back, of all components; the model is restored already.

        Tensors are as the schema says. What is missing stays as it is.

        Raises:
            UserError: A value does not fit this run.
        """


class TrainedStage(Protocol):
    """The part of a stage that components may use between iterations."""

    @property
    def model(self) -> TrainableModel:
        """The model with its current parameters."""
        ...

    @property
    def extent(self) -> float:
        """Camera extent in world units."""
        ...

    def gaussians(self) -> Gaussians:
        """The model as it is rendered."""
        ...

    def calibrated(self, camera: Camera) -> Camera:
        """A training camera as the components have learned it."""
        ...

    def render(self, camera: Camera, *, geometry: bool) -> RenderOutput:
        """Render without gradients; ``geometry`` asks for depth and normals."""
        ...


@dataclass(frozen=True)
class IterationContext:
    """The run around a component, between two iterations."""

    iteration: int
    stage: TrainedStage
    cameras: Sequence[Camera]  # of all training views
    load_photograph: Callable[[Camera], Tensor]  # (H, W, 3) or (H, W, 4) uint8
    white_background: bool
    group: ProcessGroup
    console: Console
