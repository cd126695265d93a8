# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of the coarse stage, declared once for all entry points that run it."""

from __future__ import annotations

import argparse
from pathlib import Path

from gaussian_splatting.compute import add_backend_flags, add_device_flags, compute_options
from gaussian_splatting.data.images import SugarSize
from gaussian_splatting.vanilla.vanilla_options import (
    add_optimizer_flags,
    add_run_flags,
    add_split_flags,
    image_split,
    memory_options,
    optimizer_config,
    run_options,
    split_notices,
)
from sugar_trainers.coarse_config import CoarseConfig, CoarseSchedule, Regularization
from sugar_trainers.coarse_run import (
    CHECKPOINT_INTERVAL,
    CHECKPOINT_MILESTONES,
    TEST_ITERATIONS,
    CoarseOptions,
)
from sugar_utils.errors import UserError
from sugar_utils.flags import (
    HelpFormatter,
    IntList,
    Parser,
    boolean,
    integer,
    non_negative_float,
    positive_float,
    positive_int,
)


def add_scene_flags(
    parser: argparse.ArgumentParser,
    *,
    checkpoint: bool = True,
    background: bool = True,
    gpu: tuple[str, ...] = ("--gpu",),
) -> None:
    """What to read: scene, checkpoint, split and image size.

    Args:
        parser: Gets the flags.
        checkpoint: Whether the script starts from a checkpoint.
        background: Whether the script renders on a background of the user's choice.
        gpu: Spellings of the flag that numbers the GPU.
    """
    add = parser.add_argument_group("input").add_argument
    add("-s", "--scene_path", type=Path, help="scene folder (images/ and sparse/0/)")
    if checkpoint:
        add("-c", "--checkpoint_path", type=Path, help="vanilla 3DGS checkpoint folder, or a PLY")
        add(
            "-i",
            "--iteration_to_load",
            type=integer,
            default=7_000,
            help="iteration of the checkpoint to start from",
        )
    add("--eval", type=boolean, default=True, help="hold out every 8th image")
    add(
        "--images",
        default=None,
        help="folder of the photographs in the scene folder; unset: as the checkpoint was trained",
    )
    if background:
        add(
            "--white_background",
            type=boolean,
            default=False,
            help="composite transparent photographs, and render, on white instead of black",
        )
    add_size_flags(parser)
    add_device_flags(parser, gpu=gpu)


def add_size_flags(parser: argparse.ArgumentParser) -> None:
    """Size of the images."""
    add = parser.add_argument_group("image size").add_argument
    add(
        "--resolution_factor",
        type=positive_float,
        default=None,
        help="divide the original image size by this; unset: long side at most --img_size_limit",
    )
    add(
        "--img_resolution",
        type=integer,
        default=1,
        choices=(1, 2, 4, 8),
        help="divisor of the image size, applied before the limit",
    )
    add(
        "--img_size_limit",
        type=positive_int,
        default=1920,
        help="longest side of the training images",
    )


def add_coarse_flags(parser: argparse.ArgumentParser) -> None:
    """Memory, sampling, checkpoints and measurements of the coarse stage."""
    add = parser.add_argument_group("coarse stage").add_argument
    add(
        "--full_res_normals",
        type=boolean,
        default=True,
        help="depth-normal consistency at the training size; False: at half of it, which needs "
        "less memory and time",
    )
    add(
        "--sdf_samples",
        type=positive_int,
        default=1_000_000,
        help="points sampled around the surface per iteration",
    )
    add(
        "--knn_batch_size",
        type=positive_int,
        default=100_000,
        help="points per launch of the neighbour search",
    )
    add(
        "--checkpoint_interval",
        type=positive_int,
        default=CHECKPOINT_INTERVAL,
        help="iterations between checkpoints to resume from",
    )
    add(
        "--checkpoint_milestones",
        action=IntList,
        default=list(CHECKPOINT_MILESTONES),
        help="iterations whose checkpoints are always kept; those before 7000 never come",
    )
    add(
        "--test_iterations",
        action=IntList,
        default=list(TEST_ITERATIONS),
        help="iterations at which the held-out images are measured",
    )
    add_backend_flags(parser)
    add_split_flags(parser)
    add_optimizer_flags(parser)
    add_run_flags(parser)  # fmt: skip


def coarse_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of the scripts that run the coarse stage alone."""
    parser = Parser(description=description, formatter_class=HelpFormatter)
    add_scene_flags(parser)
    parser.add_argument(
        "-o",
        "--output_dir",
        type=Path,
        default=None,
        help="parent of the run's folder; unset: output/coarse/<scene>",
    )
    parser.add_argument(
        "-e",
        "--estimation_factor",
        type=non_negative_float,
        default=0.2,
        help="weight of the density or sdf term",
    )
    parser.add_argument(
        "-n",
        "--normal_factor",
        type=non_negative_float,
        default=0.2,
        help="weight of the better-normal term",
    )
    add_coarse_flags(parser)
    return parser  # fmt: skip


def required_inputs(args: argparse.Namespace) -> None:
    """Check that scene and checkpoint were given.

    Raises:
        UserError: If one was not.
    """
    for flag, value in (("-s/--scene_path", args.scene_path),
                        ("-c/--checkpoint_path", args.checkpoint_path)):  # fmt: skip
        if value is None:
            raise UserError(f"{flag} is missing; --help lists all flags")


def coarse_options(
    args: argparse.Namespace,
    regularization: Regularization,
    output_dir: Path | None,
    notices: tuple[str, ...] = (),
) -> CoarseOptions:
    """Typed form of the flags above.

    Raises:
        UserError: If an input is missing.
    """
    required_inputs(args)
    notices += _ineffective(args, regularization)
    return CoarseOptions(
        scene_path=args.scene_path,
        checkpoint_path=args.checkpoint_path,
        iteration_to_load=args.iteration_to_load,
        output_dir=output_dir,
        eval_split=args.eval,
        images_dir=args.images,
        size=SugarSize(args.img_resolution, args.img_size_limit, args.resolution_factor),
        config=CoarseConfig(
            regularization=regularization,
            schedule=CoarseSchedule().scaled(args.schedule_scale),
            estimation_factor=getattr(args, "estimation_factor", 0.2),
            normal_factor=getattr(args, "normal_factor", 0.2),
            samples=args.sdf_samples,
            knn_batch_size=args.knn_batch_size,
            full_res_normals=args.full_res_normals,
            white_background=args.white_background,
            optimizer=optimizer_config(args),
            split=image_split(args),
            seed=args.random_seed,
        ),
        checkpoint_interval=args.checkpoint_interval,
        checkpoint_milestones=tuple(args.checkpoint_milestones),
        test_iterations=tuple(args.test_iterations),
        memory=memory_options(args),
        compute=compute_options(args),
        run=run_options(args),
        notices=notices,
    )


def _ineffective(args: argparse.Namespace, regularization: Regularization) -> tuple[str, ...]:
    """One line for each flag that was given but cannot act beside the others."""
    lines = [*split_notices(args)]
    default_size = SugarSize()
    limited = (args.img_resolution, args.img_size_limit) != (
        default_size.img_resolution,
        default_size.img_size_limit,
    )
    if args.resolution_factor is not None and limited:
        lines.append(
            "--img_resolution and --img_size_limit have no effect beside --resolution_factor"
        )
    if not args.full_res_normals and regularization != "dn_consistency":
        lines.append(
            f"--full_res_normals has no effect with {regularization}, which renders no normals"
        )
    if not args.eval and args.test_iterations != list(TEST_ITERATIONS):
        lines.append("--test_iterations has no effect with --eval False: nothing is held out")
    return tuple(lines)
