# SPDX-License-Identifier: Apache-2.0
"""The table of a benchmark, as Markdown and JSON: our rows, those of others, time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.public.jobs import RESULT_FILE, Result, read_result
from benchmarks.public.layouts import SCENES
from benchmarks.public.published import ALL_SCENES, PUBLISHED
from sugar_utils.files import write_json_atomic, write_text_atomic

MARKDOWN_FILE = "table.md"
JSON_FILE = "table.json"
FIGURES = {
    "dtu": {
        "mean": "Chamfer distance, mm (lower is better)",
        "accuracy": "Accuracy, mm",
        "completeness": "Completeness, mm",
    },
    "tanks": {
        "f_score": "F-score, classic points (higher is better)",
        "precision": "Precision, classic points",
        "recall": "Recall, classic points",
        "f_score_uniform": "F-score, uniform points",
    },
    "mipnerf360": {"psnr": "PSNR, dB", "ssim": "SSIM", "lpips": "LPIPS (VGG)"},
    "synthetic": {"psnr": "PSNR, dB", "ssim": "SSIM", "lpips": "LPIPS (VGG)"},
}
"""Titles of the tables of each benchmark, by figure."""

OURS = "this program"
_NONE = "–"
_MEASURED = "measured here"


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    method: str
    values: Mapping[str, float]  # by scene; a printed mean as ``ALL_SCENES``
    source: str
    time: str

    def mean_of(self, scenes: Sequence[str]) -> float | None:
        """Return the mean over scenes; None without any, or where the row lacks one of them."""
        if not scenes or not all(scene in self.values for scene in scenes):
            return None
        return sum(self.values[scene] for scene in scenes) / len(scenes)


def read_results(out: Path, benchmark: str) -> dict[str, list[Result]]:
    """Read the results in a folder by row, in the order of the scenes."""
    order = SCENES[benchmark]
    rows: dict[str, list[Result]] = {}
    for path in sorted(out.glob(f"*/*/{RESULT_FILE}")):
        result = read_result(path)
        if result.job.benchmark == benchmark:
            rows.setdefault(path.parents[1].name, []).append(result)
    for results in rows.values():
        results.sort(key=lambda result: order.index(result.job.scene))
    return rows


def write_table(out: Path, benchmark: str) -> Path:
    """Write ``table.md`` and ``table.json`` of all results in a folder; return the first."""
    results = read_results(out, benchmark)
    measured = {result.job.scene for row in results.values() for result in row}
    scenes = [scene for scene in SCENES[benchmark] if scene in measured]
    lines = [f"# {benchmark}", ""]
    content = {}
    for figure, title in FIGURES[benchmark].items():
        rows = _rows(benchmark, figure, results)
        lines += [f"## {title}", "", *_figure_table(rows, scenes, figure), ""]
        content[figure] = [vars(row) | {"mean": row.mean_of(scenes)} for row in rows]
    lines += ["## What it took", "", *_cost_table(results)]
    write_text_atomic(out / MARKDOWN_FILE, "\n".join(lines) + "\n")
    runs = {name: msgspec.to_builtins(row) for name, row in results.items()}
    write_json_atomic(out / JSON_FILE, {"benchmark": benchmark, "figures": content, "runs": runs})
    return out / MARKDOWN_FILE


def _rows(benchmark: str, figure: str, results: Mapping[str, list[Result]]) -> list[Row]:
    """Return our rows of a figure, and below them the published ones."""
    rows = []
    for name, row in results.items():
        values = {
            result.job.scene: result.scores[figure] for result in row if figure in result.scores
        }
        minutes = sum(result.trained.seconds for result in row) / 60 / len(row)
        devices = ", ".join(sorted({result.device for result in row}))
        title = OURS if name == OURS else f"{OURS}, {name}"
        rows.append(Row(title, values, _MEASURED, f"{minutes:.1f} min, {devices}"))
    for published in PUBLISHED.get((benchmark, figure), ()):
        rows.append(Row(published.method, published.values, published.source, published.time))
    return rows


def _figure_table(rows: Sequence[Row], scenes: Sequence[str], figure: str) -> list[str]:
    digits = 2 if figure == "psnr" else 3
    head = ["method", *scenes, "mean of these", "printed mean", "time a scene", "source"]
    table = []
    for row in rows:
        numbers = [row.values.get(scene) for scene in scenes]
        numbers += [row.mean_of(scenes), row.values.get(ALL_SCENES)]
        cells = [_NONE if number is None else f"{number:.{digits}f}" for number in numbers]
        table.append([row.method, *cells, row.time or _NONE, row.source])
    return _markdown(head, table)


def _cost_table(results: Mapping[str, list[Result]]) -> list[str]:
    head = ["row", "scene", "minutes", "CPU minutes", "peak GiB", "Gaussians or triangles"]
    head += ["device", "version", "flags", "notes"]
    table = []
    for name, row in results.items():
        for result in row:
            trained = result.trained
            peak = _NONE if trained.peak_gib is None else f"{trained.peak_gib:.2f}"
            times = [f"{trained.seconds / 60:.1f}", f"{result.cpu_seconds / 60:.1f}"]
            facts = [peak, f"{trained.size:,}", result.device, result.version]
            words = " ".join(result.job.flags) or _NONE
            if result.job.minutes is not None:
                words = f"--minutes {result.job.minutes:g} {words}"
            notes = "; ".join(result.notes) or _NONE
            table.append([name, result.job.scene, *times, *facts, words, notes])
    return _markdown(head, table)


def _markdown(head: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] * len(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *table)]
