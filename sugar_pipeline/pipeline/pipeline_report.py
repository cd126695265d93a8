# SPDX-License-Identifier: Apache-2.0
"""The page about a whole pipeline: settings, time, memory and results of each stage.

Photographs are compared with the Gaussians and the textured mesh of the results.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.reporting.evaluation import ImageComparison, to_uint8
from gaussian_splatting.engine.reporting.run_report import add_run_section
from gaussian_splatting.engine.view_sampling import smaller
from gaussian_splatting.rasterization import plain_background, render_view
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.any_mesh import read_any_mesh
from sugar_extractors.outputs.mesh_pictures import pick_views, shaded_views
from sugar_pipeline.pipeline.pipeline_result import StageRecord, dropped_views
from sugar_pipeline.quality.grading import Grade
from sugar_pipeline.quality.mesh_quality import MeshQuality
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, render_textured
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_utils.errors import Notify
from sugar_utils.html import Link, Page, Picture, duration_text, flattened, write_page
from sugar_utils.memory import format_bytes

N_VIEWS = 4
WIDTH = 640  # of the pictures, in pixels
_VIEWER_TITLE = "Turn the mesh and the Gaussians"

_QUALITY_NOTE = (
    "Measured against the true surface of the object; distances in % of its longest side. "
    "Accuracy goes from the mesh to the truth, completeness from what the photographs show of it "
    "to the mesh."
)


@dataclass(frozen=True)
class Summary:
    """The final results of a run, and their quality."""

    grade: Grade | None  # of the whole; None where nothing was measured
    notes: Sequence[str] = ()  # sentences that a user should read
    files: Sequence[Path] = ()  # in the folder of results, in its order
    command: str = ""  # shows them


@dataclass(frozen=True)
class Comparison:
    """Photographs and renders of the same views."""

    title: str
    rows: Mapping[str, Sequence[Picture]]
    coverage: str  # what the mesh does not cover, in a sentence


@dataclass(frozen=True)
class ReportContent:
    """Content of a report besides the stages; None and empty parts are left out."""

    settings: Mapping[str, object] | None = None  # of all stages, nested
    comparison: Comparison | None = None
    # Rows of (H, W, 3) uint8 pictures by caption. Rows of the same views stand above each other, so
    # that they can be compared.
    pictures: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)
    viewer: Path | None = None  # the page that turns mesh and Gaussians, at the top
    quality: Mapping[str, MeshQuality] = field(default_factory=dict)  # by name of the mesh
    summary: Summary | None = None
    seconds: float | None = None  # that the run took; None for the sum of its stages


def write_report(
    path: Path,
    title: str,
    stages: Sequence[StageRecord],
    content: ReportContent,
    notify: Notify,
) -> Path | None:
    """Write the report of a pipeline; None if it cannot be written."""
    return write_page(path, lambda: _page(path.parent, title, stages, content), notify)


def _page(root: Path, title: str, stages: Sequence[StageRecord], content: ReportContent) -> Page:
    """Build the page, whose links lead from the folder ``root``."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    total = content.seconds
    if total is None:
        total = sum(stage.seconds or 0.0 for stage in stages)
    page = Page(title, f"{now}, {duration_text(total)}")
    if content.viewer is not None:
        page.frame(content.viewer, root, _VIEWER_TITLE)
    if content.summary is not None:
        _add_summary(page, content.summary, root)
    _add_health(page, stages)
    _add_stages(page, stages, root)
    if content.quality:
        _add_quality(page, content.quality)
    if content.comparison is not None:
        _add_comparison(page, content.comparison)
    _add_mesh_pictures(page, content.pictures)
    for stage in stages:
        _add_stage(page, stage, root)
    if content.settings:
        page.heading("Settings")
        page.pairs(flattened(content.settings), folded="All settings, defaults included")
    page.heading("Results")
    page.files((output for stage in stages for output in stage.outputs), root)
    return page


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
    for stage in stages:
        if stage.problem:
            page.paragraph(f"Failed: {stage.name}: {stage.problem}", note=True)
    dropped = dropped_views(stages)
    if dropped:
        views = "; ".join(f"{name}: {reason}" for name, reason in dropped.items())
        page.paragraph(f"Left out {len(dropped)} views that contradict the rest: {views}.")
    for stage in stages:
        share = stage.transient_share
        if share:
            page.paragraph(
                f"Left out {share:.1%} of the pixels of the training photographs, which show what "
                "moved or stood in front; they are black in transient_masks, beside the Gaussians "
                "of the vanilla stage, and its log says in how many photographs."
            )


def _add_stages(page: Page, stages: Sequence[StageRecord], root: Path) -> None:
    rows = [
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
    ]
    header = ("stage", "status", "made", "quality", "time", "peak memory", "result")
    page.table(header, rows, text_columns=4)
    outputs = [path for stage in stages for path in stage.outputs]
    missing = [str(path) for path in outputs if not path.exists()]
    if missing:
        page.paragraph(f"Not there: {', '.join(missing)}", note=True)


def _add_quality(page: Page, qualities: Mapping[str, MeshQuality]) -> None:
    page.heading("Geometry")
    page.paragraph(_QUALITY_NOTE)
    columns = [quality.rows() for quality in qualities.values()]
    rows = []
    for cells in zip(*columns, strict=True):
        label = cells[0][0]
        rows.append((label, *(value for _, value in cells)))
    page.table(("", *qualities), rows)


def _add_comparison(page: Page, comparison: Comparison) -> None:
    page.heading(comparison.title)
    page.paragraph(comparison.coverage)
    for caption, row in comparison.rows.items():
        page.heading(caption, 3)
        page.pictures(row)


def _add_mesh_pictures(page: Page, rows: Mapping[str, Sequence[np.ndarray]]) -> None:
    rows = {caption: images for caption, images in rows.items() if images}
    if rows:
        page.heading("The mesh")
    for caption, images in rows.items():
        page.heading(caption, 3)
        page.pictures(
            Picture(image, alt=f"{caption}, view {number}")
            for number, image in enumerate(images, start=1)
        )


def _add_stage(page: Page, stage: StageRecord, root: Path) -> None:
    if stage.run_directory is None and not stage.figures:
        return
    page.heading(f"{stage.name[:1].upper()}{stage.name[1:]}")
    if stage.run_directory is not None:
        add_run_section(page, stage.run_directory, root, stage.figures)
    else:
        page.facts((name.replace("_", " "), value) for name, value in stage.figures.items())


def mesh_picture_rows(
    cameras: Sequence[Camera],
    *,
    coarse_mesh: Path | None,
    refined: Path | None,
    device: torch.device | str = "cpu",
) -> dict[str, list[np.ndarray]]:
    """Render four views of each mesh there is, by title of the row. (H, W, 3) uint8 each"""
    views = pick_views(cameras, N_VIEWS)
    paths = {"Coarse mesh": coarse_mesh, "Refined mesh": refined}
    rows = {}
    for title, path in paths.items():
        if path is not None:
            rows[title] = shaded_views(read_any_mesh(path), views, WIDTH, device=device)
    return rows


@torch.no_grad()
def compare_with_photographs(
    scene: Scene,
    images: ImageStore,
    gaussians: Gaussians | None,
    textured: TexturedMesh | None,
    device: torch.device | str = "cpu",
    title: str = "Refined Gaussians",
) -> Comparison:
    """Compare four photographs with renders of the results.

    They are held-out views, training views where there are none.

    Args:
        scene: Has the cameras.
        images: Has the photographs.
        gaussians: Those of the results, on the device.
        textured: The textured mesh, on the device.
        device: Renders.
        title: Of the Gaussians.
    """
    white = scene.white_background
    background = plain_background(white, torch.device(device))
    photograph_row = []
    gaussian_row = []
    mesh_row = []
    n_covered = 0
    n_counted = 0
    for camera in pick_views(scene.test_cameras or scene.train_cameras, N_VIEWS):
        view, image = smaller(camera, images.shown(camera), WIDTH)
        photograph_row.append(Picture(image[..., :3].numpy(), view.name))
        if gaussians is not None:
            render = render_view(gaussians, view, white=white, geometry=False).image
            assert render is not None
            gaussian_row.append(_render_picture(ImageComparison.of(view, render, image), ""))
        if textured is not None:
            covered = rasterize_triangles(textured.vertices, textured.faces, view).covered
            render = render_textured(textured, view, background, supersampling=2)
            comparison = ImageComparison.of(view, render, image, covered)
            n_covered_here = comparison.n_pixels
            n_counted_here = replace(comparison, covered=None).n_pixels
            share = n_covered_here / max(1, n_counted_here)
            mesh_row.append(_render_picture(comparison, f" on the {share:.0%} that it covers"))
            n_covered += n_covered_here
            n_counted += n_counted_here
    coverage = "No textured mesh was made."
    if n_counted:
        coverage = (
            f"The textured mesh covers {n_covered / n_counted:.0%} of these views; the rest, such "
            "as sky and distant background, is part of the Gaussians alone."
        )
    rows = {
        "Photograph": photograph_row,
        title: gaussian_row,
        "Textured mesh": mesh_row,
    }
    filled_rows = {title: row for title, row in rows.items() if row}
    kind = "Held-out" if scene.test_cameras else "Training"
    return Comparison(f"{kind} views", filled_rows, coverage)


def _render_picture(comparison: ImageComparison, pixels_text: str) -> Picture:
    """Make a picture of a render with its PSNR; ``pixels_text`` says of which pixels."""
    caption = f"{comparison.psnr():.1f} dB{pixels_text}" if comparison.n_pixels else ""
    return Picture(to_uint8(comparison.image).cpu().numpy(), caption)
