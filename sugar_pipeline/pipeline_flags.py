# SPDX-License-Identifier: Apache-2.0
"""Flags of ``train.py`` and ``train_full_pipeline.py``, and the presets among them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from sugar_extractors.mesh.mesh_options import add_mesh_flags
from sugar_extractors.texture.texture_options import add_texture_flags
from sugar_scene.mesh_bound import LAYOUTS
from sugar_trainers.coarse_config import REGULARIZATIONS
from sugar_trainers.coarse_options import add_coarse_flags, add_scene_flags
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_utils.errors import UserError
from sugar_utils.flags import (
    HelpFormatter,
    Parser,
    boolean,
    finite_float,
    integer,
    optional_str,
    positive_int,
)

STAGES = ("coarse", "mesh", "refine", "texture")
REFINEMENT_TIMES = {"short": 2_000, "medium": 7_000, "long": 15_000}
LOW_POLY, HIGH_POLY = (200_000, 6), (1_000_000, 1)
"""Triangles and Gaussians per triangle of the presets."""

DEMO_FLAGS = (
    "--demo",
    "--output_dir",
    "--stop_after",
    "--resume",
    "--overwrite",
    "--keep_checkpoints",
    "--random_seed",
    "--device",
    "--gpu",
    "--rasterizer",
    "--neighbors",
    "--views_per_step",
)


def train_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``train.py``."""
    parser = Parser(description=description, formatter_class=HelpFormatter)
    add_scene_flags(parser)
    add_pipeline_flags(parser, "--export_uv_textured_mesh")
    parser.add_argument(
        "--demo",
        action="store_true",
        help="make a small scene, take it all the way to a textured mesh and measure that",
    )
    parser.add_argument(
        "--doctor",
        action="store_true",
        help="look at the machine, and at scene and checkpoint if they are given, and say what "
        "to mend; nothing is trained",
    )
    return parser


def full_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``train_full_pipeline.py``."""
    parser = Parser(description=description, formatter_class=HelpFormatter)
    add_scene_flags(parser, checkpoint=False)
    add_vanilla_stage_flags(parser)
    add_pipeline_flags(parser, "--export_obj")
    return parser


def add_pipeline_flags(parser: argparse.ArgumentParser, texture_flag: str) -> None:
    """What both pipelines have in common.

    Args:
        parser: Gets the flags.
        texture_flag: Long name of ``-t``, which differs between the scripts.
    """
    add = parser.add_argument_group("pipeline").add_argument
    add("-r", "--regularization_type", choices=REGULARIZATIONS, default=None,
        help="how the surface is regularised; dn_consistency is recommended")  # fmt: skip
    add("--output_dir", type=Path, default=OUTPUT_ROOT, help="folder above all results")
    add("--stop_after", choices=STAGES, default=None, help="last stage to run")
    add("-t", texture_flag, dest="export_obj", type=boolean, default=True,
        help="bake a texture and write OBJ and GLB")  # fmt: skip
    add_preset_flags(parser)
    add_coarse_flags(parser)
    add_mesh_stage_flags(parser)
    add_refine_stage_flags(parser)
    add_texture_flags(parser)


def add_preset_flags(parser: argparse.ArgumentParser) -> None:
    """Names for common sizes of the mesh and lengths of the refinement."""
    add = parser.add_argument_group("presets").add_argument
    add("--low_poly", type=boolean, default=False,
        help="200,000 triangles with 6 Gaussians each, whatever -v and -g say")  # fmt: skip
    add("--high_poly", type=boolean, default=False,
        help="1,000,000 triangles with 1 Gaussian each, whatever -v, -g and --low_poly "
        "say")  # fmt: skip
    add("--refinement_time", type=optional_str, default=None, metavar="{short,medium,long}",
        help="2000, 7000 or 15000 iterations of refinement, whatever -f says")  # fmt: skip


def add_vanilla_stage_flags(parser: argparse.ArgumentParser) -> None:
    """The stage that ``train_full_pipeline.py`` puts before the others."""
    add = parser.add_argument_group("vanilla stage").add_argument
    add("--gs_output_dir", type=lambda text: None if text == "None" else Path(text), default=None,
        help="start from this vanilla checkpoint instead of training one")  # fmt: skip
    add("--vanilla_iterations", type=positive_int, default=7_000,
        help="length of the vanilla stage, and the iteration that SuGaR starts from")  # fmt: skip
    add("--max_gaussians", type=positive_int, default=None,
        help="densification never goes beyond this number")  # fmt: skip
    add("--init_ply", type=Path, default=None,
        help="start from this PLY, Gaussians or coloured points, instead of the scene's "
        "points")  # fmt: skip


def add_mesh_stage_flags(parser: argparse.ArgumentParser) -> None:
    """Level, size, and how the surface is found."""
    add = parser.add_argument_group("coarse mesh: level and size").add_argument
    add("-l", "--surface_level", type=open_share, default=0.3,
        help="density of the level set that becomes the mesh")  # fmt: skip
    add("-v", "--n_vertices_in_mesh", type=positive_int, default=HIGH_POLY[0],
        help="triangles (not vertices) kept in the foreground, and as many in the "
        "background")  # fmt: skip
    add_mesh_flags(parser)


def add_refine_stage_flags(parser: argparse.ArgumentParser) -> None:
    """Mesh-bound Gaussians."""
    add = parser.add_argument_group("refinement").add_argument
    add("-g", "--gaussians_per_triangle", type=integer, default=HIGH_POLY[1],
        choices=tuple(LAYOUTS), help="Gaussians bound to each triangle")  # fmt: skip
    add("-f", "--refinement_iterations", type=positive_int, default=15_000,
        help="length of the refinement")  # fmt: skip
    add("--export_ply", type=boolean, default=True, help="write the refined Gaussians as PLY")


def open_share(text: str) -> float:
    """A number greater than 0 and less than 1."""
    value = finite_float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must lie between 0 and 1; 0.3 is usual")
    return value


def apply_presets(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with ``--low_poly``, ``--high_poly`` and ``--refinement_time`` resolved.

    As in the original, presets win over ``-v``, ``-g`` and ``-f``, and high over low.

    Raises:
        UserError: The refinement time is none of the three.
    """
    resolved = argparse.Namespace(**vars(args))
    for wanted, (triangles, per_triangle) in (
        (args.low_poly, LOW_POLY), (args.high_poly, HIGH_POLY)
    ):  # fmt: skip
        if wanted:
            resolved.n_vertices_in_mesh = triangles
            resolved.gaussians_per_triangle = per_triangle
    if args.refinement_time is not None:
        if args.refinement_time not in REFINEMENT_TIMES:
            raise UserError(
                f"--refinement_time {args.refinement_time} is unknown; choose one of "
                f"{', '.join(REFINEMENT_TIMES)}"
            )
        resolved.refinement_iterations = REFINEMENT_TIMES[args.refinement_time]
    return resolved


def runs_stage(args: argparse.Namespace, stage: str) -> bool:
    """Whether a stage runs under ``--stop_after`` and ``-t``."""
    if stage == "texture" and not args.export_obj:
        return False
    return args.stop_after is None or STAGES.index(stage) <= STAGES.index(args.stop_after)


def notices(args: argparse.Namespace) -> tuple[str, ...]:
    """One line for each group of flags that was given but cannot act beside the others."""
    lines = []
    for stage, add_flags in (
        ("mesh", add_mesh_stage_flags),
        ("refine", add_refine_stage_flags),
        ("texture", add_texture_flags),
    ):
        used = given_flags(args, add_flags)
        if used and not runs_stage(args, stage):
            lines.append(f"{', '.join(used)}: no effect, the {stage} stage does not run")
    if args.low_poly and args.high_poly:
        lines.append("--low_poly has no effect beside --high_poly")
    return tuple(lines)


def given_flags(
    args: argparse.Namespace, add_flags: Callable[[argparse.ArgumentParser], None]
) -> list[str]:
    """Flags whose values are not the defaults, among those that ``add_flags`` declares."""
    parser = Parser(add_help=False)
    add_flags(parser)
    return changed_flags(args, parser)


def changed_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Flags of a parser whose values are not the defaults."""
    defaults = vars(parser.parse_args([]))
    return [f"--{name}" for name, value in defaults.items() if getattr(args, name) != value]
