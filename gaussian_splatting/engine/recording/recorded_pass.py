# SPDX-License-Identifier: Apache-2.0
"""One pass over a view that was recorded, with the tensors that it reads and writes."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.guard import judge, probes_of
from gaussian_splatting.engine.recording.cuda_graph import Recorder
from gaussian_splatting.engine.stage import Stage, StepResources, numbers_to_check
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.optim.adam import Gradients
from gaussian_splatting.optim.recorded_step import RecordedStep
from gaussian_splatting.rasterization.projection import IntersectionPrediction, PredictedCount
from gaussian_splatting.rasterization.projection_kernels import camera_record
from sugar_utils.device import SentNumbers

MAX_TERMS = 64  # of the loss of a view


class FixedCapacity(IntersectionPrediction):
    """Predicts the same number for every view: the capacity of a recording."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def predict(self, camera: Camera, n_gaussians: int) -> PredictedCount:
        """Return the capacity."""
        return PredictedCount(self, camera, n_gaussians, self._capacity)


class RecordedPass:
    """One recorded pass with the tensors that it reads and writes.

    Args:
        step_mask: Record the optimiser's step, too, which changes nothing where this is false on
            the device, as it becomes by bad numbers; None: the host makes the step. (1,) bool
    """

    def __init__(
        self,
        stage: Stage,
        recorder: Recorder,
        view: TrainingView,
        resources: StepResources,
        *,
        step_mask: Tensor | None,
    ) -> None:
        self._stage = stage
        self._optimizer = stage.model.optimizer
        self._view = copied(view)
        self._inputs: list[Any] = list(inputs_of(self._view))
        # Numbers of cameras that no other view shares, because these cameras are copies.
        device = stage.model.device
        self._records = {c: camera_record(c, device) for c in cameras_in(self._inputs)}
        self._step_mask = step_mask
        self._step = None if step_mask is None else RecordedStep(self._optimizer)
        self._probes: Tensor | None = None  # of a view whose step was recorded
        # Outside of the recording: the loop holds the values of the terms, and would hold memory
        # of the recording with them when it is dropped.
        self._values = torch.zeros(MAX_TERMS, device=device)
        # Launches for all rows are no part of a recording: the host makes them where they are due.
        self._optimizer.catch_up()
        # A recorder may carry out what it records.
        with self._without_step():
            self._recording, self._result = recorder.record(lambda: self._recorded_work(resources))
        self._lets_steps_wait = self._optimizer.steps_by_factors()
        self._gradients = self._optimizer.take_gradients()

    def _recorded_work(self, resources: StepResources) -> ViewResult:
        result = self._stage.train_on(self._view, resources)
        values = self._values[: len(result.terms)]
        torch.stack([value.reshape(()) for value in result.terms.values()], out=values)
        terms = dict(zip(result.terms, values.unbind(), strict=True))
        result = replace(result, terms=terms)
        if self._step is None or self._step_mask is None:
            return result
        numbers = numbers_to_check(self._stage, result)
        probes = probes_of(numbers)
        judge(numbers, probes, self._step_mask)
        if self._step.record(self._step_mask):
            self._probes = probes
        return result

    @contextlib.contextmanager
    def _without_step(self) -> Iterator[None]:
        """Let nothing be changed on the device by what is done in the context."""
        if self._step_mask is None:
            yield
            return
        before = self._step_mask.clone()
        self._step_mask.fill_(False)
        try:
            yield
        finally:
            self._step_mask.copy_(before)

    def gradients(self, view: TrainingView, predictor: IntersectionPrediction) -> Gradients:
        """Carry the pass out on a view without its step, and return the gradients."""
        with self._without_step():
            self.repeat(view, list(inputs_of(view)), predictor)
        return self._optimizer.take_gradients()

    def repeat(
        self,
        view: TrainingView,
        inputs: Iterable[Tensor | Camera],
        predictor: IntersectionPrediction,
    ) -> ViewResult:
        """Carry the pass out on another view, which has these inputs; see :func:`inputs_of`."""
        if not self._lets_steps_wait:
            self._optimizer.catch_up()
        step = None if self._probes is None else self._step
        if step is not None:
            step.send_numbers()
        cameras = {}
        for recorded, value in zip(self._inputs, inputs, strict=True):
            if isinstance(value, Camera):
                cameras[recorded] = value
                record = self._records[recorded]
                record.copy_(camera_record(value, record.device))
            else:
                recorded.detach().copy_(value.detach())
        self._recording.replay()
        self._optimizer.put_gradients(self._gradients)
        if step is not None:
            step.mark_made()
        sent = None if self._probes is None else SentNumbers(self._probes)
        if view.exposure is not None and self._view.exposure is not None:
            view.exposure.grad = self._view.exposure.grad
        predicted = []
        for guess in self._result.predicted:
            camera = cameras[guess.camera]
            is_of_tiles = isinstance(guess.predictor, FixedCapacity)
            source = predictor if is_of_tiles else guess.predictor
            predicted.append(replace(guess, predictor=source, camera=camera, count=None))
        step_mask = None if sent is None else self._step_mask
        return replace(
            self._result, view=view, predicted=predicted, probes=sent, step_mask=step_mask
        )


def inputs_of(value: Any) -> Iterator[Tensor | Camera]:
    """Tensors and cameras of a view, and of what it holds, in the order of the fields."""
    if isinstance(value, Tensor | Camera):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from inputs_of(getattr(value, field.name))


def cameras_in(inputs: Iterable[Tensor | Camera]) -> list[Camera]:
    return [value for value in inputs if isinstance(value, Camera)]


def copied(value: Any) -> Any:
    """Copy a view with all its tensors and cameras; other values are shared."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Camera):
        return replace(value)
    if is_dataclass(value) and not isinstance(value, type):
        copies = {field.name: copied(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **copies)
    return value


def are_equal(some: Gradients, others: Gradients) -> bool:
    """Whether gradients agree in all bits."""
    if some.dense.keys() != others.dense.keys() or len(some.of_colors) != len(others.of_colors):
        return False
    pairs = [(gradient, others.dense[name]) for name, gradient in some.dense.items()]
    for one, other in zip(some.of_colors, others.of_colors, strict=True):
        pairs.append((one.colors, other.colors))
    return all(torch.equal(one, other) for one, other in pairs)


def facts_of(inputs: Iterable[Tensor | Camera]) -> Hashable:
    """Sizes and types of what a pass reads of a view."""
    facts: list[Hashable] = []
    for value in inputs:
        if isinstance(value, Camera):
            facts.append((value.width, value.height, value.shows_object))
        else:
            facts.append((value.shape, value.dtype, value.requires_grad))
    return tuple(facts)
