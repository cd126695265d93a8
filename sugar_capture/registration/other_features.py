# SPDX-License-Identifier: Apache-2.0
"""Registering images without a pose by another kind of features.

They are compared with images that show the same. The features are appended to those before, and
the mapper goes on with the model that is there; where most have no pose, it maps anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sugar_capture.features import matching
from sugar_capture.features.appended_features import append_features, images_with_features
from sugar_capture.features.feature_database import create_database, is_whole, remove_database
from sugar_capture.features.feature_kinds import FeatureInputs, FeatureKind
from sugar_capture.pairs.chosen_pairs import (
    Pair,
    connected_images,
    pairs_among_partners,
    pairs_to_match,
    pairs_with,
    recorded_pairs,
)
from sugar_capture.registration import mapping
from sugar_capture.registration.capture import Capture, Registration
from sugar_capture.registration.plain_steps import continue_model, is_lost, map_images
from sugar_capture.registration.pose_time import PoseSpeed
from sugar_capture.registration.proven_images import remove_unproven
from sugar_capture.registration.steps import KeptStep, RegistrationStep

FEW_PHOTOGRAPHS = 30  # of a capture, up to which one without a pose is compared with all others
_PARTNERS = 8  # registered images that match one without a pose best, compared with each other
_LEAST_FEATURES = 30  # of an image that may be registered


class OtherFeatures(KeptStep, RegistrationStep):
    """Features of one further kind, of images without a pose and of those that match them."""

    is_reported = True

    def __init__(self, kind: FeatureKind) -> None:
        self.kind = kind
        self.name = kind.name
        self.label = kind.label

    def settings(self, capture: Capture) -> tuple[object, ...]:
        """Return the kind of features and their limits."""
        return (self.kind.key(), *self._limits(capture))

    def most_added(self, capture: Capture, before: Registration) -> int:
        """Return the number of images without a pose.

        Cameras of other programs and views of panoramas are left as they are.
        """
        if capture.known is not None or capture.of_panoramas:
            return 0
        return len(capture.unregistered(before.models))

    def seconds(self, capture: Capture, before: Registration, speed: PoseSpeed) -> float:
        """Return the seconds that features, pairs and mapping take."""
        pairs = _first_pairs(capture, before)
        n_images = len({index for pair in pairs for index in pair})
        n_pairs = len(pairs)
        if not is_lost(capture, before.models):
            n_unregistered = len(capture.unregistered(before.models))
            n_pairs += n_unregistered * _PARTNERS * (_PARTNERS - 1) // 2
        seconds = n_images * speed.extraction * self.kind.extraction_cost
        seconds += n_pairs * speed.matching * self.kind.matching_cost
        return seconds + speed.mapping(capture.n) * self.kind.matching_cost

    def database(self, capture: Capture, before: Registration) -> Path:
        """Return the database with the features of this step and of those before it."""
        path = _own_database(self, capture)
        return path if path.is_file() else before.database

    def is_sound(self, capture: Capture, before: Registration) -> bool:
        """Whether the database of these features has all images and is not damaged."""
        return is_whole(_features(self, capture), capture.n)

    def prepare(self, capture: Capture, before: Registration) -> None:
        """Write databases without features."""
        features = _features(self, capture)
        whole_features = _whole_features(self, capture)
        for database in (features, whole_features, _own_database(self, capture)):
            remove_database(database)
        if before.in_masks:
            create_database(whole_features, capture.photographs, capture.sfm.camera)
        create_database(features, capture.photographs, capture.sfm.camera)

    def run(self, capture: Capture, before: Registration) -> None:
        """Find and match the features, append them to those before, and add what they prove."""
        features = _features(self, capture)
        pairs = self._find_features(capture, before)
        self._match(capture, pairs, "comparing photographs that are left out")
        unregistered = capture.unregistered(before.models)
        matches = matching.verified_matches(features)
        if not connected_images(unregistered, matches):
            return
        if not is_lost(capture, before.models):
            partners = pairs_among_partners(unregistered, matches, _PARTNERS)
            self._match(capture, partners, "comparing photographs beside them")
        database = _own_database(self, capture)
        pixel_sizes = capture.pixel_sizes(self._limits(capture)[0])
        append_features(before.database, features, database, pixel_sizes, capture.seed)
        folder = self.folder(capture)
        if is_lost(capture, before.models):
            map_images(capture, replace(before, database=database), folder)
            further = mapping.read_models(folder)
        else:
            further = continue_model(capture, before, folder, database)
        remove_unproven(capture, further, before.models, database, folder)

    def _limits(self, capture: Capture) -> tuple[int, int]:
        """Longest side in pixels at which features are looked for, and the most of an image."""
        return self.kind.limits or (capture.sfm.extraction_size, capture.sfm.max_features)

    def _inputs(self, capture: Capture) -> FeatureInputs:
        return FeatureInputs(capture.photographs, *self._limits(capture), capture.seed)

    def _find_features(self, capture: Capture, before: Registration) -> list[Pair]:
        """Extract the features of all images that are compared; return the pairs of them."""
        unregistered = capture.unregistered(before.models)
        self._extract(capture, before, unregistered)
        # What shows nothing at all matches nothing, so the others need no features for it.
        bare = set(unregistered).difference(
            images_with_features(_features(self, capture), unregistered, _LEAST_FEATURES)
        )
        pairs = [pair for pair in _first_pairs(capture, before) if bare.isdisjoint(pair)]
        self._extract(capture, before, sorted({index for pair in pairs for index in pair}))
        return pairs

    def _extract(self, capture: Capture, before: Registration, indices: Sequence[int]) -> None:
        if not indices:
            return
        features = _features(self, capture)
        extracted = _whole_features(self, capture) if before.in_masks else features
        with capture.step(f"looking for features: {self.label}", len(indices)) as advance:
            self.kind.extract(extracted, self._inputs(capture), indices, advance)
        if before.in_masks:
            matching.copy_masked_features(
                extracted,
                features,
                capture.photographs,
                capture.masks,
                self._limits(capture)[0],
                indices,
            )

    def _match(self, capture: Capture, pairs: Sequence[Pair], title: str) -> None:
        if not pairs:
            return
        with capture.step(f"{title}: {self.label}", len(pairs)) as advance:
            self.kind.match(_features(self, capture), self._inputs(capture), pairs, advance)


def _features(step: OtherFeatures, capture: Capture) -> Path:
    """Return the file of the features of a step alone, and of their matches."""
    return capture.path(f"{step.name}_features.db")


def _whole_features(step: OtherFeatures, capture: Capture) -> Path:
    """Return the file of the same features outside of masks, too."""
    return capture.path(f"{step.name}_whole_features.db")


def _own_database(step: OtherFeatures, capture: Capture) -> Path:
    """Return the file of the features of a step and of those before it."""
    return capture.path(f"{step.name}_database.db")


def _first_pairs(capture: Capture, before: Registration) -> list[Pair]:
    """Return the pairs of image indices that are compared first. Ascending"""
    n = capture.n
    compared = capture.unregistered(before.models)
    if is_lost(capture, before.models):
        compared = list(range(n))
    if n <= FEW_PHOTOGRAPHS:
        return pairs_with(compared, n)
    similar = pairs_to_match(before.similar_by, n, "similar")
    pairs = recorded_pairs(capture.photographs).union(similar)
    return sorted(pair for pair in pairs if not set(pair).isdisjoint(compared))
