# SPDX-License-Identifier: Apache-2.0
"""Passes over views that a GPU repeats in one piece, as CUDA graphs.

From the activation of the Gaussians to the optimiser's step, a pass is the same launches for every
view of one size; with few Gaussians the host needs longer to make them than the GPU to carry them
out. So a pass is recorded once, and repeated with other views, whose camera and photograph are
copied to where the recorded launches read them. Bits do not depend on it.

The step belongs to the recording where it follows from one view alone. The GPU then judges the
numbers of the view by itself, and leaves all values as they are where these are bad; the host reads
them afterwards. Where components or other processes act before the step, the host makes it.

A recording holds as long as the number of Gaussians, the size of the images, the terms of the loss
and the capacity for what a view may need do. The first one of a run is compared with the same pass
made launch by launch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.recording.cuda_graph import CudaRecorder, Recorder
from gaussian_splatting.engine.recording.recorded_pass import (
    FixedCapacity,
    RecordedPass,
    are_equal,
    cameras_in,
    copied,
    facts_of,
    inputs_of,
)
from gaussian_splatting.engine.stage import Stage, StepResources
from gaussian_splatting.engine.step_runner import NewStepRunner, StepRunner, plain_runner
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.optim.recorded_step import step_facts
from gaussian_splatting.rasterization import WarpRasterizer
from gaussian_splatting.rasterization.compute import Compute
from gaussian_splatting.rasterization.projection import IntersectionPrediction, rounded_up
from sugar_utils.errors import Notify
from sugar_utils.memory import out_of_memory

MAX_RECORDINGS = 8


@dataclass(frozen=True)
class _Key:
    """The facts that a recording depends on, besides where the parameters lie."""

    kind: Hashable  # see ``Stage.variant``, and facts of the view
    resources: Hashable
    capacity: int  # of the tile lists
    step: Hashable | None  # see ``recorded_step.step_facts``; None where the host makes the step


@dataclass(frozen=True)
class _Request:
    """A pass that is asked for."""

    stage: Stage
    view: TrainingView  # prepared
    resources: StepResources
    predictor: IntersectionPrediction  # of the resources

    def launched(self) -> ViewResult:
        """Make the pass launch by launch."""
        return self.stage.train_on(self.view, self.resources)


class RecordedRunner:
    """Carries out the passes of one stage, recorded ones where that can be.

    Args:
        warn: Called with the reason why nothing is recorded any more, if so.
    """

    def __init__(self, recorder: Recorder, warn: Notify) -> None:
        self._recorder = recorder
        self._warn = warn
        self._is_on = True
        self._was_compared = False
        self._parameters: Hashable = None
        self._passes: OrderedDict[_Key, RecordedPass] = OrderedDict()
        # Kinds that were made launch by launch: their kernels and constants are on the device.
        self._ready: set[Hashable] = set()

    def run(self, stage: Stage, view: TrainingView, resources: StepResources) -> ViewResult:
        """Do what :meth:`Stage.accumulate` does."""
        view = stage.prepare(view)
        kind = stage.variant(view) if self._may_record(stage, view, resources) else None
        predictor = resources.intersections
        if kind is None or predictor is None:
            return stage.train_on(view, resources)
        inputs = list(inputs_of(view))
        capacity = _capacity(cameras_in(inputs), len(stage.model), predictor)
        if capacity is None:
            return stage.train_on(view, resources)
        kind = (kind, view.exposure is None, view.exposed_pixels is None, facts_of(inputs))
        if kind not in self._ready:
            self._ready.add(kind)
            return stage.train_on(view, resources)
        self._drop_outdated(stage)
        step = None
        if resources.is_only_view and _step_follows(stage, view):
            step = step_facts(stage.model.optimizer)
        key = _Key(kind, resources.memory, rounded_up(capacity), step)
        recorded = self._passes.get(key)
        if recorded is not None:
            self._passes.move_to_end(key)
            return recorded.repeat(view, predictor)
        request = _Request(stage, view, resources, predictor)
        return self._first_of(key, request)

    def _may_record(self, stage: Stage, view: TrainingView, resources: StepResources) -> bool:
        """Whether our rasterizer and the table of terms alone act on a view, without the host."""
        return (
            self._is_on
            # Gradients of a recorded pass are lost when the next one is repeated.
            and resources.n_views_here == 1
            # With strips, the host reads where the tile lists of each begin.
            and resources.memory.split.strips == 1
            and isinstance(stage.rasterizer, WarpRasterizer)
            # The launches of a view would depend on which steps wait.
            and not stage.model.optimizer.has_late_steps
            and not view.added
        )

    def _drop_outdated(self, stage: Stage) -> None:
        """Drop the recordings of parameters that are gone."""
        leaves = stage.model.optimizer.leaves.values()
        parameters = tuple((tensor.data_ptr(), tensor.shape) for tensor in leaves)
        if parameters != self._parameters:
            self._passes.clear()
            self._parameters = parameters

    def _first_of(self, key: _Key, request: _Request) -> ViewResult:
        """Record a pass and carry it out; make it launch by launch where that fails."""
        if not self._was_compared:
            return self._compared(key, request)
        recorded = self._record(key, request)
        if recorded is None:
            return request.launched()
        return recorded.repeat(request.view, request.predictor)

    def _record(self, key: _Key, request: _Request) -> RecordedPass | None:
        """Record a pass; None where that fails, which is not tried again."""
        resources = replace(request.resources, intersections=FixedCapacity(key.capacity))
        with_step = key.step is not None
        try:
            recorded = RecordedPass(
                request.stage, self._recorder, request.view, resources, with_step=with_step
            )
        except RuntimeError as error:
            request.stage.model.optimizer.zero_grad()
            if out_of_memory(error):
                raise
            self._switch_off(str(error).splitlines()[0][:200])
            return None
        self._passes[key] = recorded
        if len(self._passes) > MAX_RECORDINGS:
            self._passes.popitem(last=False)
        return recorded

    def _compared(self, key: _Key, request: _Request) -> ViewResult:
        """Make a pass launch by launch, and compare its gradients with those of a recorded one."""
        optimizer = request.stage.model.optimizer
        self._was_compared = True
        result = request.launched()
        gradients = optimizer.take_gradients()
        recorded = self._record(key, request)
        if recorded is not None:
            repeated = recorded.gradients(copied(request.view), request.predictor)
            if not are_equal(gradients, repeated):
                self._switch_off("a repeated pass gave other gradients than its launches did")
        optimizer.put_gradients(gradients)
        return result

    def _switch_off(self, reason: str) -> None:
        self._is_on = False
        self._passes.clear()
        self._warn(f"every launch is made by the host, without CUDA graphs: {reason}")


def _capacity(
    cameras: Iterable[Camera], n_gaussians: int, predictor: IntersectionPrediction
) -> int | None:
    """Length of tile lists that is enough for all cameras of a view; None if not known."""
    capacities = []
    for camera in cameras:
        predicted = predictor.predict(camera, n_gaussians)
        if predicted is None:
            return None
        capacities.append(predicted.capacity)
    return max(capacities)


def _step_follows(stage: Stage, view: TrainingView) -> bool:
    """Whether no component acts between a view and the optimiser's step."""
    return not view.gradients_are_read and not stage.rules(view.iteration).frozen


def step_runner(compute: Compute) -> NewStepRunner:
    """Return what makes the step runner of a run: a recorded one on a GPU, unless it is off."""
    if not compute.cuda_graph or compute.device.type != "cuda":
        return plain_runner

    def recorded_runner(warn: Notify) -> StepRunner:
        return RecordedRunner(CudaRecorder(compute.device), warn)

    return recorded_runner
