# SPDX-License-Identifier: Apache-2.0
"""Choosing how to save memory: the least slowdown that fits a budget, before training begins.

All phases of a stage share one plan. Bytes are those of tensors on the training device, predicted
by :mod:`gaussian_splatting.engine.memory_model`; what is left of the budget goes to photographs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.memory_model import (
    MemoryBreakdown,
    MemoryPlan,
    StepLoad,
    ViewLoad,
    predict,
)
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.optim.optimizer_config import STATE_FORMATS, OptimizerConfig
from gaussian_splatting.rasterization import project
from gaussian_splatting.shared_flags import optional_boolean
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.memory import available_bytes, format_bytes
from sugar_utils.settings import flag, from_args
from sugar_utils.torchrun import Launch

MAX_STRIPS = 32
MIN_CHUNK = 50_000
STRIPS = 4
SURVEYED_VIEWS = 4
MIN_PHOTOGRAPHS = 2
"""The one that is trained on and the next one."""

_SHARE = 0.8
"""Of the free memory; the rest is for what is not in tensors, and for other programs."""

LoadsOf = Callable[[OptimizerConfig], Mapping[str, StepLoad]]
"""Step of each phase with an optimiser's formats."""


@dataclass(frozen=True)
class MemoryOptions:
    """What the user said about memory; none of it changes the result but for rounding.

    Attributes:
        processes: How many train together; where each sees several views per step, it keeps one
            more copy of the gradients.
        sharers: How many of them share the memory of this machine's CPU.
    """

    vram_budget: float | None = flag(
        None, "GiB for tensors on the training device, and on the CPU for photographs as well; "
        "unset: four fifths of what is free there. Strips, chunks of samples and the photographs "
        "in memory follow from it; see below", group="memory", parse=positive_float,
        idle="in vanilla training; it says so",
    )  # fmt: skip
    gradient_accumulation: bool | None = optional_boolean(
        None, "work on one image in horizontal strips, which bounds the memory of pixels; the "
        "gradient is that of the whole image; unset: as --vram_budget needs it",
    )  # fmt: skip
    accumulation_steps: int | None = flag(
        None, f"number of strips, {STRIPS} when unset; at most one per image row", group="memory",
        parse=positive_int, idle="without --gradient_accumulation True; it says so",
    )  # fmt: skip
    use_gradient_checkpointing: bool | None = optional_boolean(
        None, "project and blend again instead of keeping the results; the same bits, a little "
        "less memory, about 1.15 times the time; unset: as --vram_budget needs it",
    )  # fmt: skip
    processes: int = 1
    sharers: int = 1

    @property
    def budget(self) -> int | None:
        """Bytes for tensors and photographs; None for what is free."""
        return None if self.vram_budget is None else round(self.vram_budget * 2**30)

    @property
    def split(self) -> ImageSplit:
        """The strips that the flags ask for."""
        strips = (self.accumulation_steps or STRIPS) if self.gradient_accumulation else 1
        return ImageSplit(strips, bool(self.use_gradient_checkpointing))

    @property
    def fixed_split(self) -> bool:
        """Whether the flags name the strips, so that no plan may change them."""
        return (self.gradient_accumulation, self.use_gradient_checkpointing) != (None, None)

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for a flag that was given and cannot act."""
        if self.accumulation_steps is None or self.gradient_accumulation:
            return ()
        return ("--accumulation_steps has no effect without --gradient_accumulation True",)


def memory_options(args: argparse.Namespace) -> MemoryOptions:
    """The settings that were parsed, for the processes that torchrun started."""
    launch = Launch.read()
    return from_args(MemoryOptions, args, processes=launch.size, sharers=launch.local_size)


@dataclass(frozen=True)
class MemoryChoice:
    """A plan that fits.

    Attributes:
        image_bytes: Of them for photographs; 0 where those lie in other memory.
    """

    plan: MemoryPlan
    phases: dict[str, MemoryBreakdown]
    budget: int
    image_bytes: int

    def lines(self) -> list[str]:
        """The plan and its breakdown for people."""
        photographs = (
            f"{format_bytes(self.image_bytes)} of it for photographs"
            if self.image_bytes
            else "photographs stay in the memory of the host"
        )
        found = [
            f"memory plan: {describe(self.plan)}; {format_bytes(self.budget)} to use, {photographs}"
        ]
        for phase, needs in self.phases.items():
            parts = sorted(needs.parts.items(), key=lambda part: -part[1])
            found.append(
                f"memory of {phase}: {format_bytes(needs.total)} at most, {needs.peak_at}: "
                + ", ".join(f"{name} {format_bytes(n)}" for name, n in parts)
            )
        return found


def describe(plan: MemoryPlan) -> str:
    """A plan for people."""
    strips = plan.split.strips
    words = ["whole images" if strips == 1 else f"images in {strips} strips"]
    if plan.sample_chunk is not None:
        words.append(f"{plan.sample_chunk:,} samples at once")
    if plan.split.recompute:
        words.append("projections computed again")
    return ", ".join(words)


def cheaper(plan: MemoryPlan) -> MemoryPlan | None:
    """The next plan that needs less memory: smaller pieces, then computing again; None at the end.

    For steps whose memory was misjudged, so all that can become smaller does so at once.
    """
    strips = min(2 * plan.split.strips, max(MAX_STRIPS, plan.split.strips))
    chunk = plan.sample_chunk
    if chunk is not None and chunk > MIN_CHUNK:
        chunk = max(MIN_CHUNK, chunk // 2)
    next_one = MemoryPlan(replace(plan.split, strips=strips), chunk)
    if next_one != plan:
        return next_one
    return (
        None if plan.split.recompute else replace(plan, split=replace(plan.split, recompute=True))
    )


def surveyed(cameras: Sequence[Camera]) -> list[Camera]:
    """Some evenly spaced views, and before them the one with the largest image."""
    stride = max(1, len(cameras) // SURVEYED_VIEWS)
    return [max(cameras, key=lambda camera: camera.width * camera.height), *cameras[::stride]]


def survey(gaussians: Gaussians, cameras: Sequence[Camera]) -> list[ViewLoad]:
    """What views cost."""
    with torch.no_grad():
        return [ViewLoad.of(project(gaussians, camera)) for camera in cameras]


def worst_view(load: StepLoad, views: Sequence[ViewLoad]) -> StepLoad:
    """A step on the view that needs most."""
    loads = [replace(load, view=view) for view in views]
    return max(loads, key=lambda one: predict(one, MemoryPlan()).total)


def usable_bytes(options: MemoryOptions, device: torch.device, held: int) -> int | None:
    """The budget, or most of what is free and of what is held but will be let go; None: unknown."""
    if options.budget is not None:
        return options.budget
    free = available_bytes(device)
    if free is None:
        return None
    if device.type == "cpu":
        free //= options.sharers
    return int(_SHARE * (free + held))


def choose(
    loads_of: LoadsOf,
    optimizer: OptimizerConfig,
    first: MemoryPlan,
    options: MemoryOptions,
    budget: int,
    photographs: Sequence[int],
) -> MemoryChoice:
    """The plan with the least slowdown that fits.

    Args:
        first: What the flags ask for; also what is best where memory is plenty.
        photographs: Bytes of each photograph that the stage reads; none where they lie in other
            memory.
    """
    loads = loads_of(optimizer)
    plans = _plans(first, options)
    least = MIN_PHOTOGRAPHS * max(photographs, default=0)
    for plan in plans:
        phases = {name: predict(load, plan) for name, load in loads.items()}
        room = budget - max(needs.total for needs in phases.values())
        if room >= least:
            return MemoryChoice(plan, phases, budget, min(sum(photographs), room))
    raise UserError(_refusal(loads_of, optimizer, first, options, budget, least))


def _plans(first: MemoryPlan, options: MemoryOptions) -> list[MemoryPlan]:
    """Plans from fast to slow: chunks cost least, then strips, then computing again."""
    chunks: list[int | None] = [first.sample_chunk]
    while chunks[-1] is not None and chunks[-1] > MIN_CHUNK:
        chunks.append(max(MIN_CHUNK, chunks[-1] // 2))
    splits = [first.split]
    while not options.fixed_split and splits[-1].strips < MAX_STRIPS:
        splits.append(replace(splits[-1], strips=2 * splits[-1].strips))
    if not options.fixed_split:
        splits += [ImageSplit(split.strips, recompute=True) for split in splits]
    return [MemoryPlan(split, chunk) for split in splits for chunk in chunks]


def _refusal(
    loads_of: LoadsOf,
    optimizer: OptimizerConfig,
    first: MemoryPlan,
    options: MemoryOptions,
    budget: int,
    least: int,
) -> str:
    """One line: what is needed, what there is, and what to change."""

    def needed(config: OptimizerConfig, free: MemoryOptions) -> int:
        loads, plans = loads_of(config).values(), _plans(first, free)
        return least + min(max(predict(load, plan).total for load in loads) for plan in plans)

    start = (
        f"training needs {format_bytes(needed(optimizer, options))} at least, the budget is "
        f"{format_bytes(budget)} (--vram_budget)"
    )
    anything = replace(options, gradient_accumulation=None, use_gradient_checkpointing=None)
    if options.fixed_split and needed(optimizer, anything) <= budget:
        return f"{start}; it fits without --gradient_accumulation and --use_gradient_checkpointing"
    for state in STATE_FORMATS[STATE_FORMATS.index(optimizer.optimizer_state) :]:
        for half in (optimizer.use_bfloat16, True):
            config = OptimizerConfig(state, half, optimizer.sparse_adam)
            if needed(config, anything) <= budget:
                more = " --use_bfloat16 True" if half else ""
                return f"{start}; it fits with --optimizer_state {state}{more}"
    smallest = OptimizerConfig("8bit", use_bfloat16=True, sparse_adam=optimizer.sparse_adam)
    return (
        f"{start}; even --optimizer_state 8bit --use_bfloat16 True needs "
        f"{format_bytes(needed(smallest, anything))}: give that much, smaller images or fewer "
        "Gaussians"
    )
