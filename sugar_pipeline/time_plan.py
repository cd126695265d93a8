# SPDX-License-Identifier: Apache-2.0
"""``--minutes``: lengths of the stages from their measured speed, so that a run ends in time.

Before each training stage some of its iterations are timed, spread over its schedule, with the
model and the photographs that it will have. The stage gets its share of the time that is left.
The chosen lengths are kept in a file, so that a run that is continued has the same settings.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.runner import Messages
from gaussian_splatting.engine.stepping import RunContext, Stepper
from gaussian_splatting.optim.schedule import scaled
from sugar_pipeline.pipeline_flags import runs_stage
from sugar_pipeline.plan import STAGES, PipelinePlan
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import scene_name
from sugar_trainers.stage_config import MULTIVIEW
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable, read_json, write_json_atomic
from sugar_utils.settings import with_flags

SHARES = {"vanilla": 0.2, "coarse": 0.3, "refine": 0.5}  # of the time for training
LEAST = {"vanilla": 200, "coarse": 100, "refine": 60}  # iterations
ENOUGH = {"vanilla": 800, "coarse": 350, "refine": 250}  # with fewer, images become smaller
SMALLEST_IMAGE = 256  # pixels along the longest side
TIMED_STEPS = 8
# Of a stage over its timed steps: evaluations, checkpoints, more Gaussians.
GROWTH = {"vanilla": 1.2, "coarse": 1.5, "refine": 1.2}
# Times of steps as multiples of the vanilla stage's; those of meshes and textures for each view.
COSTS = {"vanilla": 1.0, "coarse": 1.7, "refine": 2.5, "mesh": 14.0, "texture": 30.0}
MULTIVIEW_COSTS = COSTS | {"coarse": 3.2, "refine": 4.0}
TRIANGLES_PER_PIXEL = 0.6  # of a training image
SHORT = 2e8  # pixels times iterations of a stage, below which nothing is estimated


@dataclass(frozen=True)
class Speed:
    seconds: float  # of an iteration
    n_views: int
    width: int  # of the largest training image, in pixels
    height: int


def measure(options: Any, images: ImageStore, least_work: float = 0.0) -> Speed | None:
    """Time iterations of a stage on a copy of its model; nothing is written.

    None where the stage has less work than ``least_work``, in pixels times iterations, or a run in
    its folder.
    """
    run, model = options.prepare(Messages())
    cameras = list(run.scene.train_cameras)
    loop = run.loop
    largest = max(cameras, key=lambda camera: camera.width * camera.height)
    if largest.width * largest.height * (loop.last - loop.first) < least_work:
        return None
    if least_work and run.directory.path.exists():
        return None
    console = Console.silent()
    if run.init_from_images is not None:
        model = run.init_from_images(model, images, console)
    stage = run.build(model, images, console)
    stepper = Stepper(
        stage,
        cameras,
        RunContext(images, console),
        first=loop.first,
        seed=loop.seed,
    )
    stepper.step(loop.first, None)  # compiles kernels and allocates
    start = time.perf_counter()
    length = loop.last - loop.first
    for k in range(TIMED_STEPS):
        iteration = loop.first + length * (2 * k + 1) // (2 * TIMED_STEPS)
        # The value waits for the device.
        float(stepper.step(iteration, None).terms["loss"])
    seconds = (time.perf_counter() - start) / TIMED_STEPS
    return Speed(seconds, len(cameras), largest.width, largest.height)


class TimePlan:
    """Revises a plan before each of its stages.

    Args:
        args: The flags; where ``minutes`` is None, the times are only told.
        given: Flags that were given, by name; what they say is not chosen.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        make: Callable[[argparse.Namespace], PipelinePlan],
        given: Mapping[str, Any],
        console: Console,
    ) -> None:
        self._args = args
        self._make = make
        self._given = given
        self._console = console
        self._start = time.monotonic()
        self._step: float | None = None  # seconds of a vanilla iteration
        self._n_views = 0
        self._chosen: dict[str, dict[str, Any]] = {}
        if args.minutes is None:
            return
        if "schedule_scale" in given:
            raise UserError("--minutes chooses the schedules; leave --schedule_scale out")
        if not runs_stage(args, "texture"):
            raise UserError("--minutes plans whole runs; leave out --stop_after and -t False")
        name = f"time_plan_{scene_name(args.scene_path)}.json"
        self._file = Path(args.output_dir) / name
        self._identity = repr(sorted((key, str(value)) for key, value in given.items()))
        known = read_json(self._file) if self._file.is_file() else {}
        if known.get("flags") == self._identity and not args.overwrite and args.resume != "none":
            self._chosen = known["chosen"]
            self._step = known["step"]
            self._n_views = known["n_views"]
            spent = known["spent"]
            self._start -= spent
            console.headline(
                f"going on after {spent / 60:.1f} minutes of an earlier process; the plan is "
                f"{args.minutes:g}"
            )

    @property
    def spent(self) -> float:
        """Seconds since the start, without those of an interrupted stage."""
        return time.monotonic() - self._start

    def __call__(self, stage: str, plan: PipelinePlan, images: ImageStore) -> PipelinePlan:
        """The plan with the length of the stage that comes next."""
        if self._args.minutes is None:
            if stage in SHARES and self._step is None:
                self._step = 0.0
                self._tell(stage, plan, images)
            return plan
        if stage in SHARES:
            if stage not in self._chosen:
                self._chosen[stage] = self._choose(stage, plan, images)
            for name, values in self._chosen.items():
                if STAGES.index(name) <= STAGES.index(stage):
                    self._args = with_flags(self._args, **values)
            earlier = {name: getattr(plan, name) for name in STAGES[: STAGES.index(stage)]}
            plan = replace(self._make(self._args), given=plan.given, **earlier)
        check_writable(self._file.parent)
        write_json_atomic(
            self._file,
            {
                "flags": self._identity,
                "chosen": self._chosen,
                "spent": self.spent,
                "step": self._step,
                "n_views": self._n_views,
            },
        )
        return plan

    def preview(self, images: ImageStore) -> None:
        """As of the coarse stage: what it would be given."""
        self._choose("coarse", self._make(self._args), images)

    def conclude(self) -> None:
        if self._args.minutes is not None:
            self._console.headline(
                f"took {self.spent / 60:.1f} minutes; the plan was {self._args.minutes:g}"
            )

    def _choose(self, stage: str, plan: PipelinePlan, images: ImageStore) -> dict[str, Any]:
        """Flags that give a stage its length; those of the first one also give sizes."""
        speed = measure(getattr(plan, stage), images)
        sizes = {}
        if not self._chosen:
            while self._possible(stage, plan, speed) < ENOUGH[stage]:
                side = max(speed.width, speed.height) // 2
                if side < SMALLEST_IMAGE or plan.coarse.size != SugarSize(**sizes):
                    break
                sizes = {"img_size_limit": side}
                plan = self._make(with_flags(self._args, **sizes))
                speed = measure(getattr(plan, stage), images)
            if not {"n_vertices_in_mesh", "low_poly", "high_poly"} & self._given.keys():
                triangles = round(TRIANGLES_PER_PIXEL * speed.width * speed.height)
                most = plan.refine.config.n_vertices_in_fg
                sizes = sizes | {"n_vertices_in_mesh": min(triangles, most)}
        possible = self._possible(stage, plan, speed)
        full = self._full_length(stage, plan)
        n = min(full, max(LEAST[stage], int(possible)))
        self._console.info(
            f"{stage}: {n:,} of {full:,} iterations, {1000 * speed.seconds:.0f} ms each, images of "
            f"{speed.width} x {speed.height} pixels"
        )
        end = datetime.now()
        ends = []
        for name, seconds in self._seconds(stage, plan).items():
            end += timedelta(seconds=max(0.0, seconds))
            ends.append(f"{name} {end:%H:%M:%S}")
        self._console.headline(f"expected ends: {', '.join(ends)}")
        if not self._chosen and self._minutes_of(LEAST, plan) > self._args.minutes:
            enough = math.ceil(self._minutes_of(ENOUGH, plan))
            self._console.warn(
                f"{self._args.minutes:g} minutes are too short for this capture, so the run takes "
                "longer and may be poor",
                f"--minutes {enough}, or fewer photographs",
            )
        return sizes | self._flags(stage, n, full, plan)

    def _minutes_of(self, iterations: Mapping[str, int], plan: PipelinePlan) -> float:
        """Minutes of a whole run whose stages have so many iterations."""
        costs = _costs(plan)
        seconds = self.spent
        for name in STAGES:
            if name in costs and getattr(plan, name) is not None:
                n = iterations[name] * GROWTH[name] if name in iterations else self._n_views
                seconds += n * costs[name] * self._step
        return seconds / 60

    def _possible(self, stage: str, plan: PipelinePlan, speed: Speed) -> float:
        """Iterations of a stage in its share of the time that is left."""
        if not self._chosen:
            self._step = speed.seconds / _costs(plan)[stage]
            self._n_views = speed.n_views
        return self._seconds(stage, plan)[stage] / (speed.seconds * GROWTH[stage])

    def _seconds(self, stage: str, plan: PipelinePlan) -> dict[str, float]:
        costs = _costs(plan)
        after = STAGES[STAGES.index(stage) :]
        after = [name for name in after if getattr(plan, name) is not None]
        shares = {name: SHARES.get(name, 0.0) for name in after}
        others = {n: costs[n] * self._n_views * self._step for n in after if n not in SHARES}
        left = 60 * self._args.minutes - self.spent - sum(others.values())
        return {n: others.get(n, left * shares[n] / sum(shares.values())) for n in after}

    def _full_length(self, stage: str, plan: PipelinePlan) -> int:
        if stage == "vanilla":
            return self._args.vanilla_iterations
        if stage == "refine":
            return scaled(plan.refine.config.refinement_iterations, 1 / self._args.schedule_scale)
        schedule = plan.coarse.config.schedule
        return scaled(schedule.last - schedule.first, 1 / schedule.schedule_scale)

    def _flags(self, stage: str, n: int, full: int, plan: PipelinePlan) -> dict[str, Any]:
        """Flags with which a stage has so many iterations, and earlier stages those they had."""
        if stage == "refine":
            iterations = scaled(n, 1 / self._args.schedule_scale)
            return {"refinement_iterations": iterations, "refinement_time": None}
        flags: dict[str, Any] = {"schedule_scale": n / full}
        if "short_multiview" not in self._given:
            # Its length is that of this plan.
            flags["short_multiview"] = False
        if stage == "coarse" and plan.vanilla is not None:
            flags["vanilla_iterations"] = scaled(plan.vanilla.config.iterations, full / n)
        if stage == "coarse" and "test_iterations" not in self._given:
            flags["test_iterations"] = []  # that of the last iteration is enough
        return flags

    def _tell(self, stage: str, plan: PipelinePlan, images: ImageStore) -> None:
        """Say how long all stages will take, unless that is not long."""
        speed = measure(getattr(plan, stage), images, SHORT)
        if speed is None:
            return
        costs = _costs(plan)
        step = speed.seconds * GROWTH[stage] / costs[stage]
        minutes = {}
        for name in STAGES[STAGES.index(stage) :]:
            options = getattr(plan, name)
            if options is not None:
                n = speed.n_views
                if name == "vanilla":
                    n = options.config.iterations
                elif name in SHARES:
                    n = options.loop.last - options.loop.first
                minutes[name] = n * costs[name] * step / 60
        stages = ", ".join(f"{name} {time:.1f}" for name, time in minutes.items())
        self._console.headline(
            f"expected minutes: {stages}, together {sum(minutes.values()):.0f}; --minutes N "
            "chooses lengths and sizes for N minutes"
        )


def _costs(plan: PipelinePlan) -> dict[str, float]:
    return MULTIVIEW_COSTS if plan.coarse.config.regularization_type == MULTIVIEW else COSTS
