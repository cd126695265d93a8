# SPDX-License-Identifier: Apache-2.0
"""The page about a whole pipeline: what was asked, what each stage took and made.

Nothing is rendered here; the caller passes the pictures.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.reporting.run_report import add_run_section, last_value, read_curves
from sugar_extractors.mesh_pictures import (
    pick_views,
    preview_glb,
    read_any_mesh,
    shaded_views,
    textured_views,
)
from sugar_extractors.mesh_quality import MeshQuality
from sugar_extractors.texture.textured_mesh_io import TexturedMesh
from sugar_utils.errors import UserError
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
    """One stage of a pipeline, as it went."""

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

    @property
    def size_text(self) -> str:
        """How many Gaussians and triangles it made."""
        figures = dict(self.figures)
        if self.run_directory is not None and "Gaussians" not in figures:
            count = last_value(read_curves(self.run_directory / "tensorboard"), "Gaussians/count")
            figures["Gaussians"] = None if count is None else int(count)
        counts = ((figures.get(name), word) for name, word in _COUNTED.items())
        return ", ".join(f"{n:,} {word}" for n, word in counts if isinstance(n, int))


def write_report(
    path: Path,
    title: str,
    stages: Sequence[StageRecord],
    *,
    notify: Callable[[str], None],
    settings: Mapping[str, object] | None = None,
    pictures: Mapping[str, Sequence[np.ndarray]] | None = None,
    model: bytes | None = None,
    quality: MeshQuality | Mapping[str, MeshQuality] | None = None,
) -> Path | None:
    """Write the report of a pipeline; None if it cannot be written.

    Args:
        pictures: Rows of (H, W, 3) uint8 pictures by caption. Rows of the same views stand above
            each other, so that they can be compared.
    """

    def build() -> Page:
        now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
        total = sum(stage.seconds or 0.0 for stage in stages)
        page = Page(title, f"{now}, {duration_text(total)}")
        _add_health(page, stages)
        _add_stages(page, stages, path.parent)
        if quality is not None:
            _add_quality(page, quality if isinstance(quality, Mapping) else {"mesh": quality})
        if any((pictures or {}).values()) or model is not None:
            page.heading("The mesh")
        if model is not None:
            page.model(model)
        for caption, row in (pictures or {}).items():
            if row:
                page.heading(caption, 3)
                page.pictures(
                    Picture(image, alt=f"{caption}, view {k}") for k, image in enumerate(row, 1)
                )
        for stage in stages:
            _add_stage(page, stage, path.parent)
        if settings:
            page.heading("Settings")
            page.pairs(flattened(settings), folded="All settings, defaults included")
        page.heading("Results")
        page.files((output for stage in stages for output in stage.outputs), path.parent)
        return page

    return write_page(path, build, notify)


def _add_health(page: Page, stages: Sequence[StageRecord]) -> None:
    failed = [stage for stage in stages if stage.problem]
    for stage in failed:
        page.paragraph(f"Failed: {stage.name}: {stage.problem}", note=True)
    if not failed:
        page.paragraph("No stage failed its checks.")
    dropped = {name: why for stage in stages for name, why in stage.dropped_views.items()}
    if dropped:
        named = "; ".join(f"{name}: {why}" for name, why in dropped.items())
        page.paragraph(f"Left out {len(dropped)} views that contradict the rest: {named}.")


def _add_stages(page: Page, stages: Sequence[StageRecord], root: Path) -> None:
    page.table(
        ("stage", "status", "made", "time", "peak memory", "result"),
        (
            (
                stage.name,
                stage.status,
                stage.size_text or None,
                duration_text(stage.seconds) if stage.seconds else None,
                format_bytes(stage.peak_bytes) if stage.peak_bytes else None,
                Link.to(stage.outputs[0], root) if stage.outputs else None,
            )
            for stage in stages
        ),
        text_columns=3,
    )
    missing = [
        str(output) for stage in stages for output in stage.outputs if not sizes_of([output])
    ]
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


N_VIEWS, WIDTH = 4, 640


def mesh_picture_rows(
    cameras: Sequence[Camera],
    *,
    coarse_mesh: Path | None,
    refined: Path | None,
    textured: TexturedMesh | None,
    white_background: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, list[np.ndarray]]:
    """Four views of each mesh there is, by title of the row. (H, W, 3) uint8 each"""
    views = pick_views(cameras, N_VIEWS)
    rows: dict[str, list[np.ndarray]] = {}
    if coarse_mesh is not None:
        rows["Coarse mesh"] = shaded_views(read_any_mesh(coarse_mesh), views, WIDTH, device=device)
    if refined is not None:
        rows["Refined mesh"] = shaded_views(read_any_mesh(refined), views, WIDTH, device=device)
    if textured is not None:
        rows["Textured mesh, without lighting"] = textured_views(
            textured.to(device), views, WIDTH, white_background
        )
    return rows


def model_to_turn(
    textured: TexturedMesh | None, cameras: Sequence[Camera], notify: Callable[[str], None]
) -> bytes | None:
    """The textured mesh, small and upright, for the report."""
    if textured is None:
        return None
    try:
        return preview_glb(textured, cameras)
    except UserError as error:
        notify(f"the report has no model to turn: {error}")
        return None
