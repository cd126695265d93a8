# SPDX-License-Identifier: Apache-2.0
"""The flags of the coarse stage, and what they mean together."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from gaussian_splatting.compute import BackendFlags, DeviceFlags, compute_options
from gaussian_splatting.engine.memory_plan import memory_options
from gaussian_splatting.optim.learned_exposure import LaterExposure
from gaussian_splatting.optim.optimizer_config import optimizer_config
from gaussian_splatting.shared_flags import ScheduleFlags
from sugar_trainers.coarse_config import CoarseConfig, CoarseSchedule, Regularization
from sugar_trainers.coarse_stage import CoarseOptions
from sugar_trainers.presets import with_preset
from sugar_utils.settings import from_args, parser_of


def coarse_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of the scripts that run the coarse stage alone."""
    return parser_of(description, CoarseOptions, DeviceFlags, BackendFlags, ScheduleFlags)


def coarse_options(
    args: argparse.Namespace,
    regularization: Regularization,
    output_dir: Path | None,
    notices: tuple[str, ...] = (),
) -> CoarseOptions:
    """The run that was asked for.

    Raises:
        UserError: An input is missing, or what was asked for cannot be had.
    """
    args = with_preset(args)
    config = from_args(
        CoarseConfig,
        args,
        regularization_type=regularization,
        schedule=CoarseSchedule().scaled(args.schedule_scale),
        exposure=from_args(LaterExposure, args).with_schedule(args.schedule_scale),
        optimizer=optimizer_config(args),
    )
    # Inputs that are missing are told before the device is looked for.
    options = from_args(
        CoarseOptions, args, config=config, memory=memory_options(args), output_dir=output_dir
    )
    notices += (*options.memory.notices, *options.size.notices, *_ineffective(options))
    return replace(options, compute=compute_options(args), notices=notices)


def _ineffective(options: CoarseOptions) -> list[str]:
    """One line for each flag that was given but cannot act beside the others."""
    lines, mode = [], options.config.regularization_type
    if not options.config.full_res_normals and mode != "dn_consistency":
        lines.append(f"--full_res_normals has no effect with {mode}, which renders no normals")
    if not options.eval and options.test_iterations != CoarseOptions.test_iterations:
        lines.append("--test_iterations has no effect with --eval False: nothing is held out")
    return lines
