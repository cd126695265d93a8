# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of the mesh stage, declared once for all entry points that run it."""

from __future__ import annotations

import argparse
from pathlib import Path

from gaussian_splatting.compute import compute_options
from gaussian_splatting.data.images import SugarSize
from sugar_extractors.mesh.ablations import RESOLUTION
from sugar_extractors.mesh.level_sets import (
    DIAMOND_EXTENT,
    MIN_OPACITY,
    N_NEIGHBORS,
    RAY_REACH,
    RAY_SAMPLES,
)
from sugar_extractors.mesh.mesh_config import (
    BACKGROUND_FACTOR,
    DECIMATION_TARGETS,
    EXTRACTORS,
    FOREGROUND_FACTOR,
    MIN_BACKGROUND_SHARE,
    SURFACE_LEVELS,
    SURFACE_POINTS,
    MeshOptions,
)
from sugar_extractors.mesh.meshing_backends import BACKENDS, SolverConfig
from sugar_extractors.mesh.poisson import PoissonConfig
from sugar_extractors.mesh.surface_samples import CANDIDATES_PER_POINT
from sugar_extractors.mesh.tsdf import DEPTHS, TsdfConfig
from sugar_trainers.coarse_options import add_scene_flags, required_inputs
from sugar_utils.errors import UserError
from sugar_utils.flags import (
    HelpFormatter,
    Parser,
    boolean,
    finite_float,
    integer,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
    vector3,
)

_POISSON, _SOLVER, _TSDF = PoissonConfig(), SolverConfig(), TsdfConfig()


def share(text: str) -> float:
    """A number of at least 0 and less than 1."""
    value = finite_float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 0 and less than 1")
    return value


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    """How the surface is found and meshed; shared by all scripts that make a mesh.

    The level and the number of triangles are not among them: scripts name and preset them
    differently.
    """
    add = parser.add_argument_group("coarse mesh").add_argument
    add("--mesh_extractor", choices=EXTRACTORS, default="poisson",
        help="poisson: level sets and screened Poisson, as in the paper; tsdf: fusion of "
        "rendered depth")  # fmt: skip
    add("--project_mesh_on_surface_points", type=boolean, default=True,
        help="snap the vertices of the decimated Poisson mesh to the surface points")  # fmt: skip
    add("-b", "--bboxmin", type=vector3, default=None, metavar="(X,Y,Z)",
        help="low corner of the foreground in world coordinates; unset: a cube around the "
        "cameras")  # fmt: skip
    add("-B", "--bboxmax", type=vector3, default=None, metavar="(X,Y,Z)",
        help="high corner of the foreground")  # fmt: skip
    add("--center_bbox", type=boolean, default=None,
        help="move the foreground box by the mean camera centre; unset: only the default "
        "cube")  # fmt: skip
    add("--background_mesh", type=boolean, default=True,
        help="mesh what lies outside the foreground, too")  # fmt: skip
    add("--foreground_factor", type=positive_float, default=FOREGROUND_FACTOR,
        help="half side of the default foreground cube in camera extents")  # fmt: skip
    add("--background_factor", type=positive_float, default=BACKGROUND_FACTOR,
        help="half side of the background cube in camera extents")  # fmt: skip
    add("--min_background_share", type=share, default=MIN_BACKGROUND_SHARE,
        help="leave the background out if it has a smaller share of the surface points: Poisson "
        "makes large blobs of a few")  # fmt: skip
    add("--surface_points", type=positive_int, default=SURFACE_POINTS,
        help="points sampled on the surface, per level")  # fmt: skip
    add("--candidates_per_point", type=positive_int, default=CANDIDATES_PER_POINT,
        help="pixels tried per surface point wanted")  # fmt: skip
    add("--density_factor", type=positive_float, default=1.0,
        help="factor of the density, before it is compared with the level")  # fmt: skip
    add("--poisson_depth", type=positive_int, default=_SOLVER.depth,
        help="octree depth; 6 to 8 where the mesh is bumpy or full of holes")  # fmt: skip
    add("--poisson_threads", type=non_negative_int, default=_SOLVER.threads,
        help="threads of the Poisson solver, 0 for all cores; with more than 1 no two runs give "
        "the same bits")  # fmt: skip
    add("--poisson_width", type=non_negative_float, default=_SOLVER.width,
        help="side of the finest octree cells in world units, in place of the depth; 0 for the "
        "depth")  # fmt: skip
    add("--poisson_scale", type=positive_float, default=_SOLVER.scale,
        help="side of the solver's cube in sides of the points' bounding cube")  # fmt: skip
    add("--poisson_linear_fit", type=boolean, default=_SOLVER.linear_fit,
        help="interpolate linearly between octree nodes")  # fmt: skip
    add("--vertices_density_quantile", type=share, default=_POISSON.density_quantile,
        help="share of badly supported Poisson vertices to cut away; 0 avoids holes")  # fmt: skip
    add("--max_gap", type=non_negative_float, default=_POISSON.max_gap,
        help="cut away Poisson vertices farther than this many octree cells from every surface "
        "point; 0 keeps them")  # fmt: skip
    add("--outlier_neighbors", type=positive_int, default=_POISSON.outlier_neighbors,
        help="neighbours that decide whether a surface point is an outlier")  # fmt: skip
    add("--outlier_ratio", type=positive_float, default=_POISSON.outlier_ratio,
        help="standard deviations beyond which it is one")  # fmt: skip
    add("--min_opacity", type=share, default=MIN_OPACITY,
        help="Gaussians that are not more opaque than this are ignored")  # fmt: skip
    add("--mesh_neighbors", type=positive_int, default=N_NEIGHBORS,
        help="Gaussians that the density is summed over")  # fmt: skip
    add("--diamond_extent", type=positive_float, default=DIAMOND_EXTENT,
        help="half diagonals of the diamonds that rays are cast at, in standard "
        "deviations")  # fmt: skip
    add("--ray_samples", type=positive_int, default=RAY_SAMPLES,
        help="densities per ray")  # fmt: skip
    add("--ray_reach", type=positive_float, default=RAY_REACH,
        help="standard deviations searched before and behind a diamond")  # fmt: skip
    add("--tsdf_depth", choices=DEPTHS, default=_TSDF.depth,
        help="blended: depth as rendered, all Gaussians averaged; level_set: first point of "
        "the density's level set at 0.3")  # fmt: skip
    add("--tsdf_voxel_size", type=positive_float, default=None,
        help="world units; unset: from the size of a pixel on the surface")  # fmt: skip
    add("--tsdf_truncation", type=positive_float, default=_TSDF.truncation_voxels,
        help="reach of the fused distances, in voxels")  # fmt: skip
    add("--meshing_backend", choices=BACKENDS, default="auto",
        help="library for Poisson and decimation; auto: Open3D where it can be "
        "imported")  # fmt: skip


def mesh_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``extract_mesh.py``."""
    parser = Parser(description=description, formatter_class=HelpFormatter)
    add_scene_flags(parser, background=False)
    add = parser.add_argument_group("model and output").add_argument
    add("-m", "--coarse_model_path", type=Path, default=None,
        help=".pt of a coarse run, or its folder")  # fmt: skip
    add("--use_vanilla_3dgs", type=boolean, default=False, help="mesh the vanilla Gaussians")
    add("-o", "--mesh_output_dir", type=Path, default=None,
        help="folder of the meshes; unset: output/coarse_mesh/<scene>")  # fmt: skip
    add("-l", "--surface_level", type=non_negative_float, default=None,
        help=f"density of the surface; unset: {SURFACE_LEVELS}, a mesh each")  # fmt: skip
    add("-d", "--decimation_target", type=positive_int, default=None,
        help="triangles of the foreground and of the background; unset: "
        f"{DECIMATION_TARGETS}, a mesh each")  # fmt: skip
    add("--random_seed", type=integer, default=0, help="seed of the choice of pixels")
    add("--overwrite", type=boolean, default=False,
        help="replace meshes that were made with other settings")  # fmt: skip
    add_mesh_flags(parser)
    add = parser.add_argument_group("ablations of the paper").add_argument
    add("--use_centers_to_extract_mesh", type=boolean, default=False,
        help="Poisson on the Gaussians' centres instead of level sets")  # fmt: skip
    add("--use_marching_cubes", type=boolean, default=False,
        help="marching cubes on the density instead of Poisson")  # fmt: skip
    add("--grid_resolution", type=positive_int, default=RESOLUTION,
        help="corners along the side of its grid")  # fmt: skip
    return parser


def check_ray_samples(args: argparse.Namespace) -> None:
    """Check that a ray has two ends.

    Raises:
        UserError: If it has not.
    """
    if args.ray_samples < 2:
        raise UserError("--ray_samples must be at least 2; 21 is usual")


def mesh_settings(args: argparse.Namespace) -> dict:
    """Fields of ``MeshOptions`` that :func:`add_mesh_flags` sets."""
    return {
        "extractor": args.mesh_extractor,
        "project_on_surface_points": args.project_mesh_on_surface_points,
        "bboxmin": args.bboxmin,
        "bboxmax": args.bboxmax,
        "center_bbox": args.center_bbox,
        "background": args.background_mesh,
        "foreground_factor": args.foreground_factor,
        "background_factor": args.background_factor,
        "min_background_share": args.min_background_share,
        "surface_points": args.surface_points,
        "candidates_per_point": args.candidates_per_point,
        "density_factor": args.density_factor,
        "min_opacity": args.min_opacity,
        "n_neighbors": args.mesh_neighbors,
        "diamond_extent": args.diamond_extent,
        "ray_samples": args.ray_samples,
        "ray_reach": args.ray_reach,
        "poisson": PoissonConfig(
            solver=SolverConfig(
                depth=args.poisson_depth,
                threads=args.poisson_threads,
                width=args.poisson_width,
                scale=args.poisson_scale,
                linear_fit=args.poisson_linear_fit,
            ),
            density_quantile=args.vertices_density_quantile,
            max_gap=args.max_gap,
            outlier_neighbors=args.outlier_neighbors,
            outlier_ratio=args.outlier_ratio,
        ),
        "tsdf": TsdfConfig(
            depth=args.tsdf_depth,
            voxel_size=args.tsdf_voxel_size,
            truncation_voxels=args.tsdf_truncation,
        ),
        "backend": args.meshing_backend,
    }


def mesh_options(args: argparse.Namespace) -> MeshOptions:
    """Typed form of the flags of :func:`mesh_parser`.

    Raises:
        UserError: If a flag asks for what this version cannot do, or an input is missing.
    """
    required_inputs(args)
    if args.use_centers_to_extract_mesh and args.use_marching_cubes:
        raise UserError("--use_centers_to_extract_mesh and --use_marching_cubes exclude each other")
    check_ray_samples(args)
    settings = mesh_settings(args)
    if args.use_centers_to_extract_mesh:
        settings["extractor"] = "centers"
    if args.use_marching_cubes:
        settings["extractor"] = "marching_cubes"
    return MeshOptions(
        scene_path=args.scene_path,
        checkpoint_path=args.checkpoint_path,
        iteration_to_load=args.iteration_to_load,
        coarse_model_path=args.coarse_model_path,
        use_vanilla=args.use_vanilla_3dgs,
        output_dir=args.mesh_output_dir,
        eval_split=args.eval,
        images_dir=args.images,
        size=SugarSize(args.img_resolution, args.img_size_limit, args.resolution_factor),
        surface_levels=SURFACE_LEVELS if args.surface_level is None else (args.surface_level,),
        decimation_targets=(
            DECIMATION_TARGETS if args.decimation_target is None else (args.decimation_target,)
        ),
        seed=args.random_seed,
        overwrite=args.overwrite,
        compute=compute_options(args),
        grid_resolution=args.grid_resolution,
        **settings,
    )
