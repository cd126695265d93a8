# SPDX-License-Identifier: Apache-2.0
"""The settings of all stages, resolved and checked before the first one starts.

Every stage's result has a name that follows from the flags, so the input of each stage is known
before the one that makes it has run.
"""

from __future__ import annotations

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
from sugar_utils.flags import FlagValues
from sugar_utils.settings import from_args, require_given
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
    # Those of the run, which repeat it; empty where none do.
    flags: FlagValues = field(default_factory=FlagValues)
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


def plan_of(flags: FlagValues) -> PipelinePlan:
    """Plan a run of ``train.py`` or ``train_full_pipeline.py``, whose flags these are.

    Raises:
        UserError: A flag is missing or wrong, also of a stage that does not run.
    """
    resolved = apply_presets(flags)
    plan = _full_plan(resolved) if "gs_output_dir" in flags else _train_plan(resolved)
    return replace(plan, flags=flags)


def _train_plan(flags: FlagValues) -> PipelinePlan:
    """Plan the stages from a checkpoint to a textured mesh."""
    mode = flags["regularization_type"]
    if mode is None:
        raise UserError(
            f"-r/--regularization_type is missing; choose one of {', '.join(MODES)} "
            "(dn_consistency is the recommended one, multiview the one for the best surface)"
        )
    require_given(flags, CoarseOptions, "scene_path", "checkpoint_path")
    scene_path = flags["scene_path"]
    root = flags["output_dir"]
    coarse = from_args(
        options_of_mode(mode),
        flags,
        output_dir=stage_folder(COARSE_FOLDER, scene_path, root),
        run=_run_of(flags, "coarse"),
    )
    mesh = from_args(
        MeshOptions,
        flags,
        compute=coarse.compute,
        coarse_model_path=coarse.result,
        mesh_output_dir=stage_folder(COARSE_MESH_FOLDER, scene_path, root),
        surface_levels=(flags["surface_level"],),
        decimation_targets=(flags["n_vertices_in_mesh"],),
    )
    refine = from_args(
        RefineOptions,
        flags,
        compute=coarse.compute,
        memory=coarse.memory,
        mesh_path=mesh.mesh_paths[0],
        coarse_model_path=coarse.result,
        output_dir=stage_folder(REFINED_FOLDER, scene_path, root),
        ply_dir=stage_folder(REFINED_PLY_FOLDER, scene_path, root),
        config=from_args(RefineConfig, flags, n_vertices_in_fg=flags["n_vertices_in_mesh"]),
        run=_run_of(flags, "refine"),
    )
    texture = from_args(
        TextureOptions,
        flags,
        compute=coarse.compute,
        refined_model_path=refine.result,
        mesh_output_dir=stage_folder(REFINED_MESH_FOLDER, scene_path, root),
    )
    runs_texture = runs_stage(flags, "texture")
    if runs_texture and texture.atlas == "xatlas":
        load_xatlas()
    return PipelinePlan(
        coarse,
        mesh=mesh if runs_stage(flags, "mesh") else None,
        refine=refine if runs_stage(flags, "refine") else None,
        texture=texture if runs_texture else None,
        messages=messages(flags),
        force=flags["force"],
        result_folder=result_folder(scene_path, root),
    )


def result_folder(scene_path: Path, output_dir: Path) -> Path:
    """Folder with the results of a scene under plain names.

    It is neither one of the original's tree nor the scene itself.
    """
    name = scene_name(scene_path)
    folder = output_dir / name
    is_scene = folder.resolve() == scene_path.resolve()
    if is_scene or name in STAGE_FOLDERS:
        return folder.with_name(f"{name}_result")
    return folder


def _full_plan(flags: FlagValues) -> PipelinePlan:
    """Plan a vanilla stage before the others, unless a checkpoint is given.

    Photographs without cameras, and videos, get a stage that computes camera poses first.
    """
    require_given(flags, CoarseOptions, "scene_path")
    convert = convert_options(flags)
    scene_path = scene_root(flags["scene_path"])
    iterations = flags["vanilla_iterations"]
    checkpoint = flags["gs_output_dir"]
    is_trained = checkpoint is None
    if is_trained:
        checkpoint = stage_folder(VANILLA_FOLDER, scene_path, flags["output_dir"])
        iterations = scaled(iterations, flags["schedule_scale"])
    flags = flags.replaced(
        scene_path=scene_path, checkpoint_path=checkpoint, iteration_to_load=iterations
    )
    plan = replace(_train_plan(flags), convert=convert)
    if is_trained:
        return replace(plan, vanilla=_vanilla_options(flags, plan.coarse))
    unused = [f"--{name}" for name in ("max_gaussians", "init_ply") if flags[name]]
    if not unused:
        return plan
    line = f"{', '.join(unused)}: no effect with --gs_output_dir, nothing is trained before"
    return replace(plan, messages=(*plan.messages, line))


def with_cameras(plan: PipelinePlan, console: Console) -> PipelinePlan:
    """Compute camera poses where the capture has none; return the plan of what follows."""
    if plan.convert is None:
        return plan
    # Most scenes have cameras, and what reads videos is slow to load.
    from sugar_capture.conversion.convert_run import convert

    convert(plan.convert, console)
    return replace(plan, convert=None)


def with_mode(plan: PipelinePlan, console: Console) -> PipelinePlan:
    """Return a plan in the mode, ``-r``, that suits the capture.

    To know the capture, missing camera poses are computed first.
    """
    flags = with_cameras(plan, console).flags
    scene = load_scene(
        plan.coarse.scene_path,
        size_rule=SugarSize(),
        images_dir=flags["images"] or "images",
        eval_split=flags["eval"],
        notify=say_nothing,
    )
    mode, reason = mode_of(scene)
    console.info(f"--regularization_type {mode}: {reason}")
    return plan_of(flags.replaced(regularization_type=mode))


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


def convert_options(flags: FlagValues) -> ConvertOptions | None:
    """Options of the stage that computes camera poses; None where the scene has cameras.

    Raises:
        UserError: Several processes run, of which only one can compute poses.
    """
    scene_path = flags["scene_path"]
    if not needs_cameras(scene_path):
        return None
    if Launch.read().size > 1:
        raise UserError(
            f"{scene_path}: has no cameras yet, or those of other photographs; let one "
            f"process find them first: {command_text('convert', '-s', scene_path)}"
        )
    time_limit = None
    if flags["minutes"] is not None:
        seconds = 60 * flags["minutes"]
        time_limit = PoseTimeLimit(POSE_SHARE * seconds, MOST_POSE_SHARE * seconds, seconds)
    return from_args(
        ConvertOptions,
        flags,
        source_path=scene_path,
        overwrite=False,
        time_limit=time_limit,
    )


def _run_of(flags: FlagValues, stage: str) -> RunOptions:
    """Options of a stage's run; ``--resume PATH`` applies only to the stage of that checkpoint.

    The stage follows from the name of the checkpoint's folder; unknown names are coarse.
    """
    options = from_args(RunOptions, flags)
    if options.resume in ("auto", "none"):
        return options
    checkpoint = Path(options.resume)
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    name = folder.resolve().name
    checkpoint_stage = "coarse"
    if name.startswith("sugarfine_") and runs_stage(flags, "refine"):
        checkpoint_stage = "refine"
    elif name == CHECKPOINT_FOLDER and "gs_output_dir" in flags and flags["gs_output_dir"] is None:
        checkpoint_stage = "vanilla"
    return options if checkpoint_stage == stage else replace(options, resume="auto")


def _vanilla_options(flags: FlagValues, coarse: CoarseOptions) -> VanillaOptions:
    """Options of the vanilla stage: held-out views and image size are those of the others."""
    n = scaled(flags["vanilla_iterations"], flags["schedule_scale"])
    config = from_args(VanillaConfig, flags, iterations=n, optimizer=coarse.config.optimizer)
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
        flags,
        source_path=flags["scene_path"],
        model_path=flags["checkpoint_path"],
        images=flags["images"] or "images",
        # A size that the user asks for is that of all stages; else each keeps the original's rule.
        size=None if coarse.size == SugarSize() else coarse.size,
        config=replace(config, densification=rules),
        checkpoint_interval=scaled_checkpoint_interval(
            flags["checkpoint_interval"], flags["schedule_scale"], n
        ),
        test_iterations=(),
        save_iterations=(),
        memory=coarse.memory,
        compute=coarse.compute,
        run=_run_of(flags, "vanilla"),
    )
