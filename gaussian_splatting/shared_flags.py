# SPDX-License-Identifier: Apache-2.0
"""Flags that the settings of several stages have: each is worded once, here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from gaussian_splatting.core.milestones import scaled
from sugar_utils.flags import boolean, positive_float, positive_int
from sugar_utils.settings import flag, flags_of

# Each makes a field of its own, because a dataclass names the one that it is given.
random_seed = partial(
    flag,
    0,
    "order of views, samples, splits, random starts; the same seed and flags give the same bits",
    group="run",
)
max_gaussians = partial(
    flag,
    None,
    "densification never goes beyond this number: the strongest candidates first; the "
    "vanilla stage thins out more points at the start evenly",
    group="densification",
    parse=positive_int,
    no_effect_when="unless -r multiview, where the vanilla stage does not run",
)
white_background = partial(
    flag,
    False,
    "composite transparent photographs, and render, on white instead of black",
    group="background",
    task="result",
)
schedule_scale = partial(
    flag,
    1.0,
    "multiply every milestone, interval and length of the schedule, for quick runs; 1 "
    "is the paper's",
    group="run",
    parse=positive_float,
    no_effect_when="with --demo, which has its own",
    task="time and memory",
)
# True where it is given without a value.
optional_boolean = partial(flag, group="memory", parse=boolean, nargs="?", const=True)


CHECKPOINT_INTERVAL = 1_000  # iterations
LEAST_CHECKPOINT_INTERVAL = 250  # on short schedules; a checkpoint may have hundreds of megabytes
_LEAST_SHARE = 3  # parts into which checkpoints divide a stage that is even shorter
_FEW_ITERATIONS = 100  # a stage of fewer has checkpoints as its schedule says

Preset = Literal["reference", "fast"]
inert = partial(flag, group="accepted for old commands", no_effect_when="always")
"""A field that is a flag of the original which does nothing here; its help says why."""


def checkpoint_interval(group: str) -> Any:
    """A field for the interval between checkpoints."""
    return flag(
        CHECKPOINT_INTERVAL,
        "iterations between two checkpoints to resume from; where unset at "
        "least 250, or a third of a short stage",
        group=group,
        parse=positive_int,
    )


def scaled_checkpoint_interval(interval: int, scale: float, length: int) -> int:
    """Iterations between two checkpoints of a stage on a scaled schedule.

    Args:
        interval: Of the whole schedule.
        scale: Length of the schedule over that of the whole one.
        length: Iterations of the stage.
    """
    least = least_checkpoint_interval(length) if interval == CHECKPOINT_INTERVAL else 1
    return max(least, scaled(interval, scale))


def least_checkpoint_interval(length: int) -> int:
    """Fewest iterations between two checkpoints by default, in a stage of a length."""
    if length < _FEW_ITERATIONS:
        return 1
    return min(LEAST_CHECKPOINT_INTERVAL, length // _LEAST_SHARE)


def preset(group: str) -> Any:
    """A field for the preset of a stage."""
    return flag(
        "reference",
        "reference: values of the papers; fast: as good in our measurements, in less time: "
        "--densification scored, --growing_resolution True, --robust True, and auto for "
        "--short_multiview, --sdf_samples, --surface_points and --poisson_depth; flags that are "
        "given win; unset: fast in the pipelines, reference in a single stage",
        group=group,
        choices=get_args(Preset),
        unset=True,
        task="time and memory",
    )


@dataclass(frozen=True)
class InertFlags:
    """Flags of the original that old commands carry."""

    @property
    def messages(self) -> tuple[str, ...]:
        """One line for each flag that was given."""
        return tuple(
            f"--{one.name} has no effect: {one.help}"
            for one in flags_of(type(self))
            if getattr(self, one.name) not in (None, False)
        )
