# SPDX-License-Identifier: Apache-2.0
"""Lengths of stages that fit into a time: functions of a plan, of speeds, and of what is left."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gaussian_splatting.core.milestones import scaled
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_pipeline.timing.stage_costs import (
    RESULTS,
    SECONDS_OF_TRIANGLE,
    costs_of,
    n_iterations,
    seconds_without_training,
)
from sugar_pipeline.timing.stage_speed import Speed

SHARES = {"vanilla": 0.2, "coarse": 0.3, "refine": 0.5}  # of the time for training
# Iterations. A refinement that cannot have enough is left out: one iteration binds the Gaussians.
LEAST = {"vanilla": 200, "coarse": 100, "refine": 1}
ENOUGH = {"vanilla": 800, "coarse": 350, "refine": 250}  # with fewer, images become smaller
# Of a stage over its timed steps: evaluations, checkpoints, more Gaussians.
GROWTH = {"vanilla": 1.2, "coarse": 1.5, "refine": 1.2}


@dataclass(frozen=True)
class Pace:
    """The speed of a machine with a capture, measured on the first stage that trains."""

    step: float  # seconds of an iteration of the vanilla stage
    speed: Speed  # of the first stage

    @classmethod
    def of(cls, stage: str, plan: PipelinePlan, speed: Speed) -> Pace:
        """Return the pace that follows from the speed of a stage."""
        return cls(speed.seconds / costs_of(plan)[stage], speed)


def choose_length(
    stage: str, plan: PipelinePlan, speed: Speed, pace: Pace, remaining: float
) -> int:
    """Return the iterations of a training stage in its share of the time that remains.

    At least ``LEAST``; a refinement that cannot have ``ENOUGH`` has the least.

    Args:
        stage: The one that comes next.
        plan: With the images and meshes of this run.
        speed: Of the stage.
        pace: Of the stages that follow.
        remaining: Seconds for the stage and all that follows.
    """
    full = full_length(stage, plan)
    n_possible = int(possible_length(stage, plan, speed, pace, remaining))
    if stage == "refine" and n_possible < min(ENOUGH[stage], full):
        return LEAST[stage]
    return min(full, max(LEAST[stage], n_possible))


def possible_length(
    stage: str, plan: PipelinePlan, speed: Speed, pace: Pace, remaining: float
) -> float:
    """Return the iterations that a stage has time for, whatever its schedule; negative for none.

    Args are those of :func:`choose_length`.
    """
    seconds = seconds_of_stages(stage, plan, pace, remaining)[stage]
    return seconds / (speed.seconds * GROWTH[stage])


def seconds_of_stages(
    stage: str, plan: PipelinePlan, pace: Pace, remaining: float
) -> dict[str, float]:
    """Return the seconds of a stage and of those after it, by name in their order.

    Stages that do not train have what is expected of them; those that train share the rest.

    Args:
        remaining: Seconds for all of them.
    """
    names = stages_from(stage, plan)
    seconds = seconds_beside_training(names, plan, pace)
    training = [name for name in names if name in SHARES]
    for_training = remaining - sum(seconds.values())
    if stage != "refine":
        refinement = for_training * SHARES["refine"] / sum(SHARES[name] for name in training)
        n_refinements = refinement / (GROWTH["refine"] * costs_of(plan)["refine"] * pace.step)
        if n_refinements < min(ENOUGH["refine"], full_length("refine", plan)):
            training.remove("refine")
            seconds["refine"] = 0.0
    share_sum = sum(SHARES[name] for name in training)
    for name in training:
        seconds[name] = for_training * SHARES[name] / share_sum
    return {name: seconds[name] for name in names}


def seconds_of_lengths(lengths: Mapping[str, int], plan: PipelinePlan, pace: Pace) -> float:
    """Return the seconds of a whole run whose training stages have so many iterations."""
    costs = costs_of(plan)
    names = [*plan.stages, RESULTS]
    seconds = sum(seconds_beside_training(names, plan, pace).values())
    for name in names:
        if name in lengths:
            seconds += lengths[name] * GROWTH[name] * costs[name] * pace.step
    return seconds


def seconds_of_schedules(stage: str, plan: PipelinePlan, pace: Pace) -> dict[str, float]:
    """Return the seconds of a stage and of those after it with the schedules of their plan."""
    names = stages_from(stage, plan)
    others = seconds_beside_training(names, plan, pace)
    seconds = {}
    for name in names:
        if name in SHARES:
            expected = n_iterations(getattr(plan, name)) * costs_of(plan)[name] * pace.step
        else:
            expected = others[name]
        seconds[name] = GROWTH[stage] * expected
    return seconds


def seconds_beside_training(names: list[str], plan: PipelinePlan, pace: Pace) -> dict[str, float]:
    """Return the expected seconds of those of some stages that do not train."""
    others = [name for name in names if name in SECONDS_OF_TRIANGLE]
    return seconds_without_training(others, plan, pace.speed, pace.step)


def stages_from(stage: str, plan: PipelinePlan) -> list[str]:
    """Return the names of a stage of the plan and of those after it, and of the results."""
    names = plan.stages[plan.stages.index(stage) :]
    return names if plan.texture is None else [*names, RESULTS]


def full_length(stage: str, plan: PipelinePlan) -> int:
    """Return the iterations of a stage without a limit of time."""
    schedule = plan.coarse.config.schedule
    if stage == "vanilla":
        assert plan.vanilla is not None, "the stage is part of the plan"
        return scaled(plan.vanilla.config.iterations, 1 / schedule.schedule_scale)
    if stage == "refine":
        assert plan.refine is not None, "--minutes plans whole runs"
        config = plan.refine.config
        return scaled(config.refinement_iterations, 1 / config.schedule_scale)
    return scaled(schedule.last - schedule.first, 1 / schedule.schedule_scale)


def flags_of_length(
    stage: str, n: int, plan: PipelinePlan, given: Collection[str]
) -> dict[str, object]:
    """Return the flags with which a stage has ``n`` iterations, and earlier ones those they had.

    Args:
        given: Names of flags whose values stay.
    """
    if stage == "refine":
        assert plan.refine is not None, "--minutes plans whole runs"
        iterations = scaled(n, 1 / plan.refine.config.schedule_scale)
        return {"refinement_iterations": iterations, "refinement_time": None}
    full = full_length(stage, plan)
    flags: dict[str, object] = {"schedule_scale": n / full}
    if "short_multiview" not in given:
        # Its length is that of this plan.
        flags["short_multiview"] = False
    if stage == "coarse" and plan.vanilla is not None:
        flags["vanilla_iterations"] = scaled(plan.vanilla.config.iterations, full / n)
    if stage == "coarse" and "test_iterations" not in given:
        flags["test_iterations"] = []  # that of the last iteration is enough
    return flags
