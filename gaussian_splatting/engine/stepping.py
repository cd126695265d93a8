# SPDX-License-Identifier: Apache-2.0
"""One optimiser step: views of all processes, their checks, their mean; and requests to stop.

Which photograph and which random draws belong to a view follows from the iteration and the view's
index in its step, so a run is the same however many processes share the views; only the order of
the sums, and with it their rounding, depends on that.
"""

from __future__ import annotations

import signal
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.guard import PARAMETER_INTERVAL, check_parameters, check_step
from gaussian_splatting.engine.memory_plan import cheaper, describe
from gaussian_splatting.engine.stage import Stage, StepResult
from gaussian_splatting.engine.training_views import SizedViews, ViewSampler
from gaussian_splatting.rasterization.projection import IntersectionPrediction, PairsMissed
from sugar_utils.console import Console
from sugar_utils.device import upload
from sugar_utils.errors import Notify, TrainingError, UserError
from sugar_utils.frame import EXIT_OF_SIGNAL, signal_handler
from sugar_utils.memory import out_of_memory, release_cached
from sugar_utils.process_group import ProcessGroup

SIGNALS = tuple(EXIT_OF_SIGNAL)  # what asks a run to stop


@dataclass
class StepSum:
    terms: dict[str, Tensor]
    showing: int = 0
    stop: str | None = None  # signal that asked a process to stop; None if none did

    def add(self, terms: dict[str, Tensor]) -> None:
        """Count another view; a term that a view lacks counts as zero."""
        for name, value in terms.items():
            self.terms[name] = self.terms[name] + value if name in self.terms else value


class EmptyViews:
    """Views that show no Gaussian: each is named once, and too many in a row end the run."""

    def __init__(self, n_cameras: int, warn: Notify) -> None:
        self._n_cameras = n_cameras
        self._warn = warn
        self._named: set[str] = set()
        self._in_a_row = 0

    def name(self, camera_name: str, iteration: int) -> None:
        if camera_name not in self._named:
            self._named.add(camera_name)
            self._warn(
                f"{camera_name} shows no Gaussian (iteration {iteration}) and teaches nothing; "
                "check its pose, or leave its image out"
            )

    def count(self, showing: int, of: int, n_gaussians: int, iteration: int) -> None:
        """Take note of a step; stop if none of the last epoch's views shows anything."""
        self._in_a_row = 0 if showing else self._in_a_row + of
        if self._in_a_row >= self._n_cameras:
            raise TrainingError(
                f"none of the {n_gaussians} Gaussians is visible in the last {self._in_a_row} "
                f"views, at iteration {iteration}; the last good checkpoint is kept: check the "
                "poses, and that checkpoint and scene belong together"
            )


class Stepper:
    def __init__(
        self,
        stage: Stage,
        cameras: Sequence[Camera],
        *,
        first: int,
        seed: int,
        images: ImageStore,
        group: ProcessGroup,
        console: Console,
    ) -> None:
        self._stage = stage
        self._cameras = cameras
        self._first = first
        self._order = ViewSampler(len(cameras), seed, stage.name)
        self._views = SizedViews(images)
        images.serve(stage.model.device)
        self._group = group
        self._console = console
        self._empty = EmptyViews(len(cameras), console.warn)
        self._kept = list(range(len(cameras)))
        stage.pairs = IntersectionPrediction()
        self._n_views = stage.model.optimizer.config.views_per_step
        if self._n_views > max(len(cameras), group.size):
            raise UserError(
                f"--views_per_step {self._n_views}: there are only {len(cameras)} views to train "
                "on; give fewer"
            )
        self._view_indices = group.share(self._n_views)

    def camera(self, iteration: int, view_index: int = 0) -> Camera:
        """The view of this index in the step; another one in place of an excluded one."""
        index = self._order.index(self._place(iteration, view_index))
        if index not in self._kept:
            index = self._kept[index % len(self._kept)]
        return self._cameras[index]

    def exclude(self, names: Collection[str]) -> None:
        """Train on other views in place of these from the next step on."""
        self._kept = [k for k, c in enumerate(self._cameras) if c.name not in names]

    def epoch(self, iteration: int) -> int:
        return self._order.epoch(self._place(iteration, 0))

    def align(self) -> None:
        """Give all processes the parameters of the first, to the bit."""
        self._same_number(self._group.all_gather_numbers([len(self._stage.model)]), self._first)
        for parameter in self._stage.model.optimizer.parameters.values():
            self._group.broadcast_(parameter.detach())

    def step(self, iteration: int, requested: str | None) -> StepSum:
        """Learn from the views of one iteration; raises ``TrainingError`` if numbers went bad."""
        stage = self._stage
        self._begin(iteration)
        total = self._see_views(iteration)
        total.stop = requested
        if not self._group.is_alone:
            self._add_up(iteration, total)
        self._empty.count(total.showing, self._n_views, len(stage.model), iteration)
        if self._n_views > 1:
            for gradient in stage.model.optimizer.gradients().values():
                gradient.div_(self._n_views)
            total.terms = {name: value / self._n_views for name, value in total.terms.items()}
        if stage.poses is not None:
            stage.poses.step(iteration)
        stage.apply(iteration)
        return total

    def _place(self, iteration: int, view_index: int) -> int:
        return (iteration - self._first) * self._n_views + view_index

    def _see_views(self, iteration: int) -> StepSum:
        """Sum of this process's views; gradients are added up in the parameters."""
        optimizer = self._stage.model.optimizer
        total: StepSum | None = None
        held: dict[str, Tensor] = {}
        for view_index in self._view_indices:
            result, shows = self._train_on(iteration, view_index, checked=total is not None)
            if total is None:
                total = StepSum(dict(result.terms))
            else:
                optimizer.add_gradients(held)
                total.add(result.terms)
            total.showing += shows
            if view_index + 1 in self._view_indices:
                held = optimizer.take_gradients()
        return total

    def _train_on(self, iteration: int, view_index: int, checked: bool) -> tuple[StepResult, bool]:
        """One view, and whether it shows any Gaussian."""
        stage = self._stage
        model = self._stage.model
        scale = stage.view_scale(iteration)
        camera, photograph = self._views.get(self.camera(iteration, view_index), scale)
        target = upload(photograph, model.device)
        poses = stage.poses
        last = view_index + 1 not in self._view_indices
        after = (iteration + 1, self._view_indices.start) if last else (iteration, view_index + 1)
        self._views.prefetch(self.camera(*after))
        if poses is not None:
            camera = poses.moved(camera)
        result = self._accumulate(iteration, camera, target, view_index)
        try:
            shows = self._check(iteration, camera, result, checked)
        except PairsMissed:
            model.optimizer.zero_grad()
            result = self._accumulate(iteration, camera, target, view_index)
            shows = self._check(iteration, camera, result, checked)
        result.commit()
        if not shows:
            self._empty.name(camera.name, iteration)
        elif poses is not None:
            poses.collect(camera, model.optimizer.parameters, model.optimizer.gradients())
        return result, shows

    def _check(self, iteration: int, camera: Camera, result: StepResult, checked: bool) -> bool:
        optimizer = self._stage.model.optimizer
        return check_step(
            losses=result.terms,
            gradients=optimizer.gradients(),
            log_scales=optimizer.parameters["log_scales"],
            extent=self._stage.extent,
            radii=result.radii,
            iteration=iteration,
            camera_name=camera.name,
            parameters=optimizer.parameters,
            look_at_parameters=not checked and iteration % PARAMETER_INTERVAL == 0,
            guess=result.guess,
        )

    def _accumulate(
        self, iteration: int, camera: Camera, target: Tensor, view_index: int
    ) -> StepResult:
        """The terms of one view; where memory runs out, again with the next cheaper plan."""
        stage = self._stage
        while True:
            try:
                return stage.accumulate(iteration, camera, target, view_index)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                plan = cheaper(stage.memory_plan)
                if plan is None:
                    raise UserError(
                        f"out of memory in iteration {iteration} with every plan tried; the last "
                        "checkpoint stays: use smaller images, fewer Gaussians or "
                        "--optimizer_state bf16"
                    ) from error
            # Outside the handler: its traceback holds all that the step had allocated.
            stage.model.optimizer.zero_grad()
            stage.memory_plan = plan
            release_cached(stage.model.device)
            self._console.warn(
                f"out of memory in iteration {iteration}: repeated, and continued, with "
                f"{describe(plan)}"
            )

    def _begin(self, iteration: int) -> None:
        try:
            self._stage.begin(iteration)
        except UserError:
            # A neighbour search trips over coordinates that are not finite: say whose they are.
            parameters = self._stage.model.optimizer.parameters
            check_parameters(parameters, iteration, self.camera(iteration).name)
            raise

    def _add_up(self, iteration: int, total: StepSum) -> None:
        """Sums over the processes: gradients one parameter at a time, in place."""
        group = self._group
        stage = self._stage
        optimizer = self._stage.model.optimizer
        names = list(total.terms)
        present = [name in optimizer.gradients() for name in optimizer.parameters]
        rows = group.all_gather_numbers(
            [
                len(stage.model),
                0 if total.stop is None else 1 + SIGNALS.index(total.stop),
                zlib.crc32(",".join(names).encode()),
                total.showing,
                *map(int, present),
            ]
        )
        self._same_number(rows, iteration)
        signal = max(row[1] for row in rows)
        total.stop = SIGNALS[signal - 1] if signal else None
        if any(row[2] != rows[0][2] for row in rows):
            # A view may lack a term, as where it shows nothing to sample.
            names = list(dict.fromkeys(name for found in group.all_gather(names) for name in found))
        total.showing = sum(row[3] for row in rows)
        for column, parameter in enumerate(optimizer.parameters.values(), start=4):
            if any(row[column] for row in rows):
                gradient = parameter.grad
                whole = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
                group.sum_(whole)
                parameter.grad = whole
        zero = total.terms["loss"].new_zeros(())
        terms = torch.stack([total.terms.get(name, zero) for name in names])
        group.sum_(terms)
        total.terms = dict(zip(names, terms.unbind(), strict=True))
        own = () if stage.poses is None else (stage.poses.statistics(),)
        for statistic in (*stage.step_statistics(), *own):
            group.sum_(statistic)

    def _same_number(self, rows: Sequence[Sequence[int]], iteration: int) -> None:
        if any(row[0] != rows[0][0] for row in rows):
            numbers = ", ".join(f"{row[0]:,}" for row in rows)
            raise TrainingError(
                f"the processes hold different numbers of Gaussians at iteration {iteration} "
                f"({numbers}); the last good checkpoint is kept: use GPUs of one model and "
                "continue from it"
            )


class StopRequest:
    """Context in which the first stop signal sets ``requested`` to its name.

    A second Ctrl-C raises ``KeyboardInterrupt`` at once.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._handlers = signal_handler(self._handle, lambda handler: True)

    def __enter__(self) -> StopRequest:
        self._handlers.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._handlers.__exit__(*exception)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = self.requested or signal.Signals(number).name
