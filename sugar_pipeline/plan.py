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
from typing import Any

from gaussian_splatting.data.reference_layout import CHECKPOINT_FOLDER
from gaussian_splatting.data.scene import Scene, load_scene
from gaussian_splatting.engine.runner import RunOptions
from gaussian_splatting.optim.schedule import scaled
from gaussian_splatting.shared_flags import scaled_checkpoint_interval
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_capture.convert_options import ConvertOptions
from sugar_capture.scene_folder import needs_cameras, scene_root
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.texture.texture_atlas import load_xatlas
from sugar_extractors.texture.texturing import TextureOptions
from sugar_pipeline.pipeline_flags import apply_presets, messages, runs_stage
from sugar_scene.reprojection import NeighborViews
from sugar_trainers.capture import SugarSize
from sugar_trainers.coarse_run import CoarseOptions, options_of_mode
from sugar_trainers.naming import OUTPUT_ROOT, scene_name
from sugar_trainers.refine_run import RefineOptions
from sugar_trainers.stage_config import MODES, MULTIVIEW, RefineConfig
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.settings import from_args, require_given, with_flags
from sugar_utils.torchrun import Launch

STAGES = ("convert", "vanilla", "coarse", "mesh", "refine", "texture")  # in their order
STAGE_FOLDERS = (
    "vanilla_gs",
    "coarse",
    "coarse_mesh",
    "refined",
    "refined_ply",
    "refined_mesh",
    "metrics",
    "exports",
    "renders",
)
"""Folders of the original's tree, and of programs beside it, in the output folder."""
MIN_DENSIFICATION_INTERVAL = 50
MIN_RESET_INTERVAL = 1_000


@dataclass(frozen=True)
class PipelinePlan:
    coarse: CoarseOptions
    mesh: MeshOptions | None = None  # None to stop before it; likewise below
    refine: RefineOptions | None = None
    texture: TextureOptions | None = None
    vanilla: VanillaOptions | None = None  # None where a checkpoint is given
    convert: ConvertOptions | None = None  # None where the scene has cameras
    messages: tuple[str, ...] = ()
    force: bool = False  # whether stages follow on a failed one
    given: Mapping[str, Any] = field(default_factory=dict)  # flags that repeat the run
    # Folder that gets what is handed out under plain names.
    result_folder: Path = OUTPUT_ROOT

    @property
    def n_stages(self) -> int:
        return sum(getattr(self, name) is not None for name in STAGES)

    def settings(self) -> dict[str, Any]:
        """Inputs and resolved settings of each stage; files of earlier stages must exist."""
        found = {}
        for name in STAGES[1:]:
            options = getattr(self, name)
            if options is not None:
                job = options.jobs[0] if name == "mesh" else ()
                found[name] = {**options.sources(), **options.identity(*job)}
        return found


def train_plan(args: argparse.Namespace) -> PipelinePlan:
    if args.regularization_type is None:
        raise UserError(
            f"-r/--regularization_type is missing; choose one of {', '.join(MODES)} "
            "(dn_consistency is the recommended one, multiview the one for the best surface)"
        )
    args = apply_presets(args)
    require_given(args, CoarseOptions, "scene_path", "checkpoint_path")
    scene = scene_name(args.scene_path)
    root = args.output_dir
    coarse = from_args(
        options_of_mode(args.regularization_type),
        args,
        output_dir=root / "coarse" / scene,
        run=_run_of(args, "coarse"),
    )
    mesh = from_args(
        MeshOptions,
        args,
        compute=coarse.compute,
        coarse_model_path=coarse.result,
        mesh_output_dir=root / "coarse_mesh" / scene,
        surface_levels=(args.surface_level,),
        decimation_targets=(args.n_vertices_in_mesh,),
    )
    refine = from_args(
        RefineOptions,
        args,
        compute=coarse.compute,
        memory=coarse.memory,
        mesh_path=mesh.mesh_paths[0],
        coarse_model_path=coarse.result,
        output_dir=root / "refined" / scene,
        ply_dir=root / "refined_ply" / scene,
        config=from_args(RefineConfig, args, n_vertices_in_fg=args.n_vertices_in_mesh),
        run=_run_of(args, "refine"),
    )
    texture = from_args(
        TextureOptions,
        args,
        compute=coarse.compute,
        refined_model_path=refine.result,
        mesh_output_dir=root / "refined_mesh" / scene,
    )
    # What is wrong is told for stages that do not run, too.
    later = {"mesh": mesh, "refine": refine, "texture": texture}
    running = {name: options for name, options in later.items() if runs_stage(args, name)}
    if "texture" in running and texture.atlas == "xatlas":
        load_xatlas()
    return PipelinePlan(
        coarse,
        messages=messages(args),
        force=args.force,
        result_folder=result_folder(args),
        **running,
    )


def result_folder(args: argparse.Namespace) -> Path:
    """Folder with the results of a scene under plain names.

    It is neither one of the original's tree nor the scene itself.
    """
    name = scene_name(args.scene_path)
    folder = Path(args.output_dir) / name
    is_scene = folder.resolve() == Path(args.scene_path).resolve()
    return folder.with_name(f"{name}_result") if is_scene or name in STAGE_FOLDERS else folder


def full_plan(args: argparse.Namespace) -> PipelinePlan:
    """Plan of ``train_full_pipeline.py``: a vanilla stage, if none is given, before the others.

    Photographs without cameras, and videos, get a stage that finds them before all others.
    """
    args = apply_presets(args)
    require_given(args, CoarseOptions, "scene_path")
    convert = convert_options(args)
    args.scene_path = scene_root(args.scene_path)
    if args.gs_output_dir is not None:
        args.checkpoint_path = args.gs_output_dir
        args.iteration_to_load = args.vanilla_iterations
        plan = train_plan(args)
        idle = [f"--{name}" for name in ("max_gaussians", "init_ply") if getattr(args, name)]
        if idle:
            line = f"{', '.join(idle)}: no effect with --gs_output_dir, nothing is trained before"
            plan = replace(plan, messages=(*plan.messages, line))
        return replace(plan, convert=convert)
    args.checkpoint_path = args.output_dir / "vanilla_gs" / scene_name(args.scene_path)
    args.iteration_to_load = scaled(args.vanilla_iterations, args.schedule_scale)
    plan = train_plan(args)
    return replace(plan, convert=convert, vanilla=_vanilla_options(args, plan.coarse))


MIN_VIEWS = 12
MIN_OVERLAP = 0.9


def with_mode(args: argparse.Namespace, console: Console) -> argparse.Namespace:
    """The flags with ``-r``: given, or what suits the capture; missing cameras are found first."""
    if args.regularization_type is not None:
        return args
    args = apply_presets(args)
    require_given(args, CoarseOptions, "scene_path")
    options = convert_options(args)
    if options is not None:
        # Most scenes have cameras, and what reads videos is slow to load.
        from sugar_capture.convert_run import convert

        convert(options, console)
    scene = load_scene(
        scene_root(args.scene_path),
        size_rule=SugarSize(),
        images_dir=args.images or "images",
        eval_split=args.eval,
        notify=lambda line: None,
    )
    mode, reason = mode_of(scene)
    console.info(f"--regularization_type {mode}: {reason}")
    return with_flags(args, regularization_type=mode)


def mode_of(scene: Scene) -> tuple[str, str]:
    cameras = scene.train_cameras
    if len(cameras) < MIN_VIEWS:
        return "dn_consistency", f"there are only {len(cameras)} training views"
    neighbors = NeighborViews(cameras, scene.extent, observations=scene.observations)
    n = len(cameras) - len(neighbors.without_neighbors)
    mode = MULTIVIEW if n >= MIN_OVERLAP * len(cameras) else "dn_consistency"
    return mode, f"{n} of {len(cameras)} training views have neighbours to be compared with"


def convert_options(args: argparse.Namespace) -> ConvertOptions | None:
    """How to find the cameras of photographs or of a video; None where there are some."""
    if not needs_cameras(args.scene_path):
        return None
    if Launch.read().size > 1:
        raise UserError(
            f"{args.scene_path}: has no cameras yet, or those of other photographs; let one "
            "process find them first: "
            f"sugar convert, or python gaussian_splatting/convert.py, with -s {args.scene_path}"
        )
    return from_args(ConvertOptions, args, source_path=args.scene_path, overwrite=False)


def _run_of(args: argparse.Namespace, stage: str) -> RunOptions:
    """Treatment of earlier runs; a checkpoint given by path concerns the stage that made it.

    The name of its folder tells which one; the coarse one if it is unknown.
    """
    options = from_args(RunOptions, args)
    if options.resume in ("auto", "none"):
        return options
    checkpoint = Path(options.resume)
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    name = folder.resolve().name
    maker = "coarse"
    if name.startswith("sugarfine_") and runs_stage(args, "refine"):
        maker = "refine"
    elif name == CHECKPOINT_FOLDER and getattr(args, "gs_output_dir", args) is None:
        maker = "vanilla"
    return options if maker == stage else replace(options, resume="auto")


def _vanilla_options(args: argparse.Namespace, coarse: CoarseOptions) -> VanillaOptions:
    """The vanilla stage holds out what the others hold out, at the size that they train on."""
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
