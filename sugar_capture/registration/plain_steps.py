# SPDX-License-Identifier: Apache-2.0
"""The steps that every capture has: SIFT features, matches of chosen pairs, models, further pairs.

They use one database. Features inside of masks are those of the whole images that lie there.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from sugar_capture import panoramas
from sugar_capture.features import matching
from sugar_capture.features.feature_database import (
    create_database,
    is_whole,
    open_database,
    remove_database,
)
from sugar_capture.pairs.chosen_pairs import (
    Pair,
    connected_images,
    joining_pairs,
    pairs_of_unregistered,
    pairs_to_match,
    recorded_pairs,
    second_round,
)
from sugar_capture.pairs.first_pairs import images_apart
from sugar_capture.registration import mapping
from sugar_capture.registration.capture import Capture, Registration
from sugar_capture.registration.mapping import Models
from sugar_capture.registration.pose_time import PoseSpeed, announced, expected_pairs, note_mapping
from sugar_capture.registration.registration_report import FINE_ERROR
from sugar_capture.registration.steps import KeptStep, RegistrationStep, register
from sugar_utils.errors import UserError
from sugar_utils.files import replaced_folder

# Most of the images that match others that a model may lack which was placed at once. To register
# thousands one by one takes several times as long.
_FEW_UNREGISTERED = 0.02
LEAST_SHARE = 0.5  # of the images that are registered, to add others to their model


class PlainStep(KeptStep, RegistrationStep):
    """A step that every capture has.

    Args:
        prefix: Beginning of its name, which separates its files from those of another database.
    """

    suffix: str  # end of its name
    is_required = True

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.name = f"{prefix}{self.suffix}"

    def most_added(self, capture: Capture, before: Registration) -> int:
        """Return the number of images, of which none is registered yet."""
        return capture.n


class SiftFeatures(PlainStep):
    """SIFT features of all images, or of what lies inside of their masks."""

    suffix = "features"
    label = "SIFT"

    def settings(self, capture: Capture) -> tuple[object, ...]:
        """Return the lens model and the limits of features."""
        sfm = capture.sfm
        return sfm.camera, sfm.extraction_size, sfm.max_features

    def seconds(self, capture: Capture, before: Registration, speed: PoseSpeed) -> float:
        """Return the seconds that the features of all images take."""
        return capture.n * speed.extraction

    def is_sound(self, capture: Capture, before: Registration) -> bool:
        """Whether the database has all images and is not damaged."""
        return is_whole(before.database, capture.n)

    def prepare(self, capture: Capture, before: Registration) -> None:
        """Write a database without features; the steps that used the earlier one are forgotten."""
        for step in plain_steps(self.prefix):
            capture.note(**{step.name: None})
        remove_database(before.database)
        lenses = None if capture.known is None else capture.known.lens_groups()
        rigs = panoramas.rigs_of(capture.photographs) if capture.of_panoramas else None
        create_database(before.database, capture.photographs, capture.sfm.camera, lenses, rigs)

    def run(self, capture: Capture, before: Registration) -> None:
        """Extract features, or take those inside of masks from those of the whole images."""
        sfm = capture.sfm
        if before.in_masks:
            whole = whole_features(capture)
            matching.copy_masked_features(
                whole.database,
                before.database,
                capture.photographs,
                capture.masks,
                sfm.extraction_size,
            )
            return
        with capture.step("looking for features", capture.n) as advance:
            matching.extract_features(
                before.database,
                capture.photographs,
                sfm.extraction_size,
                sfm.max_features,
                advance,
            )


class ChosenPairs(PlainStep):
    """Matches of the pairs that the matcher chooses, and of images that few others match."""

    suffix = "pairs"
    label = "matches of chosen pairs"

    def settings(self, capture: Capture) -> tuple[object, ...]:
        """Return the matcher and the seed."""
        return capture.matcher, capture.seed

    def seconds(self, capture: Capture, before: Registration, speed: PoseSpeed) -> float:
        """Return the seconds that the pairs of the first round take."""
        return expected_pairs(capture.n, capture.work) * speed.matching

    def prepare(self, capture: Capture, before: Registration) -> None:
        """Remove all matches from the database."""
        with open_database(before.database) as database:
            database.clear_two_view_geometries()
            database.clear_matches()

    def run(self, capture: Capture, before: Registration) -> None:
        """Match the chosen pairs, then those of images that few match, and of separate parts."""
        pairs = chosen_pairs(capture, before.database)
        where = _where(before)
        capture.match_pairs(before.database, pairs, f"comparing pairs{where}")
        if capture.matcher == "exhaustive":
            return
        # Of the first round alone, so that a call that resumes makes the same choice.
        verified = matching.verified_matches(before.database)
        matches = {pair: verified[pair] for pair in pairs if pair in verified}
        further = second_round(capture.n, matches).difference(pairs)
        capture.match_pairs(before.database, further, f"comparing loose photographs{where}")
        verified = matching.verified_matches(before.database)
        matches = {pair: verified[pair] for pair in {*pairs, *further} if pair in verified}
        apart = images_apart(matches, capture.n)
        joining = set(joining_pairs(before.database, apart, capture.n)).difference(pairs, further)
        capture.match_pairs(before.database, joining, f"comparing separate parts{where}")


class Mapping(PlainStep):
    """Models of the matches that the database has."""

    suffix = "mapping"
    label = "mapping"

    def settings(self, capture: Capture) -> tuple[object, ...]:
        """Return the mapper, the seed, and whether the focal length is kept."""
        return capture.mapper, capture.seed, capture.keeps_focal

    def seconds(self, capture: Capture, before: Registration, speed: PoseSpeed) -> float:
        """Return the seconds that a model of all images takes."""
        return speed.mapping(capture.n)

    def prepare(self, capture: Capture, before: Registration) -> None:
        """Do nothing, as the folder of models is written at once."""

    def run(self, capture: Capture, before: Registration) -> None:
        """Register the images."""
        map_images(capture, before, self.folder(capture))

    def result(self, capture: Capture, before: Registration, key: str) -> Registration:
        """Read the models.

        Raises:
            UserError: They are missing or damaged.
        """
        if not self.folder(capture).is_dir():
            raise UserError(f"{self.folder(capture)} is missing")
        return super().result(capture, before, key)


class FurtherPairs(PlainStep):
    """Matches of images without a pose with all others, among thousands with similar ones.

    So a choice of pairs loses no image that all pairs would have registered.
    """

    suffix = "further_pairs"
    is_required = False
    label = "further pairs"

    def settings(self, capture: Capture) -> tuple[object, ...]:
        """Return what its result depends on, beside that of the step before."""
        return (self.label,)

    def most_added(self, capture: Capture, before: Registration) -> int:
        """Return the number of images without a pose; 0 where all pairs are matched already."""
        if capture.matcher == "exhaustive" or capture.known is not None:
            return 0
        return len(capture.unregistered(before.models))

    def seconds(self, capture: Capture, before: Registration, speed: PoseSpeed) -> float:
        """Return the seconds that the pairs take, and the images that they may register."""
        n_added = self.most_added(capture, before)
        n_pairs = n_added * (capture.n - 1)
        if is_lost(capture, before.models):
            n_pairs = capture.n * (capture.n - 1) // 2
            n_added = capture.n
        return n_pairs * speed.matching + speed.mapping(n_added)

    def prepare(self, capture: Capture, before: Registration) -> None:
        """Keep matches of pairs, which are those that other settings would find."""

    def run(self, capture: Capture, before: Registration) -> None:
        """Match the pairs; add what matches to the model, or map anew where there is hardly one."""
        unregistered = capture.unregistered(before.models)
        compared: Collection[int] = unregistered
        if is_lost(capture, before.models):
            compared = range(capture.n)
        pairs = pairs_of_unregistered(before.database, compared, capture.n)
        title = f"comparing photographs that are left out{_where(before)}"
        capture.match_pairs(before.database, pairs, title)
        if not connected_images(unregistered, matching.verified_matches(before.database)):
            return
        if is_lost(capture, before.models):
            map_images(capture, before, self.folder(capture))
        else:
            continue_model(capture, before, self.folder(capture))


def plain_steps(prefix: str) -> list[PlainStep]:
    """Return the steps that every capture has, in order."""
    return [
        SiftFeatures(prefix),
        ChosenPairs(prefix),
        Mapping(prefix),
        FurtherPairs(prefix),
    ]


def whole_features(capture: Capture) -> Registration:
    """Return the registration with the features of whole images, and no matches."""
    return register(capture, [SiftFeatures()], capture.start(in_masks=False))


def chosen_pairs(capture: Capture, database: Path) -> list[Pair]:
    """Return the pairs of image indices that the matcher compares first. Ascending"""
    pairs = pairs_to_match(database, capture.n, capture.matcher)
    if capture.matcher == "exhaustive":
        return pairs
    return sorted(recorded_pairs(capture.photographs).union(pairs))


def is_lost(capture: Capture, models: Models) -> bool:
    """Whether there is no model that images could be added to."""
    return models.n_registered < LEAST_SHARE * capture.n


def map_images(capture: Capture, before: Registration, folder: Path) -> None:
    """Register all images by the matches of a database, and write the models into a folder."""
    where = _where(before)
    title = "registering photographs"
    poses = None
    if capture.known is not None:
        title = "triangulating points"
        poses = [(camera.rotation, camera.center) for camera in capture.known.cameras]
    elif capture.mapper == "global":
        capture.work.console.info(
            f"placing {capture.n} photographs at once, which shows no progress"
        )
    with capture.step(f"{title}{where}", capture.n) as advance:
        advance = announced(advance, capture.n, capture.work)
        models = mapping.map_photographs(
            before.database, capture.names, folder, capture.mapping_options, poses, advance
        )
    note_mapping(capture.work, models.n_registered)
    is_automatic = capture.mapper == "global" and capture.sfm.mapper == "auto"
    if is_automatic and poses is None and _is_doubtful(capture, before.database, models):
        _map_one_by_one(capture, before, folder, models)


def continue_model(
    capture: Capture, before: Registration, folder: Path, database: Path | None = None
) -> Models:
    """Add images to the largest model one by one, and write the models into a folder.

    Args:
        database: Of other features than those that the model was made of; None: of the same.
    """
    model = before.models.largest
    if model is None:
        raise ValueError("there is no model to add images to")
    title = f"registering photographs that are left out{_where(before)}"
    with capture.step(title, capture.n) as advance:
        if database is not None:
            model = mapping.with_points_of(database, model, capture.seed)
        return mapping.map_photographs(
            database or before.database,
            capture.names,
            folder,
            capture.mapping_options,
            None,
            advance,
            model,
        )


def _where(registration: Registration) -> str:
    """Where features are extracted, for messages."""
    return " in the masks" if registration.in_masks else ""


def _is_doubtful(capture: Capture, database: Path, models: Models) -> bool:
    """Whether models lack many images that match others, or their reprojection error is large.

    A few are added to the model by :class:`FurtherPairs`.
    """
    if models.largest is None or _error(capture, models) > FINE_ERROR:
        return True
    matches = matching.verified_matches(database)
    n_missing = len(connected_images(capture.unregistered(models), matches))
    is_completed = capture.matcher != "exhaustive"
    n_allowed = _FEW_UNREGISTERED * capture.n if is_completed else 0
    return n_missing > n_allowed


def _error(capture: Capture, models: Models) -> float:
    """Mean reprojection error in pixels of the size at which features are extracted."""
    if models.largest is None:
        return math.inf
    largest_pixel = max(capture.pixel_sizes(capture.sfm.extraction_size).values())
    return models.largest.compute_mean_reprojection_error() / largest_pixel


def _map_one_by_one(capture: Capture, before: Registration, folder: Path, models: Models) -> None:
    """Register the images incrementally; the better models stay in the folder."""
    capture.work.console.info(
        f"{models.n_registered} of {capture.n} photographs are placed at once, reprojection error "
        f"{_error(capture, models):.2f} px: trying one after the other"
    )
    other_folder = folder.with_name(f"{folder.name}_one_by_one")
    options = replace(capture.mapping_options, mapper="incremental")
    title = f"registering photographs one by one{_where(before)}"
    with capture.step(title, capture.n) as advance:
        incremental = mapping.map_photographs(
            before.database, capture.names, other_folder, options, None, advance
        )
    is_better = incremental.n_registered > models.n_registered
    if incremental.n_registered == models.n_registered:
        is_better = _error(capture, incremental) < _error(capture, models)
    if is_better:
        with replaced_folder(folder) as fresh:
            shutil.copytree(other_folder, fresh)
    shutil.rmtree(other_folder)
