# SPDX-License-Identifier: Apache-2.0
"""The page about a whole pipeline: what was asked, what each stage took and made.

Photographs are compared with the refined Gaussians and the textured mesh.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.components.view_checks import smaller
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.reporting.evaluation import psnr, to_uint8
from gaussian_splatting.engine.reporting.run_report import add_run_section, last_value, read_curves
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.rasterization import plain_background, render_view
from sugar_extractors.mesh_pictures import pick_views, preview_glb, read_any_mesh, shaded_views
from sugar_extractors.mesh_quality import MeshQuality
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, render_textured
from sugar_pipeline.grading import Grade
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_utils.errors import Notify, UserError
from sugar_utils.html import Link, Page, Picture, duration_text, flattened, sizes_of, write_page
from sugar_utils.memory import format_bytes

_COUNTED = {"Gaussians": "Gaussians", "triangles": "triangles", "faces": "triangles"}
"""Figures that say how large a result is, and the word for them."""

_QUALITY_NOTE = (
    "Measured against the true surface of the object; distances in % of its longest side. "
    "Accuracy goes from the mesh to the truth, completeness from what the photographs show of it "
    "to the mesh."
)


@dataclass(frozen=True)
class StageRecord:
    name: str
    # How long it took; None when it was not run because its result was there.
    seconds: float | None = None
    peak_bytes: int | None = None  # most memory in use; None when it was not run
    outputs: Sequence[Path] = ()
    # Folder of a training run; None for a stage that trains nothing.
    run_directory: Path | None = None
    figures: Mapping[str, object] = field(default_factory=dict)
    status: str = "finished"
    problem: str | None = None  # why the result is a failure; None if it is not
    dropped_views: Mapping[str, str] = field(default_factory=dict)
    health: Mapping[str, float] = field(default_factory=dict)  # of a training run's record
    grade: Grade | None = None  # None where nothing was measured

    @property
    def size_text(self) -> str:
        figures = dict(self.figures)
        if self.run_directory is not None and "Gaussians" not in figures:
            count = last_value(read_curves(self.run_directory / "tensorboard"), "Gaussians/count")
            figures["Gaussians"] = None if count is None else int(count)
        counts = ((figures.get(name), word) for name, word in _COUNTED.items())
        return ", ".join(f"{n:,} {word}" for n, word in counts if isinstance(n, int))


@dataclass(frozen=True)
class Summary:
    """The results that a run hands out, and their quality."""

    grade: Grade | None  # of the whole; None where nothing was measured
    notes: Sequence[str] = ()  # sentences that a user should read
    files: Sequence[Path] = ()  # in the folder of results, those for people first
    command: str = ""  # shows them


@dataclass(frozen=True)
class Comparison:
    """Photographs beside renders of the results."""

    title: str
    rows: Mapping[str, Sequence[Picture]]
    coverage: str  # what the mesh does not cover, in a sentence


def write_report(
    path: Path,
    title: str,
    stages: Sequence[StageRecord],
    *,
    notify: Notify,
    settings: Mapping[str, object] | None = None,
    comparison: Comparison | None = None,
    pictures: Mapping[str, Sequence[np.ndarray]] | None = None,
    model: bytes | None = None,
    quality: MeshQuality | Mapping[str, MeshQuality] | None = None,
    summary: Summary | None = None,
) -> Path | None:
    """Write the report of a pipeline; None if it cannot be written.

    Args:
        pictures: Rows of (H, W, 3) uint8 pictures by caption. Rows of the same views stand above
            each other, so that they can be compared.
        model: A GLB to be turned, at the top of the page.
    """

    def build() -> Page:
        now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
        total = sum(stage.seconds or 0.0 for stage in stages)
        page = Page(title, f"{now}, {duration_text(total)}")
        if model is not None:
            page.model(model)
        if summary is not None:
            _add_summary(page, summary, path.parent)
        _add_health(page, stages)
        _add_stages(page, stages, path.parent)
        if quality is not None:
            _add_quality(page, quality if isinstance(quality, Mapping) else {"mesh": quality})
        if comparison is not None:
            page.heading(comparison.title)
            page.paragraph(comparison.coverage)
            for caption, row in comparison.rows.items():
                page.heading(caption, 3)
                page.pictures(row)
        if any((pictures or {}).values()):
            page.heading("The mesh")
        for caption, row in (pictures or {}).items():
            if row:
                page.heading(caption, 3)
                seen = enumerate(row, start=1)
                page.pictures(Picture(image, alt=f"{caption}, view {k}") for k, image in seen)
        for stage in stages:
            _add_stage(page, stage, path.parent)
        if settings:
            page.heading("Settings")
            page.pairs(flattened(settings), folded="All settings, defaults included")
        page.heading("Results")
        page.files((output for stage in stages for output in stage.outputs), path.parent)
        return page

    return write_page(path, build, notify)


def _add_summary(page: Page, summary: Summary, root: Path) -> None:
    if summary.grade is not None:
        word, reason = summary.grade
        page.paragraph(f"The result is {word}: {reason}.", note=word == "poor")
    for line in summary.notes:
        page.paragraph(line, note=True)
    if summary.files:
        page.files(summary.files, root)
        page.paragraph(f"To look at it: {summary.command}")


def _add_health(page: Page, stages: Sequence[StageRecord]) -> None:
    failed = [stage for stage in stages if stage.problem]
    for stage in failed:
        page.paragraph(f"Failed: {stage.name}: {stage.problem}", note=True)
    dropped = {name: why for stage in stages for name, why in stage.dropped_views.items()}
    if dropped:
        named = "; ".join(f"{name}: {why}" for name, why in dropped.items())
        page.paragraph(f"Left out {len(dropped)} views that contradict the rest: {named}.")


def _add_stages(page: Page, stages: Sequence[StageRecord], root: Path) -> None:
    rows = (
        (
            stage.name,
            stage.status,
            stage.size_text or None,
            None if stage.grade is None else str(stage.grade),
            duration_text(stage.seconds) if stage.seconds else None,
            format_bytes(stage.peak_bytes) if stage.peak_bytes else None,
            Link.to(stage.outputs[0], root) if stage.outputs else None,
        )
        for stage in stages
    )
    header = ("stage", "status", "made", "quality", "time", "peak memory", "result")
    page.table(header, rows, text_columns=4)
    missing = [str(path) for stage in stages for path in stage.outputs if not sizes_of([path])]
    if missing:
        page.paragraph(f"Not there: {', '.join(missing)}", note=True)


def _add_quality(page: Page, qualities: Mapping[str, MeshQuality]) -> None:
    page.heading("Geometry")
    page.paragraph(_QUALITY_NOTE)
    columns = [quality.rows() for quality in qualities.values()]
    rows = ((cells[0][0], *(value for _, value in cells)) for cells in zip(*columns, strict=True))
    page.table(("", *qualities), rows)


def _add_stage(page: Page, stage: StageRecord, root: Path) -> None:
    if stage.run_directory is None and not stage.figures:
        return
    page.heading(f"{stage.name[:1].upper()}{stage.name[1:]}")
    if stage.run_directory is not None:
        add_run_section(page, stage.run_directory, root, stage.figures)
    else:
        page.facts((name.replace("_", " "), value) for name, value in stage.figures.items())


N_VIEWS = 4
WIDTH = 640


def mesh_picture_rows(
    cameras: Sequence[Camera],
    *,
    coarse_mesh: Path | None,
    refined: Path | None,
    device: torch.device | str = "cpu",
) -> dict[str, list[np.ndarray]]:
    """Four views of each mesh there is, by title of the row. (H, W, 3) uint8 each"""
    views = pick_views(cameras, N_VIEWS)
    meshes = {"Coarse": coarse_mesh, "Refined": refined}
    return {
        f"{name} mesh": shaded_views(read_any_mesh(path), views, WIDTH, device=device)
        for name, path in meshes.items()
        if path is not None
    }


@torch.no_grad()
def compare_with_photographs(
    scene: Scene,
    images: ImageStore,
    refined: Gaussians | None,
    textured: TexturedMesh | None,
    device: torch.device | str = "cpu",
) -> Comparison:
    """Four held-out views, training views where there are none, and what renders of them differ."""
    white = scene.white_background
    rows = {name: [] for name in ("Photograph", "Refined Gaussians", "Textured mesh")}
    behind = plain_background(white, device)
    covered = shown = 0
    for camera in pick_views(scene.test_cameras or scene.train_cameras, N_VIEWS):
        view, image = smaller(camera, images.shown(camera).cpu(), WIDTH)
        counted = is_counted(image)
        if counted is None:
            counted = torch.ones(image.shape[:2], dtype=torch.bool, device="cpu")
        rows["Photograph"].append(Picture(image[..., :3].numpy(), view.name))

        def add(name: str, render: Tensor, pixels: Tensor, where: str, image=image) -> None:
            value = psnr(render.cpu(), image[..., :3].float() / 255, pixels.double())
            text = f"{min(value, 100.0):.1f} dB{where}" if bool(pixels.any()) else ""
            rows[name].append(Picture(to_uint8(render).cpu().numpy(), text))

        if refined is not None:
            render = render_view(refined, view, white=white, geometry=False).image
            add("Refined Gaussians", render, counted, "")
        if textured is not None:
            hits = rasterize_triangles(textured.vertices, textured.faces, view).covered.cpu()
            render = render_textured(textured, view, behind, supersampling=2)
            share = float((hits & counted).sum() / counted.sum().clamp_min(1))
            add("Textured mesh", render, hits & counted, f" on the {share:.0%} that it covers")
            covered = covered + int((hits & counted).sum())
            shown = shown + int(counted.sum())
    coverage = "No textured mesh was made."
    if shown:
        coverage = (
            f"The textured mesh covers {covered / shown:.0%} of these views; the rest, such as sky "
            "and distant background, is part of the refined Gaussians alone."
        )
    kind = "Held-out" if scene.test_cameras else "Training"
    return Comparison(f"{kind} views", {n: row for n, row in rows.items() if row}, coverage)


def model_to_turn(textured: TexturedMesh | None, scene: Scene, notify: Notify) -> bytes | None:
    """Return the textured mesh for the report, small and as upright as in the folder of results."""
    if textured is None:
        return None
    try:
        return preview_glb(textured, scene.calibrated_cameras, scene.points)
    except UserError as error:
        notify(f"the report has no model to turn: {error}")
        return None
