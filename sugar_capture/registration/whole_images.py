# SPDX-License-Identifier: Apache-2.0
"""Registering whole images where what lies inside of masks is too little for some of them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sugar_capture.features import matching
from sugar_capture.features.feature_database import is_whole, open_database, remove_database
from sugar_capture.pairs.chosen_pairs import (
    SIMILAR_UNORDERED,
    connected_images,
    pairs_among_partners,
)
from sugar_capture.registration.capture import Capture, Registration
from sugar_capture.registration.plain_steps import (
    FurtherPairs,
    chosen_pairs,
    continue_model,
    is_lost,
    plain_steps,
    whole_features,
)
from sugar_capture.registration.pose_time import PoseSpeed
from sugar_capture.registration.proven_images import remove_unproven
from sugar_capture.registration.registration_report import FINE_SHARE, NARROW, model_facts
from sugar_capture.registration.steps import KeptStep, RegistrationStep, is_in_time, register
from sugar_utils.files import atomic_path

if TYPE_CHECKING:
    import pycolmap

# Registered images that match one without a pose best. They are compared with each other in
# whole, so that there are points outside of the masks.
WHOLE_PARTNERS = 8


class WholeImages(RegistrationStep):
    """Whole images, where masks leave too little: added to the model in masks, or all anew."""

    name = "whole_images"
    label = "whole photographs"

    def most_added(self, capture: Capture, before: Registration) -> int:
        """Return the number of images without a pose; 0 where nearly all have one."""
        if before.models.n_registered >= FINE_SHARE * capture.n:
            return 0
        return len(capture.unregistered(before.models))

    def seconds(self, capture: Capture, before: Registration, speed: PoseSpeed) -> float:
        """Return the seconds that it takes to add images to the model in masks."""
        n_added = len(capture.unregistered(before.models))
        n_partners = WHOLE_PARTNERS * (WHOLE_PARTNERS - 1) // 2
        n_pairs = n_added * (min(capture.n, SIMILAR_UNORDERED) + n_partners)
        return n_pairs * speed.matching + speed.mapping(n_added)

    def perform(self, capture: Capture, before: Registration) -> Registration:
        """Return the registration in masks with whole images, or that of whole images alone.

        All are registered anew only where images are left that match others in whole.
        """
        info = capture.work.console.info
        n_masked = before.models.n_registered
        info(
            f"{n_masked} of {capture.n} photographs are registered inside the masks: trying whole "
            "ones"
        )
        best = before
        may_add_more = True
        if self._can_extend(capture, before):
            added = AddedWholeImages()
            extended = added.perform(capture, before)
            if extended.folder != before.folder:
                best = register(capture, [FurtherPairs("extended_")], extended)
                n_added = best.models.n_registered - n_masked
                info(f"{n_added} whole photographs are added to those registered inside the masks")
            matches = matching.verified_matches(added.database(capture, before))
            may_add_more = bool(connected_images(capture.unregistered(best.models), matches))
        whole = self._anew(capture, best) if may_add_more else None
        if whole is not None:
            n_whole = whole.models.n_registered
            info(
                f"{n_whole} of {capture.n} whole photographs are registered: these poses are taken"
            )
            return whole
        if best is before:
            info("no more whole photographs are registered: poses from inside the masks are taken")
        return best

    def _can_extend(self, capture: Capture, before: Registration) -> bool:
        """Whether a model has enough images to add others to, and its lenses are estimated."""
        if capture.known is not None or capture.of_panoramas:
            return False
        return not is_lost(capture, before.models)

    def _anew(self, capture: Capture, best: Registration) -> Registration | None:
        """Register all whole images; None where that takes too long, or registers no more."""
        steps = plain_steps("")
        # Features of the whole images are there: those in masks are some of them.
        pairs_and_mapping = steps[1:3]

        def seconds(speed: PoseSpeed) -> float:
            return sum(step.seconds(capture, best, speed) for step in pairs_and_mapping)

        if not is_in_time(capture, f"{self.name}_anew", best.key, seconds):
            info = capture.work.console.info
            info("note: registering all whole photographs would take longer than is left")
            return None
        whole = register(capture, steps, capture.start(in_masks=False))
        # On a narrow path the cameras hardly moved, as where an object turned before a background.
        model = whole.models.largest
        is_wide = model is not None and model_facts(model).spread >= NARROW
        is_more = whole.models.n_registered > best.models.n_registered
        return whole if is_wide and is_more else None


class AddedWholeImages(KeptStep):
    """Whole images that are added to a model of what lies inside of masks.

    Its database has the features of whole images and the matches inside of masks. Only images
    without a pose are compared again, and those that match them.
    """

    name = "extended"

    def settings(self, capture: Capture) -> tuple[object, ...]:
        """Return the digest of the images, without that of the masks."""
        return (self.name, capture.content)

    def database(self, capture: Capture, before: Registration) -> Path:
        """Return the database of whole images."""
        return capture.path("extended_database.db")

    def is_sound(self, capture: Capture, before: Registration) -> bool:
        """Whether the database has all images and is not damaged."""
        return is_whole(self.database(capture, before), capture.n)

    def prepare(self, capture: Capture, before: Registration) -> None:
        """Write the features of whole images, and the matches inside of masks of registered."""
        whole = whole_features(capture)
        database = self.database(capture, before)
        remove_database(database)
        with atomic_path(database) as temporary:
            shutil.copyfile(whole.database, temporary)
            _copy_matches(capture, before, temporary)

    def run(self, capture: Capture, before: Registration) -> None:
        """Match images without a pose in whole, and add those that match to the model."""
        unregistered = capture.unregistered(before.models)
        database = self.database(capture, before)
        pairs = [
            pair
            for pair in chosen_pairs(capture, database)
            if not set(pair).isdisjoint(unregistered)
        ]
        capture.match_pairs(database, pairs, "comparing whole photographs that are left out")
        matches = matching.verified_matches(database)
        if not connected_images(unregistered, matches):
            return
        partners = pairs_among_partners(unregistered, matches, WHOLE_PARTNERS)
        with open_database(database) as opened:
            for first, second in partners:
                if opened.exists_two_view_geometry(first + 1, second + 1):
                    opened.delete_two_view_geometry(first + 1, second + 1)
                if opened.exists_matches(first + 1, second + 1):
                    opened.delete_matches(first + 1, second + 1)
        capture.match_pairs(database, partners, "comparing whole photographs beside them")
        whole = replace(before, in_masks=False)
        extended = continue_model(capture, whole, self.folder(capture), database)
        remove_unproven(capture, extended, before.models, database, self.folder(capture))

    def result(self, capture: Capture, before: Registration, key: str) -> Registration:
        """Read the registration after the step; that before it where it registered nothing."""
        if not self.folder(capture).is_dir():
            return replace(before, key=key)
        after = super().result(capture, before, key)
        return replace(after, in_masks=False, similar_by=after.database)


def _copy_matches(capture: Capture, masked: Registration, path: Path) -> None:
    """Copy matches inside of masks to a database of whole images, where they have other indices.

    Those of images without a pose are not copied.
    """
    unregistered = set(capture.unregistered(masked.models))
    verified = matching.verified_matches(masked.database)
    with (
        open_database(masked.database) as source,
        open_database(path) as target,
    ):
        target.clear_two_view_geometries()
        target.clear_matches()
        indices = _indices_in_whole_images(capture, target)
        for first, second in sorted(verified):
            if not unregistered.isdisjoint((first, second)):
                continue
            geometry = source.read_two_view_geometry(first + 1, second + 1)
            rows = geometry.inlier_matches
            columns = [indices[first][rows[:, 0]], indices[second][rows[:, 1]]]
            geometry.inlier_matches = np.stack(columns, axis=1).astype(np.uint32)
            target.write_two_view_geometry(first + 1, second + 1, geometry)


def _indices_in_whole_images(capture: Capture, database: pycolmap.Database) -> list[np.ndarray]:
    """Return the index among the features of the whole image of each feature inside of its mask."""
    size = capture.sfm.extraction_size
    indices = []
    for index, photograph in enumerate(capture.photographs):
        keypoints = database.read_keypoints(index + 1).reshape(-1, 4)
        inside = np.ones(len(keypoints), dtype=bool)
        mask = capture.masks[index]
        if mask is not None:
            inside = matching.are_inside(keypoints, photograph, mask, size)
        indices.append(np.flatnonzero(inside))
    return indices
