# SPDX-License-Identifier: Apache-2.0
"""From images or a video to a scene with cameras, step by step; a second call resumes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.data.world_offset import write_offset
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_capture import scene_folder
from sugar_capture.conversion.capture_check import (
    CaptureFinding,
    Directions,
    check_capture,
    direction_map,
)
from sugar_capture.conversion.convert_inputs import ConvertInputs, read_inputs
from sugar_capture.conversion.registration_evidence import collect_evidence
from sugar_capture.conversion.registration_page import (
    CaptureMaps,
    RunFacts,
    camera_map,
    convert_page,
)
from sugar_capture.convert_options import ConvertOptions, SfmOptions
from sugar_capture.features.feature_kinds import kinds_up_to
from sugar_capture.features.photographs import describe_capture
from sugar_capture.known_cameras import KnownCameras
from sugar_capture.registration import mapping
from sugar_capture.registration.capture import Capture
from sugar_capture.registration.mapping import Models
from sugar_capture.registration.plain_steps import plain_steps
from sugar_capture.registration.pose_time import with_features_in_time
from sugar_capture.registration.registration_report import (
    Evidence,
    RegistrationReport,
    registration_of,
)
from sugar_capture.registration.step_list import register_images
from sugar_capture.registration.steps import key_after
from sugar_capture.scene_folder import Original, Work, note
from sugar_utils.console import Console
from sugar_utils.errors import UserError, shortened
from sugar_utils.files import check_writable, exclusive, file_digest, write_json_atomic
from sugar_utils.html import Page, write_page
from sugar_utils.libraries import load_pycolmap
from sugar_utils.recipe import digest_of
from sugar_utils.schemas import Coordinate, Count, read_checked

OUTCOME = "outcome.json"  # results for programs, in the folder of work
_MOST_ADVICE = 2  # lines on the console; the page has all of them


class Outcome(msgspec.Struct):
    """``outcome.json``: the fields that a later call reads."""

    line: str
    registered: Count
    photographs: Count
    points: Count
    reprojection_error: Coordinate
    left_out: dict[str, str] = {}  # reasons by name of a photograph without a pose


@dataclass(frozen=True)
class Converted:
    """The result of :func:`convert`."""

    root: Path  # scene folder
    page: Path | None  # the page about it; None if it could not be written
    outcome: dict[str, Any]  # see ``Outcome``
    seconds: float = 0.0  # 0 where an earlier call had finished
    peak_bytes: int = 0

    def figures(self) -> dict[str, object]:
        """Return the figures that a report of a pipeline shows."""
        n_registered = self.outcome["registered"]
        n_photographs = self.outcome["photographs"]
        return {
            "registered_images": f"{n_registered} of {n_photographs}",
            "points": self.outcome["points"],
            "reprojection_error_px": self.outcome["reprojection_error"],
        }


def convert(options: ConvertOptions, console: Console | None = None) -> Converted:
    """Find the cameras of images or of a video, and write a scene that 3DGS programs read.

    If it is killed at any moment, the same call resumes.

    Args:
        console: None writes to a console of its own, and to a log file in the scene.
    """
    source = scene_folder.find_source(options.source_path)
    scene_folder.require_free(source, options.overwrite)
    check_writable(source.work)
    with exclusive(source.work, "wait for it"), contextlib.ExitStack() as stack:
        open_console = console
        if open_console is None:
            open_console = stack.enter_context(Console(source.work / "log.txt"))
        for message in options.inert.messages:
            open_console.info(message)
        note(source)
        return _convert(Work(source, options, open_console))


def unregistered_photographs(scene: Path) -> dict[str, str]:
    """Return the photographs of a scene without a pose: name to the reason.

    Empty where another program found the cameras.
    """
    path = scene / scene_folder.WORK / OUTCOME
    if not path.is_file():
        return {}
    return read_checked(path, Outcome).get("left_out", {})


def _convert(work: Work) -> Converted:
    source = work.source
    inputs = read_inputs(work)
    if inputs.known is None:
        work = with_features_in_time(work, inputs.photographs)
    cameras_flag = _absolute_cameras_flag(work.options.sfm.cameras)
    note(source, cameras=cameras_flag)
    source_digest = scene_folder.source_digest(source, inputs.mask_folder, cameras_flag)
    capture = _capture_of(work, inputs)
    sfm = work.options.sfm
    # Missing weights are said before anything is computed.
    kinds_up_to(sfm.features, sfm.feature_weights)
    key = _result_key(capture, inputs)
    if work.noted("finished", key) and not work.flat.is_dir():
        outcome = read_checked(source.work / OUTCOME, Outcome)
        work.console.info(f"finished before: {outcome['line']}")
        return Converted(source.root, source.root / scene_folder.PAGE, outcome)
    describe_capture(inputs.photographs, work.console.info)
    registration = None
    if work.options.skip_matching:
        models = _read_finished_models(work, inputs)
    else:
        registration = register_images(
            capture, _is_in_masks(inputs, sfm), _tries_whole(inputs, sfm)
        )
        models = registration.models
    evidence = collect_evidence(capture, models, registration)
    if inputs.known is not None:
        _require_fitting_cameras(inputs.known, evidence)
        evidence = replace(evidence, given=True)
    report = registration_of(evidence)
    by_name = scene_folder.originals(inputs.photographs, inputs.masks)
    _flatten(work, models, by_name, key)
    converted = _report(work, evidence, report, by_name, inputs.known)
    if work.flat.is_dir():
        _publish(work, inputs.mask_folder, finished=key, taken=source_digest)
    _announce(work.console, converted)
    return converted


def _absolute_cameras_flag(flag: str | None) -> str | None:
    """Return the flag ``--cameras`` so that it means the same in another working directory."""
    if flag is None or flag == "none":
        return flag
    return str(Path(flag).resolve())


def _capture_of(work: Work, inputs: ConvertInputs) -> Capture:
    """Return what the steps of the registration are given."""
    files = inputs.file_digests()
    is_one_round = inputs.n_rounds == 1
    return Capture(
        work,
        inputs.photographs,
        masks=inputs.masks,
        content=digest_of(files, *inputs.known_digests),
        masked_content=digest_of(files, inputs.mask_digests(), *inputs.known_digests),
        known=inputs.known,
        of_panoramas=inputs.of_panoramas,
        keeps_focal=is_one_round and _is_in_masks(inputs, work.options.sfm),
    )


def _is_in_masks(inputs: ConvertInputs, sfm: SfmOptions) -> bool:
    """Whether features are those inside of masks."""
    return sfm.masked_features is not False and any(inputs.masks)


def _tries_whole(inputs: ConvertInputs, sfm: SfmOptions) -> bool:
    """Whether whole images are tried where masks leave too little."""
    # The background of a turntable would say that the camera stood still.
    is_allowed = sfm.masked_features == "auto" and inputs.n_rounds == 0
    return is_allowed and _is_in_masks(inputs, sfm)


def _result_key(capture: Capture, inputs: ConvertInputs) -> str:
    """Return a digest of all that the scene depends on."""
    work = capture.work
    sfm = work.options.sfm
    model_keys = []
    if _is_in_masks(inputs, sfm):
        model_keys.append(_models_key(capture, in_masks=True))
    if not model_keys or _tries_whole(inputs, sfm):
        model_keys.append(_models_key(capture, in_masks=False))
    parts: list[Any] = [model_keys, inputs.mask_digests(), work.options.resize]
    if work.options.skip_matching:
        model_files = [p for p in sorted((work.models / "0").glob("*")) if p.is_file()]
        parts.append([file_digest(path) for path in model_files])
    else:
        # Any fixed value will do; with this one, scenes of earlier versions stay finished.
        parts.append(False)
    if sfm.features != "auto" or sfm.feature_weights is not None:
        kinds = kinds_up_to(sfm.features, sfm.feature_weights)
        parts.append([kind.key() for kind in kinds])
    return digest_of(*parts)


def _models_key(capture: Capture, in_masks: bool) -> str:
    """Return a digest of all that the first models depend on."""
    registration = capture.start(in_masks)
    for step in plain_steps("")[:3]:
        registration = replace(registration, key=key_after(step, capture, registration))
    return registration.key


def _read_finished_models(work: Work, inputs: ConvertInputs) -> Models:
    """Read the models that ``--skip_matching`` takes, and check that they are of these images."""
    folder = work.models / "0"
    models = mapping.read_models(work.models) if work.models.is_dir() else Models(None, [])
    model = models.largest
    if model is None:
        raise UserError(f"--skip_matching: no model in {folder}; leave the flag out")
    by_name = {photograph.name: photograph for photograph in inputs.photographs}
    missing = [name for name in models.names if name not in by_name]
    if missing:
        raise UserError(
            f"--skip_matching: {len(missing)} photographs of {folder} are not in "
            f"{work.source.folder} ({missing[0]}, ...); put them there"
        )
    for number in model.reg_image_ids():
        image = model.images[number]
        lens = model.cameras[image.camera_id]
        photograph = by_name[image.name]
        if (lens.width, lens.height) != (photograph.width, photograph.height):
            raise UserError(
                f"--skip_matching: {folder} was made of photographs of {lens.width} x "
                f"{lens.height} px, but {photograph.path} is {photograph.width} x "
                f"{photograph.height} px when upright; use the photographs that it was made of"
            )
    return models


def _require_fitting_cameras(known: KnownCameras, evidence: Evidence) -> None:
    """Raise a ``UserError`` if most images contradict the cameras of another program."""
    n_wrong = len(evidence.contradicting or {})
    if 2 * n_wrong <= len(evidence.names) and evidence.n_points > 0:
        return
    raise UserError(
        f"{known.source.path}: its cameras do not fit the photographs, of which {n_wrong} "
        f"contradict them, with {evidence.n_points} points in common; check that these are the "
        "images that they were computed from, or pass --cameras none"
    )


def _flatten(work: Work, models: Models, by_name: Mapping[str, Original], key: str) -> None:
    """Write undistorted images and their model beside the scene, unless that is noted."""
    if models.largest is None:
        raise ValueError("there is no model to undistort")
    if not work.noted("flattening", key):
        shutil.rmtree(work.flat, ignore_errors=True)
        note(work.source, flattening=key, finished=None)
    if not work.noted("flattened", key):
        with work.step("undistorting photographs", models.n_registered) as advance:
            scene_folder.write_flat_pictures(
                models.largest, by_name, work.flat, work.options.resize, advance
            )
            scene_folder.write_flat_model(work.models / "0", by_name, work.flat)
        note(work.source, flattened=key)


def _publish(work: Work, mask_folder: Path | None, finished: str, taken: str) -> None:
    """Move the results into the scene, and note that the scene is complete."""
    before = work.source
    published = scene_folder.publish(before, work.flat, mask_folder)
    shutil.rmtree(work.flat, ignore_errors=True)
    if published.folder != before.folder:
        work.console.info(
            f"{before.folder}: the photographs as taken are in {published.folder.name}/ now, "
            f"{before.folder.name}/ has undistorted copies"
        )
    note(published, published=True, finished=finished, taken=taken)


def _announce(console: Console, converted: Converted) -> None:
    console.headline(converted.outcome["line"])
    for advice in converted.outcome["advice"][:_MOST_ADVICE]:
        console.headline(f"  what helps: {advice}")
    if converted.page is not None:
        console.info(f"map and details: {converted.page}")


def _report(
    work: Work,
    evidence: Evidence,
    report: RegistrationReport,
    by_name: Mapping[str, Original],
    known: KnownCameras | None,
) -> Converted:
    """Check the capture, and write the page, the offset and ``outcome.json``."""
    root = work.source.root
    scene = work.flat if (work.flat / "sparse" / "0").is_dir() else root
    findings, directions = _check_capture(work, scene)
    if findings:
        report = registration_of(replace(evidence, warnings=len(findings)))

    def page() -> Page:
        # Points of the flat model have the colours of the images.
        model = load_pycolmap().Reconstruction(str(scene / "sparse" / "0"))
        flat_names = [original.flat_name for original in by_name.values()]
        maps = CaptureMaps(camera_map(model, flat_names), direction_map(directions))
        files = {name: original.photograph.path for name, original in by_name.items()}
        run = RunFacts(work.steps, _settings(work.options))
        title = f"Cameras of {root.resolve().name}"
        return convert_page(title, evidence, report, findings, maps, files, run)

    page_path = write_page(root / scene_folder.PAGE, page, work.console.warn)
    outcome = _outcome(work, evidence, report, findings, known)
    offset = known.offset if known is not None else None
    write_offset(root, np.zeros(3) if offset is None else np.array(offset))
    write_json_atomic(root / scene_folder.WORK / OUTCOME, outcome)
    seconds = sum(step.seconds for step in work.steps)
    peak_bytes = max(step.peak_bytes for step in work.steps)
    return Converted(root, page_path, outcome, seconds, peak_bytes)


def _check_capture(work: Work, scene: Path) -> tuple[list[CaptureFinding], Directions]:
    """Check a scene for likely problems, and print warnings."""
    mask_options = work.options.masks
    mask_source = "none" if mask_options.masks == "none" else None
    with work.step("checking views", 1):
        capture = load_scene(
            scene,
            size_rule=VanillaSize(),
            eval_split=False,
            masks=replace(mask_options, masks=mask_source),
            view_options=ViewOptions(),
            notify=lambda line: None,
        )
        findings, directions = check_capture(capture)
    dropped = [f"{name} ({reason})" for name, reason in capture.dropped_views.items()]
    if dropped:
        advice = "training leaves them out; take them again"
        findings.append(CaptureFinding("contradicting photographs", shortened(dropped), advice))
    for finding in findings:
        work.console.warn(f"{finding.what}: {finding.where}", finding.advice)
    return findings, directions


def _settings(options: ConvertOptions) -> dict[str, object]:
    """Return the settings that the page shows."""
    settings = asdict(options.sfm)
    settings["masks"] = options.masks.masks
    settings["random_seed"] = options.random_seed
    return settings


def _outcome(
    work: Work,
    evidence: Evidence,
    report: RegistrationReport,
    findings: list[CaptureFinding],
    known: KnownCameras | None,
) -> dict[str, Any]:
    """Return the content of ``outcome.json``."""
    return {
        "line": report.line(evidence),
        "quality": report.word,
        "photographs": len(evidence.names),
        "registered": report.n_registered,
        "registered_by": dict(evidence.registered_by),
        "left_out": dict(report.left_out),
        "other_models": report.other_models,
        "advice": report.advice,
        "findings": [finding._asdict() for finding in findings],
        "reprojection_error": evidence.error,
        "points": evidence.n_points,
        "track_length": evidence.track_length,
        "cameras": None if known is None else known.source.name,
        "offset": None if known is None else known.offset,
        "steps": [step._asdict() for step in work.steps],
    }
