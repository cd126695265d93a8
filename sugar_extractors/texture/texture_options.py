# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of the texture stage, declared once for all entry points that run it."""

from __future__ import annotations

import argparse
from pathlib import Path

from gaussian_splatting.compute import compute_options
from gaussian_splatting.data.images import SugarSize
from sugar_extractors.texture.postprocess import DENSITY_THRESHOLD, ITERATIONS
from sugar_extractors.texture.texture_atlas import ATLASES
from sugar_extractors.texture.texturing import SOURCES, SQUARE_SIZE, TextureOptions
from sugar_scene.mesh_bound import LAYOUTS
from sugar_trainers.coarse_options import add_scene_flags, required_inputs
from sugar_utils.errors import UserError
from sugar_utils.flags import (
    HelpFormatter,
    Parser,
    boolean,
    integer,
    non_negative_float,
    non_negative_int,
    positive_int,
)

STANDALONE_SQUARE_SIZE = 10


def add_texture_flags(parser: argparse.ArgumentParser, square_size: int = SQUARE_SIZE) -> None:
    """How the mesh is textured; shared by all scripts that make a textured mesh."""
    add = parser.add_argument_group("textured mesh").add_argument
    add("--square_size", type=positive_int, default=square_size,
        help="texels per side of the square that holds two triangles, at least 5; decides the "
        "size of the texture")  # fmt: skip
    add("--texture_atlas", choices=ATLASES, default="squares",
        help="squares: every two triangles fill a square; xatlas: unfold the surface, which takes "
        "long for large meshes")  # fmt: skip
    add("--texture_source", choices=SOURCES, default="renders",
        help="renders: the refined Gaussians; photos: the photographs")  # fmt: skip
    add("--postprocess_mesh", type=boolean, default=False,
        help="peel border triangles of low density off")  # fmt: skip
    add("--postprocess_density_threshold", type=non_negative_float, default=DENSITY_THRESHOLD,
        help="border triangles of a larger density stay")  # fmt: skip
    add("--postprocess_iterations", type=non_negative_int, default=ITERATIONS,
        help="rings of border triangles to peel off")  # fmt: skip
    add("--export_glb", type=boolean, default=True,
        help="write the textured mesh as one .glb file, too")  # fmt: skip


def texture_settings(args: argparse.Namespace) -> dict:
    """Fields of ``TextureOptions`` that :func:`add_texture_flags` sets."""
    return {
        "square_size": args.square_size,
        "atlas": args.texture_atlas,
        "source": args.texture_source,
        "postprocess": args.postprocess_mesh,
        "postprocess_density_threshold": args.postprocess_density_threshold,
        "postprocess_iterations": args.postprocess_iterations,
        "glb": args.export_glb,
    }


def texture_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``extract_refined_mesh_with_texture.py``."""
    parser = Parser(description=description, formatter_class=HelpFormatter)
    add_scene_flags(parser, gpu=("-g", "--gpu"))
    add = parser.add_argument_group("model and output").add_argument
    add("-m", "--refined_model_path", type=Path, default=None,
        help=".pt of a refinement, or its folder")  # fmt: skip
    add("-o", "--mesh_output_dir", type=Path, default=None,
        help="folder of the mesh; unset: output/refined_mesh/<scene>")  # fmt: skip
    add("-n", "--n_gaussians_per_surface_triangle", type=integer, default=None,
        choices=tuple(LAYOUTS),
        help="checked against the model; unset: as the model has")  # fmt: skip
    add("--random_seed", type=integer, default=0,
        help="seed of the initial points of a scene without points; textures do not "
        "depend on it")  # fmt: skip
    add("--overwrite", type=boolean, default=False,
        help="replace a mesh that was made with other settings")  # fmt: skip
    add_texture_flags(parser, STANDALONE_SQUARE_SIZE)
    return parser


def texture_options(args: argparse.Namespace) -> TextureOptions:
    """Typed form of the flags of :func:`texture_parser`.

    Raises:
        UserError: If an input is missing.
    """
    required_inputs(args)
    if args.refined_model_path is None:
        raise UserError(
            "-m/--refined_model_path is missing; pass the .pt that train_refined.py made"
        )
    return TextureOptions(
        scene_path=args.scene_path,
        checkpoint_path=args.checkpoint_path,
        iteration_to_load=args.iteration_to_load,
        eval_split=args.eval,
        images_dir=args.images,
        size=SugarSize(args.img_resolution, args.img_size_limit, args.resolution_factor),
        refined_model_path=args.refined_model_path,
        output_dir=args.mesh_output_dir,
        per_triangle=args.n_gaussians_per_surface_triangle,
        white_background=args.white_background,
        seed=args.random_seed,
        overwrite=args.overwrite,
        compute=compute_options(args),
        **texture_settings(args),
    )
