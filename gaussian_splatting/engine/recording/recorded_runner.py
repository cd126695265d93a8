# SPDX-License-Identifier: Apache-2.0
"""Passes over views that a GPU repeats in one piece, as CUDA graphs.

From the activation of the Gaussians to the optimiser's step, a pass is the same launches for every
view of one size; with few Gaussians the host needs longer to make them than the GPU to carry them
out. So a pass is recorded once, and repeated with other views, whose camera and photograph are
copied to where the recorded launches read them. Bits do not depend on it.

The step belongs to the recording where it follows from one view alone. The GPU then judges the
numbers of the view by itself. From bad ones on it leaves all values as they are, until the host,
which may be a step ahead, has read them. Where components or other processes act before the step,
the host makes it.

A recording holds as long as the parameters, the size of the images, the terms of the loss and the
capacity for what a view may need do. The first one of each kind is compared with the same pass made
launch by launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gaussian_splatting.core.device_checks import obstacle
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.recording.cuda_graph import CudaRecorder, Recorder
from gaussian_splatting.engine.recording.failures import reason_of
from gaussian_splatting.engine.recording.recorded_pass import (
    FixedCapacity,
    RecordedPass,
    are_equal,
    cameras_in,
    copied,
    facts_of,
    inputs_of,
)
from gaussian_splatting.engine.recording.recordings import PassKey, Recordings
from gaussian_splatting.engine.stage import Stage, StepResources
from gaussian_splatting.engine.step_runner import NewStepRunner, StepRunner, plain_runner
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.optim.recorded_step import step_facts
from gaussian_splatting.rasterization import WarpRasterizer
from gaussian_splatting.rasterization.compute import Compute
from gaussian_splatting.rasterization.projection import IntersectionPrediction
from sugar_utils.errors import Notify
from sugar_utils.memory import out_of_memory, release_cached

CHECK = "gaussian_splatting.engine.checks.recorder_check"


@dataclass(frozen=True)
class _Request:
    """A pass that is asked for."""

    stage: Stage
    view: TrainingView  # prepared
    resources: StepResources
    predictor: IntersectionPrediction  # of the resources
    inputs: list[Tensor | Camera]  # of the view

    def launched(self) -> ViewResult:
        """Make the pass launch by launch."""
        return self.stage.train_on(self.view, self.resources)

    def repeated(self, recorded: RecordedPass) -> ViewResult:
        """Repeat a recorded pass."""
        return recorded.repeat(self.view, self.inputs, self.predictor)


class RecordedRunner:
    """Carries out the passes of one stage, recorded ones where that can be.

    Args:
        warn: Called with the reason why nothing is recorded any more, if so.
    """

    def __init__(self, recorder: Recorder, warn: Notify) -> None:
        self._recorder = recorder
        self._warn = warn
        self._is_on = True
        # On the device: whether no step had bad numbers since :meth:`restart`. (1,) bool
        self._step_mask: Tensor | None = None
        self._recordings = Recordings()
        self._compared: set[Hashable] = set()  # kinds of which a recording gave the same bits

    def run(self, stage: Stage, view: TrainingView, resources: StepResources) -> ViewResult:
        """Do what :meth:`Stage.accumulate` does."""
        view = stage.prepare(view)
        kind = stage.variant(view) if self._may_record(stage, view, resources) else None
        predictor = resources.intersections
        if kind is None or predictor is None:
            return stage.train_on(view, resources)
        inputs = list(inputs_of(view))
        request = _Request(stage, view, resources, predictor, inputs)
        cameras = cameras_in(inputs)
        n_gaussians = len(stage.model)
        needed = _capacity(cameras, n_gaussians, predictor)
        if needed is None:
            return request.launched()
        kind = (kind, view.exposure is None, view.exposed_pixels is None, facts_of(inputs))
        leaves = stage.model.optimizer.leaves.values()
        self._recordings.follow(tuple((leaf.data_ptr(), leaf.shape) for leaf in leaves))
        capacity = self._recordings.capacity(
            kind, needed, lambda: max(predictor.largest(c, n_gaussians) for c in cameras)
        )
        step = None
        if resources.is_only_view and not view.gradients_are_read:
            step = step_facts(stage.model.optimizer)
        key = PassKey(kind, resources.memory, step)
        recorded = self._recordings.find(key)
        if recorded is not None:
            return request.repeated(recorded)
        # The first time launch by launch: then its kernels and constants are on the device.
        if not self._recordings.is_due(key):
            return request.launched()
        return self._first_of(key, request, capacity)

    def restart(self) -> None:
        """Let steps change the model again."""
        if self._step_mask is not None:
            self._step_mask.fill_(True)

    def release(self, *, ran_out: bool) -> bool:
        """Drop all recordings; whether there were any."""
        has_any = len(self._recordings) > 0
        if has_any and ran_out:
            self._hold_fewer()
        self._recordings.clear()
        return has_any

    def _may_record(self, stage: Stage, view: TrainingView, resources: StepResources) -> bool:
        """Whether our rasterizer and the table of terms alone act on a view, without the host."""
        return (
            self._is_on
            and resources.memory.records
            # Gradients of a recorded pass are lost when the next one is repeated.
            and resources.n_views_here == 1
            # With strips, the host reads where the tile lists of each begin.
            and resources.memory.split.strips == 1
            and isinstance(stage.rasterizer, WarpRasterizer)
            and not view.added
            # The host drops gradients before such a step: once, so it is not worth a recording.
            and not stage.rules(view.iteration).frozen
        )

    def _first_of(self, key: PassKey, request: _Request, capacity: int) -> ViewResult:
        """Record a pass and carry it out; make it launch by launch where that fails."""
        misses = self._recordings.misses
        if misses is not None:
            self._switch_off(f"{misses} of the last passes had to be recorded anew")
            return request.launched()
        if key.kind not in self._compared:
            self._compared.add(key.kind)
            return self._compare(key, request, capacity)
        recorded = self._record(key, request, capacity)
        if recorded is None:
            return request.launched()
        return request.repeated(recorded)

    def _record(self, key: PassKey, request: _Request, capacity: int) -> RecordedPass | None:
        """Record a pass; None where that fails, which is not tried again."""
        self._recordings.make_room(key)
        resources = replace(request.resources, intersections=FixedCapacity(capacity))
        optimizer = request.stage.model.optimizer
        if self._step_mask is None:
            self._step_mask = torch.ones(1, dtype=torch.bool, device=optimizer.device)
        step_mask = None if key.step is None else self._step_mask
        try:
            recorded = RecordedPass(
                request.stage, self._recorder, request.view, resources, step_mask=step_mask
            )
        except RuntimeError as error:
            is_full = out_of_memory(error)
            if not is_full:
                self._switch_off(reason_of(error))
        else:
            self._recordings.put(key, recorded)
            return recorded
        # Outside the handler: its traceback holds all that was recorded.
        optimizer.zero_grad()
        if is_full:
            self._hold_fewer()
            release_cached(request.stage.model.device)
        return None

    def _hold_fewer(self) -> None:
        """Drop all recordings for want of memory."""
        if not self._recordings.lower_limit():
            self._switch_off("there is no memory to hold one")

    def _compare(self, key: PassKey, request: _Request, capacity: int) -> ViewResult:
        """Make a pass launch by launch, and compare its gradients with those of a recorded one."""
        optimizer = request.stage.model.optimizer
        result = request.launched()
        gradients = optimizer.take_gradients()
        recorded = self._record(key, request, capacity)
        if recorded is not None:
            repeated = recorded.gradients(copied(request.view), request.predictor)
            # A pass whose lists are too short lacks something, and is made again.
            is_complete = all(guess.is_enough for guess in result.predicted)
            if is_complete and not are_equal(gradients, repeated):
                self._switch_off("a repeated pass gave other gradients than its launches did")
        optimizer.put_gradients(gradients)
        return result

    def _switch_off(self, reason: str) -> None:
        self._is_on = False
        self._recordings.clear()
        self._warn(without_graphs(reason))


def without_graphs(reason: str) -> str:
    """Return the warning that nothing is recorded."""
    return f"every launch is made by the host, without CUDA graphs: {reason}"


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


def step_runner(compute: Compute) -> NewStepRunner:
    """Return what makes the step runner of a run.

    It is a recorded one on a GPU where its check passes, unless recording is off.
    """
    if not compute.cuda_graph or compute.device.type != "cuda":
        return plain_runner

    def recorded_runner(warn: Notify) -> StepRunner:
        reason = obstacle(CHECK, compute.device)
        if reason is not None:
            warn(without_graphs(reason))
            return plain_runner(warn)
        return RecordedRunner(CudaRecorder(compute.device), warn)

    return recorded_runner
