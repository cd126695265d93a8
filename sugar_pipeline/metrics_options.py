# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of ``metrics.py``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from gaussian_splatting.compute import add_device_flags, compute_options
from gaussian_splatting.data.images import SugarSize
from sugar_extractors.mesh.mesh_config import EXTRACTORS, MeshVariant
from sugar_pipeline.model_metrics import MetricsOptions
from sugar_pipeline.pipeline_flags import add_preset_flags, apply_presets
from sugar_scene.mesh_bound import LAYOUTS
from sugar_trainers.coarse_config import REGULARIZATIONS
from sugar_trainers.coarse_options import add_size_flags
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_utils.errors import UserError
from sugar_utils.files import read_json
from sugar_utils.flags import (
    HelpFormatter,
    Parser,
    boolean,
    integer,
    non_negative_float,
    positive_int,
)
from sugar_utils.schemas import FileName, conform

_SceneConfig = Annotated[dict[FileName, FileName], Meta(min_length=1)]


def metrics_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``metrics.py``."""
    parser = Parser(description=description, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--scene_config", default=None,
        help="JSON file, or text, that maps each scene folder to its vanilla checkpoint "
        "folder")  # fmt: skip
    add("-i", "--iteration_to_load", type=integer, default=7_000,
        help="vanilla iteration that SuGaR started from")  # fmt: skip
    add("-e", "--estimation_factor", type=non_negative_float, default=0.2,
        help="weight of the density or sdf term")  # fmt: skip
    add("-r", "--regularization_type", choices=REGULARIZATIONS, default=None,
        help="mode of the coarse stage")  # fmt: skip
    add("-l", "--surface_level", type=non_negative_float, default=0.3, help="level of the mesh")
    add("-v", "--n_vertices_in_mesh", type=positive_int, default=1_000_000,
        help="triangle target of the mesh")  # fmt: skip
    add("-g", "--gaussians_per_triangle", type=integer, default=1, choices=tuple(LAYOUTS),
        help="Gaussians bound to each triangle")  # fmt: skip
    add("-f", "--refinement_iterations", type=positive_int, default=15_000,
        help="iteration of the refined model")  # fmt: skip
    add_preset_flags(parser)
    add("--evaluate_vanilla", type=boolean, default=False,
        help="measure the vanilla checkpoint, too; its iteration 30000 if it is there")  # fmt: skip
    add("--use_uv_texture", type=boolean, default=False,
        help="render the textured mesh instead of the Gaussians")  # fmt: skip
    add("--use_diffuse_color_only", type=boolean, default=False,
        help="render the view-independent part of the colours")  # fmt: skip
    add("--mesh_extractor", choices=EXTRACTORS, default="poisson",
        help="how the mesh was made: poisson or tsdf")  # fmt: skip
    add("--use_poisson_center", type=boolean, default=False,
        help="the mesh was made of Gaussian centres")  # fmt: skip
    add("--use_marching_cubes", type=boolean, default=False,
        help="the mesh was made by marching cubes")  # fmt: skip
    add("--white_background", type=boolean, default=False, help="render on white")
    add("--output_dir", type=Path, default=OUTPUT_ROOT, help="folder above all results")
    add_size_flags(parser)
    add_device_flags(parser)
    return parser


def metrics_options(args: argparse.Namespace) -> MetricsOptions:
    """Typed form of the flags above.

    Raises:
        UserError: If an input is missing, or flags contradict each other.
    """
    args = apply_presets(args)
    if args.regularization_type is None:
        raise UserError(
            f"-r/--regularization_type is missing; choose one of {', '.join(REGULARIZATIONS)}"
        )
    if args.use_poisson_center and args.use_marching_cubes:
        raise UserError("--use_poisson_center and --use_marching_cubes exclude each other")
    if args.use_uv_texture and args.use_diffuse_color_only:
        raise UserError(
            "--use_uv_texture and --use_diffuse_color_only exclude each other: a texture has no "
            "other colours"
        )
    if args.mesh_extractor != "poisson" and (args.use_poisson_center or args.use_marching_cubes):
        raise UserError(
            f"--mesh_extractor {args.mesh_extractor} excludes --use_poisson_center and "
            "--use_marching_cubes: a mesh was made in one way"
        )
    return MetricsOptions(
        scenes=read_scene_config(args.scene_config),
        iteration_to_load=args.iteration_to_load,
        regularization=args.regularization_type,
        estimation_factor=args.estimation_factor,
        surface_level=args.surface_level,
        n_vertices_in_mesh=args.n_vertices_in_mesh,
        per_triangle=args.gaussians_per_triangle,
        refinement_iterations=args.refinement_iterations,
        variant=_variant(args),
        evaluate_vanilla=args.evaluate_vanilla,
        uv_texture=args.use_uv_texture,
        diffuse_only=args.use_diffuse_color_only,
        white_background=args.white_background,
        size=SugarSize(args.img_resolution, args.img_size_limit, args.resolution_factor),
        output_root=args.output_dir,
        compute=compute_options(args),
    )


def _variant(args: argparse.Namespace) -> MeshVariant:
    if args.use_marching_cubes:
        return "marchingcubes"
    if args.use_poisson_center:
        return "poissoncenters"
    return "tsdf" if args.mesh_extractor == "tsdf" else ""


def read_scene_config(text: str | None) -> dict[Path, Path]:
    """Scene folders and their checkpoint folders, from a JSON file or the JSON itself.

    Raises:
        UserError: It is missing, or not an object of strings.
    """
    advice = 'write {"scene folder": "vanilla checkpoint folder", ...}'
    if not text:
        raise UserError(f"--scene_config is missing; {advice}")
    if text.lstrip().startswith("{"):
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"--scene_config is not JSON ({error}); {advice}") from error
        text = "the given JSON"
    else:
        config = read_json(Path(text))
    pairs = conform(config, _SceneConfig, f"--scene_config {text}", advice)
    return {Path(scene): Path(checkpoint) for scene, checkpoint in pairs.items()}
