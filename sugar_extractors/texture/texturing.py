# SPDX-License-Identifier: Apache-2.0
"""The texture stage: from a refined model to a textured mesh."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.components.exposures import saved_exposures
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.spherical_harmonics import sh_to_rgb
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore, shared_or_own_store
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.run_identity import scene_inputs
from gaussian_splatting.rasterization import render_view
from gaussian_splatting.scenes import reference_layout
from gaussian_splatting.scenes.reference_layout import ReferenceCheckpoint
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.shared_flags import white_background
from sugar_extractors.mesh.mesh_config import OUTPUT_FLAG
from sugar_extractors.photographs import photo_source
from sugar_extractors.placing import PlacementOptions, scale_of
from sugar_extractors.results import read_state
from sugar_extractors.texture import texture_atlas as atlases
from sugar_extractors.texture.border_peeling import (
    DENSITY_THRESHOLD,
    ITERATIONS,
    face_density,
    kept_faces,
)
from sugar_extractors.texture.photo_baking import Resolution, bake_photographs
from sugar_extractors.texture.placed_copy import write_placed
from sugar_extractors.texture.texture_atlas import Atlas
from sugar_extractors.texture.texture_baking import (
    BakedTexture,
    Baker,
    BakingConfig,
    ViewColors,
    ViewSource,
    with_filled_gaps,
)
from sugar_scene.bound_model import bound_cloud_from_state
from sugar_scene.mesh_bound import LAYOUTS, BoundCloud
from sugar_scene.mesh_files.textured_mesh_io import (
    MeshStyle,
    TexturedMesh,
    mesh_files,
    write_mesh_files,
)
from sugar_trainers.capture import CaptureOptions, load_views, model_file
from sugar_trainers.naming import REFINED_MESH_FOLDER, stage_folder
from sugar_utils import flags
from sugar_utils.command_text import command_text
from sugar_utils.console import Console
from sugar_utils.errors import UserError, printable
from sugar_utils.files import file_digest, remove_stale_temporaries
from sugar_utils.flags import AUTO, Automatic
from sugar_utils.memory import memory_usage, reset_peak
from sugar_utils.recipe import Recipe, alone_with
from sugar_utils.settings import flag, parser_of

MIN_ALPHA = 0.5  # pixels of an object that the Gaussians cover less give no colour
SQUARE_SIZE = 8
STANDALONE_SQUARE_SIZE = 10
TEXTURE_SIZE = 8_192
_STANDALONE = "only extract_refined_mesh_with_texture.py"
_flag = partial(flag, group="texture")
_peel = partial(flag, group="texture", no_effect_when="without --postprocess_mesh True")
_alone = partial(flag, group=_STANDALONE)


@dataclass(frozen=True, kw_only=True)
class TextureOptions(CaptureOptions):
    """Flags of a texture run; the topology of the mesh comes from the refined model itself."""

    refined_model_path: Path = _alone(
        MISSING,
        ".pt of a refinement, or its folder; needed",
        short="-m",
        parse=Path,
        missing=f"pass the .pt that {command_text('refine')} made",
    )
    mesh_output_dir: Path | None = _alone(
        None, "folder of the mesh; unset: output/refined_mesh/<scene>", short="-o", parse=Path
    )
    n_gaussians_per_surface_triangle: int | None = _alone(
        None,
        "checked against the model; unset: as the model has",
        short="-n",
        parse=flags.integer,
        choices=tuple(LAYOUTS),
    )
    square_size: int | Automatic = _flag(
        SQUARE_SIZE,
        "texels per side of the square that holds two triangles, at least 5; decides "
        "the size of the texture for any atlas. auto: a texel is a pixel of the photograph that "
        "shows a place best; unset: 8, auto with --preset fast",
        parse=flags.positive_or_auto,
        metavar="{N,auto}",
        modes={"fast": AUTO},
    )
    texture_size: int = _flag(
        TEXTURE_SIZE,
        "texels per side of the texture at most",
        parse=flags.positive_int,
        no_effect_when="unless --square_size is auto",
    )
    texture_atlas: str | None = _flag(
        None,
        "squares: every two triangles fill a square; charts: unfold the surface; xatlas: by "
        "that package, which takes long for large meshes; unset: charts where --square_size is "
        "auto, else squares",
        choices=atlases.ATLASES,
    )
    texture_source: str = _flag(
        "renders",
        "renders: the refined Gaussians, without view-dependent colour; photos: the "
        "photographs, in their mean exposure; unset: renders, photos with --preset fast",
        choices=("renders", "photos"),
        modes={"fast": "photos"},
    )
    baking: BakingConfig = BakingConfig()
    postprocess_mesh: bool = _flag(False, "peel border triangles of low density off")
    postprocess_density_threshold: float = _peel(
        DENSITY_THRESHOLD,
        "border triangles of a larger density stay",
        parse=flags.non_negative_float,
    )
    postprocess_iterations: int = _peel(
        ITERATIONS, "rings of border triangles to peel off", parse=flags.non_negative_int
    )
    export_glb: bool = _flag(True, "write the textured mesh as one .glb file, too")
    lit: bool = _flag(
        False,
        "viewers light the .glb, by a plain material (roughness 1, metallic 0); else they "
        "show the colours of the texture as they are",
        no_effect_when="with --export_glb False",
    )
    placement: PlacementOptions = PlacementOptions()
    white_background: bool = white_background()
    random_seed: int = _alone(
        0, "seed of the initial points of a scene without points; textures do not depend on it"
    )
    overwrite: bool = _alone(False, "replace a mesh that was made with other settings")

    def __post_init__(self) -> None:
        if self.square_size != AUTO:
            atlases.check_square_size(self.square_size)

    @property
    def atlas(self) -> str:
        """The kind of the atlas, decided."""
        if self.texture_atlas is not None:
            return self.texture_atlas
        return "charts" if self.square_size == AUTO else "squares"

    @property
    def model(self) -> Path:
        """The refined ``.pt`` itself, or the last one of a run's folder."""
        return model_file(self.refined_model_path, "--refined_model_path")

    @property
    def obj_path(self) -> Path:
        """The OBJ to write, named after the refined model's folder."""
        folder = self.mesh_output_dir
        if folder is None:
            folder = stage_folder(REFINED_MESH_FOLDER, self.scene_path)
        model = self.refined_model_path
        run_folder = model if model.is_dir() else model.resolve().parent
        suffix = "_postprocessed" if self.postprocess_mesh else ""
        return folder / f"{run_folder.resolve().name}{suffix}.obj"

    def identity(self) -> dict[str, Any]:
        """Return the settings that the result depends on."""
        settings = self.capture_identity()
        settings["square_size"] = self.square_size
        settings["atlas"] = self.atlas
        settings["source"] = self.texture_source
        settings["depth_tolerance"] = self.baking.depth_tolerance
        settings["cosine_power"] = self.baking.cosine_power
        if self.square_size == AUTO:
            settings["texture_size"] = self.texture_size
        settings["postprocess"] = self.postprocess_mesh
        settings["white_background"] = self.white_background
        if self.postprocess_mesh:
            settings["postprocess_density_threshold"] = self.postprocess_density_threshold
            settings["postprocess_iterations"] = self.postprocess_iterations
        if self.lit:
            settings["lit"] = True
        return settings

    def inputs(self, scene: Scene) -> dict[str, Any]:
        """Return digests of the files that are read; of images only where colours are theirs."""
        digests = scene_inputs(scene, photographs=self.texture_source == "photos")
        return {**digests, "refined model": file_digest(self.model)}

    def sources(self) -> dict[str, Any]:
        """Return the paths that the record of the result names."""
        return {**super().sources(), "refined_model": self.refined_model_path.resolve()}


def extract_textured_mesh(
    options: TextureOptions, console: Console | None = None, images: ImageStore | None = None
) -> Path:
    """Write a refined model as a textured mesh, with a ``.json`` file beside it.

    A complete mesh of the same settings is not made again.

    Args:
        images: Store of the images, which other stages share; None to open one.

    Returns:
        The OBJ.
    """
    console = console or Console()
    target = options.obj_path
    if options.atlas == "xatlas":
        atlases.load_xatlas()
    _check_name(target)
    options.compute.report(console.note)
    model = options.model
    checkpoint, scene = load_views(
        options,
        console.note,
        white_background=options.white_background,
        seed=options.random_seed,
        require_images=options.texture_source == "photos",
    )
    exposures, exposure_file = _exposures(options, model, checkpoint, console)
    inputs = options.inputs(scene)
    if exposure_file is not None:
        inputs["exposures"] = file_digest(exposure_file)
    identity = Recipe(options.identity(), inputs, options.sources())
    read_model = functools.cache(partial(_read_model, options, model, console))
    # Read before the output's folder is touched, unless a result makes it needless.
    if not target.exists():
        read_model()
    # Raises an error for wrong names of images before the work.
    scale_of(scene.calibrated_cameras, options.placement, scene.offset)
    with alone_with(target, OUTPUT_FLAG):
        files = mesh_files(target, options.export_glb)
        if identity.is_finished(files, options.overwrite, OUTPUT_FLAG):
            console.headline(f"exists already: {target}")
        else:
            remove_stale_temporaries(target.parent)
            with shared_or_own_store(images, options.white_background) as store:
                cloud = read_model().to(options.compute.device)
                colors = _ColorSources(scene.train_cameras, store, exposures)
                _texture(options, identity, cloud, colors, console)
        if options.placement.wanted:
            write_placed(
                target,
                scene,
                lambda: read_model().to_gaussians(),
                options.placement,
                options.export_glb,
                console.info,
                lit=options.lit,
            )
    return target


def _check_name(target: Path) -> None:
    # An OBJ refers to its other files in lines of text, where some names cannot stand.
    if printable(target.stem) != target.stem:
        raise UserError(
            f"{target}: control characters in a name cannot be referred to in an OBJ; rename the "
            "refined model's folder"
        )


@dataclass(frozen=True)
class _ColorSources:
    """Views of a capture that colour a texture."""

    cameras: Sequence[Camera]
    images: ImageStore
    exposures: Mapping[str, Tensor]  # by the name of the camera


def face_colors(cloud: BoundCloud) -> Tensor:
    """Return the mean view-independent colour of each face's Gaussians. (F, 3)"""
    colors = sh_to_rgb(cloud.sh_dc[:, 0]).clamp(0, 1)
    return colors.reshape(-1, cloud.per_triangle, 3).mean(dim=1)


def render_source(gaussians: Gaussians, white_background: bool = False) -> ViewSource:
    """Return a source of view-independent renders of Gaussians; of objects, without background."""

    def render(camera: Camera) -> ViewColors:
        output = render_view(gaussians, camera, white=white_background, geometry=False, sh_degree=0)
        image = torch.nan_to_num(output.image)
        if not camera.shows_object:
            return ViewColors(image.clamp(0, 1))
        alpha = torch.nan_to_num(output.alpha)[..., None]
        background = (1 - alpha) * float(white_background)
        colors = (image - background) / alpha.clamp_min(MIN_ALPHA)
        weights = (alpha >= MIN_ALPHA).to(colors.dtype)
        return ViewColors(torch.cat([colors.clamp(0, 1), weights], dim=2))

    return render


def _exposures(
    options: TextureOptions, model: Path, checkpoint: ReferenceCheckpoint, console: Console
) -> tuple[dict[str, Tensor], Path | None]:
    """Return exposures of the refinement, else of the checkpoint, and their file.

    There are none for renders, and for images of a training without exposures.
    """
    if options.texture_source != "photos":
        return {}, None
    resume = load_payload(model).get("resume") or {}
    path = model
    exposures = saved_exposures(resume.get("stage", {}))
    if not exposures:
        path = checkpoint.ply_path.with_name(reference_layout.EXPOSURE_FILE)
        exposures = reference_layout.read_exposures(path, console.info)
    if not exposures:
        return {}, None
    console.info(f"exposures of {path} are taken out of the photographs")
    return exposures, path


def _read_model(options: TextureOptions, path: Path, console: Console) -> BoundCloud:
    try:
        cloud = read_state(path, bound_cloud_from_state)
    except UserError as error:
        raise UserError(f"{error}; check --refined_model_path") from error
    per_triangle = options.n_gaussians_per_surface_triangle
    if per_triangle not in (None, cloud.per_triangle):
        raise UserError(
            f"{path}: has {cloud.per_triangle} Gaussians per triangle, not the {per_triangle} of "
            "--n_gaussians_per_surface_triangle; leave that flag out"
        )
    n_faces = cloud.faces.shape[0]
    console.info(f"{path}: {n_faces:,} triangles with {cloud.per_triangle} Gaussians each")
    if not options.postprocess_mesh:
        return cloud
    is_kept = kept_faces(
        cloud.faces,
        face_density(cloud),
        options.postprocess_iterations,
        options.postprocess_density_threshold,
    )
    n_peeled = int((~is_kept).sum())
    console.info(f"peeled {n_peeled:,} border triangles off")
    if not is_kept.any():
        raise UserError(
            f"{path}: no triangle is left after peeling; lower "
            "--postprocess_density_threshold or --postprocess_iterations"
        )
    return cloud.with_triangles(is_kept.nonzero()[:, 0])


@torch.no_grad()
def _texture(
    options: TextureOptions,
    identity: Recipe,
    cloud: BoundCloud,
    colors: _ColorSources,
    console: Console,
) -> None:
    """Make the texture, and publish the mesh with its record."""
    device = cloud.vertices.device
    reset_peak(device)
    start = time.monotonic()
    is_photos = options.texture_source == "photos"
    resolution = None
    if is_photos or options.square_size == AUTO:
        resolution = Resolution.of(cloud.vertices, cloud.faces, colors.cameras)
    size = _square_size(options, cloud, resolution)
    atlas = atlases.make_atlas(options.atlas, cloud.vertices, cloud.faces, size)
    unwrapped = time.monotonic()
    baked = _baked(options, cloud, atlas, colors, resolution, console)
    texture = baked.texture
    if atlas.kind != "squares":
        texture = with_filled_gaps(texture, atlas)
    finished = time.monotonic()
    mesh = TexturedMesh(cloud.vertices, cloud.faces, atlas.uvs, texture)
    seen_face_share = round(baked.seen_faces / baked.face_count, 4)
    result = {
        "vertices": cloud.vertices.shape[0],
        "faces": atlas.n_faces,
        "views": len(colors.cameras),
        "texture_side": atlas.side,
        "bands": baked.n_bands,
        "atlas": atlas.kind,
        "filled_share": round(atlas.filled_share, 4),
        "seen_texel_share": round(baked.seen_texels / max(1, baked.face_texels), 4),
        "seen_face_share": seen_face_share,
        "unwrap_seconds": round(unwrapped - start, 2),
        "seconds": round(finished - start, 2),
        "bake_seconds": round(finished - unwrapped, 2),
        "peak_bytes": memory_usage(device).peak,
    }

    def figures() -> dict[str, Any]:
        return {**result, "write_seconds": round(time.monotonic() - finished, 2)}

    files = mesh_files(options.obj_path, options.export_glb)
    with identity.publish(files, figures) as targets:
        # The OBJ of this folder is laid out as the original's, which has no normals.
        write_mesh_files(targets, mesh, MeshStyle(lit=options.lit))
    console.info(
        f"texture {atlas.side} x {atlas.side}, {100 * seen_face_share:.1f} % of the "
        f"triangles seen ({time.monotonic() - start:.1f} s): {options.obj_path}"
    )


def _square_size(options: TextureOptions, cloud: BoundCloud, resolution: Resolution | None) -> int:
    """Return the size of a square in texels, which ``auto`` takes from the views."""
    square_size = options.square_size
    if not isinstance(square_size, str):
        return square_size
    if resolution is None:
        raise ValueError("--square_size auto needs the resolution of the views")
    size = atlases.fitting_square_size(options.atlas, cloud.vertices, cloud.faces, resolution.best)
    largest = atlases.largest_square_size(len(cloud.faces), options.texture_size)
    return min(size, largest)


def _baked(
    options: TextureOptions,
    cloud: BoundCloud,
    atlas: Atlas,
    colors: _ColorSources,
    resolution: Resolution | None,
    console: Console,
) -> BakedTexture:
    """Bake the texture from images, or from renders without their ``resolution``."""
    colors_of_faces = face_colors(cloud)
    with console.progress("texture, percent", 1, 100) as progress:

        def on_view(done: int, total: int) -> None:
            progress.update(100 * done // total)

        baker = Baker(cloud.vertices, cloud.faces, atlas, colors.cameras, options.baking, on_view)
        if options.texture_source == "photos" and resolution is not None:
            photographs = photo_source(colors.images, cloud.vertices.device, colors.exposures)
            return bake_photographs(baker, photographs, colors_of_faces, resolution)
        # What hangs in front of the mesh took part in all renders that the colours were learned by.
        source = render_source(cloud.activate_all(), options.white_background)
        return baker.bake(source, colors_of_faces)


def texture_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``extract_refined_mesh_with_texture.py``."""
    square = {"default": STANDALONE_SQUARE_SIZE, "group": _STANDALONE}
    gpu = {"short": "-g", "group": _STANDALONE}
    device = {"group": _STANDALONE}
    return parser_of(description, TextureOptions, square_size=square, gpu=gpu, device=device)
