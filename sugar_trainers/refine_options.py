# SPDX-License-Identifier: Apache-2.0
"""The flags of the refinement stage, and what they mean together."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from gaussian_splatting.compute import BackendFlags, DeviceFlags, compute_options
from gaussian_splatting.engine.memory_plan import memory_options
from gaussian_splatting.optim.optimizer_config import optimizer_config
from gaussian_splatting.shared_flags import ScheduleFlags
from sugar_trainers.presets import with_preset
from sugar_trainers.refine_config import RefineConfig
from sugar_trainers.refine_stage import RefineOptions
from sugar_utils.errors import UserError
from sugar_utils.settings import from_args, parser_of


def refine_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``train_refined.py``."""
    return parser_of(description, RefineOptions, DeviceFlags, BackendFlags, ScheduleFlags)


def refine_config(args: argparse.Namespace, **given: Any) -> RefineConfig:
    """Settings of the optimisation, the schedule scaled.

    Args:
        args: What was parsed.
        given: Fields that follow from something else.

    Raises:
        UserError: Half a box is given.
    """
    config = from_args(RefineConfig, args, optimizer=optimizer_config(args), **given)
    return config.with_schedule(args.schedule_scale)


def refine_options(args: argparse.Namespace) -> RefineOptions:
    """The run that was asked for.

    Raises:
        UserError: An input is missing, or what was asked for cannot be had.
    """
    args = with_preset(args)
    memory = memory_options(args)
    options = from_args(RefineOptions, args, config=refine_config(args), memory=memory)
    if not options.mesh_path.is_file():
        raise UserError(f"--mesh_path {options.mesh_path}: no such file; pass the coarse mesh PLY")
    notices = (*memory.notices, *options.size.notices)
    return replace(options, compute=compute_options(args), notices=notices)
