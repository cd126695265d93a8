# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of the vanilla trainer and of runs in general, declared once."""

from __future__ import annotations

import argparse
from pathlib import Path

from gaussian_splatting.compute import add_backend_flags, add_device_flags, compute_options
from gaussian_splatting.engine.memory_plan import MemoryOptions
from gaussian_splatting.engine.session import RunOptions
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.optim.densification import DensificationConfig
from gaussian_splatting.optim.optimizer_config import STATE_FORMATS, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from gaussian_splatting.vanilla.vanilla_stage import VanillaConfig
from sugar_utils.errors import UserError
from sugar_utils.flags import (
    IntList,
    boolean,
    integer,
    non_negative_float,
    positive_float,
    positive_int,
)
from sugar_utils.torchrun import Launch

ACCUMULATION_STEPS = 4
_RATES = LearningRates()
_RULES = DensificationConfig()


_WHOLE_SCHEDULE = (
    "multiply every milestone, interval and length of the schedule, for quick runs; "
    "1 is the paper's"
)
_VANILLA_SCHEDULE = (
    "multiply the milestones of learning rates, densification and opacity reset, for quick runs; "
    "--iterations and lists of iterations are taken as they are"
)


def add_run_flags(parser: argparse.ArgumentParser, schedule_help: str = _WHOLE_SCHEDULE) -> None:
    """Flags of every training run: checkpoints, resuming, seed, schedule."""
    group = parser.add_argument_group("run")
    group.add_argument(
        "--resume",
        default="auto",
        metavar="{auto,none,PATH}",
        help="auto: go on where an unfinished run with the same settings stopped; "
        "none: start anew; PATH: continue this checkpoint",
    )
    group.add_argument(
        "--overwrite",
        type=boolean,
        default=False,
        help="replace a run with other settings in the output folder",
    )
    group.add_argument(
        "--keep_checkpoints",
        type=positive_int,
        default=3,
        help="interval checkpoints to keep; milestones always stay",
    )
    group.add_argument(
        "--random_seed",
        type=integer,
        default=0,
        help="the same seed and flags give the same result",
    )
    group.add_argument(
        "--views_per_step",
        type=positive_int,
        default=None,
        help="views whose gradients are averaged in one step, a multiple of the number of "
        "processes (unset: one for each process)",
    )
    group.add_argument(
        "--schedule_scale",
        type=positive_float,
        default=1.0,
        help=schedule_help,
    )


def run_options(args: argparse.Namespace) -> RunOptions:
    """Typed form of :func:`add_run_flags`, as far as it concerns the folder."""
    return RunOptions(
        resume=args.resume, overwrite=args.overwrite, keep_checkpoints=args.keep_checkpoints
    )


def add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    """How every training stage stores what it optimises, and which Gaussians step."""
    group = parser.add_argument_group("optimiser memory")
    group.add_argument(
        "--optimizer_state",
        choices=STATE_FORMATS,
        default="fp32",
        help="storage of Adam's moments: 8, 4 or about 2.5 bytes per value; bf16 and 8bit round "
        "stochastically",
    )
    group.add_argument(
        "--use_bfloat16",
        type=boolean,
        nargs="?",
        const=True,
        default=False,
        help="store the colour bands 1 to 3, their gradients and moments in bfloat16; all else, "
        "and all arithmetic, stays float32",
    )
    group.add_argument(
        "--sparse_adam",
        type=boolean,
        nargs="?",
        const=True,
        default=False,
        help="step only the Gaussians that the views of a step show; moments of the others do not "
        "decay",
    )


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """Typed form of :func:`add_optimizer_flags`, and of how many views make a step.

    Raises:
        UserError: The processes cannot share the views evenly.
    """
    size = Launch.read().size
    views = args.views_per_step or size
    if views % size != 0:
        raise UserError(
            f"--views_per_step {views}: {size} processes cannot share them evenly; give a "
            f"multiple of {size}"
        )
    return OptimizerConfig(args.optimizer_state, args.use_bfloat16, args.sparse_adam, views)


def add_split_flags(parser: argparse.ArgumentParser) -> None:
    """How every training stage works through one image."""
    add = parser.add_argument_group("image memory").add_argument
    add(
        "--vram_budget",
        type=positive_float,
        default=None,
        help="GiB for tensors and photographs on the training device; strips, chunks of samples "
        "and the number of photographs in memory follow from it (unset: most of what is free)",
    )
    add(
        "--gradient_accumulation",
        type=boolean,
        nargs="?",
        const=True,
        default=None,
        help="work on one image in horizontal strips, which needs less memory for pixels; the "
        "gradient is that of the whole image (unset: as --vram_budget needs it)",
    )
    add(
        "--accumulation_steps",
        type=positive_int,
        default=None,
        help=f"number of strips; acts with --gradient_accumulation only (unset: "
        f"{ACCUMULATION_STEPS})",
    )
    add(
        "--use_gradient_checkpointing",
        type=boolean,
        nargs="?",
        const=True,
        default=None,
        help="project and blend again instead of keeping the results; same gradient to the bit, "
        "a little less memory, more time (unset: as --vram_budget needs it)",
    )


def image_split(args: argparse.Namespace) -> ImageSplit:
    """Typed form of :func:`add_split_flags`."""
    strips = (args.accumulation_steps or ACCUMULATION_STEPS) if args.gradient_accumulation else 1
    return ImageSplit(strips, bool(args.use_gradient_checkpointing))


def memory_options(args: argparse.Namespace) -> MemoryOptions:
    """What :func:`add_split_flags` leaves to the planner."""
    budget = None if args.vram_budget is None else round(args.vram_budget * 2**30)
    given = (args.gradient_accumulation, args.use_gradient_checkpointing)
    fixed, launch = any(flag is not None for flag in given), Launch.read()
    return MemoryOptions(budget, fixed, processes=launch.size, sharers=launch.local_size)


def split_notices(args: argparse.Namespace) -> tuple[str, ...]:
    """One line if a flag of :func:`add_split_flags` was given that cannot act."""
    if args.accumulation_steps is None or args.gradient_accumulation:
        return ()
    return ("--accumulation_steps has no effect without --gradient_accumulation True",)


def add_vanilla_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of the vanilla trainer, spelled as in the reference implementation."""
    add = parser.add_argument
    add("-s", "--source_path", type=Path, required=True, help="scene folder")
    add("-m", "--model_path", type=Path, required=True, help="folder to write")
    add("-i", "--images", default="images", help="folder of the photographs in the scene folder")
    add(
        "-r",
        "--resolution",
        type=float,
        default=-1.0,
        help="-1: at most 1600 px wide; 1, 2, 4, 8: divisor; other: width in pixels",
    )
    add("-w", "--white_background", action="store_true", help="render on white instead of black")
    add("--eval", action="store_true", help="hold out every 8th view")
    add(
        "--iterations",
        type=positive_int,
        default=None,
        help="number of iterations; not touched by --schedule_scale (default: 30000 scaled)",
    )
    add("--sh_degree", type=int, default=3, choices=(0, 1, 2, 3), help="highest colour degree")
    add(
        "--init_ply",
        type=Path,
        default=None,
        help="start from this PLY, Gaussians or coloured points, instead of the scene's points",
    )
    add(
        "--max_gaussians",
        type=positive_int,
        default=None,
        help="densification never goes beyond this number",
    )
    add(
        "--test_iterations",
        action=IntList,
        default=[7_000, 30_000],
        help="when to measure held-out views",
    )
    add(
        "--save_iterations",
        action=IntList,
        default=[7_000, 30_000],
        help="when to write a PLY, besides the end",
    )
    add(
        "--checkpoint_iterations",
        action=IntList,
        default=[],
        help="further iterations whose checkpoints are kept",
    )
    add(
        "--checkpoint_interval",
        type=positive_int,
        default=1000,
        help="iterations between checkpoints to resume from",
    )
    add("--start_checkpoint", type=Path, default=None, help="same as --resume PATH")
    _add_optimisation_flags(parser)
    add_device_flags(parser)
    add_backend_flags(parser)
    add_split_flags(parser)
    add_optimizer_flags(parser)
    _add_inert_flags(parser)
    add_run_flags(parser, _VANILLA_SCHEDULE)  # fmt: skip


def _add_optimisation_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("optimisation").add_argument
    add(
        "--position_lr_init",
        type=positive_float,
        default=_RATES.position_init,
        help="first learning rate of positions, per unit of camera extent",
    )
    add(
        "--position_lr_final",
        type=positive_float,
        default=_RATES.position_final,
        help="their last learning rate",
    )
    add(
        "--position_lr_max_steps",
        type=positive_int,
        default=_RATES.position_steps,
        help="iterations from the first to the last",
    )
    add(
        "--feature_lr",
        type=positive_float,
        default=_RATES.sh,
        help="learning rate of colours; higher bands use a twentieth",
    )
    add(
        "--opacity_lr",
        type=positive_float,
        default=_RATES.opacity,
        help="learning rate of opacities",
    )
    add("--scaling_lr", type=positive_float, default=_RATES.scale, help="learning rate of sizes")
    add(
        "--rotation_lr",
        type=positive_float,
        default=_RATES.rotation,
        help="learning rate of rotations",
    )
    add(
        "--percent_dense",
        type=positive_float,
        default=_RULES.percent_dense,
        help="share of the extent above which Gaussians are split instead of cloned",
    )
    add(
        "--lambda_dssim",
        type=non_negative_float,
        default=0.2,
        help="weight of 1 - SSIM in the colour loss; the rest is L1",
    )
    add(
        "--densification_interval",
        type=positive_int,
        default=_RULES.interval,
        help="iterations between two rounds of densification",
    )
    add(
        "--opacity_reset_interval",
        type=positive_int,
        default=_RULES.opacity_reset_interval,
        help="iterations between two resets of all opacities",
    )
    add(
        "--densify_from_iter",
        type=positive_int,
        default=_RULES.start,
        help="densification begins after this iteration",
    )
    add(
        "--densify_until_iter",
        type=positive_int,
        default=_RULES.stop,
        help="densification and opacity resets end before this iteration",
    )
    add(
        "--densify_grad_threshold",
        type=positive_float,
        default=_RULES.gradient_threshold,
        help="screen-space gradient from which a Gaussian is cloned or split",
    )
    add("--random_background", action="store_true", help="a random background per iteration")


_INERT = {
    "position_lr_delay_mult": "it is inert in the reference as well",
    "data_device": "photographs stay in memory as bytes and go to the device one at a time",
    "ip": "there is no network viewer",
    "port": "there is no network viewer",
    "debug_from": "non-finite numbers are detected in every iteration",
}


def _add_inert_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the reference that old commands carry; using one says that it does nothing."""
    add = parser.add_argument_group("accepted for old commands, without effect").add_argument
    for name, reason in _INERT.items():
        add(f"--{name}", default=None, help=reason)
    add("--quiet", action="store_true", help="output that is not a terminal is short anyway")
    add("--detect_anomaly", action="store_true", help=_INERT["debug_from"])


def inert_notices(args: argparse.Namespace) -> list[str]:
    """One line for each flag given that has no effect."""
    used = [name for name in _INERT if getattr(args, name) is not None]
    lines = [f"--{name} has no effect: {_INERT[name]}" for name in used]
    if args.detect_anomaly:
        lines.append(f"--detect_anomaly has no effect: {_INERT['debug_from']}")
    if args.quiet:
        lines.append("--quiet has no effect: output that is not a terminal is short anyway")
    return lines


def vanilla_config(args: argparse.Namespace) -> VanillaConfig:
    """Typed settings of the optimisation, the schedule scaled."""
    if args.lambda_dssim > 1:
        raise UserError(f"--lambda_dssim {args.lambda_dssim} must lie between 0 and 1")
    config = VanillaConfig(
        iterations=args.iterations or max(1, round(30_000 * args.schedule_scale)),
        rates=LearningRates(
            position_init=args.position_lr_init,
            position_final=args.position_lr_final,
            position_steps=args.position_lr_max_steps,
            sh=args.feature_lr,
            opacity=args.opacity_lr,
            scale=args.scaling_lr,
            rotation=args.rotation_lr,
        ),
        densification=DensificationConfig(
            start=args.densify_from_iter,
            stop=args.densify_until_iter,
            interval=args.densification_interval,
            gradient_threshold=args.densify_grad_threshold,
            percent_dense=args.percent_dense,
            opacity_reset_interval=args.opacity_reset_interval,
            max_gaussians=args.max_gaussians,
        ),
        sh_degree=args.sh_degree,
        dssim_weight=args.lambda_dssim,
        white_background=args.white_background,
        random_background=args.random_background,
        optimizer=optimizer_config(args),
        split=image_split(args),
        seed=args.random_seed,
    )
    return config.with_schedule(args.schedule_scale)


def budget_notices(args: argparse.Namespace) -> tuple[str, ...]:
    """One line if a memory budget was given, which the vanilla stage cannot keep."""
    if args.vram_budget is None:
        return ()
    return (
        "--vram_budget has no effect on vanilla training, whose Gaussians grow in number: bound "
        "them with --max_gaussians",
    )


def vanilla_options(args: argparse.Namespace) -> VanillaOptions:
    """Typed form of :func:`add_vanilla_flags`."""
    run = run_options(args)
    if args.start_checkpoint is not None and args.resume == "auto":
        run = RunOptions(str(args.start_checkpoint), run.overwrite, run.keep_checkpoints)
    return VanillaOptions(
        scene_path=args.source_path,
        output=args.model_path,
        images_dir=args.images,
        resolution=args.resolution,
        eval_split=args.eval,
        config=vanilla_config(args),
        init_ply=args.init_ply,
        checkpoint_interval=args.checkpoint_interval,
        checkpoint_iterations=tuple(args.checkpoint_iterations),
        test_iterations=tuple(args.test_iterations),
        save_iterations=tuple(args.save_iterations),
        compute=compute_options(args),
        run=run,
        notices=(*split_notices(args), *budget_notices(args), *inert_notices(args)),
    )
