# SPDX-License-Identifier: Apache-2.0
"""Run the stages of a plan in one process, check their results, and write the report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.reporting.health import FailedResult, problem_of
from gaussian_splatting.engine.reporting.run_report import REPORT_FILE
from gaussian_splatting.formats.placement import TRANSFORM
from gaussian_splatting.scenes.reference_layout import CHECKPOINT_FOLDER
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_capture.convert_options import ConvertOptions
from sugar_extractors.any_mesh import read_any_mesh
from sugar_extractors.export.reading import read_gaussians_in_scene
from sugar_extractors.mesh.extraction import extract_coarse_mesh
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.outputs.result_folder import HandedOut, write_result_folder
from sugar_extractors.outputs.result_page import write_index
from sugar_extractors.placing import PlacementOptions
from sugar_extractors.texture.texturing import TextureOptions, extract_textured_mesh
from sugar_pipeline.pipeline import pipeline_report
from sugar_pipeline.pipeline.input_checks import check_names_of_photographs, check_places
from sugar_pipeline.pipeline.pipeline_report import ReportContent, Summary
from sugar_pipeline.pipeline.pipeline_result import (
    CAMERA_POSES,
    COARSE,
    COARSE_MESH,
    REFINEMENT,
    TEXTURED,
    VANILLA,
    PipelineResult,
    StageRecord,
    dropped_views,
    file_record,
    training_record,
)
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_pipeline.pipeline.run_times import TIMES_FILE, RunTimes
from sugar_pipeline.pipeline.watched_stage import run_watched_stage
from sugar_pipeline.quality import mesh_quality
from sugar_pipeline.quality.grading import MAX_LOSS, Grade, grade_mesh, loses, mesh_health, worst
from sugar_pipeline.quality.mesh_quality import MeshQuality
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh
from sugar_trainers.capture import CaptureOptions, load_views
from sugar_trainers.coarse_run import CoarseOptions
from sugar_trainers.naming import INDEX, LOG, scene_name
from sugar_trainers.refine_run import RefineOptions
from sugar_trainers.stage_options import load_capture
from sugar_utils.command_text import command_text
from sugar_utils.console import Console
from sugar_utils.errors import Notify, OtherSettings, UserError, say_nothing, shortened
from sugar_utils.files import check_writable
from sugar_utils.html import duration_text
from sugar_utils.process_group import ProcessGroup
from sugar_utils.settings import SETTINGS_FILE, changed_flags, write_settings

TITLE = "SuGaR of"  # begins the title of a pipeline's report, not of a single run's
_TITLES = {
    "convert": CAMERA_POSES,
    "vanilla": VANILLA,
    "coarse": COARSE,
    "mesh": COARSE_MESH,
    "refine": REFINEMENT,
    "texture": "texture",
}
_TRAINING_STAGES = ("vanilla", "coarse", "refine")  # those in which all processes take part

Revise = Callable[[str, PipelinePlan, ImageStore], PipelinePlan]


def run_stages(
    plan: PipelinePlan,
    console: Console | None = None,
    revise: Revise | None = None,
    start: float | None = None,
) -> PipelineResult:
    """Run all stages of a plan; finished ones are skipped.

    All stages share one store of decoded photographs. Several processes train together; the first
    alone does the rest while the others wait.

    Args:
        plan: Options of the stages.
        console: Gets the messages; if None, the terminal.
        revise: Called before each stage with its name; returns the plan to go on with.
        start: When the run began, by ``time.monotonic``; None: now.

    Raises:
        FailedResult: The result of a stage is a failure, and the plan does not force the rest.
        UserError: The folder of results could not be written; all stages have their results.
    """
    if start is None:
        start = time.monotonic()
    group = plan.coarse.compute.group
    console = console or (Console() if group.is_first else Console.silent())
    white = plan.coarse.config.white_background
    with group.single_report(), ImageStore(white, sharers=group.size) as images:
        run = _PipelineRun(plan, images, console, start)
        run.run_all(group, revise)
        if group.is_first:
            run.conclude()
            console.close()
        group.barrier()
    failures = [record for record in run.result.records if record.problem]
    first_failure = group.broadcast(failures[0] if failures else None)
    if first_failure is not None and not run.plan.force:
        raise FailedResult(
            f"{first_failure.name}: {first_failure.problem}; what was made is kept, "
            "--force True goes on"
        )
    folder_problem = group.broadcast(run.folder_problem)
    if folder_problem is not None:
        raise UserError(
            f"no folder of results: {folder_problem}; the results of all stages are kept"
        )
    return run.result


class _PipelineRun:
    """One run of a plan: runs the stages in their order, and then writes the results.

    A stage reads the files of the stages before it; ``result`` collects what they made.
    """

    def __init__(
        self, plan: PipelinePlan, images: ImageStore, console: Console, start: float
    ) -> None:
        self.plan = plan
        self.result = PipelineResult()
        # Why the folder of results is not complete; None where it is, or there is none.
        self.folder_problem: str | None = None
        self._images = images
        self._console = console
        self._start = start
        self._times = RunTimes(plan.result_folder / TIMES_FILE)

    def run_all(self, group: ProcessGroup, revise: Revise | None) -> None:
        """Run the stages, up to one that fails unless the plan forces the rest."""
        console = self._console
        for message in self.plan.messages:
            console.note(message)
        check_names_of_photographs(self.plan)
        if self.plan.convert is None:
            check_places(self.plan)
        for number, stage in enumerate(self.plan.stages, start=1):
            stage_start = time.monotonic()
            if revise is not None:
                self.plan = revise(stage, self.plan, self._images)
            title = self._title(stage)
            console.headline(f"stage {number} of {len(self.plan.stages)}: {title}")
            problem = None
            if group.is_first or stage in _TRAINING_STAGES:
                with self._noted_flags(group.is_first):
                    record = self._run_stage(stage)
                if group.is_first:
                    record = self._compared_with_coarse(record)
                    record = self._with_time(record, stage_start)
                    console.headline(_outcome(record))
                self.result.records.append(record)
                problem = record.problem
            if number == 1 and group.is_first:
                # Not before a stage has accepted its inputs: what is refused leaves nothing behind.
                console.open_log(check_writable(self.plan.result_folder) / LOG)
            # What a stage wrote is there before the next one reads it.
            problem = group.broadcast(problem)
            if problem is not None:
                console.warn(f"{title}: {problem}")
                if not self.plan.force:
                    return

    @contextlib.contextmanager
    def _noted_flags(self, is_first: bool) -> Iterator[None]:
        """Note the flags of the run while a stage runs, and name those that have changed.

        A stage that stops in the middle leaves the note, one that refuses its inputs does not.

        Raises:
            OtherSettings: There is a result of other flags, which are named.
        """
        folder = self.plan.result_folder
        is_new = is_first and not (folder / SETTINGS_FILE).is_file()
        fresh_folders = [path for path in (folder, folder.parent) if not path.exists()]
        if is_new:
            write_settings(check_writable(folder), self.plan.flags.given)
        try:
            yield
        except UserError as error:
            if is_new:
                (folder / SETTINGS_FILE).unlink(missing_ok=True)
            for path in fresh_folders:
                # Other files may be in it by now.
                with contextlib.suppress(OSError):
                    path.rmdir()
            if isinstance(error, OtherSettings):
                lines = changed_flags(folder, self.plan.flags.given)
                raise error.in_flags(lines, "--output_dir") from error
            raise
        if is_first:
            write_settings(folder, self.plan.flags.given)

    def _with_time(self, record: StageRecord, stage_start: float) -> StageRecord:
        """Return the record of a stage that has just ended with the time that its result took."""
        result = record.outputs[0]
        if not self.result.records:
            self._times.add("start", stage_start - self._start, result)
        seconds = max(time.monotonic() - stage_start, record.seconds or 0.0)
        return replace(record, seconds=self._times.add(record.name, seconds, result))

    def _title(self, stage: str) -> str:
        title = _TITLES[stage]
        if stage == "coarse":
            return f"{title}, {self.plan.coarse.config.regularization_type}"
        return title

    def _run_stage(self, stage: str) -> StageRecord:
        """Run one stage of the plan."""
        runs = {
            "convert": self._find_cameras,
            "vanilla": self._train_vanilla,
            "coarse": self._train_coarse,
            "mesh": self._extract_mesh,
            "refine": self._refine,
            "texture": self._bake_texture,
        }
        return runs[stage](getattr(self.plan, stage))

    def _find_cameras(self, options: ConvertOptions) -> StageRecord:
        # Most scenes have cameras, and what reads videos is slow to load.
        from sugar_capture.conversion.convert_run import convert

        conversion = convert(options, self._console)
        check_places(self.plan)
        outputs = [conversion.root / "sparse" / "0"]
        if conversion.page is not None:
            outputs.insert(0, conversion.page)
        return StageRecord(
            CAMERA_POSES,
            conversion.seconds,
            conversion.peak_bytes,
            outputs,
            figures=conversion.figures(),
        )

    def _train_vanilla(self, options: VanillaOptions) -> StageRecord:
        ply = run_watched_stage(options, images=self._images, console=self._console)
        return training_record(VANILLA, options.model_path / CHECKPOINT_FOLDER, [ply])

    def _train_coarse(self, options: CoarseOptions) -> StageRecord:
        path = run_watched_stage(options, images=self._images, console=self._console)
        return training_record(self._title("coarse"), path.parent, [path])

    def _extract_mesh(self, options: MeshOptions) -> StageRecord:
        path = extract_coarse_mesh(options, self._console)[0]
        self.result.coarse_mesh = path
        return self._with_mesh_health(file_record(COARSE_MESH, path))

    def _refine(self, options: RefineOptions) -> StageRecord:
        path = run_watched_stage(options, images=self._images, console=self._console)
        self.result.refined = path
        outputs = [path]
        if options.export_ply:
            outputs.append(options.ply_path)
        return training_record(REFINEMENT, path.parent, outputs)

    def _bake_texture(self, options: TextureOptions) -> StageRecord:
        path = extract_textured_mesh(options, self._console, self._images)
        self.result.textured = path
        return self._with_mesh_health(file_record(TEXTURED, path))

    def _with_mesh_health(self, record: StageRecord) -> StageRecord:
        """Add figures of some views of the last mesh, its grade, and the reason."""
        options = self.plan.mesh
        result = self.result
        if options is None or options.bboxmin is not None or result.coarse_mesh is None:
            return record
        _, scene = load_views(options, say_nothing)
        if not all(camera.image_path for camera in scene.train_cameras):
            return record
        if result.textured is not None:
            mesh = read_textured_mesh(result.textured)
        else:
            mesh = read_any_mesh(result.coarse_mesh)
        cameras = scene.test_cameras or scene.train_cameras
        figures = mesh_health(mesh, cameras, self._images.shown)
        return replace(
            record,
            figures={**record.figures, **figures},
            problem=problem_of(figures),
            grade=grade_mesh(figures),
        )

    def _compared_with_coarse(self, record: StageRecord) -> StageRecord:
        """Grade a refinement against the coarse model; other records stay as they are."""
        coarse = self.result.coarse_record
        if record.name != REFINEMENT or coarse is None:
            return record
        loss = loses(record.health, coarse.health)
        if loss <= MAX_LOSS:
            return record
        self.result.splats_are_coarse = True
        reason = (
            f"views are {loss:.1f} dB worse than with the coarse model, whose Gaussians are handed "
            "out instead"
        )
        advice = "more iterations: --refinement_time, -f or --minutes"
        self._console.warn(f"{record.name}: {reason}", advice)
        return replace(record, grade=Grade("poor", reason))

    def conclude(self) -> None:
        """Write the folder of results and the report, measure and grade them, and print them.

        One of them that fails stops none of the others. ``folder_problem`` is kept for the end,
        because that folder is what the run is for; a page about it is not worth an error.
        """
        plan = self.plan
        result = self.result
        console = self._console
        conclusion_start = time.monotonic()
        result.unregistered = _unregistered(plan.coarse.scene_path)
        result.grade = worst(_grades_of_results(result))
        has_failed = any(record.problem for record in result.records)
        if plan.force or not has_failed:
            try:
                result.files = _write_result_folder(plan, result, console.warn)
            except UserError as error:
                self.folder_problem = str(error)
        try:
            result.quality = _measure(plan, result)
        except UserError as error:
            console.warn(f"the mesh is not measured: {error}")
        try:
            result.report = self._write_report(conclusion_start)
            self._times.write()
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

    def _end_of_run(self, conclusion_start: float) -> None:
        """Note how long the run took."""
        seconds = time.monotonic() - conclusion_start
        self._times.add("results", seconds, self.plan.result_folder / TRANSFORM)
        self.result.seconds = self._times.total

    def _write_report(self, conclusion_start: float) -> Path | None:
        """Write the report into the folder of the last training stage, and a copy to the results.

        The run ends when all is there that it shows. None where nothing was trained, or where it
        could not be written.
        """
        result = self.result
        notify = self._console.warn
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
                scene, self._images, gaussians, textured, device, result.splats_title
            ),
            quality=result.quality,
            viewer=viewer if viewer in result.files else None,
        )


def _outcome(record: StageRecord) -> str:
    """One line about a stage that ended: size and time of the result, and its quality."""
    facts = []
    if record.size_text:
        facts.append(record.size_text)
    if record.seconds is not None:
        facts.append(duration_text(record.seconds))
    quality = ""
    if record.problem is not None:
        # A warning of its own gives the reason.
        quality = "; poor"
    elif record.grade is not None:
        quality = f"; {record.grade}"
    if not facts and not quality:
        return f"  {record.name}: ended"
    return f"  {record.name}: {', '.join(facts)}{quality}"


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
    results = HandedOut(
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
