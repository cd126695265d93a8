# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of the refinement stage."""

from __future__ import annotations

import argparse
from pathlib import Path

from gaussian_splatting.compute import add_backend_flags, compute_options
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
from sugar_scene.mesh_bound import LAYOUTS
from sugar_trainers.coarse_options import add_scene_flags, required_inputs
from sugar_trainers.refine_config import RefineConfig
from sugar_trainers.refine_run import CHECKPOINT_INTERVAL, RefineOptions
from sugar_utils.errors import UserError
from sugar_utils.flags import (
    HelpFormatter,
    Parser,
    boolean,
    integer,
    non_negative_float,
    positive_int,
    require_box,
    vector3,
)


def refine_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``train_refined.py``."""
    parser = Parser(description=description, formatter_class=HelpFormatter)
    add_scene_flags(parser)
    add = parser.add_argument
    add("-m", "--mesh_path", type=Path, help="coarse mesh (PLY with vertex colours)")
    add(
        "-o",
        "--output_dir",
        type=Path,
        default=None,
        help="parent of the run's folder; unset: output/refined/<scene>",
    )
    add(
        "-n",
        "--normal_consistency_factor",
        type=non_negative_float,
        default=0.1,
        help="weight of the normal consistency of the mesh",
    )
    add(
        "-g",
        "--gaussians_per_triangle",
        type=integer,
        default=1,
        choices=tuple(LAYOUTS),
        help="Gaussians bound to each triangle",
    )
    add(
        "-v",
        "--n_vertices_in_fg",
        type=positive_int,
        default=1_000_000,
        help="nominal number of foreground vertices; sets the learning rate of vertices only",
    )
    add(
        "-f",
        "--refinement_iterations",
        type=positive_int,
        default=15_000,
        help="length of the refinement",
    )
    for flag, name, which in (("-b", "--bboxmin", "low"), ("-B", "--bboxmax", "high")):
        add(
            flag,
            name,
            type=vector3,
            default=None,
            metavar="(X,Y,Z)",
            help=f"{which} corner of the foreground; sets the learning rate of vertices only",
        )
    add("--export_ply", type=boolean, default=True, help="write the refined Gaussians as PLY")
    add(
        "--checkpoint_interval",
        type=positive_int,
        default=CHECKPOINT_INTERVAL,
        help="iterations between checkpoints to resume from",
    )
    add_backend_flags(parser)
    add_split_flags(parser)
    add_optimizer_flags(parser)
    add_run_flags(parser)
    return parser


def refine_options(args: argparse.Namespace) -> RefineOptions:
    """Typed form of the flags above.

    Raises:
        UserError: If an input is missing or half a box is given.
    """
    required_inputs(args)
    if args.mesh_path is None:
        raise UserError("-m/--mesh_path is missing; pass the coarse mesh that extract_mesh.py made")
    if not args.mesh_path.is_file():
        raise UserError(f"--mesh_path {args.mesh_path}: no such file; pass the coarse mesh PLY")
    require_box(args.bboxmin, args.bboxmax)
    box = None if args.bboxmin is None else (args.bboxmin, args.bboxmax)
    config = RefineConfig(
        iterations=args.refinement_iterations,
        per_triangle=args.gaussians_per_triangle,
        normal_consistency_factor=args.normal_consistency_factor,
        n_vertices_in_fg=args.n_vertices_in_fg,
        bbox=box,
        white_background=args.white_background,
        optimizer=optimizer_config(args),
        split=image_split(args),
        seed=args.random_seed,
    )
    return RefineOptions(
        scene_path=args.scene_path,
        checkpoint_path=args.checkpoint_path,
        mesh_path=args.mesh_path,
        iteration_to_load=args.iteration_to_load,
        output_dir=args.output_dir,
        eval_split=args.eval,
        images_dir=args.images,
        size=SugarSize(args.img_resolution, args.img_size_limit, args.resolution_factor),
        config=config.with_schedule(args.schedule_scale),
        checkpoint_interval=args.checkpoint_interval,
        export_ply=args.export_ply,
        memory=memory_options(args),
        compute=compute_options(args),
        run=run_options(args),
        notices=split_notices(args),
    )
