# SPDX-License-Identifier: Apache-2.0
"""The training loop that every stage runs in."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaussian_splatting.engine.checkpoint import (
    CheckpointStore,
    checkpoint_path,
    packed_state,
    unpacked_state,
)
from gaussian_splatting.engine.component import Component, IterationContext
from gaussian_splatting.engine.guard import TOTAL, check_parameters
from gaussian_splatting.engine.observer import Observer
from gaussian_splatting.engine.reporting.progress import Reporter
from gaussian_splatting.engine.reporting.run_logger import RunLogger
from gaussian_splatting.engine.run_directory import ResumePlan, RunDirectory
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.engine.stepping import RunContext, Stepper, StepSum
from gaussian_splatting.engine.stop_request import StopRequest
from gaussian_splatting.scenes.scene import Scene
from sugar_utils.entrypoint import EXIT_OF_SIGNAL
from sugar_utils.errors import UserError
from sugar_utils.memory import SpillWatch, out_of_memory, release_cached

_RESUME_BEGINNINGS = ("--resu", "--sta")
"""Shortest forms of --resume and --start_checkpoint that the parsers take."""


class Interrupted(UserError):
    """The user asked the run to stop; it is saved."""

    label = "stopped"

    def __init__(self, message: str, signal_name: str) -> None:
        super().__init__(message)
        self.exit_code = EXIT_OF_SIGNAL.get(signal_name, 130)


@dataclass(frozen=True)
class LoopConfig:
    """When the loop does what; all numbers are absolute iterations."""

    first: int
    last: int
    seed: int = 0
    log_interval: int = 200
    # Iterations between two checkpoints; None for milestones only.
    checkpoint_interval: int | None = 1000
    checkpoint_milestones: tuple[int, ...] = ()
    keep_checkpoints: int | None = None  # how many interval checkpoints to keep; None for all
    test_iterations: tuple[int, ...] = ()
    export_iterations: tuple[int, ...] = ()

    def checkpoint_due(self, iteration: int) -> bool:
        """Whether the schedule asks for a checkpoint after an iteration."""
        if iteration in self.checkpoint_milestones:
            return True
        interval = self.checkpoint_interval
        return interval is not None and interval > 0 and iteration % interval == 0


class Trainer:
    """Runs a stage from the first or a saved iteration to the last, in one or more processes.

    The first process leads: it shows, measures, exports and saves. The others follow with the same
    steps.
    """

    def __init__(
        self,
        stage: Stage,
        config: LoopConfig,
        scene: Scene,
        run: RunDirectory,
        context: RunContext,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._stage = stage
        self._config = config
        self._scene = scene
        self._images = context.images
        self._run = run
        self._console = context.console
        self._group = context.group
        self._observers = observers
        self._cameras = list(scene.train_cameras)
        self._stepper = Stepper(stage, self._cameras, context, first=config.first, seed=config.seed)
        self._store: CheckpointStore | None = None
        if self._group.is_first:
            self._store = CheckpointStore(
                run.path, config.keep_checkpoints, config.checkpoint_milestones, config.last
            )
        self._losses: list[float] = []
        self._spill_watch = SpillWatch(stage.model.device, context.console.warn)

    def run(self, plan: ResumePlan) -> Path:
        """Train, and return the final checkpoint."""
        start = self._config.first
        timings: dict[str, dict[str, float]] = {}
        if plan.payload is not None:
            start = self._restore(plan)
            timings = self._run.timings()
        # As large as the model; from here on only the model's own tensors count.
        plan.payload = None
        self._stepper.align()
        if self._group.is_first:
            self._lead(start, timings)
        else:
            self._follow(start)
        # What the first process wrote is there for all.
        self._group.barrier()
        return checkpoint_path(self._run.path, self._config.last)

    def _lead(self, start: int, timings: dict[str, dict[str, float]]) -> None:
        last = self._config.last
        if self._run.replaces:
            self._read_all_photographs()
        self._record("running", timings)
        reporter = Reporter(
            self._stage, self._console, self._run.tensorboard, start, self._scene, timings
        )
        progress = self._console.progress(self._stage.name, self._config.first, last)
        with reporter, StopRequest() as stop, progress as bar:
            for iteration in range(start, last + 1):
                reporter.enter_phase(self._stage.phase(iteration))
                step = self._stepper.step(iteration, stop.requested)
                is_shown = bar.due or iteration == last
                if is_shown or self._is_looked_at(iteration):
                    self._stepper.check_last()
                self._log(iteration, step, reporter)
                bar.update(iteration, fields=reporter.fields(step.terms) if is_shown else None)
                self._after_step(iteration, reporter)
                for observer in self._observers:
                    observer.after_step(self._stage, iteration, step.terms, lambda: stop.requested)
                # Several processes stop after an iteration that all of them know of.
                signal_name = stop.requested if self._group.is_alone else step.stop
                if signal_name and iteration < last:
                    self._stepper.check_last()
                    self._save(iteration, reporter)
                    self._record("interrupted", reporter.summary())
                    # The others leave when this one has saved: who started them may end all with
                    # the first.
                    self._group.barrier()
                    raise self._interrupted(iteration, signal_name)
        if start > last:
            # The run was finished, but what it exported is gone.
            self._stage.export(last)
        self._record("finished", reporter.summary(), **reporter.results())

    def _follow(self, start: int) -> None:
        with StopRequest() as stop:
            for iteration in range(start, self._config.last + 1):
                step = self._stepper.step(iteration, stop.requested)
                self._compare(iteration)
                self._call_components(iteration)
                if step.stop and iteration < self._config.last:
                    self._group.barrier()
                    raise self._interrupted(iteration, step.stop)

    def _read_all_photographs(self) -> None:
        """Find out that a photograph cannot be read before another run is replaced."""
        self._console.headline(f"reading all photographs before the run in {self._run.path} goes")
        for camera in [*self._cameras, *self._scene.test_cameras]:
            self._images.get(camera)

    def _is_logged(self, iteration: int) -> bool:
        return iteration % self._config.log_interval == 0 or iteration == self._config.first

    def _is_looked_at(self, iteration: int) -> bool:
        """Whether anything but the next step depends on the model after an iteration."""
        config = self._config
        has_observer = bool(self._observers)
        is_measured = iteration in (*config.test_iterations, *config.export_iterations)
        is_kept = self._is_logged(iteration) or config.checkpoint_due(iteration)
        return has_observer or is_measured or is_kept or bool(self._looking(iteration))

    def _looking(self, iteration: int) -> list[Component]:
        """Components that look at the model after an iteration."""
        return [each for each in self._stage.components if each.looks_at(iteration)]

    def _log(self, iteration: int, step: StepSum, reporter: Reporter) -> None:
        if not self._is_logged(iteration):
            return
        self._losses.append(float(step.terms[TOTAL]))
        self._spill_watch.look()
        log_figures = functools.partial(reporter.log, iteration, step.terms)
        self._observe(log_figures, "log figures")

    def _compare(self, iteration: int) -> None:
        if self._config.checkpoint_due(iteration) or iteration == self._config.last:
            self._group.check_same(self._stage.model.optimizer.parameters.values(), iteration)

    def _call_components(self, iteration: int) -> None:
        """Let components look at the model; they may exclude views from the next step on."""
        context = IterationContext(
            iteration=iteration,
            stage=self._stage,
            cameras=self._cameras,
            load_photograph=self._images.shown,
            white_background=self._scene.white_background,
            group=self._group,
            console=self._console,
        )
        n_excluded = len(self._stage.excluded_views())
        for component in self._looking(iteration):
            component.after_iteration(context)
        excluded = self._stage.excluded_views()
        if len(excluded) != n_excluded:
            self._stepper.exclude(excluded)

    def _after_step(self, iteration: int, reporter: Reporter) -> None:
        self._compare(iteration)
        self._call_components(iteration)
        is_last = iteration == self._config.last
        exports = is_last or iteration in self._config.export_iterations
        if exports:
            # What is exported elsewhere must not be left without the run that made it.
            self._run.check_present()
            self._check_parameters(iteration)
        if exports and self._run.replaces:
            # Exports belong to the run that has checkpoints in the folder.
            self._save(iteration, reporter)
        if iteration in self._config.test_iterations or is_last:
            self._observe(lambda: reporter.evaluate(iteration, self._images), "measure the views")
        if is_last:
            self._observe(lambda: reporter.write_pictures(self._run.path), "write pictures")
        if exports:
            self._stage.export(iteration)
        if self._config.checkpoint_due(iteration) or is_last:
            self._save(iteration, reporter)

    def _observe(self, work: Callable[[], object], purpose: str) -> None:
        """Run work that training does not depend on; out of memory here does not end the run."""
        try:
            work()
            return
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            reason = str(error).split("\n")[0]
        release_cached(self._stage.model.device)
        self._console.warn(f"not enough memory to {purpose}; training goes on ({reason})")

    def _check_parameters(self, iteration: int) -> None:
        """Check parameters now; the check in a later iteration would be too late for files."""
        parameters = self._stage.model.optimizer.parameters
        check_parameters(parameters, iteration, self._stepper.camera(iteration).name)

    def _save(self, iteration: int, reporter: Reporter) -> Path:
        self._run.check_present()
        self._check_parameters(iteration)
        # In the order that tools which read these files expect; then what only this program reads.
        model_state = self._stage.model.state()
        payload = {
            "state_dict": model_state.pop("state_dict"),
            "train_losses": list(self._losses),
            "epoch": self._stepper.epoch(iteration),
            "iteration": iteration,
            "optimizer_state_dict": model_state.pop("optimizer_state_dict"),
            "resume": {
                **self._run.identity.record(),
                **packed_state(self._stage.extra_state()),
            },
            **model_state,
        }
        if self._store is None:
            raise ValueError("the first process saves")
        path = self._store.save(iteration, payload)
        try:
            self._run.check_present()
        except UserError:
            path.unlink(missing_ok=True)
            raise
        if self._run.replaces:
            self._replace_other_run(path, reporter)
        self._store.prune()
        self._console.info(f"saved {path}")
        return path

    def _replace_other_run(self, checkpoint: Path, reporter: Reporter) -> None:
        """Remove the run that was in the folder; log and curves move there."""
        self._console.close()
        reporter.logger.close()
        try:
            self._run.replace_other(checkpoint)
        finally:
            self._console.open_log(self._run.log)
            reporter.logger = RunLogger(self._run.tensorboard, notify=self._console.warn)
        self._console.headline(f"the run that was in {self._run.path} is replaced")

    def _record(self, status: str, timings: dict[str, dict[str, float]], **more: object) -> None:
        views = self._scene.record()
        views["dropped_views"] = {**views["dropped_views"], **self._stage.excluded_views()}
        self._run.record(status, timings=timings, **views, **more)

    def _restore(self, plan: ResumePlan) -> int:
        """Take a checkpoint back; return the iteration to go on with."""
        payload: dict[str, Any] = plan.payload or {}
        first = self._config.first
        last = self._config.last
        if not first <= payload["iteration"] <= last:
            raise UserError(
                f"{plan.source} is of iteration {payload['iteration']}, but this run goes from "
                f"{first} to {last}; continue with the flags that the checkpoint was made with"
            )
        self._stage.model.restore(payload)
        self._stage.restore_extra(unpacked_state(payload.get("resume", {})))
        self._stepper.exclude(self._stage.excluded_views())
        self._losses = list(payload["train_losses"])
        self._console.headline(
            f"continuing after iteration {payload['iteration']} of {plan.source}"
        )
        return payload["iteration"] + 1

    def _interrupted(self, iteration: int, signal_name: str) -> Interrupted:
        path = checkpoint_path(self._run.path, iteration)
        command = _command_to_continue(path, self._group.size)
        return Interrupted(
            f"{signal_name} after iteration {iteration}, saved as {path}; continue with: {command}",
            signal_name,
        )


def _command_to_continue(checkpoint: Path, processes: int) -> str:
    """The command line of this run, pointed at a checkpoint where it named another."""
    installed = Path(sys.argv[0]).stem == "sugar"
    alone = [] if installed else [Path(sys.executable).name]
    several = ["torchrun", f"--nproc_per_node={processes}"]
    words = [*(alone if processes == 1 else several), *sys.argv]
    if any(word.startswith(_RESUME_BEGINNINGS) for word in sys.argv):
        words += ["--resume", str(checkpoint)]
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
