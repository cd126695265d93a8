# SPDX-License-Identifier: Apache-2.0
"""Measure the file that a person takes away: an exported mesh against held-out photographs.

The mesh is rendered without lighting. A pixel has the mean colour of ``SAMPLES_PER_SIDE`` squared
rays through it; a ray has the bilinear colour of the texture, as the picture file has it (sRGB),
where it first meets a triangle. Covered pixels are those of which every ray meets the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gaussian_splatting.core.cloud import MAX_SH_DEGREE, Gaussians
from gaussian_splatting.core.moved import moved_points
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.data.world_offset import near_offset
from gaussian_splatting.engine.reporting.evaluation import (
    EvaluationResult,
    ImageComparison,
    ViewScore,
)
from gaussian_splatting.formats.placement import Placement, expected_record
from gaussian_splatting.rasterization import plain_background, render_view
from gaussian_splatting.rasterization.compute import Compute, DeviceFlags
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.export.reading import read_gaussians_in_scene
from sugar_extractors.results import capture_of, scene_of
from sugar_pipeline.quality.exported_mesh import ExportedMesh, Shape, read_exported
from sugar_scene.mesh_files.textured_mesh_io import MeshPicture, render_colored, sample_texture
from sugar_trainers import naming
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import scene_name
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import remove_stale_temporaries, write_json_atomic
from sugar_utils.flags import boolean
from sugar_utils.memory import format_bytes
from sugar_utils.settings import flag, made_of

SAMPLES_PER_SIDE = 4  # rays per side of a pixel
SPLITS = ("test", "train")
UNMOVED = "none"  # word for a file that was not moved
_FITTED = "psnr_after_gain_and_offset"
_SCORES = {
    "psnr": "psnr",
    "ssim": "ssim",
    _FITTED: "fitted_psnr",
    "psnr_covered": "counted_psnr",
    "ssim_covered": "counted_ssim",
    f"{_FITTED}_covered": "counted_fitted_psnr",
}
"""Fields of a view's score by their names in the JSON file."""
_flag = partial(flag, group="exported file")
_common_flag = partial(flag, group="metrics")


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """Flags of all that is measured: which photographs, how they are read, where figures go."""

    white_background: bool = _common_flag(False, "render on white")
    exposure_compensation: bool = _common_flag(
        False,
        "also measure PSNR after a gain and an offset per view and channel, as "
        "psnr_after_gain_and_offset",
        parse=boolean,
        nargs="?",
        const=True,
    )
    output_dir: Path = _common_flag(naming.OUTPUT_ROOT, "folder above all results", parse=Path)
    mask_options: MaskOptions = field(default_factory=MaskOptions)
    view_options: ViewOptions = field(default_factory=ViewOptions)
    size: SugarSize = field(default_factory=SugarSize)
    compute: Compute = made_of(DeviceFlags, Compute)


@dataclass(frozen=True, kw_only=True)
class ExportedOptions(ComparisonOptions):
    """Flags of ``metrics.py --exported``: the file and its references."""

    exported: Path = _flag(
        MISSING,
        "measure this exported mesh instead of models: a .glb, an .obj with its files, or a .ply "
        "with vertex colours; -s is needed, other flags of models have no effect",
        parse=Path,
    )
    scene_path: Path | None = _flag(
        None,
        "scene folder, for its cameras and photographs; unset: the one that the record beside the "
        "file names",
        short="-s",
        parse=Path,
        no_effect_when="without --exported",
    )
    checkpoint_path: Path | None = _flag(
        None,
        "vanilla checkpoint whose cameras.json says where the cameras are, and which views are "
        "held out; unset: that of the record, or the cameras of the scene",
        short="-c",
        parse=Path,
        no_effect_when="without --exported",
    )
    split: str = _flag(
        "test",
        "photographs to compare with: test, the held-out ones, or train",
        choices=SPLITS,
        no_effect_when="without --exported",
    )
    exported_transform: str | None = _flag(
        None,
        "JSON file with the matrix from the scene to the file, as an export that moves writes it, "
        "or none for a file that was not moved; unset: the one beside the file",
        parse=str,
        no_effect_when="without --exported",
    )
    exported_gaussians: Path | None = _flag(
        None,
        "also measure these Gaussians, on the same pixels: the .pt or the folder of a refinement, "
        "or a file of Gaussians, which its record brings to the scene",
        parse=Path,
        no_effect_when="without --exported",
    )

    @property
    def result_path(self) -> Path:
        """The JSON file of the figures; each file and split has its own."""
        kind = self.exported.suffix.lower().removeprefix(".")
        name = f"results_exported_{self.exported.stem}_{kind}"
        if self.split != SPLITS[0]:
            name += f"_{self.split}"
        return self.output_dir / naming.METRICS_FOLDER / f"{name}.json"


class MeshRenderer:
    """Renders an exported mesh from cameras of its scene, on one device."""

    def __init__(self, mesh: ExportedMesh, vertices: Tensor, background: Tensor) -> None:
        """Move the mesh to the device of its vertices.

        Args:
            mesh: Faces and colours.
            vertices: In the world of the scene. (V, 3) float32
            background: Colour behind the mesh. (3,)
        """
        device = vertices.device
        self._vertices = vertices
        self._background = background
        self._faces = torch.from_numpy(mesh.faces).to(device)
        self._uvs = torch.from_numpy(mesh.uvs).float().to(device)
        self._colors = torch.from_numpy(mesh.colors).float().to(device) / 255
        self._textures = [torch.from_numpy(texture.copy()).to(device) for texture in mesh.textures]
        self._face_textures = torch.from_numpy(mesh.face_textures).to(device)

    @torch.no_grad()
    def render(self, camera: Camera) -> MeshPicture:
        """Return the picture of a camera; covered are pixels of which every ray meets the mesh."""
        device = self._vertices.device
        size = camera.shape
        image = torch.zeros(*size, 3, device=device)
        hits = torch.zeros(size, dtype=torch.int32, device=device)
        n_rays = SAMPLES_PER_SIDE**2
        for row, column in product(range(SAMPLES_PER_SIDE), repeat=2):
            # Another ray of the same pixel is the middle of the pixel of a shifted camera.
            x = (column + 0.5) / SAMPLES_PER_SIDE - 0.5
            y = (row + 0.5) / SAMPLES_PER_SIDE - 0.5
            shifted = replace(camera, cx=camera.cx - x, cy=camera.cy - y)
            rays = render_colored(
                self._vertices, self._faces, shifted, self._colors_at, self._background
            )
            image += rays.image
            hits += rays.covered
        return MeshPicture(image / n_rays, hits == n_rays)

    def _colors_at(self, faces: Tensor, weights: Tensor) -> Tensor:
        """Return colours of points of the mesh. (P,) rows of faces, (P, 3) -> (P, 3)"""
        corners = self._faces[faces]
        colors = (weights[..., None] * self._colors[corners]).sum(dim=1)
        uvs = (weights[..., None] * self._uvs[corners]).sum(dim=1)
        # A texture repeats beyond its sides.
        is_inside = (uvs >= 0) & (uvs <= 1)
        uvs = torch.where(is_inside, uvs, uvs - uvs.floor())
        textures = self._face_textures[faces]
        for index, texture in enumerate(self._textures):
            is_on = textures == index
            colors[is_on] = sample_texture(texture, uvs[is_on])
        return colors


def measure_exported(options: ExportedOptions, console: Console) -> Path:
    """Measure an exported mesh, print the figures, and write them as JSON.

    Returns:
        The JSON file: scene name to the name of the file to its figures. ``psnr`` and ``ssim`` are
        those of whole pictures, ``psnr_covered`` and ``ssim_covered`` those of pixels that the mesh
        covers: means over the views, in dB. ``gaussians`` has the same of
        ``--exported_gaussians``.

    Raises:
        UserError: A file is missing or unsuitable, or the mesh is in none of the views.
    """
    mesh = read_exported(options.exported)
    placement = _placement_of(options)
    scene = _scene_of(options, console)
    cameras = scene.test_cameras if options.split == "test" else scene.train_cameras
    if not cameras:
        raise UserError(f"{scene.root}: has no {options.split} views; pass another --split")
    remove_stale_temporaries(options.result_path.parent)
    device = options.compute.device
    offset = placement.offset
    if not placement.is_recorded:
        offset = near_offset(mesh.vertices, scene.offset, options.exported, console.info)
    points = moved_points(mesh.vertices - offset, placement.to_scene(scene.offset))
    vertices = torch.from_numpy(points).float().to(device)
    background = plain_background(options.white_background, device)
    renderer = MeshRenderer(mesh, vertices, background)
    gaussians = _read_gaussians(options, scene, console)
    figures = _measure_views(renderer, gaussians, cameras, options)
    if not any(figures.covered_shares):
        raise UserError(
            f"{options.exported}: none of {len(cameras)} {options.split} views shows it, taken as "
            f"{placement.source}; check -s, or say where it stands with --exported_transform"
        )
    shares = figures.covered_shares
    row = {**_means(figures.mesh, shares), **_file_figures(mesh), "frame": placement.source}
    if figures.gaussians is not None:
        row["gaussians"] = _means(figures.gaussians, shares)
    row["views"] = _view_rows(figures)
    name = scene_name(scene.root)
    console.table(f"{options.exported}, {name}:", _table_rows(row, options), headline=True)
    write_json_atomic(options.result_path, {name: {options.exported.name: row}})
    console.info(f"written: {options.result_path}")
    return options.result_path


class _Figures(NamedTuple):
    """Scores of all views, of the pixels that the mesh covers and of whole pictures."""

    mesh: EvaluationResult
    gaussians: EvaluationResult | None  # on the same pixels; None where none are compared
    covered_shares: list[float]  # of the pixels of each view, those that the mesh covers


def _measure_views(
    renderer: MeshRenderer,
    gaussians: Gaussians | None,
    cameras: Sequence[Camera],
    options: ExportedOptions,
) -> _Figures:
    """Compare a mesh, and Gaussians if there are some, with the photographs of cameras."""
    fitted = options.exposure_compensation
    white = options.white_background
    mesh_scores = []
    gaussian_scores = []
    covered_shares = []
    with ImageStore(white) as images:
        for camera in cameras:
            image, covered = renderer.render(camera)
            comparison = ImageComparison.of(camera, image, images.shown(camera), covered)
            mesh_scores.append(ViewScore.of(camera.name, comparison, fitted))
            covered_shares.append(float(covered.double().mean()))
            if gaussians is not None:
                comparison = replace(comparison, image=_gaussian_image(gaussians, camera, white))
                gaussian_scores.append(ViewScore.of(camera.name, comparison, fitted))
    return _Figures(
        EvaluationResult(tuple(mesh_scores)),
        EvaluationResult(tuple(gaussian_scores)) if gaussian_scores else None,
        covered_shares,
    )


def _placement_of(options: ExportedOptions) -> Placement:
    """Return where the file stands.

    Raises:
        UserError: A record is damaged, or the one is missing that a file of its name has.
    """
    path = options.exported
    record_name = options.exported_transform
    if record_name == UNMOVED:
        return Placement.unmoved(path)
    if record_name is not None:
        record = Path(record_name)
        if not record.is_file():
            raise UserError(f"--exported_transform {record_name}: no such file; or pass {UNMOVED}")
        return Placement.of(path, record)
    placement = Placement.of(path)
    expected = expected_record(path)
    if not placement.is_recorded and expected is not None:
        raise UserError(
            f"{path}: no {expected} beside it says where it stands; pass it as "
            f"--exported_transform, or {UNMOVED} for a file that was not moved"
        )
    return placement


def _scene_of(options: ExportedOptions, console: Console) -> Scene:
    """Return the capture that the file was made from."""
    capture = capture_of([options.exported], options.scene_path, options.checkpoint_path)
    if capture.scene is None:
        raise UserError("-s/--scene_path is missing; pass the scene folder of the exported file")
    return scene_of(
        capture,
        options.size,
        console.info,
        white_background=options.white_background,
        masks=options.mask_options,
        view_options=options.view_options,
        require_images=True,
    )


def _read_gaussians(options: ExportedOptions, scene: Scene, console: Console) -> Gaussians | None:
    """Read the Gaussians to measure on the same pixels, in the scene; None without any."""
    path = options.exported_gaussians
    if path is None:
        return None
    if not path.exists():
        raise UserError(f"--exported_gaussians {path}: no such file or folder")
    cloud = read_gaussians_in_scene(path, console.info, scene.offset)
    return cloud.to(options.compute.device).activate()


def _gaussian_image(gaussians: Gaussians, camera: Camera, white: bool) -> Tensor:
    """Return the render of Gaussians. (H, W, 3)"""
    output = render_view(gaussians, camera, white=white, geometry=False, sh_degree=MAX_SH_DEGREE)
    assert output.image is not None
    return output.image


def _means(scores: EvaluationResult, covered_shares: Sequence[float]) -> dict[str, Any]:
    """Return means over the views; those of covered pixels over the views that have some."""
    means: dict[str, Any] = {}
    for key, field_name in _SCORES.items():
        value = scores.mean(field_name)
        if value is not None:
            means[key] = value
    means["covered_share"] = sum(covered_shares) / len(covered_shares)
    means["n_views"] = len(scores.per_view)
    means["n_views_covered"] = sum(view.counted_psnr is not None for view in scores.per_view)
    return means


def _view_rows(figures: _Figures) -> dict[str, dict[str, float | None]]:
    """Return the figures of the mesh in each view, under the names of the JSON file."""
    rows = {}
    for view, share in zip(figures.mesh.per_view, figures.covered_shares, strict=True):
        row: dict[str, float | None] = {"covered_share": share}
        for key, field_name in _SCORES.items():
            row[key] = getattr(view, field_name)
        # Of covered pixels only where it was asked for.
        if row[_FITTED] is None:
            del row[_FITTED]
        del row[f"{_FITTED}_covered"]
        rows[view.name] = row
    return rows


def _file_figures(mesh: ExportedMesh) -> dict[str, Any]:
    """Return the figures of the file that need no photograph."""
    shape = Shape.of(mesh)
    return {
        "triangles": mesh.n_faces,
        "vertices": len(mesh.vertices),
        "positions": shape.positions,
        "open_edges": shape.open_edges,
        "open_edge_share": shape.open_edge_share,
        "components": shape.components,
        "bytes": mesh.n_bytes,
        "files": {path.name: path.stat().st_size for path in mesh.files},
        "textures": [[texture.shape[1], texture.shape[0]] for texture in mesh.textures],
    }


def _table_rows(row: dict[str, Any], options: ExportedOptions) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table on the console."""
    yield from _quality_rows(row, "")
    if "gaussians" in row:
        yield from _quality_rows(row["gaussians"], "Gaussians, ")
    views = f"{row['n_views']} {options.split} views"
    yield "covered", f"{row['covered_share']:.1%} of the pixels of {views}"
    yield "triangles", f"{row['triangles']:,}"
    yield "vertices", f"{row['vertices']:,} at {row['positions']:,} positions"
    yield "open edges", f"{row['open_edges']:,} ({row['open_edge_share']:.2%})"
    yield "components", f"{row['components']:,}"
    yield "size", f"{format_bytes(row['bytes'])} in {', '.join(row['files'])}"
    sizes = [f"{width} x {height}" for width, height in row["textures"]]
    yield "textures", ", ".join(sizes) or "none, vertex colours"
    yield "frame", row["frame"]


def _quality_rows(figures: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of the image quality of a mesh, or of Gaussians."""
    for label, suffix in (("covered pixels", "_covered"), ("whole pictures", "")):
        if f"psnr{suffix}" not in figures:
            continue
        text = f"PSNR {figures[f'psnr{suffix}']:.2f} dB, SSIM {figures[f'ssim{suffix}']:.4f}"
        fitted = figures.get(_FITTED + suffix)
        if fitted is not None:
            text += f", {fitted:.2f} dB after gain and offset"
        yield f"{prefix}{label}", text
