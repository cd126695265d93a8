# SPDX-License-Identifier: Apache-2.0
"""Feature fallback: images without a pose are registered by further kinds of features.

Each step compares those that are left out with photographs that show the same. Its features are
appended to those before, and the mapper goes on with the model that is there; where most are left
out, it maps anew. Captures that register whole never come here.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sugar_capture import mapping, matching
from sugar_capture.feature_database import create_database, database_errors, is_whole
from sugar_capture.ladder.appended_features import append_features, images_with_features
from sugar_capture.ladder.feature_steps import FeatureStep, StepInputs, steps_up_to
from sugar_capture.ladder.step_evidence import unproven_images
from sugar_capture.mapping import Models
from sugar_capture.pairs.chosen_pairs import (
    Pair,
    best_partners,
    connected_images,
    pairs_to_match,
    pairs_with,
    recorded_pairs,
)
from sugar_capture.pose_time import PoseSpeed, measured_speed
from sugar_capture.registration_attempts import Attempt
from sugar_utils.recipe import digest_of

FEW_PHOTOGRAPHS = 30  # of a capture, up to which one that is left out is compared with all others
_PARTNERS = 8  # registered images that match one that is left out best, compared with each other
_LEAST_FEATURES = 30  # of an image that may be registered
_LEAST_SHARE = 0.5  # of the images that are registered, to add others to their model


@dataclass(frozen=True)
class Climbed:
    """The models after the last step, and the images that each step registered."""

    models: Models
    attempt: Attempt  # whose database and models count
    # Names of the images that each step registered, by its label; without those of every capture.
    registered_by: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # steps that were left out, and why


@dataclass(frozen=True, kw_only=True)
class FurtherAttempt(Attempt):
    """Adding images that are left out, by features of another kind.

    Its database has the features and matches of the attempt before it, and further ones.
    """

    base: Attempt  # its features decide which images are similar
    previous: Attempt  # whose database is added to
    step: FeatureStep

    @property
    def prefix(self) -> str:
        """Beginning of the names of files and notes."""
        return f"{self.step.name}_"

    @property
    def features(self) -> Path:
        """File of the features of this step alone, and of their matches."""
        return self.work.source.work / f"{self.prefix}features.db"

    @property
    def whole_features(self) -> Path:
        """File of the same features outside of masks, too."""
        return self.work.source.work / f"{self.prefix}whole_features.db"

    def keys(self) -> dict[str, str]:
        """Return a digest for each step of all that its result depends on."""
        sfm = self.work.options.sfm
        models_key = self.previous.keys()["models"]
        key = digest_of(models_key, self.step.key(), sfm.extraction_size, sfm.max_features)
        return {"features": key, "matches": key, "models": key}

    def first_pairs(self, models: Models) -> list[Pair]:
        """Return the pairs of image indices that are compared first. Ascending"""
        n = len(self.photographs)
        left_out = self.left_out(models)
        if self.is_lost(models):
            left_out = list(range(n))
        if n <= FEW_PHOTOGRAPHS:
            return pairs_with(left_out, n)
        similar = pairs_to_match(self.base.database, n, "similar")
        pairs = recorded_pairs(self.photographs).union(similar)
        return sorted(pair for pair in pairs if not set(pair).isdisjoint(left_out))

    def is_lost(self, models: Models) -> bool:
        """Whether there is no model that images could be added to."""
        return models.n_registered < _LEAST_SHARE * len(self.photographs)

    def add(self, models: Models) -> Models | None:
        """Register further images; None if there are none.

        Steps that an earlier call finished are skipped.
        """
        key = self.keys()["models"]
        if self.noted("nothing", key):
            return None
        with database_errors(self.features):
            further = self._noted_models("models", key, self.models)
            if further is None:
                further = self._register(models)
        if further is None:
            self.note(nothing=key)
            return None
        self.note(models=key)
        return further

    def _register(self, models: Models) -> Models | None:
        left_out = self.left_out(models)
        pairs = self._find_features(models, left_out)
        self._match(pairs, "comparing photographs that are left out")
        verified = matching.verified_matches(self.features)
        if not connected_images(left_out, verified):
            return None
        if not self.is_lost(models):
            partners: set[Pair] = set()
            for index in left_out:
                best = best_partners(index, verified, left_out, _PARTNERS)
                partners.update(itertools.combinations(sorted(best), 2))
            self._match(sorted(partners), "comparing photographs beside them")
        seed = self.work.options.random_seed
        append_features(
            self.previous.database, self.features, self.database, self._pixel_sizes(), seed
        )
        return self._proven(self._map_further(models), models)

    def _find_features(self, models: Models, left_out: Collection[int]) -> list[Pair]:
        """Extract the features of all images that are compared; return the pairs of them."""
        key = self.keys()["features"]
        n = len(self.photographs)
        if not self.noted("features", key) or not is_whole(self.features, n):
            for database in (self.features, self.whole_features, self.database):
                for path in database.parent.glob(f"{database.name}*"):
                    path.unlink()
            camera_model = self.work.options.sfm.camera
            if self.masks is not None:
                create_database(self.whole_features, self.photographs, camera_model)
            create_database(self.features, self.photographs, camera_model)
            self.note(features=key, models=None, nothing=None)
        self._extract(sorted(left_out))
        # What shows nothing at all matches nothing, so the others need no features for it.
        bare = set(left_out).difference(
            images_with_features(self.features, sorted(left_out), _LEAST_FEATURES)
        )
        pairs = [pair for pair in self.first_pairs(models) if bare.isdisjoint(pair)]
        self._extract(sorted({index for pair in pairs for index in pair}))
        return pairs

    def _extract(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        extracted = self.features if self.masks is None else self.whole_features
        with self.work.step(f"looking for features: {self.step.label}", len(indices)) as advance:
            self.step.extract(extracted, self._inputs, indices, advance)
        if self.masks is not None:
            size = self.work.options.sfm.extraction_size
            matching.copy_masked_features(
                extracted, self.features, self.photographs, self.masks, size, indices
            )

    def _match(self, pairs: Sequence[Pair], title: str) -> None:
        if not pairs:
            return
        with self.work.step(f"{title}: {self.step.label}", len(pairs)) as advance:
            self.step.match(self.features, self._inputs, pairs, advance)

    @property
    def _inputs(self) -> StepInputs:
        sfm = self.work.options.sfm
        return StepInputs(
            self.photographs, sfm.extraction_size, sfm.max_features, self.work.options.random_seed
        )

    def _pixel_sizes(self) -> dict[int, float]:
        """Pixels of the file per pixel at which features are extracted, of each image."""
        size = self.work.options.sfm.extraction_size
        sizes = {}
        for index, photograph in enumerate(self.photographs):
            sizes[index] = max(1.0, max(photograph.width, photograph.height) / size)
        return sizes

    def _map_further(self, models: Models) -> Models:
        """Go on with the largest model, or map anew where most images are left out."""
        if self.is_lost(models):
            return self._map_matches()
        if models.largest is None:
            raise ValueError("there is no model to add images to")
        seed = self.work.options.random_seed
        with tempfile.TemporaryDirectory() as folder:
            model = mapping.placed_model(self.database, Path(folder), models.largest, seed)
        return self.continued(Models(model, models.registered))

    def _proven(self, further: Models, models: Models) -> Models | None:
        """Return models without images that their matches do not prove; None if none are left."""
        before = set(models.registered[0]) if models.registered else set()
        added = set(further.registered[0]).difference(before) if further.registered else set()
        unproven = unproven_images(further, added, self.database, self.names)
        if unproven:
            further = mapping.without_images(unproven, self.models)
        return further if further.n_registered > models.n_registered else None


def climb(models: Models, attempt: Attempt) -> Climbed:
    """Register images that are left out, by one kind of features after the other.

    Cameras of other programs and views of panoramas are left as they are.
    """
    sfm = attempt.work.options.sfm
    climbed = Climbed(models, attempt)
    if attempt.known is not None or attempt.of_panoramas or not attempt.left_out(models):
        return climbed
    previous = attempt
    for step in steps_up_to(sfm.features, sfm.feature_weights):
        left_out = attempt.left_out(climbed.models)
        if not left_out:
            break
        further = _further_attempt(attempt, previous, step)
        if not _fits(further, climbed.models):
            n = len(left_out)
            line = f"{step.label} for the {n} photographs left out would take longer than is left"
            attempt.work.console.info(f"note: {line}")
            climbed = replace(climbed, notes=[*climbed.notes, line])
            continue
        further_models = further.add(climbed.models)
        if further.database.is_file():
            previous = further
        if further_models is not None:
            climbed = _after(climbed, further, further_models)
    return climbed


def _further_attempt(base: Attempt, previous: Attempt, step: FeatureStep) -> FurtherAttempt:
    return FurtherAttempt(
        base.work,
        base.photographs,
        masks=base.masks,
        content=base.content,
        keeps_focal=base.keeps_focal,
        base=base,
        previous=previous,
        step=step,
    )


def _after(climbed: Climbed, further: FurtherAttempt, models: Models) -> Climbed:
    """Return the result after a step that registered further images."""
    label = further.step.label
    before = climbed.models.registered[0] if climbed.models.registered else []
    added = sorted(set(models.registered[0]).difference(before))
    n = len(further.photographs)
    further.work.console.info(
        f"{len(added)} photographs are registered by {label}: {models.n_registered} of {n}"
    )
    return Climbed(models, further, {**climbed.registered_by, label: added}, climbed.notes)


def _fits(further: FurtherAttempt, models: Models) -> bool:
    """Whether a step fits in the time that is left; noted, so that a later call agrees."""
    seconds = further.work.options.seconds
    if seconds is None:
        return True
    key = further.keys()["models"]
    for noted_answer in (True, False):
        if further.noted("fits", f"{key} {noted_answer}"):
            return noted_answer
    remaining = seconds - sum(step.seconds for step in further.work.steps)
    is_in_time = False
    if remaining > 0:
        start = time.monotonic()
        speed = measured_speed(further.photographs, further.work.options.sfm)
        remaining -= time.monotonic() - start
        is_in_time = expected_seconds(further, models, speed) <= remaining
    further.note(fits=f"{key} {is_in_time}")
    return is_in_time


def expected_seconds(further: FurtherAttempt, models: Models, speed: PoseSpeed) -> float:
    """Return the seconds that a step takes."""
    step = further.step
    pairs = further.first_pairs(models)
    n_images = len({index for pair in pairs for index in pair})
    n_beside = 0
    if not further.is_lost(models):
        n_beside = len(further.left_out(models)) * _PARTNERS * (_PARTNERS - 1) // 2
    seconds = n_images * speed.extraction * step.extraction_cost
    seconds += (len(pairs) + n_beside) * speed.matching * step.matching_cost
    return seconds + speed.mapping(len(further.photographs)) * step.matching_cost
