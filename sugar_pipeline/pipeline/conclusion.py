# SPDX-License-Identifier: Apache-2.0
"""The end of a run: the folder of its results, their measures and grades, and the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.reporting.run_report import REPORT_FILE
from gaussian_splatting.formats.placement import TRANSFORM
from sugar_extractors.any_mesh import read_any_mesh
from sugar_extractors.export.reading import read_gaussians_in_scene
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.outputs.result_page import write_index
from sugar_extractors.placing import PlacementOptions
from sugar_pipeline.pipeline import pipeline_report
from sugar_pipeline.pipeline.pipeline_report import ReportContent, Summary
from sugar_pipeline.pipeline.pipeline_result import (
    COARSE_MESH,
    REFINEMENT,
    TEXTURED,
    PipelineResult,
    StageRecord,
    dropped_views,
)
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_pipeline.pipeline.run_times import RunTimes
from sugar_pipeline.quality import mesh_quality
from sugar_pipeline.quality.grading import Grade, worst
from sugar_pipeline.quality.mesh_quality import MeshQuality
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh
from sugar_trainers.capture import CaptureOptions, load_views
from sugar_trainers.naming import INDEX, scene_name
from sugar_trainers.stage_options import load_capture
from sugar_utils.command_text import command_text
from sugar_utils.console import Console
from sugar_utils.errors import Notify, UserError, say_nothing, shortened
from sugar_utils.html import duration_text
from sugar_utils.settings import write_settings

TITLE = "SuGaR of"  # begins the title of a pipeline's report, not of a single run's


@dataclass(frozen=True)
class Conclusion:
    """Everything that follows on the last stage of a run, in the one process that reports."""

    plan: PipelinePlan
    result: PipelineResult
    images: ImageStore
    console: Console
    times: RunTimes

    def run(self) -> str | None:
        """Write the folder of results and the report, measure and grade them, and print them.

        One of them that fails stops none of the others. Why the folder of results is not complete
        is returned, because that folder is what the run is for; a page about it is not worth an
        error. None where it is complete, or there is none.
        """
        plan = self.plan
        result = self.result
        console = self.console
        conclusion_start = time.monotonic()
        folder_problem = None
        result.unregistered = _unregistered(plan.coarse.scene_path)
        result.grade = worst(_grades_of_results(result))
        has_failed = any(record.problem for record in result.records)
        if plan.force or not has_failed:
            try:
                result.files = _write_result_folder(plan, result, console.warn)
            except UserError as error:
                folder_problem = str(error)
        try:
            result.quality = _measure(plan, result)
        except UserError as error:
            console.warn(f"the mesh is not measured: {error}")
        try:
            result.report = self._write_report(conclusion_start)
            self.times.write()
        except UserError as error:
            console.warn(f"no report: {error}")
        page = plan.result_folder / REPORT_FILE
        if result.files and page.is_file():
            result.files.append(page)
        if result.last_run_directory is not None and plan.flags.given:
            write_settings(result.last_run_directory, plan.flags.given)
        files = {
            "mesh": result.coarse_mesh,
            "refined model": result.refined,
            "textured mesh": result.textured,
            "report": result.report,
        }
        for label, path in files.items():
            if path is not None:
                console.info(f"{label}: {path}")
        print_result(result, console, plan.flags.get("minutes"))
        return folder_problem

    def _end_of_run(self, conclusion_start: float) -> None:
        """Note how long the run took."""
        seconds = time.monotonic() - conclusion_start
        self.times.add("results", seconds, self.plan.result_folder / TRANSFORM)
        self.result.seconds = self.times.total

    def _write_report(self, conclusion_start: float) -> Path | None:
        """Write the report into the folder of the last training stage, and a copy to the results.

        The run ends when all is there that it shows. None where nothing was trained, or where it
        could not be written.
        """
        result = self.result
        notify = self.console.warn
        self._end_of_run(conclusion_start)
        directory = result.last_run_directory
        if directory is None:
            return None
        path = directory / REPORT_FILE
        # The same page; its links lead from there.
        copy = self.plan.result_folder / REPORT_FILE if result.files else path
        if all(_is_current(page, result.records) for page in (path, copy)):
            return path
        content = self._report_content()
        self._end_of_run(conclusion_start)
        content = replace(content, seconds=result.seconds)
        scene = scene_name(self.plan.coarse.scene_path)
        title = f"{TITLE} {scene}"
        if copy != path:
            pipeline_report.write_report(copy, title, result.records, content, notify)
        return pipeline_report.write_report(path, title, result.records, content, notify)

    def _report_content(self) -> ReportContent:
        """Gather the report's entries of the stages with results."""
        result = self.result
        # A stage that failed its checks may have ended the pipeline.
        plan = replace(
            self.plan,
            mesh=self.plan.mesh if result.coarse_mesh else None,
            refine=self.plan.refine if result.refined else None,
            texture=self.plan.texture if result.textured else None,
        )
        last = plan.coarse if plan.refine is None else plan.refine
        device = last.compute.device
        _, scene = load_capture(last, say_nothing)
        cameras = scene.test_cameras or scene.train_cameras
        gaussians = None
        if result.splats is not None:
            cloud = read_gaussians_in_scene(result.splats, say_nothing)
            gaussians = cloud.to(device).activate()
        textured = None
        if result.textured is not None:
            textured = read_textured_mesh(result.textured).to(device)
        viewer = plan.result_folder / INDEX
        return ReportContent(
            settings=plan.settings(),
            summary=_summary(plan, result),
            pictures=pipeline_report.mesh_picture_rows(
                cameras, coarse_mesh=result.coarse_mesh, refined=result.refined, device=device
            ),
            comparison=pipeline_report.compare_with_photographs(
                scene, self.images, gaussians, textured, device, result.splats_title
            ),
            quality=result.quality,
            viewer=viewer if viewer in result.files else None,
        )


def print_result(result: PipelineResult, console: Console, minutes: object = None) -> None:
    """Print how long a run took, how good its results are, and where they are.

    Args:
        minutes: That were planned; None without a plan.
    """
    for name, quality in result.quality.items():
        console.headline(
            f"{name} against the known geometry: Chamfer distance {quality.chamfer:.2%} of the "
            f"object's size, F-score at 1 % {quality.f_scores[-1]:.3f}"
        )
    if result.seconds is not None:
        planned = "" if minutes is None else f"; the plan was {minutes:g} minutes"
        console.headline(f"took {duration_text(result.seconds)}{planned}")
    if result.grade is not None:
        console.headline(f"the result is {result.grade}")
    missing = {
        "without a pose": result.unregistered,
        "left out": dropped_views(result.records),
    }
    for words, photographs in missing.items():
        if photographs:
            console.headline(f"{words}: {_named(photographs)}")
    if not result.files:
        return
    names = [path.name for path in result.files]
    console.headline(f"results in {result.folder}: {', '.join(names)}")
    console.headline(f"to look at them: {command_text('view', result.folder)}")


def _named(photographs: Mapping[str, str]) -> str:
    """Name some photographs with their reasons."""
    views = [f"{name} ({reason})" for name, reason in photographs.items()]
    return f"{len(photographs)} photographs: {shortened(views)}"


def _unregistered(scene: Path) -> Mapping[str, str]:
    # What reads videos is slow to load.
    from sugar_capture.conversion.convert_run import unregistered_photographs

    return unregistered_photographs(scene)


def _grades_of_results(result: PipelineResult) -> list[Grade]:
    """Grades of the last mesh, and of the Gaussians in the folder of results."""
    models = [record for record in result.records if record.run_directory is not None]
    if result.splats_are_coarse:
        models = [record for record in models if record.name != REFINEMENT]
    # The textured mesh comes after the coarse one.
    meshes = [record for record in result.records if record.name in (COARSE_MESH, TEXTURED)]
    last_records = [*models[-1:], *meshes[-1:]]
    return [record.grade for record in last_records if record.grade is not None]


def _write_result_folder(plan: PipelinePlan, result: PipelineResult, notify: Notify) -> list[Path]:
    """Copy the results into one folder, under plain names and upright, with a page of them."""
    splats = result.splats
    if splats is None:
        return []
    last = _last_options(plan)
    _, scene = load_views(last, say_nothing)
    if plan.texture is None:
        placement = PlacementOptions()
        writes_glb = True
        is_lit = False
    else:
        placement = plan.texture.placement
        writes_glb = plan.texture.export_glb
        is_lit = plan.texture.lit
    results = FinalResults(
        result.mesh,
        splats,
        partial(read_gaussians_in_scene, splats, say_nothing),
        glb=writes_glb,
        lit=is_lit,
        checkpoint=last.checkpoint_path,
    )
    files = write_result_folder(plan.result_folder, results, scene, placement)
    is_upright = placement.orient in (None, "up")
    index = write_index(plan.result_folder, upright=is_upright, lit=is_lit, notify=notify)
    return files if index is None else [*files, index]


def _last_options(plan: PipelinePlan) -> CaptureOptions:
    """Options of the last stage, which reads the scene as the results have it."""
    return plan.texture or plan.refine or plan.mesh or plan.coarse


def _measure(plan: PipelinePlan, result: PipelineResult) -> dict[str, MeshQuality]:
    """Compare the meshes with the true geometry, where the scene has it."""
    root = plan.coarse.scene_path
    device = plan.coarse.compute.device
    has_reference = (root / mesh_quality.OBJECT_FILE).is_file()
    if not has_reference or result.coarse_mesh is None:
        return {}
    reference = mesh_quality.read_reference(root)
    _, scene = load_views(_last_options(plan), say_nothing)
    reference = reference.moved_back(scene.offset_in_folder(reference.visible_points))
    paths = {"coarse mesh": result.coarse_mesh, "refined mesh": result.refined}
    qualities = {}
    for name, path in paths.items():
        if path is not None:
            mesh = read_any_mesh(path)
            qualities[name] = mesh_quality.compare_surfaces(mesh, reference, device=device)
    return qualities


def _is_current(report: Path, records: Sequence[StageRecord]) -> bool:
    """Whether a report of all stages exists that is newer than their results."""
    if not report.is_file():
        return False
    if f"<title>{TITLE}" not in report.read_text(encoding="utf-8", errors="replace"):
        return False
    report_time = report.stat().st_mtime_ns
    outputs = [path for record in records for path in record.outputs if path.exists()]
    return all(path.stat().st_mtime_ns <= report_time for path in outputs)


def _summary(plan: PipelinePlan, result: PipelineResult) -> Summary:
    notes = []
    for record in result.records:
        is_replaced = record.name == REFINEMENT and result.splats_are_coarse
        if is_replaced and record.grade is not None:
            notes.append(record.grade.reason)
    if result.unregistered:
        notes.append(f"Without a pose: {_named(result.unregistered)}.")
    return Summary(result.grade, notes, result.files, command_text("view", plan.result_folder))
