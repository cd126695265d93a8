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
and the room for what a view may need do. The first one of a run is compared with the same pass made
launch by launch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.core.cuda_graph import Recorder
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.guard import may_step, probes_of
from gaussian_splatting.engine.stage import Stage, StepResources, numbers_to_check
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.optim.adam import Gradients
from gaussian_splatting.rasterization.projection import (
    IntersectionPrediction,
    PredictedCount,
)
from gaussian_splatting.rasterization.projection_kernels import camera_record
from sugar_utils.errors import Notify
from sugar_utils.memory import out_of_memory

MAX_RECORDINGS = 8
STEPS_PER_DOUBLING = 4
"""Sizes of tile lists between a size and its double, so that many views share a recording."""


class _FixedRoom(IntersectionPrediction):
    """Predicts the capacity of a recording for every view."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def predict(self, camera: Camera, n_gaussians: int) -> PredictedCount:
        """Return the capacity."""
        return PredictedCount(self, camera, n_gaussians, self._capacity)


def rounded_up(capacity: int) -> int:
    """Round the length of tile lists up to one of few sizes."""
    step = math.ceil(STEPS_PER_DOUBLING * math.log2(max(1, capacity)))
    return math.ceil(2 ** (step / STEPS_PER_DOUBLING))


@dataclass(frozen=True)
class _Key:
    """The facts that a recording depends on, besides where the parameters lie."""

    kind: Hashable  # see ``Stage.recorded_as``, and facts of the view
    resources: Hashable
    capacity: int  # of the tile lists
    step: Hashable | None  # see ``GroupedAdam.step_facts``; None where the host makes the step


class _RecordedPass:
    """One recorded pass with the tensors that it reads and writes.

    Args:
        with_step: Record the optimiser's step, too.
    """

    def __init__(
        self,
        stage: Stage,
        recorder: Recorder,
        view: TrainingView,
        resources: StepResources,
        *,
        with_step: bool,
    ) -> None:
        self._stage = stage
        self._optimizer = stage.model.optimizer
        self._view = _copied(view)
        self._inputs: list[Any] = list(_inputs_of(self._view))
        # Numbers of cameras that no other view shares, because these cameras are copies.
        device = stage.model.device
        self._records = {c: camera_record(c, device) for c in _cameras_in(self._inputs)}
        # Zero while launches are recorded: a recorder may carry them out.
        self._is_enabled = torch.zeros(1, dtype=torch.int32, device=device)
        if with_step:
            self._optimizer.send_numbers()
        self._recording, self._result = recorder.record(
            lambda: self._recorded_work(resources, with_step=with_step)
        )
        self._gradients = self._optimizer.take_gradients()
        self._is_enabled.fill_(1)

    def _recorded_work(self, resources: StepResources, *, with_step: bool) -> ViewResult:
        result = self._stage.train_on(self._view, resources)
        if not with_step:
            return result
        numbers = numbers_to_check(self._stage, result)
        probes = probes_of(numbers)
        is_recorded = self._optimizer.record_step(may_step(numbers, probes) * self._is_enabled)
        return replace(result, probes=probes) if is_recorded else result

    def gradients(self, view: TrainingView, predictor: IntersectionPrediction) -> Gradients:
        """Carry the pass out on a view without its step, and return the gradients."""
        self._is_enabled.zero_()
        self.repeat(view, predictor)
        self._is_enabled.fill_(1)
        return self._optimizer.take_gradients()

    def repeat(self, view: TrainingView, predictor: IntersectionPrediction) -> ViewResult:
        """Carry the pass out on another view."""
        has_step = self._result.probes is not None
        if has_step:
            self._optimizer.send_numbers()
        cameras = {}
        for recorded, value in zip(self._inputs, _inputs_of(view), strict=True):
            if isinstance(value, Camera):
                cameras[recorded] = value
                record = self._records[recorded]
                record.copy_(camera_record(value, record.device))
            else:
                recorded.detach().copy_(value.detach())
        self._recording.replay()
        self._optimizer.put_gradients(self._gradients)
        if has_step:
            self._optimizer.mark_made()
        if view.exposure is not None and self._view.exposure is not None:
            view.exposure.grad = self._view.exposure.grad
        predicted = []
        for guess in self._result.predicted:
            camera = cameras[guess.camera]
            is_of_tiles = isinstance(guess.predictor, _FixedRoom)
            source = predictor if is_of_tiles else guess.predictor
            predicted.append(replace(guess, predictor=source, camera=camera, count=None))
        return replace(self._result, view=view, predicted=predicted)


class RecordedPasses:
    """Makes the passes of a stage, recorded ones where that can be.

    Args:
        warn: Told why nothing is recorded any more, if so.
        is_alone: Whether each step is that of one view of this process.
    """

    def __init__(self, stage: Stage, recorder: Recorder, warn: Notify, *, is_alone: bool) -> None:
        self._stage = stage
        self._is_alone = is_alone
        self._recorder = recorder
        self._warn = warn
        self._is_on = True
        self._was_compared = False
        self._parameters: Hashable = None
        self._passes: OrderedDict[_Key, _RecordedPass] = OrderedDict()
        # Kinds that were made launch by launch: their kernels and constants are on the device.
        self._ready: set[Hashable] = set()

    def accumulate(self, view: TrainingView, resources: StepResources) -> ViewResult:
        """See :meth:`Stage.accumulate`."""
        stage = self._stage
        view = stage.prepare(view)
        # With strips, the host reads where the tile lists of each begin.
        is_whole = resources.memory.split.strips == 1
        kind = stage.recorded_as(view) if self._is_on and is_whole else None
        predictor = resources.intersections
        if kind is None or predictor is None:
            return stage.train_on(view, resources)
        inputs = list(_inputs_of(view))
        capacity = self._capacity(_cameras_in(inputs), predictor)
        if capacity is None:
            return stage.train_on(view, resources)
        kind = (kind, view.exposure is None, view.exposed_pixels is None, _facts_of(inputs))
        if kind not in self._ready:
            self._ready.add(kind)
            return stage.train_on(view, resources)
        key = self._key(kind, capacity, resources, view.iteration)
        recorded = self._passes.get(key)
        if recorded is not None:
            self._passes.move_to_end(key)
            return recorded.repeat(view, predictor)
        return self._first_of(key, view, resources, predictor)

    def _capacity(self, cameras: Iterable[Camera], predictor: IntersectionPrediction) -> int | None:
        """Length of tile lists that is enough for all cameras of a view; None if not known."""
        n_gaussians = len(self._stage.model)
        capacities = []
        for camera in cameras:
            predicted = predictor.predict(camera, n_gaussians)
            if predicted is None:
                return None
            capacities.append(predicted.capacity)
        return max(capacities)

    def _key(self, kind: Hashable, capacity: int, resources: StepResources, iteration: int) -> _Key:
        """The key of a pass; recordings of parameters that are gone are dropped."""
        optimizer = self._stage.model.optimizer
        parameters = tuple(
            (tensor.data_ptr(), tensor.shape) for tensor in optimizer.leaves.values()
        )
        if parameters != self._parameters:
            self._passes.clear()
            self._parameters = parameters
        is_free = self._is_alone and self._stage.only_optimizer_acts(iteration)
        step = optimizer.step_facts() if is_free else None
        return _Key(kind, resources.memory, rounded_up(capacity), step)

    def _first_of(
        self,
        key: _Key,
        view: TrainingView,
        resources: StepResources,
        predictor: IntersectionPrediction,
    ) -> ViewResult:
        """Record a pass and carry it out; make it launch by launch where that fails."""
        if not self._was_compared:
            return self._compared(key, view, resources, predictor)
        recorded = self._record(key, view, resources)
        if recorded is None:
            return self._stage.train_on(view, resources)
        return recorded.repeat(view, predictor)

    def _record(
        self, key: _Key, view: TrainingView, resources: StepResources
    ) -> _RecordedPass | None:
        """Record a pass; None where that fails, which is not tried again."""
        room = replace(resources, intersections=_FixedRoom(key.capacity))
        try:
            recorded = _RecordedPass(
                self._stage, self._recorder, view, room, with_step=key.step is not None
            )
        except RuntimeError as error:
            self._stage.model.optimizer.zero_grad()
            if out_of_memory(error):
                raise
            self._switch_off(str(error).splitlines()[0][:200])
            return None
        self._passes[key] = recorded
        if len(self._passes) > MAX_RECORDINGS:
            self._passes.popitem(last=False)
        return recorded

    def _compared(
        self,
        key: _Key,
        view: TrainingView,
        resources: StepResources,
        predictor: IntersectionPrediction,
    ) -> ViewResult:
        """Make a pass launch by launch, and compare its gradients with those of a recorded one."""
        optimizer = self._stage.model.optimizer
        self._was_compared = True
        result = self._stage.train_on(view, resources)
        gradients = optimizer.take_gradients()
        recorded = self._record(key, view, resources)
        if recorded is not None:
            repeated = recorded.gradients(_copied(view), predictor)
            if not _are_equal(gradients, repeated):
                self._switch_off("a repeated pass gave other gradients than its launches did")
        optimizer.put_gradients(gradients)
        return result

    def _switch_off(self, reason: str) -> None:
        self._is_on = False
        self._passes.clear()
        self._warn(f"every launch is made by the host, without CUDA graphs: {reason}")


def _inputs_of(value: Any) -> Iterator[Tensor | Camera]:
    """Tensors and cameras of a view and its nested fields, in their order."""
    if isinstance(value, Tensor | Camera):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _inputs_of(getattr(value, field.name))


def _cameras_in(inputs: Iterable[Tensor | Camera]) -> list[Camera]:
    return [value for value in inputs if isinstance(value, Camera)]


def _copied(value: Any) -> Any:
    """Copy a view with all its tensors and cameras; other values are shared."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Camera):
        return replace(value)
    if is_dataclass(value) and not isinstance(value, type):
        copies = {field.name: _copied(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **copies)
    return value


def _are_equal(some: Gradients, others: Gradients) -> bool:
    """Whether gradients agree in all bits."""
    if some.dense.keys() != others.dense.keys() or len(some.of_colors) != len(others.of_colors):
        return False
    pairs = [(gradient, others.dense[name]) for name, gradient in some.dense.items()]
    for one, other in zip(some.of_colors, others.of_colors, strict=True):
        pairs.append((one.colors, other.colors))
    return all(torch.equal(one, other) for one, other in pairs)


def _facts_of(inputs: Iterable[Tensor | Camera]) -> Hashable:
    """Sizes and types of the tensors that a pass reads of a view."""
    facts: list[Hashable] = []
    for value in inputs:
        if isinstance(value, Camera):
            facts.append((value.width, value.height, value.shows_object))
        else:
            facts.append((value.shape, value.dtype, value.requires_grad))
    return tuple(facts)
