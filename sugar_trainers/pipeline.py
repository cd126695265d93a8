# SPDX-License-Identifier: Apache-2.0
"""Flags and stages of ``train.py``: from a vanilla checkpoint through SuGaR's stages."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from sugar_trainers.coarse_config import REGULARIZATIONS
from sugar_trainers.coarse_training import train_coarse
from sugar_trainers.demo import run_demo
from sugar_trainers.naming import OUTPUT_ROOT, scene_name
from sugar_trainers.options import add_coarse_flags, add_scene_flags, coarse_options
from sugar_utils.errors import UserError
from sugar_utils.flags import (
    Parser,
    boolean,
    integer,
    non_negative_float,
    optional_str,
    positive_int,
    require_both_corners,
    vector3,
)

DEMO_FLAGS = (
    "--demo",
    "--output_dir",
    "--stop_after",
    "--resume",
    "--overwrite",
    "--keep_checkpoints",
    "--random_seed",
)
STAGES = ("coarse", "mesh", "refine", "texture")
GAUSSIANS_PER_TRIANGLE = (1, 3, 4, 6)
REFINEMENT_TIMES = ("short", "medium", "long")
MIN_SQUARE_SIZE = 3


def add_pipeline_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of ``train.py``."""
    add_scene_flags(parser)
    add = parser.add_argument
    add(
        "-r",
        "--regularization_type",
        choices=REGULARIZATIONS,
        default=None,
        help="how the surface is regularised; dn_consistency is recommended",
    )
    add("--output_dir", type=Path, default=OUTPUT_ROOT, help="folder above all results")
    add(
        "--stop_after",
        choices=STAGES,
        default=None,
        help="last stage to run; this script has the coarse stage only for now",
    )
    add(
        "--demo",
        action="store_true",
        help="make a small scene, train it from scratch and show where the results are",
    )
    add_coarse_flags(parser)
    _add_later_flags(parser)  # fmt: skip


def _add_later_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the stages after the coarse one: checked now, acting when the stages are there."""
    group = parser.add_argument_group("later stages (this script ends before them for now)")
    add = group.add_argument
    add(
        "-l",
        "--surface_level",
        type=non_negative_float,
        default=0.3,
        help="density of the level set that becomes the mesh",
    )
    add(
        "-v",
        "--n_vertices_in_mesh",
        type=positive_int,
        default=1_000_000,
        help="triangles (not vertices) kept in the foreground, and as many in the background",
    )
    add(
        "--project_mesh_on_surface_points",
        type=boolean,
        default=True,
        help="move vertices to the nearest point of the level set",
    )
    add(
        "-b",
        "--bboxmin",
        type=vector3,
        default=None,
        metavar="(X,Y,Z)",
        help="one corner of the foreground box",
    )
    add(
        "-B", "--bboxmax", type=vector3, default=None, metavar="(X,Y,Z)", help="the opposite corner"
    )
    add("--center_bbox", type=boolean, default=True, help="centre the default box on the cameras")
    add(
        "-g",
        "--gaussians_per_triangle",
        type=integer,
        default=1,
        choices=GAUSSIANS_PER_TRIANGLE,
        help="Gaussians bound to each triangle",
    )
    add(
        "-f",
        "--refinement_iterations",
        type=positive_int,
        default=15_000,
        help="length of the refinement",
    )
    add("-t", "--export_uv_textured_mesh", type=boolean, default=True, help="write an OBJ")
    add(
        "--square_size",
        type=positive_int,
        default=8,
        help="texels along the side of the square that holds two triangles",
    )
    add(
        "--postprocess_mesh",
        type=boolean,
        default=False,
        help="peel off border triangles of low density",
    )
    add(
        "--postprocess_density_threshold",
        type=non_negative_float,
        default=0.1,
        help="density below which they go",
    )
    add("--postprocess_iterations", type=positive_int, default=5, help="rings that are peeled off")
    add("--export_ply", type=boolean, default=True, help="write the refined Gaussians as PLY")
    add("--low_poly", type=boolean, default=False, help="200,000 triangles with 6 Gaussians each")
    add("--high_poly", type=boolean, default=False, help="1,000,000 triangles with 1 Gaussian each")
    add(
        "--refinement_time",
        type=optional_str,
        default=None,
        metavar="{short,medium,long}",
        help="2000, 7000 or 15000 iterations of refinement",
    )


def given_flags(
    args: argparse.Namespace, add_flags: Callable[[argparse.ArgumentParser], None]
) -> list[str]:
    """Flags whose values are not the defaults, among those that ``add_flags`` declares."""
    parser = Parser(add_help=False)
    add_flags(parser)
    defaults = vars(parser.parse_args([]))
    return [f"--{name}" for name, value in defaults.items() if getattr(args, name) != value]


def later_flag_notices(args: argparse.Namespace) -> tuple[str, ...]:
    """Check the flags of later stages, and say which of those given do not act yet.

    Raises:
        UserError: If a value could not work in any version.
    """
    require_both_corners(args.bboxmin, args.bboxmax)
    if args.square_size < MIN_SQUARE_SIZE:
        raise UserError(f"--square_size {args.square_size} must be at least {MIN_SQUARE_SIZE}")
    if args.refinement_time not in (None, *REFINEMENT_TIMES):
        raise UserError(
            f"--refinement_time {args.refinement_time} is unknown; choose one of "
            f"{', '.join(REFINEMENT_TIMES)}"
        )
    used = given_flags(args, _add_later_flags)
    if not used:
        return ()
    return (
        f"{', '.join(used)}: no effect yet, this script ends after the coarse stage; "
        "extract_mesh.py and train_refined.py go on from its result",
    )


def run_pipeline(args: argparse.Namespace) -> Path:
    """Run the stages asked for.

    Returns:
        The file the last stage wrote.
    """
    if args.stop_after not in (None, "coarse"):
        raise UserError(
            f"--stop_after {args.stop_after}: this script ends after the coarse stage for now; "
            "use --stop_after coarse"
        )
    if args.demo:
        ignored = [flag for flag in given_flags(args, add_pipeline_flags) if flag not in DEMO_FLAGS]
        if ignored:
            print(f"{', '.join(ignored)}: no effect with --demo, which chooses its own settings")
        return run_demo(args)
    if args.regularization_type is None:
        raise UserError(
            f"-r/--regularization_type is missing; choose one of {', '.join(REGULARIZATIONS)} "
            "(dn_consistency is the recommended one)"
        )
    notices = later_flag_notices(args)
    if args.stop_after is None:
        notices += (
            "this script ends after the coarse stage for now (say so with --stop_after coarse); "
            "extract_mesh.py and train_refined.py go on from its result",
        )
    parent = None
    if args.scene_path is not None:
        parent = args.output_dir / "coarse" / scene_name(args.scene_path)
    return train_coarse(coarse_options(args, args.regularization_type, parent, notices))
