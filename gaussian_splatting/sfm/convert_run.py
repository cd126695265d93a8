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
from gaussian_splatting.data.consistency.image_content import sharpness
from gaussian_splatting.data.masks import with_masks
from gaussian_splatting.sfm.convert_options import ConvertOptions
from gaussian_splatting.sfm.mapping import (
    Models,
    chosen_mapper,
    map_photographs,
    read_models,
    require_mapper,
)
from gaussian_splatting.sfm.matching import (
    chosen_matcher,
    contradicting_pairs,
    create_database,
    database_errors,
    extract_features,
    is_whole,
    match_pairs,
    pairs_to_match,
    verified_matches,
)
from gaussian_splatting.sfm.photographs import (
    Photograph,
    described_photographs,
    extract_frames,
    read_grey,
    told_photographs,
)
from gaussian_splatting.sfm.registration_report import (
    FINE_SHARE,
    NARROW,
    Evidence,
    Registration,
    camera_map,
    convert_page,
    model_facts,
    registration_of,
)
from gaussian_splatting.sfm.scene_folder import (
    PAGE,
    WORK,
    Original,
    Source,
    Work,
    digest,
    find_source,
    note,
    original_masks,
    originals,
    publish,
    require_free,
    source_digest,
    write_flat_model,
    write_flat_pictures,
)
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable, exclusive, file_digest, write_json_atomic
from sugar_utils.html import write_page
from sugar_utils.libraries import load_pycolmap
from sugar_utils.schemas import Coordinate, Count, read_checked


@dataclass(frozen=True)
class Attempt:
    """One way to find the cameras; its steps are noted under names of its own."""

    work: Work
    photographs: Sequence[Photograph]
    # Of each; only where they count features are looked for. None: everywhere.
    masks: Sequence[ViewMask | None] | None
    content: str

    @property
    def prefix(self) -> str:
        """What its files and notes begin with."""
        return "" if self.masks is None else "masked_"

    @property
    def database(self) -> Path:
        """Features and matches."""
        return self.work.source.work / f"{self.prefix}database.db"

    @property
    def models(self) -> Path:
        """Folder of the models that it led to."""
        return self.work.source.work / f"{self.prefix}sparse"

    @property
    def where(self) -> str:
        """What titles of its steps end with."""
        return "" if self.masks is None else " in the masks"

    @property
    def matcher(self) -> str:
        in_order = self.work.source.video is not None
        return chosen_matcher(self.work.options.sfm.matcher, len(self.photographs), in_order)

    def keys(self) -> dict[str, str]:
        """What each step's result depends on."""
        sfm, seed = self.work.options.sfm, self.work.options.random_seed
        features = digest(self.content, sfm.camera, sfm.extraction_size, sfm.max_features)
        matches = digest(features, self.matcher, seed)
        mapper = chosen_mapper(sfm.mapper, len(self.photographs))
        return {"features": features, "matches": matches, "models": digest(matches, mapper, seed)}

    def noted(self, step: str, key: str) -> bool:
        """Whether a step was done for this key."""
        return self.work.noted(f"{self.prefix}{step}", key)

    def note(self, **steps: str | None) -> None:
        """Note steps; None takes one out."""
        note(self.work.source, **{f"{self.prefix}{step}": key for step, key in steps.items()})

    def run(self) -> Models:
        """All steps that are not done yet."""
        with database_errors(self.database):
            _find_features(self)
            _match(self)
            return _map(self)


@dataclass(frozen=True)
class FoundCameras:
    """What is gone on with."""

    models: Models
    attempt: Attempt | None = None  # which one that is; None for models that were there before


def attempts_of(
    work: Work,
    photographs: Sequence[Photograph],
    masks: Sequence[ViewMask | None],
    files: Sequence[object],
    hidden: Sequence[object],
) -> list[Attempt]:
    """The ways to find the cameras, in the order in which they are tried."""
    asked = work.options.sfm.masked_features
    masked = Attempt(work, photographs, masks, digest(files, hidden))
    whole = Attempt(work, photographs, None, digest(files))
    if asked is False or not any(masks):
        return [whole]
    return [masked, whole] if asked == "auto" else [masked]


def find_cameras(attempts: Sequence[Attempt]) -> FoundCameras:
    """Try the first way, and the second one if that leaves photographs out that this one places."""
    first = attempts[0]
    require_mapper(chosen_mapper(first.work.options.sfm.mapper, len(first.photographs)))
    found = FoundCameras(first.run(), first)
    n, placed = len(first.photographs), _n_placed(found.models)
    if placed < FINE_SHARE * n and len(attempts) > 1:
        say = first.work.console.info
        say(f"what the masks show places {placed} of {n} photographs: trying whole photographs")
        second = FoundCameras(attempts[1].run(), attempts[1])
        # A narrow path: the cameras hardly moved, as where an object turned before a background.
        if _n_placed(second.models) > placed and model_facts(second.models.largest)[1] >= NARROW:
            found = second
            now = _n_placed(found.models)
            say(f"whole photographs place {now} of {n}: taken; the masks count for the rest")
        else:
            say("whole photographs place no more of them; staying with what the masks show")
    _put_in_place(found)
    return found


def _n_placed(models: Models) -> int:
    return len(models.registered[0]) if models.registered else 0


def _put_in_place(found: FoundCameras) -> None:
    """Give the chosen models the place where programs look for them."""
    work, attempt = found.attempt.work, found.attempt
    if attempt.models == work.models:
        return
    fresh = work.source.work / ".sparse.chosen"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(attempt.models, fresh)
    note(work.source, models=None)
    shutil.rmtree(work.models, ignore_errors=True)
    fresh.rename(work.models)


def _find_features(attempt: Attempt) -> None:
    sfm, key = attempt.work.options.sfm, attempt.keys()["features"]
    photographs = attempt.photographs
    noted = attempt.noted("features", key)
    if not noted or not is_whole(attempt.database, len(photographs)):
        if noted:
            attempt.work.console.info(f"note: {attempt.database} is missing or damaged; made anew")
        for path in attempt.database.parent.glob(f"{attempt.database.name}*"):
            path.unlink()
        create_database(attempt.database, photographs, sfm.camera)
        attempt.note(features=key, found=None, matches=None, matched=None)
    if attempt.noted("found", key):
        return
    masks = attempt.masks or [None] * len(photographs)
    with attempt.work.step(f"looking for features{attempt.where}", len(photographs)) as advance:
        extract_features(
            attempt.database, photographs, masks, sfm.extraction_size, sfm.max_features,
            advance,
        )  # fmt: skip
    attempt.note(found=key)


def _match(attempt: Attempt) -> None:
    key, n = attempt.keys()["matches"], len(attempt.photographs)
    if attempt.noted("matched", key):
        return
    if not attempt.noted("matches", key):
        with load_pycolmap().Database.open(str(attempt.database)) as database:
            database.clear_two_view_geometries()
            database.clear_matches()
        attempt.note(matches=key, matched=None)
    pairs = pairs_to_match(attempt.database, n, attempt.matcher)
    with attempt.work.step(f"comparing pairs{attempt.where}", len(pairs)) as advance:
        match_pairs(attempt.database, pairs, attempt.work.options.random_seed, advance)
    attempt.note(matched=key)


def _map(attempt: Attempt) -> Models:
    work, key, n = attempt.work, attempt.keys()["models"], len(attempt.photographs)
    if attempt.noted("models", key) and attempt.models.is_dir():
        try:
            return read_models(attempt.models)
        except UserError as error:
            work.console.info(f"registering photographs again: {error}")
    mapper = chosen_mapper(work.options.sfm.mapper, n)
    if mapper == "global":
        work.console.info(f"placing {n} photographs at once, which shows no progress")
    attempt.note(models=None)
    with work.step(f"registering photographs{attempt.where}", n) as advance:
        names, seed = [p.name for p in attempt.photographs], work.options.random_seed
        models = map_photographs(attempt.database, names, attempt.models, mapper, seed, advance)
    attempt.note(models=key)
    return models


OUTCOME = "outcome.json"  # what came out, for programs, in the folder of work
_SHARPNESS_SIDE = 800
_FEWEST = 3


class Outcome(msgspec.Struct):
    line: str
    registered: Count
    photographs: Count
    points: Count
    reprojection_error: Coordinate


@dataclass(frozen=True)
class Converted:
    root: Path
    page: Path | None  # the page about it; None if it could not be written
    line: str
    seconds: float
    peak_bytes: int
    n_registered: int
    n_photographs: int
    n_points: int
    reprojection_error: float

    def figures(self) -> dict[str, object]:
        return {
            "photographs_with_a_place": f"{self.n_registered} of {self.n_photographs}",
            "points": self.n_points,
            "reprojection_error_px": self.reprojection_error,
        }


def convert(options: ConvertOptions, console: Console | None = None) -> Converted:
    """Find the cameras of photographs or of a video, and write a scene that 3DGS programs read.

    Killed at any moment, the same call goes on where it was.
    """
    source = find_source(options.source_path)
    require_free(source, options.overwrite)
    check_writable(source.work)
    with exclusive(source.work, "wait for it"), contextlib.ExitStack() as stack:
        if console is None:
            console = stack.enter_context(Console(source.work / "log.txt"))
        for message in options.messages:
            console.info(message)
        note(source)
        return _convert(Work(source, options, console))


def _convert(work: Work) -> Converted:
    source, options, console = work.source, work.options, work.console
    if source.video is not None:
        _take_frames(work)
    photographs = described_photographs(source.folder, source.recursive)
    if len(photographs) < _FEWEST:
        raise UserError(
            f"{source.folder}: {len(photographs)} photographs; at least {_FEWEST} are needed, and "
            "some dozens make a good model"
        )
    masks, moving = _masks_of(work, photographs)
    taken = source_digest(source, moving)
    files = [[p.name, file_digest(p.path)] for p in photographs]
    hidden = [None if mask is None else [file_digest(mask.path), mask.alpha] for mask in masks]
    attempts = attempts_of(work, photographs, masks, files, hidden)
    ways = [attempt.keys()["models"] for attempt in attempts]
    model = sorted((work.models / "0").glob("*"))
    given = options.skip_matching and [file_digest(path) for path in model if path.is_file()]
    key = digest(ways, hidden, options.resize, given)
    if work.noted("finished", key) and not work.flat.is_dir():
        result = _finished_before(source)
        console.info(f"finished before: {result.line}")
        return result
    told_photographs(photographs, console.info)
    if options.skip_matching:
        found = FoundCameras(_models_of_others(work, photographs))
    else:
        found = find_cameras(attempts)
    evidence = _evidence(work, photographs, found)
    registration = registration_of(evidence)
    by_name = originals(photographs, masks)
    if not work.noted("flattening", key):
        shutil.rmtree(work.flat, ignore_errors=True)
        note(source, flattening=key, finished=None)
    if not work.noted("flattened", key):
        with work.step("undistorting photographs", registration.n_registered) as advance:
            write_flat_pictures(found.models.largest, by_name, work.flat, options.resize, advance)
            write_flat_model(work.models / "0", by_name, work.flat)
        note(source, flattened=key)
    result = _report(work, evidence, registration, by_name)
    if work.flat.is_dir():
        now = publish(source, work.flat, moving)
        shutil.rmtree(work.flat, ignore_errors=True)
        if now.folder != source.folder:
            console.info(
                f"{source.folder}: the photographs as taken are in {now.folder.name}/ now, "
                f"{source.folder.name}/ has undistorted copies"
            )
        note(now, published=True, finished=key, taken=taken)
    console.info(result.line)
    if result.page is not None:
        console.info(f"map and details: {result.page}")
    return result


def _finished_before(source: Source) -> Converted:
    told = read_checked(source.work / OUTCOME, Outcome)
    return Converted(
        source.root, source.root / PAGE, told["line"], 0.0, 0, told["registered"],
        told["photographs"], told["points"], told["reprojection_error"],
    )  # fmt: skip


def _take_frames(work: Work) -> None:
    source = work.source
    choice = extract_frames(source.video, source.folder, work.options.sfm.frames, work.step)
    repeated = f"; in {choice.n_repeated} intervals nothing moved" if choice.n_repeated else ""
    work.console.info(
        f"{source.video.name}: {len(choice.chosen)} of {choice.n_frames} frames{repeated}"
    )


def _masks_of(
    work: Work, photographs: Sequence[Photograph]
) -> tuple[list[ViewMask | None], Path | None]:
    asked, moving = original_masks(work.source, work.options.masks.masks)
    cameras = [_unposed(photograph) for photograph in photographs]
    wanted = replace(work.options.masks, masks=asked)
    found = with_masks(cameras, work.source.root, wanted, work.console.info)
    masks = [camera.mask for camera in found]
    return masks, moving if any(masks) else None


def _unposed(photograph: Photograph) -> Camera:
    """A photograph as a camera without a place, to look its mask up."""
    size = float(max(photograph.width, photograph.height))
    return Camera(
        name=photograph.name, width=photograph.width, height=photograph.height, fx=size, fy=size,
        cx=photograph.width / 2, cy=photograph.height / 2, rotation=np.eye(3),
        translation=np.zeros(3), image_path=photograph.path,
    )  # fmt: skip


def _models_of_others(work: Work, photographs: Sequence[Photograph]) -> Models:
    models = read_models(work.models) if work.models.is_dir() else Models(None, [])
    if models.largest is None:
        raise UserError(f"--skip_matching: no model in {work.models / '0'}; leave the flag out")
    known = {photograph.name: photograph for photograph in photographs}
    missing = [name for name in models.registered[0] if name not in known]
    if missing:
        raise UserError(
            f"--skip_matching: {len(missing)} photographs of {work.models / '0'} are not in "
            f"{work.source.folder} ({missing[0]}, ...); put them there"
        )
    _require_their_sizes(models.largest, known, work)
    return models


def _require_their_sizes(model: Any, photographs: dict[str, Photograph], work: Work) -> None:
    for number in model.reg_image_ids():
        image = model.images[number]
        lens, photograph = model.cameras[image.camera_id], photographs[image.name]
        if (lens.width, lens.height) != (photograph.width, photograph.height):
            raise UserError(
                f"--skip_matching: {work.models / '0'} was made of photographs of {lens.width} x "
                f"{lens.height} px, but {photograph.path} is {photograph.width} x "
                f"{photograph.height} px when upright; use the photographs that it was made of"
            )


def _evidence(work: Work, photographs: Sequence[Photograph], found: FoundCameras) -> Evidence:
    names = [photograph.name for photograph in photographs]
    sharp = []
    with work.step("judging", len(photographs)) as advance:
        for done, photograph in enumerate(photographs, start=1):
            sharp.append(sharpness(read_grey(photograph.path, _SHARPNESS_SIDE)))
            advance(done)
    n_features, matches, masked = [0] * len(names), {}, False
    if found.attempt is not None:
        path = found.attempt.database
        # Unless masked features were asked for, whole photographs were tried as well.
        masked = bool(found.attempt.masks) and work.options.sfm.masked_features is True
        with database_errors(path):
            with load_pycolmap().Database.open(str(path)) as database:
                n_features = [database.num_keypoints_for_image(k + 1) for k in range(len(names))]
            matches = verified_matches(path)
    evidence = Evidence(names, sharp, n_features, matches, found.models.registered, masked=masked)
    if found.models.largest is None:
        return evidence
    model = found.models.largest
    shared, spread = model_facts(model)
    contradicting = {}
    if found.attempt is not None:
        with database_errors(found.attempt.database):
            contradicting = contradicting_pairs(model, found.attempt.database, names, matches)
    longest = max(max(photograph.width, photograph.height) for photograph in photographs)
    scale = min(1.0, work.options.sfm.extraction_size / longest)
    return replace(
        evidence, n_points=model.num_points3D(), track_length=model.compute_mean_track_length(),
        error=model.compute_mean_reprojection_error() * scale, shared=shared, spread=spread,
        contradicting=contradicting,
    )  # fmt: skip


def _report(
    work: Work, evidence: Evidence, registration: Registration, by_name: dict[str, Original]
) -> Converted:
    root = work.source.root
    line = registration.line(evidence)
    sfm = work.options.sfm
    settings = {**asdict(sfm), "masks": work.options.masks.masks,
                "random_seed": work.options.random_seed}  # fmt: skip
    files = {name: original.photograph.path for name, original in by_name.items()}
    page = write_page(
        root / PAGE,
        lambda: convert_page(
            f"Cameras of {root.resolve().name}", evidence, registration, _map_of(work, by_name),
            files, work.steps, settings,
        ),
        work.console.warn,
    )  # fmt: skip
    write_json_atomic(
        root / WORK / OUTCOME,
        {
            "line": line,
            "quality": registration.word,
            "photographs": len(evidence.names),
            "registered": registration.n_registered,
            "left_out": dict(registration.left_out),
            "other_models": registration.other_models,
            "advice": registration.advice,
            "reprojection_error": evidence.error,
            "points": evidence.n_points,
            "track_length": evidence.track_length,
            "steps": [
                {"name": name, "seconds": seconds, "peak_bytes": peak}
                for name, seconds, peak in work.steps
            ],
        },
    )
    return Converted(
        root, page, line,
        sum(seconds for _, seconds, _ in work.steps),
        max((peak for _, _, peak in work.steps), default=0),
        registration.n_registered, len(evidence.names), evidence.n_points, evidence.error,
    )  # fmt: skip


def _map_of(work: Work, by_name: dict[str, Original]) -> np.ndarray:
    """The flat model from above; its points have the colours of the photographs."""
    made = [folder / "sparse" / "0" for folder in (work.flat, work.source.root)]
    folder = next(path for path in made if path.is_dir())
    names = [original.flat_name for original in by_name.values()]
    return camera_map(load_pycolmap().Reconstruction(str(folder)), names)
