# SPDX-License-Identifier: Apache-2.0
"""Result of a pipeline: a record for each stage, and the files of the whole run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gaussian_splatting.components.transients import SHARE_CURVE
from gaussian_splatting.engine.reporting.health import problem_of
from gaussian_splatting.engine.reporting.run_report import last_value, read_curves
from gaussian_splatting.engine.run_directory import RUN_FILE
from gaussian_splatting.formats.placement import placed_gaussians, placed_path
from sugar_pipeline.quality.grading import Grade, grade_model
from sugar_pipeline.quality.mesh_quality import MeshQuality
from sugar_utils.html import duration_text
from sugar_utils.schemas import ResultNote, RunRecord, read_checked

# Names of stages in messages and reports; that of the coarse stage goes on with its mode.
CAMERA_POSES = "camera positions"
VANILLA = "vanilla 3DGS"
COARSE = "coarse SuGaR"
COARSE_MESH = "coarse mesh"
REFINEMENT = "refinement"
TEXTURED = "textured mesh"

_COUNT_WORDS = {"Gaussians": "Gaussians", "triangles": "triangles", "faces": "triangles"}
"""Figures that say how large a result is, and the word for them."""


@dataclass(frozen=True)
class StageRecord:
    """One stage of a run: its time and memory, its files, and the quality of its result."""

    name: str
    seconds: float | None = None  # None where it was not run because its result was there
    peak_bytes: int | None = None  # most memory in use; None where it was not run
    outputs: Sequence[Path] = ()
    run_directory: Path | None = None  # of a training stage; None for the others
    figures: Mapping[str, object] = field(default_factory=dict)
    status: str = "finished"
    problem: str | None = None  # why the result is a failure; None if it is not
    dropped_views: Mapping[str, str] = field(default_factory=dict)  # reasons by name of a view
    health: Mapping[str, float] = field(default_factory=dict)  # of a training run's record
    grade: Grade | None = None  # None where nothing was measured

    @property
    def size_text(self) -> str:
        """Numbers of Gaussians and triangles in words, such as ``23,078 Gaussians``."""
        figures = dict(self.figures)
        if self.run_directory is not None and "Gaussians" not in figures:
            curves = read_curves(self.run_directory / "tensorboard")
            n_gaussians = last_value(curves, "Gaussians/count")
            if n_gaussians is not None:
                figures["Gaussians"] = int(n_gaussians)
        counts = []
        for name, word in _COUNT_WORDS.items():
            count = figures.get(name)
            if isinstance(count, int):
                counts.append(f"{count:,} {word}")
        return ", ".join(counts)

    @property
    def transient_share(self) -> float | None:
        """Share of all pixels that a training left out as transient; None where it found none."""
        if self.run_directory is None:
            return None
        return last_value(read_curves(self.run_directory / "tensorboard"), SHARE_CURVE)


def dropped_views(records: Iterable[StageRecord]) -> dict[str, str]:
    """Return the views that any stage left out: name to the reason of the last one."""
    dropped: dict[str, str] = {}
    for record in records:
        dropped.update(record.dropped_views)
    return dropped


@dataclass(repr=False)
class PipelineResult:
    """Files and figures of a run, filled stage by stage; None until then."""

    records: list[StageRecord] = field(default_factory=list)
    coarse_mesh: Path | None = None  # PLY
    refined: Path | None = None  # ``.pt`` of the refined model
    textured: Path | None = None  # OBJ
    quality: dict[str, MeshQuality] = field(default_factory=dict)  # by name of the mesh
    report: Path | None = None  # HTML file
    # Whether the refined model is worse than the coarse one, whose Gaussians become the result.
    splats_are_coarse: bool = False
    files: list[Path] = field(default_factory=list)  # of the folder of results, the mesh first
    # Photographs that have no pose, so that no stage saw them: name to the reason.
    unregistered: Mapping[str, str] = field(default_factory=dict)
    grade: Grade | None = None
    seconds: float | None = None  # that the run took, in all its processes

    def __repr__(self) -> str:
        """Return one line: where the results are, which there are, and how good they are."""
        where = "nothing was made" if self.folder is None else str(self.folder)
        facts = [path.name for path in self.files]
        if self.grade is not None:
            facts.append(self.grade.word)
        if self.seconds is not None:
            facts.append(duration_text(self.seconds))
        return f"<{type(self).__name__} {where}: {', '.join(facts)}>"

    @property
    def folder(self) -> Path | None:
        """The folder of results; None where none was written."""
        return self.files[0].parent if self.files else None

    @property
    def mesh(self) -> Path | None:
        """The last mesh that was made: the textured one if there is one."""
        return self.textured or self.coarse_mesh

    @property
    def coarse_record(self) -> StageRecord | None:
        """The record of the coarse training stage; None where it did not run."""
        records = [record for record in self.records if record.name.startswith(COARSE)]
        return records[0] if records else None

    @property
    def splats(self) -> Path | None:
        """The ``.pt`` of the Gaussians among the results; None where there are none."""
        if self.refined is not None and not self.splats_are_coarse:
            return self.refined
        coarse = self.coarse_record
        return None if coarse is None else coarse.outputs[0]

    @property
    def splats_title(self) -> str:
        """Title of pictures of these Gaussians."""
        return "Refined Gaussians" if self.splats == self.refined else "Coarse Gaussians"

    @property
    def last_run_directory(self) -> Path | None:
        """Folder of the last training stage; None where nothing was trained."""
        directories = [one.run_directory for one in self.records if one.run_directory is not None]
        return directories[-1] if directories else None


def training_record(name: str, directory: Path, outputs: Sequence[Path]) -> StageRecord:
    """Make the record of a training stage from the ``run.json`` of its folder."""
    run = read_checked(directory / RUN_FILE, RunRecord)
    phases = run.get("timings", {}).values()
    health = run.get("health", {})
    has_held_out_views = bool(run.get("held_out_views"))
    return StageRecord(
        name,
        seconds=sum(phase["seconds"] for phase in phases),
        peak_bytes=max((phase["peak_bytes"] for phase in phases), default=0),
        outputs=tuple(outputs),
        run_directory=directory,
        problem=problem_of(health),
        dropped_views=run.get("dropped_views", {}),
        health=health,
        grade=grade_model(health, has_held_out_views),
    )


def file_record(name: str, path: Path) -> StageRecord:
    """Make the record of a stage that writes a JSON file with its figures next to its result."""
    note = read_checked(path.with_suffix(".json"), ResultNote)
    figures = dict(note.get("result", {}))
    seconds = figures.pop("seconds", 0.0)
    peak_bytes = figures.pop("peak_bytes", 0)
    stems = (path.stem, placed_path(path).stem, placed_gaussians(path).stem)
    siblings = sorted(p for p in path.parent.iterdir() if p.stem in stems and p != path)
    outputs = [path, *(sibling for sibling in siblings if sibling.suffix != ".json")]
    return StageRecord(name, seconds, peak_bytes, tuple(outputs), figures=figures)
