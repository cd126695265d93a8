# SPDX-License-Identifier: Apache-2.0
"""``--minutes``: choose lengths of the stages by their measured speed, so that a run ends in time.

Before each training stage some of its iterations are timed, spread over its schedule, with the
model and the photographs that it will have. The stage gets its share of the time that remains.
The chosen lengths are saved in a file, so that a run that is continued has the same settings.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from datetime import datetime, timedelta

from gaussian_splatting.data.images import ImageStore
from sugar_pipeline.pipeline.pipeline_flags import STAGES, runs_stage
from sugar_pipeline.pipeline.plan import PipelinePlan, plan_of
from sugar_pipeline.timing.lengths import (
    ENOUGH,
    LEAST,
    SHARES,
    Pace,
    choose_length,
    flags_of_length,
    full_length,
    possible_length,
    seconds_of_lengths,
    seconds_of_schedules,
    seconds_of_stages,
)
from sugar_pipeline.timing.stage_costs import TRIANGLES_PER_PIXEL, affordable_triangles
from sugar_pipeline.timing.stage_speed import Speed, measure
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import scene_name
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable, read_json
from sugar_utils.flags import FlagValues
from sugar_utils.recipe import Recipe

SMALLEST_IMAGE = 256  # pixels along the longest side
SHORT = 2e8  # pixels times iterations of a stage, below which nothing is estimated


def announce_end(minutes: float | None, console: Console) -> None:
    """Print the time of day at which a run of so many minutes is to end, if it has a limit."""
    if minutes is not None:
        end = datetime.now() + timedelta(minutes=minutes)
        console.headline(f"--minutes {minutes:g}: to end at {end:%H:%M:%S}")


def require_plannable(flags: FlagValues) -> None:
    """Refuse flags beside ``--minutes`` that leave nothing to plan.

    Raises:
        UserError: There is such a flag.
    """
    if flags["minutes"] is None:
        return
    if "schedule_scale" in flags.given:
        raise UserError("--minutes chooses the schedules; leave --schedule_scale out")
    if not runs_stage(flags, "texture"):
        raise UserError("--minutes plans whole runs; leave out --stop_after and -t False")


class ExpectedTimes:
    """Prints once, before the first training stage, how long a run without a limit will take.

    The pipeline calls it with the name of the stage that comes next.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_done = False

    def __call__(self, stage: str, plan: PipelinePlan, images: ImageStore) -> PipelinePlan:
        """Return the plan as it is."""
        if stage not in SHARES or self._is_done:
            return plan
        self._is_done = True
        speed = measure(getattr(plan, stage), images, SHORT)
        if speed is None:
            return plan
        seconds = seconds_of_schedules(stage, plan, Pace.of(stage, plan, speed))
        stages = ", ".join(f"{name} {value / 60:.1f}" for name, value in seconds.items())
        self._console.headline(
            f"expected minutes: {stages}, together {sum(seconds.values()) / 60:.0f}; --minutes N "
            "chooses lengths and sizes for N minutes"
        )
        return plan


class TimePlan:
    """Revises a plan before each of its stages, so that the run ends in ``--minutes``.

    The pipeline calls it with the name of the stage that comes next.

    Args:
        plan: Of the run; what its flags give is not chosen.
        console: Gets the messages.
        start: When the run began, by ``time.monotonic``; None: now.
    """

    def __init__(self, plan: PipelinePlan, console: Console, start: float | None = None) -> None:
        require_plannable(plan.flags)
        self._flags = plan.flags  # with what was chosen
        self._given = plan.flags.given
        self._console = console
        self._start = time.monotonic() if start is None else start
        self._pace: Pace | None = None  # None until the first stage is timed
        self._chosen: dict[str, dict[str, object]] = {}  # flags by name of the stage
        name = f"time_plan_{scene_name(plan.flags['scene_path'])}.json"
        self._file = plan.flags["output_dir"] / name
        self._recipe = Recipe({name: str(value) for name, value in self._given.items()})
        self._continue_earlier_plan()

    def _continue_earlier_plan(self) -> None:
        """Read what an earlier process with the same flags chose, unless it starts anew."""
        flags = self._flags
        starts_anew = flags["overwrite"] or flags["resume"] == "none"
        if starts_anew or not self._recipe.is_current(self._file):
            return
        saved = read_json(self._file)
        self._chosen = saved["chosen"]
        if saved["step"] is not None:
            self._pace = Pace(saved["step"], Speed(**saved["speed"]))
        spent = saved["spent"]
        self._start -= spent
        self._console.headline(
            f"going on after {spent / 60:.1f} minutes of an earlier process; the plan is "
            f"{flags['minutes']:g}"
        )

    @property
    def spent(self) -> float:
        """Seconds since the start, without those of an interrupted stage."""
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float:
        """Seconds until the run is to end."""
        return 60 * self._flags["minutes"] - self.spent

    def __call__(self, stage: str, plan: PipelinePlan, images: ImageStore) -> PipelinePlan:
        """Return the plan with the length of the stage that comes next."""
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
                self._flags = self._flags.replaced(**values)
        earlier = {name: getattr(plan, name) for name in STAGES[:position]}
        return replace(plan_of(self._flags), flags=plan.flags, **earlier)

    def _save(self) -> None:
        """Write the choices, so that a run that is continued has the same settings."""
        check_writable(self._file.parent)
        pace = self._pace
        self._recipe.write(
            self._file,
            chosen=self._chosen,
            spent=self.spent,
            step=None if pace is None else pace.step,
            speed=None if pace is None else asdict(pace.speed),
        )

    def preview(self, plan: PipelinePlan, images: ImageStore) -> None:
        """Print what the coarse stage would be given."""
        self._choose("coarse", plan, images)

    def _choose(self, stage: str, plan: PipelinePlan, images: ImageStore) -> dict[str, object]:
        """Flags that give a stage its length; those of the first one also give sizes."""
        is_first = not self._chosen
        speed = self._measured(stage, plan, images)
        pace = Pace.of(stage, plan, speed)
        sizes: dict[str, int] = {}
        if is_first:
            sizes, speed = self._sized(stage, plan, speed, images)
            plan = plan_of(self._flags.replaced(**sizes))
            pace = Pace.of(stage, plan, speed)
        elif self._pace is not None:
            pace = self._pace
        self._pace = pace
        n = choose_length(stage, plan, speed, pace, self.remaining)
        self._print_choice(stage, plan, speed, n)
        if is_first:
            self._warn_if_short(plan, pace)
        return sizes | flags_of_length(stage, n, plan, self._given.keys())

    def _sized(
        self, stage: str, plan: PipelinePlan, speed: Speed, images: ImageStore
    ) -> tuple[dict[str, int], Speed]:
        """Flags for sizes of images and meshes with enough iterations, and the stage's speed."""
        sizes: dict[str, int] = {}
        while True:
            triangles = self._triangles(plan, speed)
            plan = plan_of(self._flags.replaced(**sizes, **triangles))
            side = max(speed.width, speed.height) // 2
            is_size_given = plan.coarse.size != SugarSize(**sizes)
            pace = Pace.of(stage, plan, speed)
            n_possible = possible_length(stage, plan, speed, pace, self.remaining)
            if n_possible >= ENOUGH[stage] or side < SMALLEST_IMAGE or is_size_given:
                return sizes | triangles, speed
            sizes = {"img_size_limit": side}
            plan = plan_of(self._flags.replaced(**sizes, **triangles))
            speed = self._measured(stage, plan, images)

    def _measured(self, stage: str, plan: PipelinePlan, images: ImageStore) -> Speed:
        """Time a stage."""
        speed = measure(getattr(plan, stage), images)
        assert speed is not None, "without a least amount of work, every stage is timed"
        return speed

    def _triangles(self, plan: PipelinePlan, speed: Speed) -> dict[str, int]:
        """The flag for triangles that suit the images and the time, unless they are given."""
        if {"n_vertices_in_mesh", "low_poly", "high_poly"} & self._given.keys():
            return {}
        assert plan.refine is not None, "--minutes plans whole runs"
        suitable = TRIANGLES_PER_PIXEL * speed.width * speed.height
        affordable = affordable_triangles(self._flags["minutes"])
        most = plan.refine.config.n_vertices_in_fg
        return {"n_vertices_in_mesh": max(1, round(min(suitable, affordable, most)))}

    def _print_choice(self, stage: str, plan: PipelinePlan, speed: Speed, n: int) -> None:
        """Print the length of a stage, and when it and those after it will end."""
        assert self._pace is not None, "it is measured before anything is chosen"
        full = full_length(stage, plan)
        if stage == "refine" and n < min(ENOUGH[stage], full):
            self._console.headline(
                f"refine: left out, as fewer than {ENOUGH[stage]} iterations make nothing better"
            )
        self._console.info(
            f"{stage}: {n:,} of {full:,} iterations, {1000 * speed.seconds:.0f} ms each, images of "
            f"{speed.width} x {speed.height} pixels"
        )
        end = datetime.now()
        ends = []
        for name, seconds in seconds_of_stages(stage, plan, self._pace, self.remaining).items():
            end += timedelta(seconds=max(0.0, seconds))
            ends.append(f"{name} {end:%H:%M:%S}")
        self._console.headline(f"expected ends: {', '.join(ends)}")

    def _warn_if_short(self, plan: PipelinePlan, pace: Pace) -> None:
        """Warn where the shortest run takes longer than there is time."""
        if seconds_of_lengths(LEAST, plan, pace) <= self.remaining:
            return
        enough = math.ceil((self.spent + seconds_of_lengths(ENOUGH, plan, pace)) / 60)
        self._console.warn(
            f"{self._flags['minutes']:g} minutes are too short for this capture, so the run takes "
            "longer and may be poor",
            f"--minutes {enough}, or fewer photographs",
        )
