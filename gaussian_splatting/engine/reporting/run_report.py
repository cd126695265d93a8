# SPDX-License-Identifier: Apache-2.0
"""The report page of one training run, made from its folder alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaussian_splatting.engine.reporting.view_findings import FITTED, POSED, WORST_FILE
from gaussian_splatting.engine.run_directory import RUN_FILE
from sugar_utils import html
from sugar_utils.errors import Notify, UserError
from sugar_utils.memory import format_bytes
from sugar_utils.schemas import RunRecord, read_checked

REPORT_FILE = "report.html"
_TOTAL = "Loss/loss"
_GROUPS_OF_ITS_OWN = (
    "Loss",
    "LearningRate",
    "Parameters",
    "Memory",
    "Test",
    "Training",
    "Gaussians",
)
"""Curves that the page shows elsewhere; of all others, as those of components, the last value."""
Curves = Mapping[str, list[tuple[float, float]]]  # points of each, (iteration, value)


def write_run_report(run_directory: Path, notify: Notify) -> Path | None:
    """Write ``report.html`` of a run; None, and a message, where it cannot be written."""

    def build() -> html.Page:
        folder = run_directory.resolve()
        page = html.Page(f"Training run {folder.parent.name} / {folder.name}", str(folder))
        add_run_section(page, run_directory, run_directory)
        return page

    return html.write_page(run_directory / REPORT_FILE, build, notify)


def add_run_section(
    page: html.Page, run_directory: Path, root: Path, figures: Mapping[str, object] | None = None
) -> None:
    """Append settings, times, memory, last values, pictures and files of one run.

    What the folder lacks is left out: a run without event files has no values of curves.
    """
    record = _record(run_directory, page)
    curves = read_curves(run_directory / "tensorboard")
    facts = _figures(record, curves)
    for name, value in (figures or {}).items():
        facts.setdefault(name, value)
    page.facts(facts.items())
    if record.get("held_out_note"):
        page.paragraph(f"Held-out views were {record['held_out_note']}.", note=True)
    timings = record.get("timings", {})
    took = [
        (name, html.duration_text(phase["seconds"]), format_bytes(phase["peak_bytes"]))
        for name, phase in timings.items()
    ]
    page.table(("phase", "time", "peak memory"), took)
    if timings and len(list((run_directory / "tensorboard").glob("*tfevents*"))) > 1:
        page.paragraph("This run was continued. What a killed process took is not counted.")
    if curves:
        last_values = [(name, points[-1][1]) for name, points in curves.items()]
        page.pairs(last_values, folded="Last value of each curve")
        page.paragraph(f"TensorBoard shows the curves: tensorboard --logdir {run_directory}")
    pictures = run_directory / "views.png"
    if pictures.is_file():
        caption = "photograph, render, depth (yellow is near, violet far) and normals"
        page.wide_picture(html.Picture(pictures, caption))
    _add_worst(page, record, run_directory)
    chosen = {**record.get("sources", {}), **record.get("settings", {})}
    page.pairs(html.flattened(chosen), folded="Settings of this run")
    files = sorted(p for p in run_directory.iterdir() if p.name != REPORT_FILE)
    page.files((p for p in files if ".tmp-" not in p.name), root, folded="Files of this run")


def read_curves(tensorboard_dir: Path) -> Curves:
    """All scalars of a run's event files, by name: (iteration, value) by rising iteration.

    Where a run was continued, what an earlier process wrote from there on is left out, as in any
    viewer. Empty without files, or where TensorBoard is not installed.
    """
    files = sorted(tensorboard_dir.glob("*tfevents*"))
    return _curves_of(*((file, file.stat().st_size) for file in files)) if files else {}


@functools.lru_cache(maxsize=8)
def _curves_of(*files: tuple[Path, int]) -> Curves:
    """Kept, because the page of a pipeline asks for those of each stage several times."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        # Its classes are made when it is imported.
        from tensorboard.compat.proto.event_pb2 import (
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )
    except ImportError:
        return {}
    curves: dict[str, list[tuple[float, float]]] = {}
    for file, _ in files:
        for event in LegacyEventFileLoader(str(file)).Load():
            if event.session_log.status == SessionLog.START:
                for points in curves.values():
                    points[:] = [point for point in points if point[0] < event.step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    point = float(event.step), value.simple_value
                    curves.setdefault(value.tag, []).append(point)
    return curves


def last_value(curves: Curves, name: str) -> float | None:
    """The last value of a curve; None without one."""
    points = curves.get(name)
    return points[-1][1] if points else None


def _record(run_directory: Path, page: html.Page) -> dict[str, Any]:
    try:
        return read_checked(run_directory / RUN_FILE, RunRecord)
    except UserError as error:
        page.paragraph(str(error), note=True)
        return {}


def _figures(record: Mapping[str, Any], curves: Curves) -> dict[str, object]:
    phases = record.get("timings", {}).values()
    rows: dict[str, object] = {"status": record.get("status")}
    if phases:
        peak = max(phase["peak_bytes"] for phase in phases)
        rows["time"] = html.duration_text(sum(phase["seconds"] for phase in phases))
        rows["peak memory"] = format_bytes(peak)
    if curves.get(_TOTAL):
        rows["last iteration"] = int(curves[_TOTAL][-1][0])
    for label, name, form in (
        ("loss there", _TOTAL, "{:.4f}"),
        ("held-out PSNR", "Test/PSNR", "{:.2f} dB"),
        (f"held-out {FITTED}", f"Test/{FITTED}", "{:.2f} dB"),
        (f"held-out {POSED}", f"Test/{POSED}", "{:.2f} dB"),
        ("training PSNR", "Training/PSNR", "{:.2f} dB"),
        (f"training {FITTED}", f"Training/{FITTED}", "{:.2f} dB"),
        ("held-out SSIM", "Test/SSIM", "{:.4f}"),
        ("held-out PSNR of what masks count", "Test/PSNR_counted", "{:.2f} dB"),
        ("held-out SSIM of what masks count", "Test/SSIM_counted", "{:.4f}"),
        ("Gaussians", "Gaussians/count", "{:,.0f}"),
        ("held-out pixels in floaters", "Test/floaters", "{:.2%}"),
    ):
        value = last_value(curves, name)
        if value is not None:
            rows[label] = form.format(value)
    for name in curves:
        group, _, label = name.partition("/")
        if group not in _GROUPS_OF_ITS_OWN:
            rows[label.replace("_", " ")] = f"{last_value(curves, name):.3g}"
    return rows


def _add_worst(page: html.Page, record: Mapping[str, Any], run_directory: Path) -> None:
    figures = record.get("figures")
    worst = figures.get("worst photographs") if isinstance(figures, dict) else None
    if not isinstance(worst, dict) or not worst:
        return
    named = ", ".join(f"{name} ({value} dB)" for name, value in worst.items())
    page.paragraph(f"Photographs that fit worst, of those measured: {named}.")
    pictures = run_directory / WORST_FILE
    if pictures.is_file():
        page.wide_picture(html.Picture(pictures, "photographs that fit worst, and their renders"))
