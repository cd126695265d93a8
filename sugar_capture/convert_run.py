# SPDX-License-Identifier: Apache-2.0
"""From photographs or a video to a scene with cameras, step by step; a second call goes on."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gaussian_splatting.data.cameras import Camera, ViewMask
from gaussian_splatting.data.consistency import sharpness
from gaussian_splatting.data.masks import FOLDERS as MASK_FOLDERS
from gaussian_splatting.data.masks import with_masks
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.data.scene import VanillaSize, load_scene
from gaussian_splatting.data.world_offset import write_offset
from sugar_capture import mapping, matching, panoramas
from sugar_capture import photographs as pictures
from sugar_capture import registration_report as report
from sugar_capture import scene_folder as scene
from sugar_capture.capture_check import (
    CaptureFinding,
    Directions,
    check_capture,
    direction_map,
)
from sugar_capture.convert_options import ConvertOptions
from sugar_capture.known_cameras import KnownCameras, read_cameras, the_cameras
from sugar_capture.mapping import Models
from sugar_capture.photographs import Photograph
from sugar_capture.scene_folder import Original, Work, digest, note
from sugar_capture.turntable import write_turntable_masks
from sugar_utils import files as storage
from sugar_utils.console import Console
from sugar_utils.errors import UserError, shortened
from sugar_utils.html import Page, write_page
from sugar_utils.libraries import load_pycolmap
from sugar_utils.schemas import Coordinate, Count, read_checked

Photographs = Sequence[Photograph]

_MOST_ADVICE = 2  # lines on the console; the page has all of them
OUTCOME = "outcome.json"  # what came out, for programs, in the folder of work
_SHARPNESS_SIDE = 800
_FEWEST = 3


@dataclass(frozen=True)
class Attempt:
    """One way to find the cameras; its files and notes bear a prefix of its own."""

    work: Work
    photographs: Photographs
    # Of each; only where they count features are looked for. None: everywhere.
    masks: Sequence[ViewMask | None] | None
    content: str
    known: KnownCameras | None = None
    of_panoramas: bool = False  # whether the photographs are views of panoramas
    keeps_focal: bool = False  # a circle of cameras does not tell it

    @property
    def prefix(self) -> str:
        return "" if self.masks is None else "masked_"

    @property
    def database(self) -> Path:
        return self.work.source.work / f"{self.prefix}database.db"

    @property
    def models(self) -> Path:
        return self.work.source.work / f"{self.prefix}sparse"

    @property
    def where(self) -> str:
        return "" if self.masks is None else " in the masks"

    @property
    def matcher(self) -> str:
        in_order = self.work.source.video is not None
        asked = self.work.options.sfm.matcher
        return matching.chosen_matcher(asked, len(self.photographs), in_order)

    @property
    def mapper(self) -> str:
        return mapping.chosen_mapper(self.work.options.sfm.mapper, len(self.photographs))

    def keys(self) -> dict[str, str]:
        """What each step's result depends on."""
        sfm = self.work.options.sfm
        seed = self.work.options.random_seed
        features = digest(self.content, sfm.camera, sfm.extraction_size, sfm.max_features)
        matches = digest(features, self.matcher, seed)
        models = digest(matches, self.mapper, seed, self.keeps_focal)
        return {"features": features, "matches": matches, "models": models}

    def noted(self, step: str, key: str) -> bool:
        return self.work.noted(f"{self.prefix}{step}", key)

    def note(self, **steps: str | None) -> None:
        note(self.work.source, **{f"{self.prefix}{step}": key for step, key in steps.items()})

    def run(self) -> Models:
        with matching.database_errors(self.database):
            _find_features(self)
            _match(self)
            return _map(self)


def find_cameras(attempts: Sequence[Attempt]) -> tuple[Models, Attempt]:
    """Try the first way, and the second one if that leaves photographs out that this one places."""
    found = attempts[0]
    work = attempts[0].work
    n = len(attempts[0].photographs)
    pycolmap = load_pycolmap()
    if found.mapper == "global" and not hasattr(pycolmap, "global_mapping"):
        raise UserError(
            f"--mapper global: pycolmap {pycolmap.__version__} has none; use --mapper incremental"
        )
    models = found.run()
    if models.n_placed < report.FINE_SHARE * n and len(attempts) > 1:
        say = work.console.info
        placed = models.n_placed
        say(f"{placed} of {n} photographs are registered inside the masks: trying whole ones")
        second = attempts[1].run()
        # A narrow path: the cameras hardly moved, as where an object turned before a background.
        if second.n_placed > placed and report.model_facts(second.largest)[1] >= report.NARROW:
            models = second
            found = attempts[1]
            now = second.n_placed
            say(f"{now} of {n} whole photographs are registered: these poses are taken")
        else:
            say("no more whole photographs are registered: poses from inside the masks are taken")
    if found.models != work.models:
        # Where programs look for them.
        with storage.replaced_folder(work.models) as fresh:
            shutil.copytree(found.models, fresh)
            note(work.source, models=None)
    return models, found


def _find_features(attempt: Attempt) -> None:
    sfm = attempt.work.options.sfm
    key = attempt.keys()["features"]
    photographs = attempt.photographs
    noted = attempt.noted("features", key)
    if not noted or not matching.is_whole(attempt.database, len(photographs)):
        if noted:
            attempt.work.console.info(f"note: {attempt.database} is missing or damaged; made anew")
        for path in attempt.database.parent.glob(f"{attempt.database.name}*"):
            path.unlink()
        lenses = attempt.known and attempt.known.lens_groups()
        rigs = panoramas.rigs_of(photographs) if attempt.of_panoramas else None
        matching.create_database(attempt.database, photographs, sfm.camera, lenses, rigs)
        attempt.note(features=key, found=None, matches=None, matched=None)
    if attempt.noted("found", key):
        return
    masks = attempt.masks or [None] * len(photographs)
    with attempt.work.step(f"looking for features{attempt.where}", len(photographs)) as advance:
        matching.extract_features(
            attempt.database,
            photographs,
            masks,
            sfm.extraction_size,
            sfm.max_features,
            advance,
        )
    attempt.note(found=key)


def _match(attempt: Attempt) -> None:
    key = attempt.keys()["matches"]
    n = len(attempt.photographs)
    if attempt.noted("matched", key):
        return
    if not attempt.noted("matches", key):
        with load_pycolmap().Database.open(str(attempt.database)) as database:
            database.clear_two_view_geometries()
            database.clear_matches()
        attempt.note(matches=key, matched=None)
    pairs = matching.pairs_to_match(attempt.database, n, attempt.matcher)
    with attempt.work.step(f"comparing pairs{attempt.where}", len(pairs)) as advance:
        matching.match_pairs(attempt.database, pairs, attempt.work.options.random_seed, advance)
    attempt.note(matched=key)


def _map(attempt: Attempt) -> Models:
    work = attempt.work
    key = attempt.keys()["models"]
    n = len(attempt.photographs)
    if attempt.noted("models", key) and attempt.models.is_dir():
        try:
            return mapping.read_models(attempt.models)
        except UserError as error:
            work.console.info(f"registering photographs again: {error}")
    known = attempt.known
    if attempt.mapper == "global" and known is None:
        work.console.info(f"placing {n} photographs at once, which shows no progress")
    attempt.note(models=None)
    title = "triangulating points" if known else "registering photographs"
    with work.step(f"{title}{attempt.where}", n) as advance:
        names = [p.name for p in attempt.photographs]
        seed = work.options.random_seed
        poses = known and [(camera.rotation, camera.center) for camera in known.cameras]
        models = mapping.map_photographs(
            attempt.database,
            names,
            attempt.models,
            attempt.mapper,
            seed,
            poses,
            advance,
            attempt.of_panoramas,
            attempt.keeps_focal,
        )
    attempt.note(models=key)
    return models


class Outcome(msgspec.Struct):
    """What is read again of ``outcome.json``."""

    line: str
    registered: Count
    photographs: Count
    points: Count
    reprojection_error: Coordinate


@dataclass(frozen=True)
class Converted:
    root: Path
    page: Path | None  # the page about it; None if it could not be written
    outcome: dict[str, Any]  # see ``Outcome``
    seconds: float = 0.0
    peak_bytes: int = 0

    def figures(self) -> dict[str, object]:
        told = self.outcome
        return {
            "photographs_with_a_place": f"{told['registered']} of {told['photographs']}",
            "points": told["points"],
            "reprojection_error_px": told["reprojection_error"],
        }


def convert(options: ConvertOptions, console: Console | None = None) -> Converted:
    """Find the cameras of photographs or of a video, and write a scene that 3DGS programs read.

    Killed at any moment, the same call goes on where it was.
    """
    source = scene.find_source(options.source_path)
    scene.require_free(source, options.overwrite)
    storage.check_writable(source.work)
    with storage.exclusive(source.work, "wait for it"), contextlib.ExitStack() as stack:
        if console is None:
            console = stack.enter_context(Console(source.work / "log.txt"))
        for message in options.inert.messages:
            console.info(message)
        note(source)
        return _convert(Work(source, options, console))


def _convert(work: Work) -> Converted:
    source = work.source
    options = work.options
    console = work.console
    photographs = _photographs(work)
    asked_panoramas = options.sfm.panoramas
    of_panoramas = panoramas.are_panoramas(photographs, asked_panoramas, console.info)
    known, content = (None, []) if of_panoramas else _known_cameras(work, photographs)
    photographs = known.photographs if known else photographs
    rounds = 0 if known or of_panoramas else _turntable(work, photographs)
    masks, moving = _masks_of(work, photographs)
    if of_panoramas:
        photographs, masks = _views_of_panoramas(work, photographs, masks)
    named = options.sfm.cameras
    named = str(Path(named).resolve()) if named not in (None, "none") else named
    note(source, cameras=named)
    taken = scene.source_digest(source, moving, named)
    files = _contents(photographs)
    hidden = [mask and [storage.file_digest(mask.path), mask.alpha] for mask in masks]
    asked = options.sfm.masked_features
    same = (known, of_panoramas)
    attempts = [Attempt(work, photographs, None, digest(files, *content), *same)]
    if asked is not False and any(masks):
        key = digest(files, hidden, *content)
        masked = Attempt(work, photographs, masks, key, *same, keeps_focal=rounds == 1)
        # The background of a turntable says that the camera stood still.
        attempts = [masked, *attempts] if asked == "auto" and not rounds else [masked]
    ways = [attempt.keys()["models"] for attempt in attempts]
    model = [path for path in sorted((work.models / "0").glob("*")) if path.is_file()]
    given = options.skip_matching and [storage.file_digest(path) for path in model]
    key = digest(ways, hidden, options.resize, given)
    if work.noted("finished", key) and not work.flat.is_dir():
        told = read_checked(source.work / OUTCOME, Outcome)
        console.info(f"finished before: {told['line']}")
        return Converted(source.root, source.root / scene.PAGE, told)
    pictures.told_photographs(photographs, console.info)
    if options.skip_matching:
        models = _models_of_others(work, photographs)
        attempt = None
    else:
        models, attempt = find_cameras(attempts)
    evidence = _evidence(work, photographs, models, attempt)
    n_wrong = len(evidence.contradicting or {})
    if known and (2 * n_wrong > len(photographs) or not evidence.n_points):
        raise UserError(
            f"{known.source.path}: its cameras do not fit the photographs, of which {n_wrong} "
            f"contradict them, with {evidence.n_points} points in common; check that these are the "
            "images that they were computed from, or pass --cameras none"
        )
    evidence = replace(evidence, given=known is not None)
    registration = report.registration_of(evidence)
    by_name = scene.originals(photographs, masks)
    _flatten(work, models, by_name, key)
    result = _report(work, evidence, registration, by_name, known)
    if work.flat.is_dir():
        now = scene.publish(source, work.flat, moving)
        shutil.rmtree(work.flat, ignore_errors=True)
        if now.folder != source.folder:
            console.info(
                f"{source.folder}: the photographs as taken are in {now.folder.name}/ now, "
                f"{source.folder.name}/ has undistorted copies"
            )
        note(now, published=True, finished=key, taken=taken)
    console.headline(result.outcome["line"])
    for advice in result.outcome["advice"][:_MOST_ADVICE]:
        console.headline(f"  what helps: {advice}")
    if result.page is not None:
        console.info(f"map and details: {result.page}")
    return result


def _photographs(work: Work) -> list[Photograph]:
    """Photographs of the folder, or the frames of the video, which are written into it."""
    source = work.source
    frames = work.options.sfm.frames
    if source.video is not None:
        choice = pictures.extract_frames(source.video, source.folder, frames, work.step)
        repeated = f"; in {choice.repeated} intervals nothing moved" if choice.repeated else ""
        told = f"{len(choice.frames)} of {choice.of} frames{repeated}"
        work.console.info(f"{source.video.name}: {told}")
    photographs = pictures.described_photographs(source.folder, source.recursive)
    if len(photographs) < _FEWEST:
        raise UserError(
            f"{source.folder}: {len(photographs)} photographs; at least {_FEWEST} are needed, and "
            "some dozens make a good model"
        )
    return photographs


def _flatten(work: Work, models: Models, by_name: dict[str, Original], key: str) -> None:
    """Write what is free of the lens's distortion beside the scene, unless that is noted."""
    if not work.noted("flattening", key):
        shutil.rmtree(work.flat, ignore_errors=True)
        note(work.source, flattening=key, finished=None)
    if not work.noted("flattened", key):
        with work.step("undistorting photographs", models.n_placed) as advance:
            scene.write_flat_pictures(
                models.largest, by_name, work.flat, work.options.resize, advance
            )
            scene.write_flat_model(work.models / "0", by_name, work.flat)
        note(work.source, flattened=key)


def _known_cameras(work: Work, photographs: Photographs) -> tuple[KnownCameras | None, list[str]]:
    source = work.source
    asked = work.options.sfm.cameras
    if work.options.skip_matching or (source.video and asked is None):
        return None, []
    files = the_cameras(asked, source.folder, source.root)
    if files is None:
        return None, []
    known = read_cameras(files, photographs)
    n = len(photographs)
    moved = f"; {known.offset} subtracted from all places" if known.offset else ""
    work.console.info(f"cameras of {files.name}, {len(known.cameras)} of {n} photographs{moved}")
    for line in known.notes:
        work.console.info(f"note: {line}")
    return known, [storage.file_digest(path) for path in files.files]


def _contents(photographs: Photographs) -> list[list[str]]:
    return [[p.name, storage.file_digest(p.path)] for p in photographs]


def _turntable(work: Work, photographs: Photographs) -> int:
    """Rounds of a turntable, which get masks; 0 if the camera moved, or there are masks."""
    source = work.source
    asked = work.options.masks.masks
    folder = MASK_FOLDERS[0]
    files = digest(_contents(photographs))
    noted, _, rounds = scene.read_record(source.root).get("rounds", "").partition(" ")
    if noted == files:
        return int(rounds)
    if asked is not None or scene.original_masks(source, asked)[0] is not None:
        return 0
    n_rounds = write_turntable_masks(photographs, source.root / folder)
    if n_rounds:
        work.console.info(
            f"a turntable, {n_rounds} round{'s' * (n_rounds > 1)}: the background stands still; "
            f"masks of what moves are in {source.root / folder}; --masks none to do without them"
        )
    if n_rounds == 1 and not any(photograph.focal for photograph in photographs):
        work.console.info(
            "note: one round does not tell the focal length, and EXIF has none; add a round from "
            "another height"
        )
    note(source, rounds=f"{files} {n_rounds}")
    return n_rounds


def _masks_of(work: Work, photographs: Photographs) -> tuple[list[ViewMask | None], Path | None]:
    asked, moving = scene.original_masks(work.source, work.options.masks.masks)
    # Cameras without lens and place, to look masks up.
    cameras = [
        Camera(p.name, p.width, p.height, 1.0, 1.0, 0.0, 0.0, np.eye(3), np.zeros(3), p.path)
        for p in photographs
    ]
    wanted = replace(work.options.masks, masks=asked)
    found = with_masks(cameras, work.source.root, wanted, work.console.info)
    masks = [camera.mask for camera in found]
    return masks, moving if any(masks) else None


def _views_of_panoramas(
    work: Work, photographs: Photographs, masks: Sequence[ViewMask | None]
) -> tuple[list[Photograph], list[ViewMask | None]]:
    angle = work.options.sfm.photographer
    if angle is not None and work.options.masks.mask_mode != "ignore":
        raise UserError(
            "--photographer: what it hides says nothing, while --mask_mode object means that "
            "nothing is there; pass --mask_mode ignore, in training as well"
        )
    hidden = [mask and [storage.file_digest(mask.path), mask.alpha, mask.mode] for mask in masks]
    folder = work.source.work / f"views_{digest(_contents(photographs), hidden, angle)}"
    for other in work.source.work.glob("views_*"):
        if other != folder:
            shutil.rmtree(other)
    with work.step("cutting panoramas into views", len(photographs)) as advance:
        return panoramas.write_views(photographs, masks, folder, angle, advance)


def _models_of_others(work: Work, photographs: Photographs) -> Models:
    place = work.models / "0"
    models = mapping.read_models(work.models) if work.models.is_dir() else Models(None, [])
    model = models.largest
    if model is None:
        raise UserError(f"--skip_matching: no model in {place}; leave the flag out")
    known = {photograph.name: photograph for photograph in photographs}
    missing = [name for name in models.registered[0] if name not in known]
    if missing:
        raise UserError(
            f"--skip_matching: {len(missing)} photographs of {place} are not in "
            f"{work.source.folder} ({missing[0]}, ...); put them there"
        )
    for number in model.reg_image_ids():
        image = model.images[number]
        lens = model.cameras[image.camera_id]
        photograph = known[image.name]
        if (lens.width, lens.height) != (photograph.width, photograph.height):
            raise UserError(
                f"--skip_matching: {place} was made of photographs of {lens.width} x "
                f"{lens.height} px, but {photograph.path} is {photograph.width} x "
                f"{photograph.height} px when upright; use the photographs that it was made of"
            )
    return models


def _evidence(
    work: Work, photographs: Photographs, models: Models, attempt: Attempt | None
) -> report.Evidence:
    names = [photograph.name for photograph in photographs]
    model = models.largest
    sharp = []
    n_features = [0] * len(names)
    matches = {}
    contradicting = {}
    with work.step("checking photographs", len(photographs)) as advance:
        for done, photograph in enumerate(photographs, start=1):
            sharp.append(sharpness(pictures.read_grey(photograph.path, _SHARPNESS_SIDE)))
            advance(done)
    # Unless masked features were asked for, whole photographs were tried as well.
    masked = attempt is not None and attempt.masks is not None
    masked = masked and work.options.sfm.masked_features is True
    if attempt is not None:
        path = attempt.database
        with matching.database_errors(path):
            with load_pycolmap().Database.open(str(path)) as database:
                n_features = [database.num_keypoints_for_image(k + 1) for k in range(len(names))]
            matches = matching.verified_matches(path)
            if model is not None:
                contradicting = matching.contradicting_pairs(model, path, names, matches)
    found = report.Evidence(names, sharp, n_features, matches, models.registered, masked=masked)
    if model is None:
        return found
    shared, spread = report.model_facts(model)
    if attempt is not None and attempt.of_panoramas:
        # One view of a panorama gives all of them their pose.
        for group in panoramas.grouped(names):
            most = max(shared.get(name, 0) for name in group)
            shared |= {name: most for name in group if name in shared}
    longest = max(max(photograph.width, photograph.height) for photograph in photographs)
    scale = min(1.0, work.options.sfm.extraction_size / longest)
    return replace(
        found,
        n_points=model.num_points3D(),
        track_length=model.compute_mean_track_length(),
        error=model.compute_mean_reprojection_error() * scale,
        shared=shared,
        spread=spread,
        contradicting=contradicting,
    )


def _capture_findings(work: Work, made: Path) -> tuple[list[CaptureFinding], Directions]:
    """What is likely to go wrong with the scene in a folder, also told on the console."""
    masks = work.options.masks
    masks = replace(masks, masks="none" if masks.masks == "none" else None)
    with work.step("checking views", 1):
        capture = load_scene(
            made,
            size_rule=VanillaSize(),
            eval_split=False,
            masks=masks,
            view_options=ViewOptions(),
            notify=lambda line: None,
        )
        found, directions = check_capture(capture)
    dropped = [f"{name} ({why})" for name, why in capture.dropped_views.items()]
    if dropped:
        advice = "training leaves them out; take them again"
        found.append(CaptureFinding("contradicting photographs", shortened(dropped), advice))
    for finding in found:
        work.console.warn(f"{finding.what}: {finding.where}", finding.advice)
    return found, directions


def _report(
    work: Work,
    evidence: report.Evidence,
    registration: report.Registration,
    by_name: dict[str, Original],
    known: KnownCameras | None,
) -> Converted:
    root = work.source.root
    options = work.options
    settings = {
        **asdict(options.sfm),
        "masks": options.masks.masks,
        "random_seed": options.random_seed,
    }
    files = {name: original.photograph.path for name, original in by_name.items()}
    made = work.flat if (work.flat / "sparse" / "0").is_dir() else root
    flat_names = [original.flat_name for original in by_name.values()]
    found, directions = _capture_findings(work, made)

    def page() -> Page:
        # Points of the flat model have the colours of the photographs.
        model = load_pycolmap().Reconstruction(str(made / "sparse" / "0"))
        title = f"Cameras of {root.resolve().name}"
        from_above = report.camera_map(model, flat_names)
        around = direction_map(directions)
        return report.convert_page(
            title, evidence, registration, found, from_above, around, files, work.steps, settings
        )

    written = write_page(root / scene.PAGE, page, work.console.warn)
    names = ("name", "seconds", "peak_bytes")
    outcome = {
        "line": registration.line(evidence),
        "quality": registration.word,
        "photographs": len(evidence.names),
        "registered": registration.n_registered,
        "left_out": dict(registration.left_out),
        "other_models": registration.other_models,
        "advice": registration.advice,
        "findings": [finding._asdict() for finding in found],
        "reprojection_error": evidence.error,
        "points": evidence.n_points,
        "track_length": evidence.track_length,
        "cameras": known.source.name if known else None,
        "offset": known.offset if known else None,
        "steps": [dict(zip(names, step, strict=True)) for step in work.steps],
    }
    subtracted = known.offset if known else None
    write_offset(root, np.zeros(3) if subtracted is None else np.array(subtracted))
    storage.write_json_atomic(root / scene.WORK / OUTCOME, outcome)
    seconds = sum(step[1] for step in work.steps)
    peak = max(step[2] for step in work.steps)
    return Converted(root, written, outcome, seconds, peak)
