# SPDX-License-Identifier: Apache-2.0
"""A page about extracted meshes: figures, shaded views, settings and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.reporting.run_report import REPORT_FILE
from sugar_extractors.mesh.extraction import extract_coarse_mesh
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.quality.mesh_pictures import (
    pick_views,
    preview_glb,
    read_any_mesh,
    shaded_views,
    textured_views,
)
from sugar_extractors.texture.textured_mesh_io import read_textured_mesh
from sugar_extractors.texture.texturing import TextureOptions, extract_textured_mesh
from sugar_trainers.capture import CaptureOptions, load_views
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.html import (
    PICTURE_WIDTH,
    Page,
    Picture,
    duration_text,
    flattened,
    write_page,
)
from sugar_utils.memory import format_bytes
from sugar_utils.schemas import ResultNote, read_checked

_INSIDE_NOTE = "Brown is a surface seen from its inner side."


def extract_and_report(options: MeshOptions, console: Console | None = None) -> list[Path]:
    """Extract meshes and write ``report.html`` beside them."""
    console = console or Console()
    paths = extract_coarse_mesh(options, console)
    _report(options, paths, console)
    return paths


def texture_and_report(options: TextureOptions, console: Console | None = None) -> Path:
    """Bake a textured mesh and write ``report.html`` beside it."""
    console = console or Console()
    path = extract_textured_mesh(options, console)
    _report(options, [path], console)
    return path


def _report(options: CaptureOptions, paths: Sequence[Path], console: Console) -> None:
    try:
        _, scene = load_views(options, lambda _: None)
    except UserError as error:
        # Meshes of an earlier run are still there when their scene is not.
        console.warn(f"no report: {error}")
        return
    report = write_mesh_report(paths[0].parent, paths, scene.train_cameras, console.warn)
    if report is not None:
        console.info(f"report: {report}")


def write_mesh_report(
    directory: Path,
    mesh_paths: Sequence[Path],
    cameras: Sequence[Camera],
    notify: Callable[[str], None],
) -> Path | None:
    """Write ``report.html`` about some meshes.

    Args:
        mesh_paths: Meshes, each with its ``.json`` beside it (left out where there is none).
        cameras: Views to picture them from; four that differ are taken.

    Returns:
        The file, or None.
    """

    def build() -> Page:
        page = Page(f"Meshes of {directory.resolve().name}", str(directory.resolve()))
        page.paragraph(_INSIDE_NOTE)
        views = pick_views(cameras)
        for path in mesh_paths:
            page.heading(path.name)
            _add_mesh(page, path, views, cameras)
        page.heading("Files")
        notes = (path.with_suffix(".json") for path in mesh_paths)
        page.files([*mesh_paths, *notes], directory)
        return page

    return write_page(directory / REPORT_FILE, build, notify)


def mesh_note(path: Path) -> dict[str, Any]:
    """What the ``.json`` beside a mesh says; empty where there is none."""
    note = path.with_suffix(".json")
    try:
        return read_checked(note, ResultNote) if note.is_file() else {}
    except UserError:
        return {}


def _add_mesh(page: Page, path: Path, views: Sequence[Camera], cameras: Sequence[Camera]) -> None:
    note = mesh_note(path)
    page.facts(_fact(name, value) for name, value in note.get("result", {}).items())
    pictures = shaded_views(read_any_mesh(path), views, PICTURE_WIDTH)
    page.pictures(
        Picture(image, camera.name) for image, camera in zip(pictures, views, strict=True)
    )
    if path.suffix == ".obj":
        mesh = read_textured_mesh(path)
        textured = textured_views(mesh, views, PICTURE_WIDTH)
        page.pictures(
            Picture(image, camera.name) for image, camera in zip(textured, views, strict=True)
        )
        page.model(preview_glb(mesh, cameras))
    chosen = {**note.get("sources", {}), **note.get("settings", {})}
    page.pairs(flattened(chosen), folded="Settings of this mesh")


def _fact(name: str, value: object) -> tuple[str, object]:
    if name.endswith("_bytes") and isinstance(value, int):
        return name.removesuffix("_bytes").replace("_", " ") + " memory", format_bytes(value)
    if name.endswith("seconds") and isinstance(value, int | float):
        name = name.removesuffix("seconds").rstrip("_") or "time"
        return name.replace("_", " "), duration_text(value)
    return name.replace("_", " "), value
