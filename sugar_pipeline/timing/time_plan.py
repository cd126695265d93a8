# SPDX-License-Identifier: Apache-2.0
"""``--minutes``: choose lengths of the stages by their measured speed, so that a run ends in time.

Before each training stage some of its iterations are timed, spread over its schedule, with the
model and the photographs that it will have. The stage gets its share of the time that remains.
The chosen lengths are saved in a file, so that a run that is continued has the same settings.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path

from gaussian_splatting.core.milestones import scaled
from gaussian_splatting.data.images import ImageStore
from sugar_pipeline.pipeline.pipeline_flags import STAGES, runs_stage
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_pipeline.timing.stage_costs import (
    RESULTS,
    SECONDS_OF_TRIANGLE,
    TRIANGLES_PER_PIXEL,
    affordable_triangles,
    costs_of,
    n_iterations,
    seconds_without_training,
)
from sugar_pipeline.timing.stage_speed import Speed, measure
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import scene_name
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable, read_json
from sugar_utils.recipe import Recipe
from sugar_utils.settings import with_flags

SHARES = {"vanilla": 0.2, "coarse": 0.3, "refine": 0.5}  # of the time for training
# Iterations. A refinement that cannot have enough is left out: one iteration binds the Gaussians.
LEAST = {"vanilla": 200, "coarse": 100, "refine": 1}
ENOUGH = {"vanilla": 800, "coarse": 350, "refine": 250}  # with fewer, images become smaller
SMALLEST_IMAGE = 256  # pixels along the longest side
# Of a stage over its timed steps: evaluations, checkpoints, more Gaussians.
GROWTH = {"vanilla": 1.2, "coarse": 1.5, "refine": 1.2}
SHORT = 2e8  # pixels times iterations of a stage, below which nothing is estimated


def announce_end(minutes: float | None, console: Console) -> None:
    """Print the time of day at which a run of so many minutes is to end, if it has a limit."""
    if minutes is not None:
        end = datetime.now() + timedelta(minutes=minutes)
        console.headline(f"--minutes {minutes:g}: to end at {end:%H:%M:%S}")


def require_plannable(args: argparse.Namespace, given: Mapping[str, object]) -> None:
    """Refuse flags beside ``--minutes`` that leave nothing to plan.

    Raises:
        UserError: There is such a flag.
    """
    if args.minutes is None:
        return
    if "schedule_scale" in given:
        raise UserError("--minutes chooses the schedules; leave --schedule_scale out")
    if not runs_stage(args, "texture"):
        raise UserError("--minutes plans whole runs; leave out --stop_after and -t False")


class TimePlan:
    """Revises a plan before each of its stages, so that the run ends in time.

    The pipeline calls it with the name of the stage that comes next.

    Args:
        args: The flags; where ``minutes`` is None, the expected times are only printed.
        make: Makes the plan of flags.
        given: Flags that were given, by name; their values are not chosen.
        console: Gets the messages.
        start: When the run began, by ``time.monotonic``; None: now.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        make: Callable[[argparse.Namespace], PipelinePlan],
        given: Mapping[str, object],
        console: Console,
        start: float | None = None,
    ) -> None:
        self._args = args
        self._make = make
        self._given = given
        self._console = console
        self._start = time.monotonic() if start is None else start
        self._step = 0.0  # seconds of a vanilla iteration
        self._speed: Speed | None = None  # of the first stage
        self._has_estimated = False  # whether the expected times were printed
        self._chosen: dict[str, dict[str, object]] = {}  # flags by name of the stage
        if args.minutes is None:
            return
        require_plannable(args, given)
        name = f"time_plan_{scene_name(args.scene_path)}.json"
        self._file = Path(args.output_dir) / name
        self._recipe = Recipe({name: str(value) for name, value in given.items()})
        self._continue_earlier_plan()

    def _continue_earlier_plan(self) -> None:
        """Read the choices of an earlier process with the same flags, unless it starts anew."""
        args = self._args
        starts_anew = args.overwrite or args.resume == "none"
        if starts_anew or not self._recipe.is_current(self._file):
            return
        saved = read_json(self._file)
        self._chosen = saved["chosen"]
        self._step = saved["step"] or 0.0
        if saved["speed"] is not None:
            self._speed = Speed(**saved["speed"])
        spent = saved["spent"]
        self._start -= spent
        self._console.headline(
            f"going on after {spent / 60:.1f} minutes of an earlier process; the plan is "
            f"{args.minutes:g}"
        )

    @property
    def spent(self) -> float:
        """Seconds since the start, without those of an interrupted stage."""
        return time.monotonic() - self._start

    def __call__(self, stage: str, plan: PipelinePlan, images: ImageStore) -> PipelinePlan:
        """Return the plan with the length of the stage that comes next."""
        if self._args.minutes is None:
            if stage in SHARES and not self._has_estimated:
                self._has_estimated = True
                self._print_expected_minutes(stage, plan, images)
            return plan
        if stage in SHARES:
            plan = self._revised(stage, plan, images)
        self._save()
        return plan

    def _revised(self, stage: str, plan: PipelinePlan, images: ImageStore) -> PipelinePlan:
        """Choose the length of a training stage; stages before it stay as they are."""
        if stage not in self._chosen:
            self._chosen[stage] = self._choose(stage, plan, images)
        position = STAGES.index(stage)
        for name, values in self._chosen.items():
            if STAGES.index(name) <= position:
                self._args = with_flags(self._args, **values)
        earlier = {name: getattr(plan, name) for name in STAGES[:position]}
        return replace(self._make(self._args), given=plan.given, **earlier)

    def _save(self) -> None:
        """Write the choices, so that a run that is continued has the same settings."""
        check_writable(self._file.parent)
        self._recipe.write(
            self._file,
            chosen=self._chosen,
            spent=self.spent,
            step=self._step or None,  # None before the first stage is timed
            speed=None if self._speed is None else asdict(self._speed),
        )

    def preview(self, images: ImageStore) -> None:
        """Print the lengths that the coarse stage would get."""
        self._choose("coarse", self._make(self._args), images)

    def _choose(self, stage: str, plan: PipelinePlan, images: ImageStore) -> dict[str, object]:
        """Flags that give a stage its length; those of the first one also give sizes."""
        is_first = not self._chosen
        speed = self._measured(stage, plan, images)
        sizes: dict[str, int] = {}
        if is_first:
            sizes, speed = self._sized(stage, plan, speed, images)
            plan = self._make(with_flags(self._args, **sizes))
        n_possible = int(self._possible(stage, plan, speed))
        full = self._full_length(stage, plan)
        n = min(full, max(LEAST[stage], n_possible))
        if stage == "refine" and n_possible < min(ENOUGH[stage], full):
            n = LEAST[stage]
            self._console.headline(
                f"refine: left out, as fewer than {ENOUGH[stage]} iterations make nothing better"
            )
        self._console.info(
            f"{stage}: {n:,} of {full:,} iterations, {1000 * speed.seconds:.0f} ms each, images of "
            f"{speed.width} x {speed.height} pixels"
        )
        self._print_expected_ends(stage, plan)
        if is_first and self._minutes_of(LEAST, plan) > self._args.minutes:
            enough = math.ceil(self._minutes_of(ENOUGH, plan))
            self._console.warn(
                f"{self._args.minutes:g} minutes are too short for this capture, so the run takes "
                "longer and may be poor",
                f"--minutes {enough}, or fewer photographs",
            )
        return sizes | self._flags(stage, n, full, plan)

    def _sized(
        self, stage: str, plan: PipelinePlan, speed: Speed, images: ImageStore
    ) -> tuple[dict[str, int], Speed]:
        """Flags for sizes of images and meshes with enough iterations, and the stage's speed."""
        sizes: dict[str, int] = {}
        while True:
            triangles = self._triangles(plan, speed)
            plan = self._make(with_flags(self._args, **sizes, **triangles))
            side = max(speed.width, speed.height) // 2
            is_size_given = plan.coarse.size != SugarSize(**sizes)
            is_enough = self._possible(stage, plan, speed) >= ENOUGH[stage]
            if is_enough or side < SMALLEST_IMAGE or is_size_given:
                return sizes | triangles, speed
            sizes = {"img_size_limit": side}
            plan = self._make(with_flags(self._args, **sizes, **triangles))
            speed = self._measured(stage, plan, images)

    def _measured(self, stage: str, plan: PipelinePlan, images: ImageStore) -> Speed:
        """Time a stage; the first one also gives the speed of the stages that follow."""
        speed = measure(getattr(plan, stage), images)
        assert speed is not None, "without a least amount of work, every stage is timed"
        if not self._chosen:
            self._note_speed(stage, plan, speed)
        return speed

    def _note_speed(self, stage: str, plan: PipelinePlan, speed: Speed) -> None:
        """Record the measurements that estimates of other stages use."""
        self._step = speed.seconds / costs_of(plan)[stage]
        self._speed = speed

    def _triangles(self, plan: PipelinePlan, speed: Speed) -> dict[str, int]:
        """The flag for triangles that suit the images and the time, unless they are given."""
        if {"n_vertices_in_mesh", "low_poly", "high_poly"} & self._given.keys():
            return {}
        assert plan.refine is not None, "--minutes plans whole runs"
        suitable = TRIANGLES_PER_PIXEL * speed.width * speed.height
        affordable = affordable_triangles(self._args.minutes)
        most = plan.refine.config.n_vertices_in_fg
        return {"n_vertices_in_mesh": max(1, round(min(suitable, affordable, most)))}

    def _print_expected_ends(self, stage: str, plan: PipelinePlan) -> None:
        """Print the times of day at which this stage and those after it will end."""
        end = datetime.now()
        ends = []
        for name, seconds in self._seconds(stage, plan).items():
            end += timedelta(seconds=max(0.0, seconds))
            ends.append(f"{name} {end:%H:%M:%S}")
        self._console.headline(f"expected ends: {', '.join(ends)}")

    def _minutes_of(self, iterations: Mapping[str, int], plan: PipelinePlan) -> float:
        """Predicted minutes of a whole run with these numbers of iterations."""
        costs = costs_of(plan)
        names = [*plan.stages, RESULTS]
        seconds = self.spent + sum(self._seconds_without_training(names, plan).values())
        for name in names:
            if name in iterations:
                seconds += iterations[name] * GROWTH[name] * costs[name] * self._step
        return seconds / 60

    def _seconds_without_training(
        self, names: Sequence[str], plan: PipelinePlan
    ) -> dict[str, float]:
        """Expected seconds of those of some stages that do not train."""
        assert self._speed is not None, "the first stage is timed before anything is expected"
        others = [name for name in names if name in SECONDS_OF_TRIANGLE]
        return seconds_without_training(others, plan, self._speed, self._step)

    def _possible(self, stage: str, plan: PipelinePlan, speed: Speed) -> float:
        """Iterations of a stage in its share of the time that remains."""
        seconds = self._seconds(stage, plan)[stage]
        return seconds / (speed.seconds * GROWTH[stage])

    def _seconds(self, stage: str, plan: PipelinePlan) -> dict[str, float]:
        """Expected seconds of a stage and of those after it, by name in their order."""
        names = _stages_from(stage, plan)
        training = [name for name in names if name in SHARES]
        seconds = self._seconds_without_training(names, plan)
        for_training = 60 * self._args.minutes - self.spent - sum(seconds.values())
        share = for_training * SHARES["refine"] / sum(SHARES[name] for name in training)
        if stage != "refine" and self._is_too_short(share, plan):
            training.remove("refine")
            seconds["refine"] = 0.0
        share_sum = sum(SHARES[name] for name in training)
        for name in training:
            seconds[name] = for_training * SHARES[name] / share_sum
        return {name: seconds[name] for name in names}

    def _is_too_short(self, seconds: float, plan: PipelinePlan) -> bool:
        """Whether a refinement that takes so long would have too few iterations."""
        n_possible = seconds / (GROWTH["refine"] * costs_of(plan)["refine"] * self._step)
        return n_possible < min(ENOUGH["refine"], self._full_length("refine", plan))

    def _full_length(self, stage: str, plan: PipelinePlan) -> int:
        """Iterations of a stage without a limit of time."""
        if stage == "vanilla":
            return self._args.vanilla_iterations
        if stage == "refine":
            assert plan.refine is not None
            return scaled(plan.refine.config.refinement_iterations, 1 / self._args.schedule_scale)
        schedule = plan.coarse.config.schedule
        return scaled(schedule.last - schedule.first, 1 / schedule.schedule_scale)

    def _flags(self, stage: str, n: int, full: int, plan: PipelinePlan) -> dict[str, object]:
        """Flags with which a stage has ``n`` iterations, and earlier stages those they had."""
        if stage == "refine":
            iterations = scaled(n, 1 / self._args.schedule_scale)
            return {"refinement_iterations": iterations, "refinement_time": None}
        flags: dict[str, object] = {"schedule_scale": n / full}
        if "short_multiview" not in self._given:
            # Its length is that of this plan.
            flags["short_multiview"] = False
        if stage == "coarse" and plan.vanilla is not None:
            flags["vanilla_iterations"] = scaled(plan.vanilla.config.iterations, full / n)
        if stage == "coarse" and "test_iterations" not in self._given:
            flags["test_iterations"] = []  # that of the last iteration is enough
        return flags

    def _print_expected_minutes(self, stage: str, plan: PipelinePlan, images: ImageStore) -> None:
        """Print how long all stages will take, unless the run is short."""
        speed = measure(getattr(plan, stage), images, SHORT)
        if speed is None:
            return
        self._note_speed(stage, plan, speed)
        names = _stages_from(stage, plan)
        others = self._seconds_without_training(names, plan)
        minutes = {}
        for name in names:
            if name in SHARES:
                seconds = n_iterations(getattr(plan, name)) * costs_of(plan)[name] * self._step
            else:
                seconds = others[name]
            minutes[name] = GROWTH[stage] * seconds / 60
        stages = ", ".join(f"{name} {value:.1f}" for name, value in minutes.items())
        self._console.headline(
            f"expected minutes: {stages}, together {sum(minutes.values()):.0f}; --minutes N "
            "chooses lengths and sizes for N minutes"
        )


def _stages_from(stage: str, plan: PipelinePlan) -> list[str]:
    """Names of a stage of the plan and of those after it, and of the results of whole runs."""
    names = plan.stages[plan.stages.index(stage) :]
    return names if plan.texture is None else [*names, RESULTS]
