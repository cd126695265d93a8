# SPDX-License-Identifier: Apache-2.0
"""Finding cameras by what the masks show, and by whole photographs where those place more.

Masks leave little to go by where the object has little texture. Whole photographs are better where
the background stood still, and worthless where the object turned before it: so what the masks show
is tried first, and whole photographs are taken only if they place more.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.posing.mapping import (
    Models,
    chosen_mapper,
    map_photographs,
    read_models,
    require_mapper,
)
from gaussian_splatting.posing.matching import (
    chosen_matcher,
    create_database,
    database_errors,
    extract_features,
    is_whole,
    match_pairs,
    pairs_to_match,
)
from gaussian_splatting.posing.photographs import Photograph
from gaussian_splatting.posing.scene_folder import Work, digest, note
from gaussian_splatting.posing.verdict import FINE_SHARE, NARROW, model_facts
from sugar_utils.errors import UserError
from sugar_utils.libraries import load_pycolmap


@dataclass(frozen=True)
class Attempt:
    """One way to find the cameras; its steps are noted under names of its own.

    Attributes:
        masks: Of each; only where they count features are looked for. None: everywhere.
    """

    work: Work
    photographs: Sequence[Photograph]
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
        """How photographs to compare are chosen."""
        in_order = self.work.source.video is not None
        return chosen_matcher(self.work.options.posing.matcher, len(self.photographs), in_order)

    def keys(self) -> dict[str, str]:
        """What each step's result depends on."""
        posing, seed = self.work.options.posing, self.work.options.random_seed
        features = digest(self.content, posing.camera, posing.extraction_size, posing.max_features)
        matches = digest(features, self.matcher, seed)
        mapper = chosen_mapper(posing.mapper, len(self.photographs))
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
    """What is gone on with.

    Attributes:
        attempt: Which one that is; None where the models are somebody else's.
    """

    models: Models
    attempt: Attempt | None = None


def attempts_of(
    work: Work,
    photographs: Sequence[Photograph],
    masks: Sequence[ViewMask | None],
    files: Sequence[object],
    hidden: Sequence[object],
) -> list[Attempt]:
    """The ways to find the cameras, in the order in which they are tried."""
    asked = work.options.posing.masked_features
    masked = Attempt(work, photographs, masks, digest(files, hidden))
    whole = Attempt(work, photographs, None, digest(files))
    if asked is False or not any(masks):
        return [whole]
    return [masked, whole] if asked == "auto" else [masked]


def find_cameras(attempts: Sequence[Attempt]) -> FoundCameras:
    """Try the first way, and the second one if that leaves photographs out that this one places."""
    first = attempts[0]
    require_mapper(chosen_mapper(first.work.options.posing.mapper, len(first.photographs)))
    found = FoundCameras(first.run(), first)
    n, placed = len(first.photographs), _n_placed(found.models)
    if placed < FINE_SHARE * n and len(attempts) > 1:
        say = first.work.console.info
        say(f"what the masks show places {placed} of {n} photographs: trying whole photographs")
        second = FoundCameras(attempts[1].run(), attempts[1])
        if _n_placed(second.models) > placed and not _is_narrow(second.models):
            found = second
            now = _n_placed(found.models)
            say(f"whole photographs place {now} of {n}: taken; the masks count for the rest")
        else:
            say("whole photographs place no more of them; staying with what the masks show")
    _put_in_place(found)
    return found


def _n_placed(models: Models) -> int:
    return len(models.registered[0]) if models.registered else 0


def _is_narrow(models: Models) -> bool:
    """Whether the cameras hardly moved, as where an object turned before a background."""
    return model_facts(models.largest)[1] < NARROW


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
    posing, key = attempt.work.options.posing, attempt.keys()["features"]
    photographs = attempt.photographs
    noted = attempt.noted("features", key)
    if not noted or not is_whole(attempt.database, len(photographs)):
        if noted:
            attempt.work.console.info(f"note: {attempt.database} is missing or damaged; made anew")
        for path in attempt.database.parent.glob(f"{attempt.database.name}*"):
            path.unlink()
        create_database(attempt.database, photographs, posing.camera)
        attempt.note(features=key, found=None, matches=None, matched=None)
    if attempt.noted("found", key):
        return
    masks = attempt.masks or [None] * len(photographs)
    with attempt.work.step(f"looking for features{attempt.where}", len(photographs)) as advance:
        extract_features(
            attempt.database, photographs, masks, posing.extraction_size, posing.max_features,
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
            work.console.info(f"placing photographs again: {error}")
    mapper = chosen_mapper(work.options.posing.mapper, n)
    if mapper == "global":
        work.console.info(f"placing {n} photographs at once, which shows no progress")
    attempt.note(models=None)
    with work.step(f"placing photographs{attempt.where}", n) as advance:
        models = map_photographs(
            attempt.database,
            [photograph.name for photograph in attempt.photographs],
            attempt.models,
            mapper,
            work.options.random_seed,
            advance,
        )
    attempt.note(models=key)
    return models
