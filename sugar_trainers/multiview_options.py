# SPDX-License-Identifier: Apache-2.0
"""The flags of the multi-view mode, and what they mean together."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from gaussian_splatting.compute import BackendFlags, DeviceFlags, compute_options
from gaussian_splatting.engine.memory_plan import memory_options
from gaussian_splatting.optim.densification import DensificationConfig
from gaussian_splatting.optim.learned_exposure import LaterExposure
from gaussian_splatting.optim.optimizer_config import optimizer_config
from gaussian_splatting.shared_flags import ScheduleFlags
from sugar_trainers.coarse_config import MULTIVIEW, CoarseConfig
from sugar_trainers.coarse_options import coarse_options
from sugar_trainers.coarse_stage import CoarseOptions
from sugar_trainers.multiview_config import MultiviewConfig, MultiviewSchedule, densification
from sugar_trainers.multiview_stage import MultiviewOptions
from sugar_utils.settings import add_flags, from_args, parser_of


def multiview_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of the script that runs the mode alone."""
    parser = parser_of(description, MultiviewOptions, DeviceFlags, BackendFlags, ScheduleFlags)
    add_flags(parser, DensificationConfig, "densification")
    return parser


def options_of_mode(args: argparse.Namespace, mode: str, output_dir: Path | None) -> CoarseOptions:
    """The coarse run of any mode.

    Raises:
        UserError: As :func:`multiview_options`.
    """
    if mode == MULTIVIEW:
        return multiview_options(args, output_dir)
    return coarse_options(args, mode, output_dir)


def multiview_options(
    args: argparse.Namespace, output_dir: Path | None, notices: tuple[str, ...] = ()
) -> MultiviewOptions:
    """The run that was asked for; exposures are learned unless that is refused.

    Raises:
        UserError: An input is missing, or what was asked for cannot be had.
    """
    asked = args.exposure_compensation
    exposure = from_args(LaterExposure, args, exposure_compensation=asked is None or asked)
    config = from_args(
        MultiviewConfig,
        args,
        schedule=MultiviewSchedule().scaled(args.schedule_scale),
        exposure=exposure.with_schedule(args.schedule_scale),
        densification=densification(args.max_gaussians),
        optimizer=optimizer_config(args),
    )
    # Inputs that are missing are told before the device is looked for.
    options = from_args(
        MultiviewOptions, args, config=config, memory=memory_options(args), output_dir=output_dir
    )
    notices += (*options.memory.notices, *options.size.notices, *_ineffective(args))
    return replace(options, compute=compute_options(args), notices=notices)


def _ineffective(args: argparse.Namespace) -> list[str]:
    """One line if flags of the other modes were given."""
    names = ("sdf_samples", "knn_batch_size", "full_res_normals")
    usual = {name: (None, getattr(CoarseConfig, name)) for name in names}
    given = [f"--{n}" for n, values in usual.items() if getattr(args, n, None) not in values]
    return [f"{', '.join(given)}: no effect with multiview"] if given else []
