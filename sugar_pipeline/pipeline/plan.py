# SPDX-License-Identifier: Apache-2.0
"""The settings of all stages, resolved and checked before the first one starts.

Every stage's result has a name that follows from the flags, so the input of each stage is known
before the one that makes it has run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gaussian_splatting.core.milestones import scaled
from gaussian_splatting.engine.runner import RunOptions
from gaussian_splatting.scenes.reference_layout import CHECKPOINT_FOLDER
from gaussian_splatting.scenes.scene import Scene, load_scene
from gaussian_splatting.shared_flags import scaled_checkpoint_interval
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_capture.convert_options import ConvertOptions, PoseTimeLimit
from sugar_capture.scene_folder import needs_cameras, scene_root
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.texture.texture_atlas import load_xatlas
from sugar_extractors.texture.texturing import TextureOptions
from sugar_pipeline.pipeline.pipeline_flags import STAGES, messages, runs_stage
from sugar_scene.reprojection import NeighborViews
from sugar_trainers.capture import SugarSize
from sugar_trainers.coarse_run import CoarseOptions, options_of_mode
from sugar_trainers.naming import (
    COARSE_FOLDER,
    COARSE_MESH_FOLDER,
    METRICS_FOLDER,
    OUTPUT_ROOT,
    REFINED_FOLDER,
    REFINED_MESH_FOLDER,
    REFINED_PLY_FOLDER,
    VANILLA_FOLDER,
    scene_name,
    stage_folder,
)
from sugar_trainers.presets import apply_presets
from sugar_trainers.refine_run import RefineOptions
from sugar_trainers.stage_config import MODES, MULTIVIEW, RefineConfig
from sugar_utils.command_text import command_text
from sugar_utils.console import Console
from sugar_utils.errors import UserError, say_nothing
from sugar_utils.settings import from_args, require_given, with_flags
from sugar_utils.torchrun import Launch

STAGE_FOLDERS = (
    VANILLA_FOLDER,
    COARSE_FOLDER,
    COARSE_MESH_FOLDER,
    REFINED_FOLDER,
    REFINED_PLY_FOLDER,
    REFINED_MESH_FOLDER,
    METRICS_FOLDER,
    "exports",
    "renders",
)
"""Folders of the original's tree, and of further programs, in the output folder."""
MIN_DENSIFICATION_INTERVAL = 50
MIN_RESET_INTERVAL = 1_000
POSE_SHARE = 0.3  # of the time of a run, for camera poses
MOST_POSE_SHARE = 0.5  # the same, where photographs are without a pose
MIN_MULTIVIEW_CAMERAS = 12  # training views from which the multi-view mode is an option
MIN_MULTIVIEW_SHARE = 0.9  # of the training views that have neighbours


@dataclass(frozen=True)
class PipelinePlan:
    """Options of each stage of a run, resolved; None for a stage that does not run."""

    coarse: CoarseOptions
    mesh: MeshOptions | None = None
    refine: RefineOptions | None = None
    texture: TextureOptions | None = None
    vanilla: VanillaOptions | None = None  # None where a checkpoint is given
    convert: ConvertOptions | None = None  # None where the scene has cameras
    messages: tuple[str, ...] = ()
    force: bool = False  # whether stages follow on a failed one
    given: Mapping[str, object] = field(default_factory=dict)  # flags that repeat the run
    result_folder: Path = OUTPUT_ROOT  # gets the final results under plain names

    @property
    def stages(self) -> list[str]:
        """Names of the stages that run, in their order."""
        return [name for name in STAGES if getattr(self, name) is not None]

    def settings(self) -> dict[str, object]:
        """Inputs and resolved settings of each stage; files of earlier stages must exist."""
        settings = {}
        for name in self.stages:
            if name == "convert":
                continue
            options = getattr(self, name)
            # Settings of a mesh are those of one level and one number of triangles.
            job = options.jobs[0] if name == "mesh" else ()
            settings[name] = {**options.sources(), **options.identity(*job)}
        return settings


def train_plan(args: argparse.Namespace) -> PipelinePlan:
    """Plan ``train.py``: from a checkpoint to a textured mesh.

    Raises:
        UserError: A flag is missing or wrong, also of a stage that does not run.
    """
    if args.regularization_type is None:
        raise UserError(
            f"-r/--regularization_type is missing; choose one of {', '.join(MODES)} "
            "(dn_consistency is the recommended one, multiview the one for the best surface)"
        )
    args = apply_presets(args)
    require_given(args, CoarseOptions, "scene_path", "checkpoint_path")
    scene_path = args.scene_path
    root = args.output_dir
    coarse = from_args(
        options_of_mode(args.regularization_type),
        args,
        output_dir=stage_folder(COARSE_FOLDER, scene_path, root),
        run=_run_of(args, "coarse"),
    )
    mesh = from_args(
        MeshOptions,
        args,
        compute=coarse.compute,
        coarse_model_path=coarse.result,
        mesh_output_dir=stage_folder(COARSE_MESH_FOLDER, scene_path, root),
        surface_levels=(args.surface_level,),
        decimation_targets=(args.n_vertices_in_mesh,),
    )
    refine = _refine_options(args, coarse, mesh)
    texture = from_args(
        TextureOptions,
        args,
        compute=coarse.compute,
        refined_model_path=refine.result,
        mesh_output_dir=stage_folder(REFINED_MESH_FOLDER, scene_path, root),
    )
    runs_texture = runs_stage(args, "texture")
    if runs_texture and texture.atlas == "xatlas":
        load_xatlas()
    return PipelinePlan(
        coarse,
        mesh=mesh if runs_stage(args, "mesh") else None,
        refine=refine if runs_stage(args, "refine") else None,
        texture=texture if runs_texture else None,
        messages=messages(args),
        force=args.force,
        result_folder=result_folder(args),
    )


def _refine_options(
    args: argparse.Namespace, coarse: CoarseOptions, mesh: MeshOptions
) -> RefineOptions:
    return from_args(
        RefineOptions,
        args,
        compute=coarse.compute,
        memory=coarse.memory,
        mesh_path=mesh.mesh_paths[0],
        coarse_model_path=coarse.result,
        output_dir=stage_folder(REFINED_FOLDER, args.scene_path, args.output_dir),
        ply_dir=stage_folder(REFINED_PLY_FOLDER, args.scene_path, args.output_dir),
        config=from_args(RefineConfig, args, n_vertices_in_fg=args.n_vertices_in_mesh),
        run=_run_of(args, "refine"),
    )


def result_folder(args: argparse.Namespace) -> Path:
    """Folder with the results of a scene under plain names.

    It is neither one of the original's tree nor the scene itself.
    """
    name = scene_name(args.scene_path)
    folder = Path(args.output_dir) / name
    is_scene = folder.resolve() == Path(args.scene_path).resolve()
    if is_scene or name in STAGE_FOLDERS:
        return folder.with_name(f"{name}_result")
    return folder


def full_plan(args: argparse.Namespace) -> PipelinePlan:
    """Plan ``train_full_pipeline.py``: a vanilla stage before the others, unless one is given.

    Photographs without cameras, and videos, get a stage that computes camera poses first.
    """
    args = apply_presets(args)
    require_given(args, CoarseOptions, "scene_path")
    convert = convert_options(args)
    args.scene_path = scene_root(args.scene_path)
    if args.gs_output_dir is not None:
        args.checkpoint_path = args.gs_output_dir
        args.iteration_to_load = args.vanilla_iterations
        plan = train_plan(args)
        unused = [f"--{name}" for name in ("max_gaussians", "init_ply") if getattr(args, name)]
        if unused:
            line = f"{', '.join(unused)}: no effect with --gs_output_dir, nothing is trained before"
            plan = replace(plan, messages=(*plan.messages, line))
        return replace(plan, convert=convert)
    args.checkpoint_path = stage_folder(VANILLA_FOLDER, args.scene_path, args.output_dir)
    args.iteration_to_load = scaled(args.vanilla_iterations, args.schedule_scale)
    plan = train_plan(args)
    return replace(plan, convert=convert, vanilla=_vanilla_options(args, plan.coarse))


def with_mode(args: argparse.Namespace, console: Console) -> argparse.Namespace:
    """Return the flags with a mode, ``-r``: the given one, or one that suits the capture.

    To know the capture, missing camera poses are computed first.
    """
    if args.regularization_type is not None:
        return args
    args = apply_presets(args)
    require_given(args, CoarseOptions, "scene_path")
    options = convert_options(args)
    if options is not None:
        # Most scenes have cameras, and what reads videos is slow to load.
        from sugar_capture.conversion.convert_run import convert

        convert(options, console)
    scene = load_scene(
        scene_root(args.scene_path),
        size_rule=SugarSize(),
        images_dir=args.images or "images",
        eval_split=args.eval,
        notify=say_nothing,
    )
    mode, reason = mode_of(scene)
    console.info(f"--regularization_type {mode}: {reason}")
    return with_flags(args, regularization_type=mode)


def mode_of(scene: Scene) -> tuple[str, str]:
    """Return the mode of the coarse stage that suits a scene, and the reason in words."""
    cameras = scene.train_cameras
    n_cameras = len(cameras)
    if n_cameras < MIN_MULTIVIEW_CAMERAS:
        return "dn_consistency", f"there are only {n_cameras} training views"
    neighbors = NeighborViews(cameras, scene.extent, observations=scene.observations)
    n_with_neighbors = n_cameras - len(neighbors.without_neighbors)
    overlaps = n_with_neighbors >= MIN_MULTIVIEW_SHARE * n_cameras
    mode = MULTIVIEW if overlaps else "dn_consistency"
    reason = f"{n_with_neighbors} of {n_cameras} training views have neighbours to be compared with"
    return mode, reason


def convert_options(args: argparse.Namespace) -> ConvertOptions | None:
    """Options of the stage that computes camera poses; None where the scene has cameras.

    Raises:
        UserError: Several processes run, of which only one can compute poses.
    """
    if not needs_cameras(args.scene_path):
        return None
    if Launch.read().size > 1:
        raise UserError(
            f"{args.scene_path}: has no cameras yet, or those of other photographs; let one "
            f"process find them first: {command_text('convert', '-s', args.scene_path)}"
        )
    time_limit = None
    if args.minutes is not None:
        seconds = 60 * args.minutes
        time_limit = PoseTimeLimit(POSE_SHARE * seconds, MOST_POSE_SHARE * seconds, seconds)
    return from_args(
        ConvertOptions,
        args,
        source_path=args.scene_path,
        overwrite=False,
        time_limit=time_limit,
    )


def _run_of(args: argparse.Namespace, stage: str) -> RunOptions:
    """Options of a stage's run; ``--resume PATH`` applies only to the stage of that checkpoint.

    The stage follows from the name of the checkpoint's folder; unknown names are coarse.
    """
    options = from_args(RunOptions, args)
    if options.resume in ("auto", "none"):
        return options
    checkpoint = Path(options.resume)
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    name = folder.resolve().name
    checkpoint_stage = "coarse"
    if name.startswith("sugarfine_") and runs_stage(args, "refine"):
        checkpoint_stage = "refine"
    elif name == CHECKPOINT_FOLDER and getattr(args, "gs_output_dir", args) is None:
        checkpoint_stage = "vanilla"
    return options if checkpoint_stage == stage else replace(options, resume="auto")


def _vanilla_options(args: argparse.Namespace, coarse: CoarseOptions) -> VanillaOptions:
    """Options of the vanilla stage: held-out views and image size are those of the others."""
    n = scaled(args.vanilla_iterations, args.schedule_scale)
    config = from_args(VanillaConfig, args, iterations=n, optimizer=coarse.config.optimizer)
    if config.robustness.robust is None:
        config = replace(config, robustness=replace(config.robustness, robust=True))
    # Learning rates per step do not grow when a schedule shrinks: after a reset, opacities take
    # some hundred iterations to come back, and the coarse stage would remove what has not.
    rules = config.densification
    interval = max(rules.densification_interval, MIN_DENSIFICATION_INTERVAL)
    reset = max(rules.opacity_reset_interval, MIN_RESET_INTERVAL)
    rules = replace(rules, densification_interval=interval, opacity_reset_interval=reset)
    return from_args(
        VanillaOptions,
        args,
        source_path=args.scene_path,
        model_path=args.checkpoint_path,
        images=args.images or "images",
        # A size that the user asks for is that of all stages; else each keeps the original's rule.
        size=None if coarse.size == SugarSize() else coarse.size,
        config=replace(config, densification=rules),
        checkpoint_interval=scaled_checkpoint_interval(
            args.checkpoint_interval, args.schedule_scale, n
        ),
        test_iterations=(),
        save_iterations=(),
        memory=coarse.memory,
        compute=coarse.compute,
        run=_run_of(args, "vanilla"),
    )
