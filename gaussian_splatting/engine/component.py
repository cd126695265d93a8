# SPDX-License-Identifier: Apache-2.0
"""The protocol of components: features that a stage learns or runs with its model.

A stage is a model, a table of loss terms and a list of components. The engine calls each component
in the order of the list and knows none of them by name. An iteration calls::

    rules(iteration), begin(iteration)
    for each view:
        before_view(view)             may be called again, where a view is repeated
        after_view(result, model)     only when all numbers are good, see ``needs_numbers``
    statistics()                      summed over the processes of a run
    the optimiser's step, after_step(iteration)
    after_iteration(context)          only where looks_at(iteration)

an evaluation calls ``report`` and ``view_figures``, a checkpoint ``state`` or ``load_state``, and
an export ``export``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera, LoadImage
from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.engine.state_schema import StateRule
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.rasterization import RenderOutput
from gaussian_splatting.rasterization.projection import PredictedCount
from gaussian_splatting.scenes.scene import Scene
from sugar_utils.console import Console
from sugar_utils.device import SentNumbers, constants
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
    # The numbers to check, where the step is made with them; see ``guard.probes_of``. (n,)
    probes: SentNumbers | None = None
    # On the device: whether they, and those of all steps before, are good; None: the host has read
    # them. (1,) bool
    step_mask: Tensor | None = None

    @functools.cached_property
    def visible(self) -> Tensor:
        """Gaussians that the view shows. (N,) bool"""
        return self.radii > 0 if self.visible_rows is None else self.visible_rows


def kept_if(step_mask: Tensor | None, values: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Values that follow from a view, or others, zeros, where ``ViewResult.step_mask`` is false."""
    if step_mask is None:
        return values
    others = constants((0.0,), values.device) if otherwise is None else otherwise
    return torch.where(step_mask, values, others)


class Figure(NamedTuple):
    """A number that a component adds to an evaluation."""

    tag: str  # of the curve in TensorBoard: ``Group/name``
    value: float


class ComponentReport(NamedTuple):
    """How far a component has come."""

    figures: Sequence[Figure] = ()
    summary: str | None = None  # one line for the console about these numbers


@dataclass(frozen=True)
class IterationRules:
    """What is known of an iteration before it begins."""

    view_scale: float = 1.0  # size of its images, as a share of the full width and height
    # Parameters that its step leaves as they are, whatever their gradients.
    frozen: Collection[str] = ()
    changes_population: bool = False  # whether Gaussians are added or removed when it begins
    # Whether it begins with work on the model as the step before has left it; done again, the
    # result is the same.
    begins_with_model: bool = False

    @classmethod
    def all_of(cls, rules: Sequence[IterationRules]) -> IterationRules:
        """Return what holds where several rules do."""
        if len(rules) == 1:
            return rules[0]
        return cls(
            view_scale=min((rule.view_scale for rule in rules), default=1.0),
            frozen=frozenset(name for rule in rules for name in rule.frozen),
            changes_population=any(rule.changes_population for rule in rules),
            begins_with_model=any(rule.begins_with_model for rule in rules),
        )


NO_RULES = IterationRules()


class Component:
    """Base of all components: every hook does nothing."""

    name: str
    schema: ClassVar[tuple[StateRule, ...]] = ()  # of the tensors of its state
    # Whether photographs are expected to differ from renders by a gain and an offset per channel.
    changes_exposure: bool = False
    # Whether held-out views are also measured from the pose in which they fit best.
    fits_held_out_poses: bool = False
    # Whether its hooks keep what :func:`kept_if` returns, and its rules say when it begins with the
    # model: such hooks are called while the device works on the view.
    obeys_step_mask: bool = False

    @property
    def needs_numbers(self) -> bool:
        """Whether its hooks may be called only when the host knows that the numbers are good."""
        kind = type(self)
        return not self.obeys_step_mask and (
            kind.begin is not Component.begin
            or kind.after_view is not Component.after_view
            or kind.after_step is not Component.after_step
        )

    def looks_at(self, iteration: int) -> bool:
        """Whether :meth:`after_iteration` has work to do after an iteration."""
        return type(self).after_iteration is not Component.after_iteration

    def rules(self, iteration: int) -> IterationRules:
        """Return what an iteration may do; asked before it begins, also for the one after."""
        return NO_RULES

    def begin(self, iteration: int) -> None:
        """Update state before the views of an iteration, such as the set of Gaussians."""

    def before_view(self, view: TrainingView) -> TrainingView:
        """Return the view with what this component knows of it.

        That is another pose, an exposure, weights of pixels, a further loss
        (:meth:`TrainingView.with_loss`), or that the component reads the gradients of the view. A
        view without a photograph asks for its pose alone.
        """
        return view

    def after_view(self, result: ViewResult, model: TrainableModel) -> None:
        """Record the result of a view with finite numbers."""

    def statistics(self) -> Sequence[Tensor]:
        """Sums over the views of this step besides gradients; processes add them up in place."""
        return ()

    def after_step(self, iteration: int) -> None:
        """Count the step, or make one of its own."""

    def keep_rows(self, rows: Tensor) -> None:
        """Keep the rows of the Gaussians that stay in the model. (N,) bool"""

    def excluded_views(self) -> Mapping[str, str]:
        """Training views that are not to be shown any more: name to reason."""
        return {}

    def report(self) -> ComponentReport:
        """Return numbers that say how far it has come."""
        return ComponentReport()

    def view_figures(self, camera: Camera, output: RenderOutput) -> dict[str, float]:
        """Numbers of an evaluated view, rendered with geometry."""
        return {}

    def after_iteration(self, context: IterationContext) -> None:
        """Look at the model after a step; all processes of a run come here together."""

    def export(self, target: ExportTarget) -> None:
        """Write what other programs can use of it beside the exported model."""

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
    load_photograph: LoadImage  # (H, W, 3) or (H, W, 4) uint8
    white_background: bool
    group: ProcessGroup
    console: Console


@dataclass(frozen=True)
class ExportTarget:
    """Where a model is exported, and what of."""

    root: Path  # folder of all results of the run
    folder: Path  # of the model of this iteration
    scene: Scene
    cameras: Sequence[Camera]  # training views at their full size, as the components learned them
    console: Console
