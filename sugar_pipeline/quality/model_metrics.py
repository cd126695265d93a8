# SPDX-License-Identifier: Apache-2.0
"""Image quality of finished models on held-out views, in the original's JSON layout; LPIPS.

Renders are compared as they are, not rounded to 8 bits, so that figures can be put beside
published ones. LPIPS gets colours in [0, 1], as in 3DGS and SuGaR, although its authors scale to
[-1, 1].
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from gaussian_splatting.core.cloud import MAX_SH_DEGREE, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.reporting.evaluation import EvaluationResult, score_views
from gaussian_splatting.rasterization import plain_background, render_view
from gaussian_splatting.scenes.reference_layout import load_reference_checkpoint
from gaussian_splatting.scenes.scene import Scene, load_scene_for_checkpoint
from sugar_extractors.export.reading import read_bound_gaussians
from sugar_extractors.mesh.mesh_config import EXTRACTORS, MeshVariant, mesh_name, variant_of
from sugar_pipeline.quality.exported_metrics import (
    ComparisonOptions,
    ExportedOptions,
    measure_exported,
)
from sugar_scene.mesh_bound import LAYOUTS
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh, render_textured
from sugar_trainers import naming
from sugar_trainers.naming import (
    NORMAL_FACTOR,
    REFINED_FOLDER,
    REFINED_MESH_FOLDER,
    coarse_name,
    number_text,
    refined_name,
    scene_name,
    stage_folder,
)
from sugar_trainers.presets import PresetFlags, apply_presets
from sugar_trainers.stage_config import MODES, MULTIVIEW
from sugar_utils.console import Console
from sugar_utils.device import upload
from sugar_utils.errors import Notify, UserError, reason_of
from sugar_utils.files import json_advice, read_json, remove_stale_temporaries, write_json_atomic
from sugar_utils.flags import FlagValues, Parser, non_negative_float, positive_int
from sugar_utils.libraries import install_advice
from sugar_utils.schemas import FileName, conform
from sugar_utils.settings import flag, from_args, parser_of

PAPER_ITERATION = 30_000
_flag = partial(flag, group="metrics")

Scores = dict[str, float | list[str] | None]

_ADVICE = 'write {"scene folder": "vanilla checkpoint folder", ...}'
_SceneConfig = cast("type[dict[str, str]]", Annotated[dict[FileName, FileName], Meta(min_length=1)])

Perceptual = Callable[[Tensor, Tensor], float]  # distance of two (H, W, 3) images in [0, 1]
Render = Callable[[Camera], Tensor]  # (H, W, 3) float


@dataclass(frozen=True, kw_only=True)
class MetricsOptions(ComparisonOptions):
    """Flags of ``metrics.py``: the models to measure, and how.

    Models of the modes ``dn_consistency`` and ``density`` have the same names.
    """

    scene_config: str = _flag(
        MISSING,
        "JSON file, or text, that maps each scene folder to its vanilla checkpoint folder",
        parse=str,
        missing=_ADVICE,
    )
    iteration_to_load: int = _flag(7_000, "vanilla iteration that SuGaR started from", short="-i")
    estimation_factor: float = _flag(
        0.2, "weight of the density or sdf term", short="-e", parse=non_negative_float
    )
    regularization_type: str = _flag(
        MISSING,
        "mode of the coarse stage; needed",
        short="-r",
        choices=MODES,
        missing=f"choose one of {', '.join(MODES)}",
    )
    surface_level: float = _flag(0.3, "level of the mesh", short="-l", parse=non_negative_float)
    n_vertices_in_mesh: int = _flag(
        1_000_000, "triangle target of the mesh", short="-v", parse=positive_int
    )
    gaussians_per_triangle: int = _flag(
        1, "Gaussians bound to each triangle", short="-g", choices=tuple(LAYOUTS)
    )
    refinement_iterations: int = _flag(
        15_000, "iteration of the refined model", short="-f", parse=positive_int
    )
    mesh_extractor: str | None = _flag(
        None,
        "how the mesh was made: poisson, tsdf or tetrahedra; unset: tsdf with -r multiview, else "
        "poisson",
        choices=EXTRACTORS,
        modes={MULTIVIEW: "tsdf"},
    )
    use_poisson_center: bool = _flag(False, "the mesh was made of Gaussian centres")
    use_marching_cubes: bool = _flag(False, "the mesh was made by marching cubes")
    evaluate_vanilla: bool = _flag(
        False, "measure the vanilla checkpoint, too; its iteration 30000 if it is there"
    )
    use_uv_texture: bool = _flag(False, "render the textured mesh instead of the Gaussians")
    use_diffuse_color_only: bool = _flag(False, "render the view-independent part of the colours")

    def __post_init__(self) -> None:
        if self.use_poisson_center and self.use_marching_cubes:
            raise UserError("--use_poisson_center and --use_marching_cubes exclude each other")
        if self.use_uv_texture and self.use_diffuse_color_only:
            raise UserError(
                "--use_uv_texture and --use_diffuse_color_only exclude each other: a texture has "
                "no other colours"
            )
        variant = variant_of(self.mesh_extractor or "")
        if variant and (self.use_poisson_center or self.use_marching_cubes):
            raise UserError(
                f"--mesh_extractor {variant} excludes --use_poisson_center and "
                "--use_marching_cubes: a mesh was made in one way"
            )

    @property
    def variant(self) -> MeshVariant:
        """Word of the mesh's name that says how it was made."""
        if self.use_marching_cubes:
            return "marchingcubes"
        if self.use_poisson_center:
            return "poissoncenters"
        return variant_of(self.mesh_extractor or "")

    @property
    def result_path(self) -> Path:
        """The JSON file of the figures, named as by the original."""
        method = "sdf" if self.regularization_type == "sdf" else "density"
        suffix = {
            "": "",
            "tsdf": "_tsdf",
            "tetrahedra": "_tetrahedra",
            "poissoncenters": "_poissoncenter",
            "marchingcubes": "_marchingcubes",
        }[self.variant]
        suffix = ("_uvtexture" if self.use_uv_texture else "") + suffix
        suffix = ("_diffuseonly" if self.use_diffuse_color_only else "") + suffix
        name = f"{method}{number_text(self.estimation_factor)}_normal{number_text(NORMAL_FACTOR)}"
        if self.regularization_type == MULTIVIEW:
            name = MULTIVIEW
        return self.output_dir / naming.METRICS_FOLDER / f"results_{name}{suffix}.json"

    @property
    def key(self) -> str:
        """Key of the refined model in the JSON file."""
        level = number_text(self.surface_level)
        return f"sugar_{level}_{self.n_vertices_in_mesh}_{self.refinement_iterations}"

    @property
    def refined_name(self) -> str:
        """Folder of the refined model, without its parents."""
        run = coarse_name(self.iteration_to_load, self.regularization_type, self.estimation_factor)
        model = run.removeprefix("sugarcoarse_")
        mesh = mesh_name(model, self.surface_level, self.n_vertices_in_mesh, self.variant)
        return refined_name(Path(mesh), naming.NORMAL_CONSISTENCY, self.gaussians_per_triangle)


def measure(options: MetricsOptions | ExportedOptions, console: Console | None = None) -> Path:
    """Measure all scenes; the file is rewritten after each. Or measure an exported file.

    Returns:
        The JSON file. Of an exported file as of ``measure_exported``, else scene name to model to
        ``ssim``, ``psnr`` and ``lpips`` (null without its weights), with masks also
        ``psnr_counted`` and ``ssim_counted``, of what they count; where held-out views were left
        out also their names as ``dropped_views``, and ``psnr_with_dropped_views``.
    """
    console = console or Console()
    options.compute.report(console.info)
    if isinstance(options, ExportedOptions):
        return measure_exported(options, console)
    scenes = read_scene_config(options.scene_config)
    remove_stale_temporaries(options.result_path.parent)
    perceptual = load_perceptual(console.info)
    results: dict[str, dict[str, Scores]] = {}
    for scene_path, checkpoint_path in scenes.items():
        name = scene_name(scene_path)
        results[name] = _measure_scene(options, scene_path, checkpoint_path, perceptual, console)
        write_json_atomic(options.result_path, results)
    console.info(f"written: {options.result_path}")
    return options.result_path


def _measure_scene(
    options: MetricsOptions,
    scene_path: Path,
    checkpoint_path: Path,
    perceptual: Perceptual | None,
    console: Console,
) -> dict[str, Scores]:
    checkpoint = load_reference_checkpoint(checkpoint_path, options.iteration_to_load, console.info)
    scene = load_scene_for_checkpoint(
        scene_path,
        checkpoint,
        size_rule=options.size,
        images_dir=checkpoint.images_dir,
        white_background=options.white_background,
        masks=options.mask_options,
        view_options=options.view_options,
        notify=console.info,
    )
    if not scene.test_cameras:
        raise UserError(f"{scene_path}: no view is held out; metrics need test views")
    rows: dict[str, Scores] = {}
    with ImageStore(options.white_background) as images:
        models = _models(options, scene_path, checkpoint_path, scene.offset, console)
        for key, render in models:
            fitted = options.exposure_compensation
            scores = _score(render, scene, images, perceptual, fitted)
            rows[key] = scores
            figures = [
                f"{name} {value:.4f}" for name, value in scores.items() if isinstance(value, float)
            ]
            console.info(f"{scene_name(scene_path)} {key}: {'  '.join(figures)}")
    if checkpoint.settings.get("eval") is False:
        # The layout of the file is the original's and has no field for it.
        console.warn(
            f"{scene_name(scene_path)}: these figures are too good, because {checkpoint_path} was "
            "trained on the held-out views, too (eval=False in its cfg_args); train it with --eval"
        )
    return rows


def _models(
    options: MetricsOptions,
    scene_path: Path,
    checkpoint_path: Path,
    world_offset: np.ndarray,
    console: Console,
) -> list[tuple[str, Render]]:
    """Renderers of all models to measure, with their keys in the JSON file.

    Args:
        options: Which models.
        scene_path: Folder of the capture.
        checkpoint_path: The vanilla checkpoint.
        world_offset: Of the capture: what is subtracted from coordinates of the original. (3,)
        console: Gets notes.
    """
    models: list[tuple[str, Render]] = []
    device = options.compute.device
    if options.evaluate_vanilla:
        models += _vanilla_models(options, checkpoint_path, world_offset, console)
    name = options.refined_name
    if options.use_uv_texture:
        folder = stage_folder(REFINED_MESH_FOLDER, scene_path, options.output_dir)
        mesh = read_textured_mesh(folder / f"{name}.obj").to(device)
        background = plain_background(options.white_background, device)
        render = partial(render_textured, mesh, background=background, supersampling=2)
        models.append((options.key, render))
    else:
        folder = stage_folder(REFINED_FOLDER, scene_path, options.output_dir)
        path = folder / name / f"{options.refinement_iterations}.pt"
        cloud = read_bound_gaussians(path).to(device)
        models.append((options.key, _gaussian_render(cloud.activate_all(), options)))
    return models


def _vanilla_models(
    options: MetricsOptions, checkpoint_path: Path, world_offset: np.ndarray, console: Console
) -> list[tuple[str, Render]]:
    """Renderers of the vanilla checkpoint: SuGaR's start, and iteration 30000 if it is there."""
    models: list[tuple[str, Render]] = []
    for iteration in dict.fromkeys((options.iteration_to_load, PAPER_ITERATION)):
        try:
            checkpoint = load_reference_checkpoint(checkpoint_path, iteration, console.info)
        except UserError:
            if iteration == options.iteration_to_load:
                raise
            console.info(f"{checkpoint_path} has no iteration {iteration}; left out")
            continue
        cloud = checkpoint.read_cloud(console.info, world_offset).to(options.compute.device)
        number = f"{iteration // 1000}k" if iteration % 1000 == 0 else iteration
        models.append((f"3dgs_{number}", _gaussian_render(cloud.activate(), options)))
    return models


def _gaussian_render(gaussians: Gaussians, options: MetricsOptions) -> Render:
    degree = 0 if options.use_diffuse_color_only else MAX_SH_DEGREE

    def render(camera: Camera) -> Tensor:
        output = render_view(
            gaussians, camera, white=options.white_background, geometry=False, sh_degree=degree
        )
        assert output.image is not None
        return output.image

    return render


def _score(
    render: Render,
    scene: Scene,
    images: ImageStore,
    perceptual: Perceptual | None,
    fitted: bool,
) -> Scores:
    distances: list[float] = []

    def render_and_compare(camera: Camera) -> Tensor:
        image = render(camera)
        if perceptual is not None:
            target = upload(images.shown(camera)[..., :3], image.device).float() / 255
            distances.append(perceptual(image.clamp(0, 1), target))
        return image

    evaluation = score_views(render_and_compare, scene.test_cameras, images.shown, fitted=fitted)
    scores: Scores = {"ssim": evaluation.ssim, "psnr": evaluation.psnr}
    scores["lpips"] = sum(distances) / len(distances) if distances else None
    if fitted:
        scores["psnr_after_gain_and_offset"] = evaluation.fitted_psnr
    for name, value in evaluation.counted.items():
        scores[f"{name}_counted"] = value
    dropped = scene.dropped_test_cameras
    if dropped:
        # Held-out views that contradict the rest.
        others = score_views(render, dropped, images.shown)
        with_dropped = EvaluationResult((*evaluation.per_view, *others.per_view))
        scores["psnr_with_dropped_views"] = with_dropped.psnr
        scores["dropped_views"] = [camera.name for camera in dropped]
    return scores


def load_perceptual(notify: Notify) -> Perceptual | None:
    """Load LPIPS with the VGG network, as papers of the field report it; None if it cannot be had.

    Its weights are downloaded by torchvision on first use, which needs a network.
    """
    try:
        package = importlib.import_module("lpips")
        # The package prints where it found its weights.
        with contextlib.redirect_stdout(io.StringIO()):
            network = package.LPIPS(net="vgg", verbose=False).eval()
    # Weights come over the network: whatever goes wrong there must not cost the other figures.
    except Exception as error:
        reason = reason_of(error)
        notify(
            f"no LPIPS ({reason}); it needs a network once; {install_advice('lpips torchvision')}"
        )
        return None

    @torch.no_grad()
    def distance(image: Tensor, target: Tensor) -> float:
        image_batch = image.permute(2, 0, 1)[None].cpu()
        target_batch = target.permute(2, 0, 1)[None].cpu()
        return float(network(image_batch, target_batch))

    return distance


def metrics_parser(description: str | None) -> Parser:
    """Make the parser of ``metrics.py``."""
    return parser_of(description, MetricsOptions, ExportedOptions, PresetFlags)


def metrics_options(flags: FlagValues) -> MetricsOptions | ExportedOptions:
    """Make the options of the flags, with the presets resolved; of an exported file, or models."""
    if flags["exported"] is not None:
        return from_args(ExportedOptions, flags)
    return from_args(MetricsOptions, apply_presets(flags))


def read_scene_config(text: str) -> dict[Path, Path]:
    """Read scene folders and their checkpoint folders from a JSON file, or from the JSON itself."""
    if not text:
        raise UserError(f"--scene_config is empty; {_ADVICE}")
    if text.lstrip().startswith("{"):
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            advice = json_advice(error, _ADVICE) if isinstance(error, ValueError) else _ADVICE
            raise UserError(f"--scene_config is not JSON ({reason_of(error)}); {advice}") from error
        text = "the given JSON"
    else:
        config = read_json(Path(text))
    pairs = conform(config, _SceneConfig, f"--scene_config {text}", _ADVICE)
    return {Path(scene): Path(checkpoint) for scene, checkpoint in pairs.items()}
