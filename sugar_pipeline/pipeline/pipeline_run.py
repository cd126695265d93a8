# SPDX-License-Identifier: Apache-2.0
"""Run the stages of a plan in one process, and check their results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.reporting.health import FailedResult, problem_of
from gaussian_splatting.scenes.reference_layout import CHECKPOINT_FOLDER
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_capture.convert_options import ConvertOptions
from sugar_extractors.any_mesh import read_any_mesh
from sugar_extractors.mesh.extraction import extract_coarse_mesh
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.texture.texturing import TextureOptions, extract_textured_mesh
from sugar_pipeline.pipeline.conclusion import Conclusion
from sugar_pipeline.pipeline.input_checks import check_names_of_photographs, check_places
from sugar_pipeline.pipeline.pipeline_result import (
    CAMERA_POSES,
    COARSE,
    COARSE_MESH,
    REFINEMENT,
    TEXTURED,
    VANILLA,
    PipelineResult,
    StageRecord,
    file_record,
    training_record,
)
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_pipeline.pipeline.run_times import TIMES_FILE, RunTimes
from sugar_pipeline.pipeline.watched_stage import run_watched_stage
from sugar_pipeline.quality.grading import MAX_LOSS, Grade, grade_mesh, loses, mesh_health
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh
from sugar_trainers.capture import load_views
from sugar_trainers.coarse_run import CoarseOptions
from sugar_trainers.naming import LOG
from sugar_trainers.refine_run import RefineOptions
from sugar_utils.console import Console
from sugar_utils.errors import OtherSettings, UserError, say_nothing
from sugar_utils.files import check_writable
from sugar_utils.html import duration_text
from sugar_utils.process_group import ProcessGroup
from sugar_utils.settings import SETTINGS_FILE, changed_flags, write_settings

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
    folder_problem = None
    with group.single_report(), ImageStore(white, sharers=group.size) as images:
        run = _PipelineRun(plan, images, console, start)
        run.run_all(group, revise)
        if group.is_first:
            folder_problem = run.conclude()
            console.close()
        group.barrier()
    failures = [record for record in run.result.records if record.problem]
    first_failure = group.broadcast(failures[0] if failures else None)
    if first_failure is not None and not run.plan.force:
        raise FailedResult(
            f"{first_failure.name}: {first_failure.problem}; what was made is kept, "
            "--force True goes on"
        )
    folder_problem = group.broadcast(folder_problem)
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

    def conclude(self) -> str | None:
        """Write, measure and print the results; see :meth:`Conclusion.run`."""
        return Conclusion(self.plan, self.result, self._images, self._console, self._times).run()

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
        path = extract_coarse_mesh(options, self._console, self._images)[0]
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
