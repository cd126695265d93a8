# SPDX-License-Identifier: Apache-2.0
"""One optimiser step: views of all processes, their checks, their mean.

Which photograph and which random draws belong to a view follows from the iteration and the view's
index in its step, so a run is the same however many processes share the views; only the order of
the sums, and with it their rounding, depends on that.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.guard import (
    PARAMETER_INTERVAL,
    TOTAL,
    check_parameters,
    check_step,
    read_probes,
)
from gaussian_splatting.engine.memory_plan import cheaper, describe
from gaussian_splatting.engine.stage import Stage, StepResources, numbers_to_check
from gaussian_splatting.engine.step_runner import NewStepRunner, plain_runner
from gaussian_splatting.engine.stop_request import SIGNALS
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.engine.view_sampling import UploadedViews, ViewSampler
from gaussian_splatting.rasterization.projection import IntersectionPrediction, PredictionMissed
from sugar_utils.console import Console
from sugar_utils.device import SentNumbers
from sugar_utils.errors import Notify, TrainingError, UserError
from sugar_utils.memory import out_of_memory, release_cached
from sugar_utils.process_group import ALONE, ProcessGroup


@dataclass(frozen=True)
class RunContext:
    """The surroundings of a run: photographs, console and group of processes."""

    images: ImageStore
    console: Console
    group: ProcessGroup = ALONE
    new_runner: NewStepRunner = plain_runner  # makes what carries out the passes over views


@dataclass
class StepSum:
    """Sums over the views of a step."""

    terms: dict[str, Tensor]
    n_showing: int = 0  # views that show any Gaussian
    unread: ViewResult | None = None  # of the one view, whose numbers the host has not read yet
    stop: str | None = None  # signal that asked a process to stop; None if none did

    def add(self, terms: dict[str, Tensor]) -> None:
        """Count another view; a term that a view lacks counts as zero."""
        for name, value in terms.items():
            self.terms[name] = self.terms[name] + value if name in self.terms else value


@dataclass(frozen=True)
class _UnreadStep:
    """A step whose numbers the host has not read yet."""

    result: ViewResult
    probes: SentNumbers  # of the result
    total: StepSum  # which the loop has


class EmptyViews:
    """Views that show no Gaussian: each is named once, and too many in a row end the run."""

    def __init__(self, n_cameras: int, warn: Notify) -> None:
        self._n_cameras = n_cameras
        self._warn = warn
        self._named: set[str] = set()
        self._in_a_row = 0

    def name(self, camera_name: str, iteration: int) -> None:
        """Warn of a view, once."""
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
    """Makes the steps of a stage: chooses views, trains on them, checks and sums, steps.

    The loop owns one for the whole run. It holds what steps share: the order of the views, the
    memory plan that fits, and numbers of tile intersections at earlier visits.

    Args:
        first: First iteration of the run.
        seed: Of the run; the order of the views follows from it.

    Raises:
        UserError: A step has more views than there are.
    """

    def __init__(
        self,
        stage: Stage,
        cameras: Sequence[Camera],
        context: RunContext,
        *,
        first: int,
        seed: int,
    ) -> None:
        self._stage = stage
        self._cameras = cameras
        self._first = first
        self._order = ViewSampler(len(cameras), seed, stage.name)
        self._views = UploadedViews(context.images, stage.model.device)
        self._group = context.group
        self._console = context.console
        self._empty = EmptyViews(len(cameras), context.console.warn)
        self._usable_rows = list(range(len(cameras)))
        self._n_views = stage.model.optimizer.config.views_per_step
        if self._n_views > max(len(cameras), self._group.size):
            raise UserError(
                f"--views_per_step {self._n_views}: there are only {len(cameras)} views to train "
                "on; give fewer"
            )
        self._view_indices = self._group.share(self._n_views)
        self._resources = StepResources(
            stage.memory_plan,
            IntersectionPrediction(),
            is_only_view=self._n_views == 1,
            n_views_here=len(self._view_indices),
        )
        self._runner = context.new_runner(context.console.warn)
        self._may_read_late = False
        self._unread: _UnreadStep | None = None

    def camera(self, iteration: int, view_index: int = 0) -> Camera:
        """The view of this index in the step; another one in place of an excluded one."""
        row = self._order.index(self._place(iteration, view_index))
        if row not in self._usable_rows:
            row = self._usable_rows[row % len(self._usable_rows)]
        return self._cameras[row]

    def exclude(self, names: Collection[str]) -> None:
        """Train on other views in place of these from the next step on."""
        rows = [row for row, camera in enumerate(self._cameras) if camera.name not in names]
        self._usable_rows = rows

    def epoch(self, iteration: int) -> int:
        """Return the number of complete passes over the views before an iteration."""
        return self._order.epoch(self._place(iteration, 0))

    def align(self) -> None:
        """Give all processes the parameters of the first, to the bit."""
        counts = self._group.all_gather_numbers([len(self._stage.model)])
        self._check_same_number(counts, self._first)
        for parameter in self._stage.model.optimizer.parameters.values():
            self._group.broadcast_(parameter.detach())

    def step(self, iteration: int, requested: str | None, *, may_read_late: bool = True) -> StepSum:
        """Learn from the views of one iteration.

        Args:
            requested: Name of the signal that asked this process to stop.
            may_read_late: Whether the next step, or :meth:`check_last`, may be the first to know
                whether the numbers of this one are good.

        Raises:
            TrainingError: Numbers went bad.
        """
        stage = self._stage
        self._may_read_late = may_read_late
        self._begin(iteration)
        total = self._train_on_views(iteration)
        total.stop = requested
        if not self._group.is_alone:
            self._add_up(iteration, total)
        # The loop must not hold it, because it lies in the memory of a recording.
        result, total.unread = total.unread, None
        if result is None or result.probes is None:
            self._empty.count(total.n_showing, self._n_views, len(stage.model), iteration)
        else:
            self._unread = _UnreadStep(result, result.probes, total)
        if self._n_views > 1:
            for gradient in stage.model.optimizer.gradients().values():
                gradient.div_(self._n_views)
            total.terms = {name: value / self._n_views for name, value in total.terms.items()}
        stage.apply(iteration)
        return total

    def check_last(self) -> bool:
        """Read the numbers of the last step, if that was left to the next one.

        Where they are bad, neither that step nor what followed has changed anything: it is made
        again, now with its numbers read at once.

        Returns:
            False where it was made again.

        Raises:
            TrainingError: Numbers went bad.
        """
        unread = self._unread
        self._unread = None
        if unread is None:
            return True
        result = unread.result
        iteration = result.view.iteration
        with contextlib.suppress(PredictionMissed):
            found = read_probes(numbers_to_check(self._stage, result), unread.probes)
            if found.are_good:
                self._note(result, found.shows_any)
                n_gaussians = len(self._stage.model)
                self._empty.count(found.shows_any, 1, n_gaussians, iteration)
                return True
        optimizer = self._stage.model.optimizer
        optimizer.zero_grad()
        optimizer.uncount_step()
        self._runner.restart()
        unread.total.terms = self.step(iteration, None, may_read_late=False).terms
        return False

    def _place(self, iteration: int, view_index: int) -> int:
        """Number of a view in the order of all views of the run."""
        return (iteration - self._first) * self._n_views + view_index

    def _train_on_views(self, iteration: int) -> StepSum:
        """Sum over this process's views; gradients are added up in the parameters."""
        optimizer = self._stage.model.optimizer
        total: StepSum | None = None
        earlier_gradients: Mapping[str, Tensor] = {}
        for view_index in self._view_indices:
            is_first = total is None
            result, shows_any = self._train_on(iteration, view_index, is_first)
            if total is None:
                total = StepSum(dict(result.terms))
            else:
                optimizer.add_gradients(earlier_gradients)
                total.add(result.terms)
            if shows_any is None:
                total.unread = result
            else:
                total.n_showing += shows_any
            if view_index + 1 in self._view_indices:
                earlier_gradients = optimizer.take_gradients().dense
        if total is None:
            raise ValueError("a process has no view of its own in a step")
        return total

    def _train_on(
        self, iteration: int, view_index: int, is_first: bool
    ) -> tuple[ViewResult, bool | None]:
        """Train on one view; say whether it shows any Gaussian, None where that is read later."""
        view = self._load(iteration, view_index)
        result = self._accumulate(view)
        self._send_next(iteration, view_index)
        if not self.check_last():
            # The pass began with a model that lacked a step.
            self._begin(iteration)
            result = self._accumulate(view)
        if self._is_read_late(result):
            self._stage.commit(result)
            return result, None
        shows_any = self._check(result, is_first)
        # More than once, because with too short tile lists other numbers are counted wrong.
        while shows_any is None:
            self._stage.model.optimizer.zero_grad()
            self._runner.restart()
            result = self._accumulate(view)
            shows_any = self._check(result, is_first)
        self._stage.commit(result)
        self._note(result, shows_any)
        return result, shows_any

    def _is_read_late(self, result: ViewResult) -> bool:
        """Whether the numbers of a step are read when the next one is under way."""
        return (
            self._may_read_late
            and result.step_mask is not None
            and result.view.iteration % PARAMETER_INTERVAL != 0
            and not self._stage.needs_numbers
        )

    def _note(self, result: ViewResult, shows_any: bool) -> None:
        """Take note of a view with good numbers."""
        self._stage.note(result)
        if not shows_any:
            self._empty.name(result.view.camera.name, result.view.iteration)

    def _load(self, iteration: int, view_index: int) -> TrainingView:
        """A view and its photograph on the device; what the next view needs is prefetched."""
        scale = self._stage.rules(iteration).view_scale
        camera, photograph = self._views.get(self.camera(iteration, view_index), scale)
        place = self._place_after(iteration, view_index)
        next_camera = self.camera(*place)
        self._views.prefetch(next_camera)
        if self._stage.further_images is not None:
            self._stage.further_images.prefetch(next_camera, *place)
        return TrainingView(camera, photograph, iteration, view_index)

    def _send_next(self, iteration: int, view_index: int) -> None:
        """Begin to send what the next view needs while the device works on this one."""
        place = self._place_after(iteration, view_index)
        camera = self.camera(*place)
        self._views.send_ahead(camera, self._stage.rules(place[0]).view_scale)
        if self._stage.further_images is not None:
            self._stage.further_images.send_ahead(camera, *place)

    def _place_after(self, iteration: int, view_index: int) -> tuple[int, int]:
        """Iteration and index of the view that this process is trained on next."""
        if view_index + 1 in self._view_indices:
            return iteration, view_index + 1
        return iteration + 1, self._view_indices.start

    def _check(self, result: ViewResult, is_first: bool) -> bool | None:
        """Check all numbers of a view; whether it shows any Gaussian.

        None where a predicted number was too low, which the prediction knows now.
        """
        view = result.view
        look_at_parameters = is_first and view.iteration % PARAMETER_INTERVAL == 0
        try:
            return check_step(
                numbers_to_check(self._stage, result),
                view.iteration,
                view.camera.name,
                look_at_parameters=look_at_parameters,
                probes=result.probes,
            )
        except PredictionMissed:
            return None

    def _accumulate(self, view: TrainingView) -> ViewResult:
        """The terms of one view; where memory runs out, again with the next cheaper plan."""
        stage = self._stage
        while True:
            try:
                return self._runner.run(stage, view, self._resources)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                is_freed = self._runner.release(ran_out=True)
                plan = self._resources.memory if is_freed else cheaper(self._resources.memory)
                if plan is None:
                    raise UserError(
                        f"out of memory in iteration {view.iteration} with every plan tried; the "
                        "last checkpoint stays: use smaller images, fewer Gaussians or "
                        "--optimizer_state bf16"
                    ) from error
            # Outside the handler: its traceback holds all that the step had allocated.
            stage.model.optimizer.zero_grad()
            self._resources = replace(self._resources, memory=plan)
            release_cached(stage.model.device)
            self._console.warn(
                f"out of memory in iteration {view.iteration}: repeated, and continued, with "
                f"{describe(plan)}"
            )

    def _begin(self, iteration: int) -> None:
        rules = self._stage.rules(iteration)
        if rules.changes_population or rules.begins_with_model:
            self.check_last()
        if rules.changes_population:
            # What was changed cannot be changed once more.
            self._may_read_late = False
            # The model needs twice its memory for a while.
            if self._runner.release(ran_out=False):
                release_cached(self._stage.model.device)
        try:
            self._stage.begin(iteration)
        except UserError:
            # A neighbour search trips over coordinates that are not finite: say whose they are.
            parameters = self._stage.model.optimizer.parameters
            check_parameters(parameters, iteration, self.camera(iteration).name)
            raise

    def _add_up(self, iteration: int, total: StepSum) -> None:
        """Sum over the processes: gradients one parameter at a time, in place."""
        group = self._group
        optimizer = self._stage.model.optimizer
        names = list(total.terms)
        has_gradient = [name in optimizer.gradients() for name in optimizer.leaves]
        head = [
            len(self._stage.model),
            0 if total.stop is None else 1 + SIGNALS.index(total.stop),
            zlib.crc32(",".join(names).encode()),
            total.n_showing,
        ]
        rows = group.all_gather_numbers([*head, *map(int, has_gradient)])
        self._check_same_number(rows, iteration)
        signal = max(row[1] for row in rows)
        total.stop = SIGNALS[signal - 1] if signal else None
        if any(row[2] != rows[0][2] for row in rows):
            # A view may lack a term, as where it shows nothing to sample.
            names_of_all = group.all_gather(names)
            names = list(dict.fromkeys(name for each in names_of_all for name in each))
        total.n_showing = sum(row[3] for row in rows)
        for column, parameter in enumerate(optimizer.leaves.values(), start=len(head)):
            if any(row[column] for row in rows):
                _sum_gradient(group, parameter)
        zero = total.terms[TOTAL].new_zeros(())
        terms = torch.stack([total.terms.get(name, zero) for name in names])
        group.sum_(terms)
        total.terms = dict(zip(names, terms.unbind(), strict=True))
        for statistic in self._stage.step_statistics():
            group.sum_(statistic)

    def _check_same_number(self, rows: Sequence[Sequence[int]], iteration: int) -> None:
        if any(row[0] != rows[0][0] for row in rows):
            numbers = ", ".join(f"{row[0]:,}" for row in rows)
            raise TrainingError(
                f"the processes hold different numbers of Gaussians at iteration {iteration} "
                f"({numbers}); the last good checkpoint is kept: use GPUs of one model and "
                "continue from it"
            )


def _sum_gradient(group: ProcessGroup, parameter: Tensor) -> None:
    """Sum the gradient of a parameter over the processes; those without one add zeros."""
    if parameter.grad is None:
        gradient = torch.zeros_like(parameter)
    else:
        gradient = parameter.grad.contiguous()
    group.sum_(gradient)
    parameter.grad = gradient
