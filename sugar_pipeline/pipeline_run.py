# SPDX-License-Identifier: Apache-2.0
"""Runs the stages of a plan in one process, checks what they made, and writes the report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gaussian_splatting.data.consistency import check_view_names
from gaussian_splatting.data.depth_maps import NO_DEPTHS
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.observations import ALL_VIEWS
from gaussian_splatting.data.reference_layout import CHECKPOINT_FOLDER
from gaussian_splatting.data.scene import Scene, load_scene
from gaussian_splatting.engine.reporting.health import FailedResult, problem_of
from gaussian_splatting.engine.reporting.run_report import REPORT_FILE
from gaussian_splatting.engine.run_directory import RUN_FILE
from sugar_capture.photographs import described_photographs, output_names
from sugar_capture.scene_folder import DIVISORS, find_source, scene_root
from sugar_extractors import mesh_quality
from sugar_extractors.export.export_run import read_any_gaussians, read_bound_gaussians
from sugar_extractors.mesh.extraction import extract_coarse_mesh
from sugar_extractors.mesh_pictures import read_any_mesh
from sugar_extractors.mesh_quality import MeshQuality
from sugar_extractors.result_folder import LOG, HandedOut, write_result_folder
from sugar_extractors.texture import placed_export as placing
from sugar_extractors.texture.placed_export import PlacementOptions
from sugar_extractors.texture.textured_mesh_io import read_textured_mesh
from sugar_extractors.texture.texturing import extract_textured_mesh
from sugar_pipeline import pipeline_report
from sugar_pipeline.grading import (
    MAX_LOSS,
    Grade,
    grade_mesh,
    grade_model,
    loses,
    mesh_health,
    worst,
)
from sugar_pipeline.pipeline_report import StageRecord, Summary
from sugar_pipeline.plan import STAGES, PipelinePlan
from sugar_trainers.capture import SugarSize, load_views
from sugar_trainers.naming import scene_name
from sugar_trainers.stage_options import load_capture
from sugar_utils.console import Console, duration_text
from sugar_utils.errors import UserError, shortened
from sugar_utils.files import check_writable, require_regular_file
from sugar_utils.process_group import ProcessGroup
from sugar_utils.schemas import ResultNote, RunRecord, read_checked
from sugar_utils.settings import write_settings
from sugar_viewer.live_view import run_watched_stage

TITLE = "SuGaR of"  # begins the title of a pipeline's report, not of a single run's
# Names of stages in messages and reports; that of the coarse stage goes on with its mode.
VANILLA = "vanilla 3DGS"
COARSE = "coarse SuGaR"
COARSE_MESH = "coarse mesh"
REFINEMENT = "refinement"
TEXTURED = "textured mesh"

Revise = Callable[[str, PipelinePlan, ImageStore], PipelinePlan]


@dataclass
class PipelineResult:
    records: list[StageRecord] = field(default_factory=list)
    # Coarse mesh; None where no mesh was wanted, and likewise below.
    coarse_mesh: Path | None = None
    refined: Path | None = None
    textured: Path | None = None
    quality: dict[str, MeshQuality] = field(default_factory=dict)
    report: Path | None = None  # HTML file; None if it could not be written
    # Whether the refinement is worse than what it began with, so that this is handed out.
    splats_are_coarse: bool = False
    # Files of the folder of results, those for people first.
    files: list[Path] = field(default_factory=list)
    grade: Grade | None = None

    @property
    def mesh(self) -> Path | None:
        """The last mesh that was made: the textured one if there is one."""
        return self.textured or self.coarse_mesh


def run_stages(
    plan: PipelinePlan, console: Console | None = None, revise: Revise | None = None
) -> PipelineResult:
    """Run all stages of a plan; what is finished already is not repeated.

    All stages share one store of decoded photographs. Several processes train together; the first
    alone does the rest while the others wait. ``revise`` is called before each stage with its name
    and returns the plan to go on with.
    """
    group = plan.coarse.compute.group
    console = console or (Console() if group.is_first else Console.silent())
    white = plan.coarse.config.white_background
    with group.single_report(), ImageStore(white, sharers=group.size) as images:
        plan, result = _run_stages(plan, images, console, group, revise)
        if group.is_first:
            _conclude(plan, result, images, console)
            console.close()
        group.barrier()
    failed = group.broadcast(next((r for r in result.records if r.problem), None))
    if failed is not None and not plan.force:
        raise FailedResult(
            f"{failed.name}: {failed.problem}; what was made is kept, --force True goes on"
        )
    return result


def _run_stages(
    plan: PipelinePlan,
    images: ImageStore,
    console: Console,
    group: ProcessGroup,
    revise: Revise | None,
) -> tuple[PipelinePlan, PipelineResult]:
    for message in plan.messages:
        console.note(message)
    result = PipelineResult()
    check_names_of_photographs(plan)
    if plan.convert is None:
        check_places(plan)
    stages = [name for name in STAGES if getattr(plan, name) is not None]
    for number, name in enumerate(stages, start=1):
        if revise is not None:
            plan = revise(name, plan, images)
        title, trains, run = _stages(plan, result, images, console)[name]
        console.headline(f"stage {number} of {plan.n_stages}: {title}")
        problem = None
        if trains or group.is_first:
            record = _with_health(run(), plan, result, images)
            if group.is_first:
                record = _compared(record, result, console)
                console.headline(_outcome(record))
            result.records.append(record)
            problem = record.problem
        if number == 1 and group.is_first:
            # Not before a stage has accepted its inputs: what is refused leaves nothing behind.
            console.open_log(check_writable(plan.result_folder) / LOG)
        # What a stage wrote is there before the next one reads it.
        problem = group.broadcast(problem)
        if problem is not None:
            console.warn(f"{title}: {problem}")
            if not plan.force:
                break
    return plan, result


def _outcome(record: StageRecord) -> str:
    """One line about a stage that ended: what it made, in what time, and how good it is."""
    facts = [record.size_text, "" if record.seconds is None else duration_text(record.seconds)]
    made = ", ".join(filter(None, facts))
    grade = "" if record.grade is None else f"; {record.grade}"
    if record.problem is not None:
        # The reason is said in a warning of its own.
        grade = "; poor"
    return f"  {record.name}: {made}{grade}" if made or grade else f"  {record.name}: ended"


def _compared(record: StageRecord, result: PipelineResult, console: Console) -> StageRecord:
    """The record of a refinement, graded against the model that it began with."""
    coarse = next((one for one in result.records if one.name.startswith(COARSE)), None)
    if record.name != REFINEMENT or coarse is None:
        return record
    loss = loses(record.health, coarse.health)
    if loss <= MAX_LOSS:
        return record
    result.splats_are_coarse = True
    reason = (
        f"views are {loss:.1f} dB worse than with the coarse model, whose Gaussians are handed "
        "out instead"
    )
    console.warn(f"{record.name}: {reason}", "more iterations: --refinement_time, -f or --minutes")
    return replace(record, grade=Grade("poor", reason))


def _with_health(
    record: StageRecord, plan: PipelinePlan, result: PipelineResult, images: ImageStore
) -> StageRecord:
    """The record with what is wrong with the result, and the views that were left out."""
    if record.run_directory is not None:
        recorded = read_checked(record.run_directory / RUN_FILE, RunRecord)
        health = recorded.get("health", {})
        return replace(
            record,
            problem=problem_of(health),
            dropped_views=recorded.get("dropped_views", {}),
            health=health,
            grade=grade_model(health, bool(recorded.get("held_out_views"))),
        )
    if result.coarse_mesh is None or plan.mesh.bboxmin is not None:
        return record
    _, scene = load_views(plan.mesh, _silent)
    if not all(camera.image_path for camera in scene.train_cameras):
        return record
    textured = result.textured is not None
    mesh = read_textured_mesh(result.textured) if textured else read_any_mesh(result.coarse_mesh)
    figures = mesh_health(mesh, scene.test_cameras or scene.train_cameras, images.shown)
    return replace(
        record,
        figures={**record.figures, **figures},
        problem=problem_of(figures),
        grade=grade_mesh(figures),
    )


def _conclude(
    plan: PipelinePlan, result: PipelineResult, images: ImageStore, console: Console
) -> None:
    try:
        result.quality = _measure(plan.coarse.scene_path, result, plan.coarse.compute.device)
        result.grade = worst(_grades_of_what_is_handed_out(result))
        if plan.force or not any(record.problem for record in result.records):
            result.files = _write_result_folder(plan, result)
        result.report = _write_report(plan, result, images, console)
    except UserError as error:
        # All results are there; a page about them is not worth an error.
        console.warn(f"no report: {error}")
    trained = [r.run_directory for r in result.records if r.run_directory is not None]
    if trained and plan.given:
        write_settings(trained[-1], plan.given)
    for name, quality in result.quality.items():
        console.headline(
            f"{name} against the known geometry: Chamfer distance {quality.chamfer:.2%} of the "
            f"object's size, F-score at 1 % {quality.f_scores[-1]:.3f}"
        )
    for label, path in (
        ("mesh", result.coarse_mesh),
        ("refined model", result.refined),
        ("textured mesh", result.textured),
        ("report", result.report),
    ):
        if path is not None:
            console.info(f"{label}: {path}")
    _tell_result(result, console)


def _tell_result(result: PipelineResult, console: Console) -> None:
    """Say how good the result is, what was left out, where it is and what shows it."""
    if result.grade is not None:
        console.headline(f"the result is {result.grade}")
    dropped = {name: why for one in result.records for name, why in one.dropped_views.items()}
    if dropped:
        named = shortened([f"{name} ({why})" for name, why in dropped.items()])
        console.headline(f"left out: {len(dropped)} photographs: {named}")
    files = [path.name for path in result.files]
    if result.report is not None and result.report.name not in files:
        files.append(result.report.name)
    if result.files:
        folder = result.files[0].parent
        console.headline(f"results in {folder}: {', '.join(files)}")
        console.headline(f"to look at them: {_show_command(folder)}")


def _show_command(folder: Path) -> str:
    program = "sugar view" if Path(sys.argv[0]).stem == "sugar" else "python view.py"
    return f"{program} {shlex.quote(str(folder))}"


def _grades_of_what_is_handed_out(result: PipelineResult) -> list[Grade]:
    """Grades of the last mesh, and of the Gaussians that are handed out."""
    by_name = {record.name: record for record in result.records}
    models = [record for record in result.records if record.run_directory is not None]
    if result.splats_are_coarse:
        models = [record for record in models if record.name != REFINEMENT]
    meshes = [by_name[name] for name in (COARSE_MESH, TEXTURED) if name in by_name]
    last = [*models[-1:], *meshes[-1:]]
    return [record.grade for record in last if record.grade is not None]


def _write_result_folder(plan: PipelinePlan, result: PipelineResult) -> list[Path]:
    """Copy what is handed out into one folder, under plain names and upright."""
    splats = result.refined
    if splats is None or result.splats_are_coarse:
        coarse = [one for one in result.records if one.name.startswith(COARSE)]
        splats = coarse[0].outputs[0] if coarse else None
    if splats is None:
        return []
    last = plan.texture or plan.refine or plan.mesh or plan.coarse
    _, scene = load_views(last, _silent)
    options = PlacementOptions() if plan.texture is None else plan.texture.placement
    handed_out = HandedOut(
        result.mesh,
        splats,
        partial(read_any_gaussians, splats, _silent),
        glb=plan.texture is None or plan.texture.export_glb,
        lit=plan.texture is not None and plan.texture.lit,
    )
    return write_result_folder(plan.result_folder, handed_out, scene, options)


def _stages(
    plan: PipelinePlan, result: PipelineResult, images: ImageStore, console: Console
) -> dict[str, tuple[str, bool, Callable[[], StageRecord]]]:
    """Title, whether all processes take part, and what to call, by name."""
    coarse_title = f"{COARSE}, {plan.coarse.config.regularization_type}"

    def cameras() -> StageRecord:
        # Most scenes have cameras, and what reads videos is slow to load.
        from sugar_capture.convert_run import convert

        found = convert(plan.convert, console)
        check_places(plan)
        outputs = [path for path in (found.page, found.root / "sparse" / "0") if path is not None]
        return StageRecord(
            "camera positions", found.seconds, found.peak_bytes, outputs, figures=found.figures()
        )

    def vanilla() -> StageRecord:
        ply = run_watched_stage(plan.vanilla, images=images, console=console)
        return training_record(VANILLA, plan.vanilla.model_path / CHECKPOINT_FOLDER, [ply])

    def coarse() -> StageRecord:
        path = run_watched_stage(plan.coarse, images=images, console=console)
        return training_record(coarse_title, path.parent, [path])

    def mesh() -> StageRecord:
        result.coarse_mesh = extract_coarse_mesh(plan.mesh, console)[0]
        return file_record(COARSE_MESH, result.coarse_mesh)

    def refine() -> StageRecord:
        result.refined = run_watched_stage(plan.refine, images=images, console=console)
        outputs = [result.refined, *([plan.refine.ply_path] if plan.refine.export_ply else [])]
        return training_record(REFINEMENT, result.refined.parent, outputs)

    def texture() -> StageRecord:
        result.textured = extract_textured_mesh(plan.texture, console, images)
        return file_record(TEXTURED, result.textured)

    return {
        "convert": ("camera positions", False, cameras),
        "vanilla": (VANILLA, True, vanilla),
        "coarse": (coarse_title, True, coarse),
        "mesh": (COARSE_MESH, False, mesh),
        "refine": (REFINEMENT, True, refine),
        "texture": ("texture", False, texture),
    }


def training_record(name: str, directory: Path, outputs: Sequence[Path]) -> StageRecord:
    recorded: dict[str, Any] = read_checked(directory / RUN_FILE, RunRecord)
    phases = recorded.get("timings", {}).values()
    seconds = sum(phase["seconds"] for phase in phases)
    peak = max((phase["peak_bytes"] for phase in phases), default=0)
    return StageRecord(name, seconds, peak, tuple(outputs), directory)


def file_record(name: str, path: Path) -> StageRecord:
    """Record of a stage that writes its figures beside its result."""
    recorded: dict[str, Any] = read_checked(path.with_suffix(".json"), ResultNote)
    figures = dict(recorded.get("result", {}))
    seconds = figures.pop("seconds", 0.0)
    peak = figures.pop("peak_bytes", 0)
    names = (path.stem, placing.placed_path(path).stem, placing.placed_gaussians(path).stem)
    beside = sorted(p for p in path.parent.iterdir() if p.stem in names and p != path)
    outputs = [path, *(p for p in beside if p.suffix != ".json")]
    return StageRecord(name, seconds, peak, tuple(outputs), figures=figures)


def _measure(scene: Path, result: PipelineResult, device: torch.device) -> dict[str, MeshQuality]:
    if not (scene / mesh_quality.OBJECT_FILE).is_file() or result.coarse_mesh is None:
        return {}
    reference = mesh_quality.read_reference(scene)
    meshes = {"coarse mesh": result.coarse_mesh, "refined mesh": result.refined}
    return {
        name: mesh_quality.compare_surfaces(read_any_mesh(path), reference, device=device)
        for name, path in meshes.items()
        if path is not None
    }


def _is_current(report: Path, records: Sequence[StageRecord]) -> bool:
    """Whether a report of all stages exists that is newer than what they made."""
    if not report.is_file():
        return False
    if f"<title>{TITLE}" not in report.read_text(encoding="utf-8", errors="replace"):
        return False
    outputs = [path for record in records for path in record.outputs if path.exists()]
    return all(path.stat().st_mtime_ns <= report.stat().st_mtime_ns for path in outputs)


def _write_report(
    plan: PipelinePlan, result: PipelineResult, images: ImageStore, console: Console
) -> Path | None:
    """The report lies with the last training stage; it never costs a result."""
    # A stage that failed its checks may have ended the pipeline.
    plan = replace(
        plan,
        mesh=plan.mesh if result.coarse_mesh else None,
        refine=plan.refine if result.refined else None,
        texture=plan.texture if result.textured else None,
    )
    last = plan.coarse if plan.refine is None else plan.refine
    trained = [r.run_directory for r in result.records if r.run_directory is not None]
    if not trained:
        return None
    path = trained[-1] / REPORT_FILE
    if _is_current(path, result.records):
        return path
    _, scene = load_capture(last, _silent)
    cameras = scene.test_cameras or scene.train_cameras
    device = last.compute.device
    textured = None if result.textured is None else read_textured_mesh(result.textured)
    summary = Summary(
        result.grade,
        [str(one.grade.reason) for one in result.records if _is_replaced(one, result)],
        result.files,
        _show_command(plan.result_folder),
    )
    rows = pipeline_report.mesh_picture_rows(
        cameras, coarse_mesh=result.coarse_mesh, refined=result.refined, device=device
    )
    refined = None
    if result.refined is not None:
        refined = read_bound_gaussians(result.refined).to(device).activate_all()
    placed = None if textured is None else textured.to(device)
    comparison = pipeline_report.compare_with_photographs(scene, images, refined, placed, device)
    title = f"{TITLE} {scene_name(last.scene_path)}"
    content: dict[str, Any] = {
        "settings": plan.settings(),
        "comparison": comparison,
        "pictures": rows,
        "quality": result.quality or None,
        "notify": console.warn,
        "model": pipeline_report.model_to_turn(textured, scene, console.warn),
        "summary": summary,
    }
    if result.files:
        # The same page; its links lead from there.
        copy = plan.result_folder / REPORT_FILE
        pipeline_report.write_report(copy, title, result.records, **content)
    return pipeline_report.write_report(path, title, result.records, **content)


def _is_replaced(record: StageRecord, result: PipelineResult) -> bool:
    return record.name == REFINEMENT and result.splats_are_coarse


def check_files_of_flags(plan: PipelinePlan) -> None:
    """Before cameras are looked for: whether files and folders that later stages read are there."""
    vanilla = plan.vanilla
    if plan.convert is None or vanilla is None:
        return
    root = scene_root(plan.convert.source_path)
    if vanilla.init_ply is not None:
        require_regular_file(vanilla.init_ply)
    depths = vanilla.depth_options.depths
    places = [] if depths in (None, NO_DEPTHS.depths) else [root / depths, Path(depths)]
    if places and not any(place.is_dir() for place in places):
        raise UserError(f"--depths {depths}: no such folder, in {root} or by itself")
    # Copies at other sizes are made with the cameras.
    outputs = ("images", *(f"images_{divisor}" for divisor in DIVISORS if plan.convert.resize))
    if vanilla.images not in outputs and not (root / vanilla.images).is_dir():
        raise UserError(f"--images {vanilla.images}: no such folder in {root}")
    cameras = plan.convert.sfm.cameras
    if cameras not in (None, "none") and not Path(cameras).exists():
        raise UserError(f"--cameras {cameras}: no such file or folder; check the path")


def check_names_of_photographs(plan: PipelinePlan) -> None:
    """Before cameras are looked for: whether the photographs that flags name exist at all.

    Those of a video are frames that are not known yet.
    """
    if plan.convert is None:
        return
    source = find_source(plan.convert.source_path)
    distance = None if plan.texture is None else plan.texture.placement.known_distance
    views = () if plan.vanilla is None else plan.vanilla.view_options.keep_views
    if source.video is not None or (distance is None and not set(views) - {ALL_VIEWS}):
        return
    names = list(output_names(described_photographs(source.folder, source.recursive)))
    if plan.texture is not None and distance is not None:
        placing.check_names(plan.texture.placement, names)
    check_view_names(views, names)


def check_places(plan: PipelinePlan) -> None:
    """As soon as there are cameras: whether those that give the scale are among them."""
    if plan.texture is None or plan.texture.placement.known_distance is None:
        return
    scene = _capture(plan)
    placing.scale_of(scene.calibrated_cameras, plan.texture.placement)


def _capture(plan: PipelinePlan) -> Scene:
    """The scene as the texture stage will read it."""
    if plan.vanilla is None:
        return load_views(plan.texture, _silent)[1]
    vanilla = plan.vanilla
    return load_scene(
        vanilla.source_path,
        size_rule=SugarSize(),
        images_dir=vanilla.images,
        masks=vanilla.mask_options,
        view_options=vanilla.view_options,
        notify=_silent,
    )


def _silent(line: str) -> None:
    """What is to be said about the scene its stages say."""
