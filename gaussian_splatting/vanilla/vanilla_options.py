# SPDX-License-Identifier: Apache-2.0
"""The flags of the vanilla trainer, and what they mean together."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gaussian_splatting.compute import BackendFlags
from gaussian_splatting.engine.memory_plan import MemoryOptions
from gaussian_splatting.engine.runner import RunOptions
from gaussian_splatting.optim.optimizer_config import optimizer_config
from gaussian_splatting.optim.schedule import scaled
from gaussian_splatting.shared_flags import ScheduleFlags
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_utils.settings import add_flags, flag, flags_of, from_args, parser_of

_inert = partial(flag, group="accepted for old commands", no_effect_when="always; it says so")
_CHECKED = "non-finite numbers are detected in every iteration"
_SHORT = "output that is not a terminal is short anyway"


@dataclass(frozen=True)
class InertFlags:
    """Flags of the reference that old commands carry; using one says that it does nothing."""

    position_lr_delay_mult: str | None = _inert(None, "it is inert in the reference as well")
    data_device: str | None = _inert(None, "photographs stay in memory as bytes")
    ip: str | None = _inert(None, "a run is watched with --viewer")
    port: str | None = _inert(None, "a run is watched with --viewer")
    debug_from: str | None = _inert(None, _CHECKED)
    quiet: bool = _inert(False, _SHORT, action="store_true")
    detect_anomaly: bool = _inert(False, _CHECKED, action="store_true")


@dataclass(frozen=True)
class StartFlags:
    """The reference's name for a checkpoint to continue."""

    start_checkpoint: Path | None = flag(
        None, "the same as --resume PATH", group="vanilla trainer", parse=Path,
        no_effect_when="if --resume is given as well",
    )  # fmt: skip


def vanilla_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``gaussian_splatting/train.py``, spelled as in the reference."""
    parser = parser_of(description)
    switch: dict[str, Any] = {
        "short": "-w", "group": "vanilla trainer", "options": {"action": "store_true"}
    }  # fmt: skip
    scale = {
        "help": "multiply the milestones of learning rates, densification and opacity reset, for "
        "quick runs; --iterations and lists of iterations are taken as they are",
        "no_effect_when": "",
        "group": "vanilla trainer",
    }
    free = {"no_effect_when": ""}
    add_flags(parser, VanillaOptions, white_background=switch, init_ply=free, max_gaussians=free)
    for flags in (StartFlags, BackendFlags, MemoryOptions, InertFlags, RunOptions):
        add_flags(parser, flags)
    add_flags(parser, ScheduleFlags, schedule_scale=scale)
    return parser


def inert_messages(args: argparse.Namespace) -> list[str]:
    """One line for each flag given that has no effect."""
    return [
        f"--{inert.name} has no effect: {inert.help}"
        for inert in flags_of(InertFlags)
        if getattr(args, inert.name) not in (None, False)
    ]


def budget_messages(memory: MemoryOptions) -> tuple[str, ...]:
    """One line if a memory budget was given, which the vanilla stage cannot keep."""
    if memory.vram_budget is None:
        return ()
    return (
        "--vram_budget has no effect on vanilla training, whose Gaussians grow in number: bound "
        "them with --max_gaussians",
    )


def vanilla_config(args: argparse.Namespace) -> VanillaConfig:
    """Settings of the optimisation, the schedule scaled."""
    iterations = args.iterations or scaled(VanillaConfig.iterations, args.schedule_scale)
    config = from_args(VanillaConfig, args, iterations=iterations, optimizer=optimizer_config(args))
    return config.with_schedule(args.schedule_scale)


def vanilla_options(args: argparse.Namespace) -> VanillaOptions:
    """The run that was asked for."""
    args = argparse.Namespace(**vars(args))
    if args.start_checkpoint is not None and args.resume == "auto":
        args.resume = str(args.start_checkpoint)
    memory = from_args(MemoryOptions, args)
    return from_args(
        VanillaOptions,
        args,
        config=vanilla_config(args),
        memory=memory,
        compute=from_args(BackendFlags, args).choose(),
        messages=(*memory.messages, *budget_messages(memory), *inert_messages(args)),
    )
