# SPDX-License-Identifier: Apache-2.0
"""The texture stage: from a refined model to a textured mesh, thin borders peeled.

Poisson meshes end in flaps that the optimisation makes transparent. Rings of border triangles are
taken off, and those that Gaussians cover densely are put back.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.components.exposures import saved_exposures
from gaussian_splatting.data import reference_layout
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore, eroded, shared_or_own_store
from gaussian_splatting.data.reference_layout import ReferenceCheckpoint
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.run_directory import Identity, scene_inputs
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.losses.exposure import exposed, mean_exposure, unexposed
from gaussian_splatting.rasterization import render_view
from gaussian_splatting.rasterization.spherical_harmonics import sh_to_rgb
from gaussian_splatting.shared_flags import white_background
from sugar_extractors.mesh.mesh_config import OUTPUT_FLAG
from sugar_extractors.results import alone_with, is_finished, publish, read_state
from sugar_extractors.texture import texture_atlas as atlases
from sugar_extractors.texture.photo_baking import Resolution, bake_photographs
from sugar_extractors.texture.placed_export import PlacementOptions, scale_of, write_placed
from sugar_extractors.texture.texture_baking import (
    Baker,
    BakingConfig,
    ViewSource,
    with_filled_gaps,
)
from sugar_extractors.texture.textured_mesh_io import (
    MeshStyle,
    TexturedMesh,
    mesh_files,
    write_mesh_files,
)
from sugar_scene.geometry import neighbor_opacities
from sugar_scene.mesh_bound import LAYOUTS, BoundCloud, bound_cloud_from_state
from sugar_scene.triangle_mesh import edge_keys
from sugar_trainers.capture import CaptureOptions, load_views, model_file
from sugar_trainers.naming import OUTPUT_ROOT, scene_name
from sugar_utils import flags
from sugar_utils.console import Console
from sugar_utils.device import upload
from sugar_utils.errors import UserError, printable
from sugar_utils.files import file_digest, remove_stale_temporaries
from sugar_utils.flags import AUTO, Automatic
from sugar_utils.memory import memory_usage, reset_peak
from sugar_utils.neighbors import nearest_neighbors_of
from sugar_utils.settings import flag, parser_of

DENSITY_THRESHOLD = 0.1
ITERATIONS = 5
N_NEIGHBORS = 16
_CHUNK = 1 << 16
FaceDensity = Callable[[Tensor], Tensor]  # density at centres of faces, by row: (P,) -> (P,)

MIN_ALPHA = 0.5  # pixels of an object that the Gaussians cover less give no colour
_flag = partial(flag, group="texture")
_peel = partial(flag, group="texture", no_effect_when="without --postprocess_mesh True")
_alone = partial(flag, group="only extract_refined_mesh_with_texture.py")
STANDALONE_SQUARE_SIZE = 10
_STANDALONE = "only extract_refined_mesh_with_texture.py"


def interior_faces(faces: Tensor, iterations: int) -> Tensor:
    """Faces, (F, 3), that are left after rings of border faces were taken off. (F,) bool"""
    keys = edge_keys(faces.cpu().numpy().astype(np.int64))
    keep = np.ones(len(keys), dtype=bool)
    edges = np.unique(keys, return_inverse=True)[1].reshape(keys.shape)
    for _ in range(iterations):
        counts = np.bincount(edges[keep].ravel(), minlength=edges.max(initial=-1) + 1)
        inner = keep & (counts[edges] >= 2).all(axis=1)
        if np.array_equal(inner, keep):
            break
        keep = inner
    return torch.from_numpy(keep).to(faces.device)


def kept_faces(
    faces: Tensor,
    density: FaceDensity,
    iterations: int = ITERATIONS,
    threshold: float = DENSITY_THRESHOLD,
) -> Tensor:
    """Faces, (F, 3), away from the border, and those at it that are dense. (F,) bool"""
    keep = interior_faces(faces, iterations)
    peeled = (~keep).nonzero()[:, 0]
    if len(peeled):
        keep[peeled] = density(peeled) > threshold
    return keep


def face_density(cloud: BoundCloud) -> FaceDensity:
    """Density of mesh-bound Gaussians: the sum over the 16 nearest ones, not clamped."""
    with torch.no_grad():
        gaussians = cloud.activate()
    shape = gaussians.means, gaussians.quats, gaussians.scales, gaussians.opacities

    @torch.no_grad()
    def density(rows: Tensor) -> Tensor:
        parts = [gaussians.opacities[:0]]
        for chunk in rows.split(_CHUNK):
            points = cloud.vertices[cloud.faces[chunk]].mean(dim=1)
            k = min(N_NEIGHBORS, len(gaussians))
            found = nearest_neighbors_of(points.contiguous(), gaussians.means.contiguous(), k)
            parts.append(neighbor_opacities(points, found.indices, *shape).sum(dim=-1))
        return torch.cat(parts)

    return density


SQUARE_SIZE = 8
TEXTURE_SIZE = 8_192


@dataclass(frozen=True, kw_only=True)
class TextureOptions(CaptureOptions):
    """A texture run; the topology of the mesh comes from the refined model itself."""

    refined_model_path: Path = _alone(
        MISSING,
        ".pt of a refinement, or its folder; needed",
        short="-m",
        parse=Path,
        missing="pass the .pt that train_refined.py made",
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
        folder = self.mesh_output_dir or OUTPUT_ROOT / "refined_mesh" / scene_name(self.scene_path)
        model = self.refined_model_path
        name = (model if model.is_dir() else model.resolve().parent).resolve().name
        return folder / f"{name}{'_postprocessed' if self.postprocess_mesh else ''}.obj"

    def identity(self) -> dict[str, Any]:
        size = {"texture_size": self.texture_size} if self.square_size == AUTO else {}
        names = ("postprocess_density_threshold", "postprocess_iterations")
        peeling = {name: getattr(self, name) for name in names} if self.postprocess_mesh else {}
        return {
            **self.capture_identity(),
            "square_size": self.square_size,
            "atlas": self.atlas,
            "source": self.texture_source,
            "depth_tolerance": self.baking.depth_tolerance,
            "cosine_power": self.baking.cosine_power,
            **size,
            "postprocess": self.postprocess_mesh,
            "white_background": self.white_background,
            **peeling,
            **({"lit": True} if self.lit else {}),
        }

    def inputs(self, scene: Scene) -> dict[str, Any]:
        """Digests of what is read; of the photographs only where the colours are theirs."""
        read = scene_inputs(scene, photographs=self.texture_source == "photos")
        return {**read, "refined model": file_digest(self.model)}

    def sources(self) -> dict[str, Any]:
        return {**super().sources(), "refined_model": self.refined_model_path.resolve()}


def extract_textured_mesh(
    options: TextureOptions, console: Console | None = None, images: ImageStore | None = None
) -> Path:
    """Write a refined model as a textured mesh, with a ``.json`` file beside it.

    A complete mesh of the same settings is not made again.
    """
    console = console or Console()
    target = options.obj_path
    if options.atlas == "xatlas":
        atlases.load_xatlas()
    # An OBJ refers to its other files in lines of text, where some names cannot stand.
    if printable(target.stem) != target.stem:
        raise UserError(
            f"{target}: control characters in a name cannot be referred to in an OBJ; rename the "
            "refined model's folder"
        )
    if options.compute.device_reason:
        console.note(options.compute.device_reason)
    model = options.model
    checkpoint, scene = load_views(
        options,
        console.note,
        white_background=options.white_background,
        seed=options.random_seed,
        require_images=options.texture_source == "photos",
    )
    exposures, known = _exposures(options, model, checkpoint, console)
    inputs = {**options.inputs(scene), **known}
    identity = Identity(options.identity(), inputs, options.sources())
    read = functools.cache(partial(_read_model, options, model, console))
    # Read before the output's folder is touched, unless there is a result that makes it needless.
    if not target.exists():
        read()
    # Photographs that are named wrong are told of before the work.
    scale_of(scene.calibrated_cameras, options.placement)
    with alone_with(target, OUTPUT_FLAG):
        files = mesh_files(target, options.export_glb)
        if is_finished(files, identity, options.overwrite, OUTPUT_FLAG):
            console.headline(f"exists already: {target}")
        else:
            remove_stale_temporaries(target.parent)
            with shared_or_own_store(images, options.white_background) as store:
                cloud = read().to(options.compute.device)
                _texture(options, identity, cloud, scene, store, exposures, console)
        if options.placement.wanted:
            how = options.placement, options.export_glb, console.info
            write_placed(target, scene, lambda: read().to_gaussians(), *how, lit=options.lit)
    return target


def face_colors(cloud: BoundCloud) -> Tensor:
    """Mean colour of the Gaussians of each face, without what depends on the view. (F, 3)"""
    colors = sh_to_rgb(cloud.sh_dc[:, 0]).clamp(0, 1)
    return colors.reshape(-1, cloud.per_triangle, 3).mean(dim=1)


def render_source(gaussians: Gaussians, white_background: bool = False) -> ViewSource:
    """Renders of Gaussians without what depends on the view; of objects, without background."""

    def render(camera: Camera) -> Tensor:
        output = render_view(gaussians, camera, white=white_background, geometry=False, sh_degree=0)
        image = torch.nan_to_num(output.image)
        if camera.mask is None or camera.mask.mode != "object":
            return image.clamp(0, 1)
        alpha = torch.nan_to_num(output.alpha)[..., None]
        behind = (1 - alpha) * float(white_background)
        own = ((image - behind) / alpha.clamp_min(MIN_ALPHA)).clamp(0, 1)
        return torch.cat([own, (alpha >= MIN_ALPHA).to(own.dtype)], dim=2)

    return render


def photo_source(
    images: ImageStore, device: torch.device, exposures: Mapping[str, Tensor]
) -> Callable[[Camera], Tensor]:
    """The photographs, and how much each pixel counts; exposures are replaced by the mean one.

    A texture has the colours of the mean photograph then, as the Gaussians have.
    """

    def read(camera: Camera) -> Tensor:
        image = upload(images.get(camera), device)
        counted = is_counted(image)
        colors = image[..., :3].float() / 255
        if camera.name in exposures:
            colors = unexposed(colors, exposures[camera.name].to(device))
            colors = exposed(colors, mean.to(device)).clamp(0, 1)
        if counted is None:
            return functional.pad(colors, (0, 1), value=1.0)
        # A pixel on the outline shows what is behind it, too.
        return torch.cat([colors, eroded(counted, 1)[..., None].float()], dim=2)

    mean = mean_exposure(torch.stack(list(exposures.values()))) if exposures else None
    return read


def _exposures(
    options: TextureOptions, model: Path, checkpoint: ReferenceCheckpoint, console: Console
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Exposures of the refinement, else of the checkpoint; and the digest of their file."""
    if options.texture_source != "photos":
        return {}, {}
    found = saved_exposures((load_payload(model).get("resume") or {}).get("stage", {}))
    path = model if found else checkpoint.ply_path.with_name(reference_layout.EXPOSURE_FILE)
    found = found or reference_layout.read_exposures(path, console.info)
    if found:
        console.info(f"exposures of {path} are taken out of the photographs")
    return found, {"exposures": file_digest(path)} if found else {}


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
    peeling = options.postprocess_iterations, options.postprocess_density_threshold
    keep = kept_faces(cloud.faces, face_density(cloud), *peeling)
    console.info(f"peeled {int((~keep).sum()):,} border triangles off")
    if not keep.any():
        raise UserError(
            f"{path}: no triangle is left after peeling; lower "
            "--postprocess_density_threshold or --postprocess_iterations"
        )
    # All vertices stay.
    rows = keep.repeat_interleave(cloud.per_triangle)
    names = ("sh_dc", "sh_rest", "opacity_logits", "log_scales", "rotations")
    kept = {name: getattr(cloud, name)[rows] for name in names}
    return replace(cloud, faces=cloud.faces[keep], **kept)


@torch.no_grad()
def _texture(
    options: TextureOptions,
    identity: Identity,
    cloud: BoundCloud,
    scene: Scene,
    images: ImageStore,
    exposures: Mapping[str, Tensor],
    console: Console,
) -> None:
    device = cloud.vertices.device
    cameras = scene.train_cameras
    reset_peak(device)
    start = time.monotonic()
    surface = cloud.vertices, cloud.faces
    is_photos = options.texture_source == "photos"
    size = options.square_size
    resolution = Resolution.of(*surface, cameras) if is_photos or size == AUTO else None
    if size == AUTO:
        size = atlases.fitting_square_size(options.atlas, *surface, resolution.best)
        size = min(size, atlases.largest_square_size(len(cloud.faces), options.texture_size))
    atlas = atlases.make_atlas(options.atlas, *surface, size)
    unwrapped = time.monotonic()
    own = face_colors(cloud)
    with console.progress("texture, percent", 1, 100) as progress:

        def on_view(done: int, total: int) -> None:
            progress.update(100 * done // total)

        baker = Baker(*surface, atlas, cameras, options.baking, on_view)
        if is_photos:
            photographs = photo_source(images, device, exposures)
            baked = bake_photographs(baker, photographs, own, resolution)
        else:
            baked = baker.bake(render_source(cloud.activate(), options.white_background), own)
    texture = baked.texture
    if atlas.kind != "squares":
        texture = with_filled_gaps(texture, atlas)
    finished = time.monotonic()
    mesh = TexturedMesh(*surface, atlas.uvs, texture)
    result = {
        "vertices": cloud.vertices.shape[0],
        "faces": atlas.n_faces,
        "views": len(cameras),
        "texture_side": atlas.side,
        "bands": baked.n_bands,
        "atlas": atlas.kind,
        "filled_share": round(atlas.filled_share, 4),
        "seen_texel_share": round(baked.seen_texels / max(1, baked.face_texels), 4),
        "seen_face_share": round(baked.seen_faces / baked.face_count, 4),
        "unwrap_seconds": round(unwrapped - start, 2),
        "seconds": round(finished - start, 2),
        "bake_seconds": round(finished - unwrapped, 2),
        "peak_bytes": memory_usage(device).peak,
    }

    def figures() -> dict[str, Any]:
        return {**result, "write_seconds": round(time.monotonic() - finished, 2)}

    with publish(mesh_files(options.obj_path, options.export_glb), identity, figures) as targets:
        # The OBJ of this folder is laid out as the original's, which has no normals.
        write_mesh_files(targets, mesh, MeshStyle(lit=options.lit))
    console.info(
        f"texture {atlas.side} x {atlas.side}, {100 * result['seen_face_share']:.1f} % of the "
        f"triangles seen ({time.monotonic() - start:.1f} s): {options.obj_path}"
    )


def texture_parser(description: str | None) -> argparse.ArgumentParser:
    square = {"default": STANDALONE_SQUARE_SIZE, "group": _STANDALONE}
    gpu = {"short": "-g", "group": _STANDALONE}
    device = {"group": _STANDALONE}
    return parser_of(description, TextureOptions, square_size=square, gpu=gpu, device=device)
