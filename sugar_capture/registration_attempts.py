# SPDX-License-Identifier: Apache-2.0
"""One way to register the images of a capture: features, matches and models, step by step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gaussian_splatting.data.cameras import ViewMask
from sugar_capture import mapping, matching, panoramas
from sugar_capture.feature_database import create_database, database_errors, is_whole
from sugar_capture.known_cameras import KnownCameras
from sugar_capture.mapping import MappingOptions, Models
from sugar_capture.pairs.chosen_pairs import (
    Matcher,
    Pair,
    chosen_matcher,
    connected_images,
    pairs_of_left_out,
    pairs_to_match,
    recorded_pairs,
    second_round,
)
from sugar_capture.photographs import Photograph
from sugar_capture.registration_report import FINE_ERROR
from sugar_capture.scene_folder import Work, note
from sugar_utils.errors import UserError
from sugar_utils.files import replaced_folder
from sugar_utils.libraries import load_pycolmap
from sugar_utils.recipe import digest_of

# Most of the images that match others that a model may lack which was placed at once. To register
# thousands one by one takes several times as long.
_FEW_LEFT_OUT = 0.02


@dataclass(frozen=True)
class Attempt:
    """One way to register the images; its files and notes have a prefix of its own."""

    work: Work
    photographs: Sequence[Photograph]
    # Of each image; features are extracted where they count. None: everywhere.
    masks: Sequence[ViewMask | None] | None
    content: str  # digest of the input files
    # Of the whole images, whose features those inside of the masks are taken from.
    whole: Attempt | None = None
    known: KnownCameras | None = None
    of_panoramas: bool = False  # whether the images are views of panoramas
    keeps_focal: bool = False  # one circle of cameras does not determine the focal length

    @property
    def prefix(self) -> str:
        """Beginning of the names of files and notes."""
        return "" if self.masks is None else "masked_"

    @property
    def database(self) -> Path:
        """File of features and matches."""
        return self.work.source.work / f"{self.prefix}database.db"

    @property
    def models(self) -> Path:
        """Folder of the models."""
        return self.work.source.work / f"{self.prefix}sparse"

    @property
    def kept_models(self) -> Path:
        """Folder of a copy of the models, for when others take their place."""
        return self.work.source.work / f"{self.prefix}kept_sparse"

    @property
    def where(self) -> str:
        """Where features are extracted, for messages."""
        return "" if self.masks is None else " in the masks"

    @property
    def matcher(self) -> Matcher:
        """The matcher that is used."""
        in_order = self.work.source.video is not None
        matcher = self.work.options.sfm.matcher
        return chosen_matcher(matcher, len(self.photographs), in_order)

    @property
    def mapper(self) -> mapping.Mapper:
        """The mapper that is used."""
        return mapping.chosen_mapper(self.work.options.sfm.mapper, len(self.photographs))

    def keys(self) -> dict[str, str]:
        """Return a digest for each step of all that its result depends on."""
        sfm = self.work.options.sfm
        seed = self.work.options.random_seed
        features = digest_of(self.content, sfm.camera, sfm.extraction_size, sfm.max_features)
        matches = digest_of(features, self.matcher, seed)
        models = digest_of(matches, self.mapper, seed, self.keeps_focal)
        return {"features": features, "matches": matches, "models": models}

    def noted(self, step: str, key: str) -> bool:
        """Whether an earlier call noted a step with the same key."""
        return self.work.noted(f"{self.prefix}{step}", key)

    def note(self, **steps: str | None) -> None:
        """Note the key of each step; None removes a note."""
        note(self.work.source, **{f"{self.prefix}{step}": key for step, key in steps.items()})

    def run(self) -> Models:
        """Register the images; steps that an earlier call finished are skipped."""
        with database_errors(self.database):
            self.extract_features()
            self._match()
            return self._map()

    def extract_features(self) -> None:
        """Extract the features of all images into the database, or take them from whole images."""
        sfm = self.work.options.sfm
        key = self.keys()["features"]
        n = len(self.photographs)
        is_noted = self.noted("features", key)
        if not is_noted or not is_whole(self.database, n):
            if is_noted:
                self.work.console.info(f"note: {self.database} is missing or damaged; made anew")
            self._create_database()
            self.note(features=key, found=None, matches=None, matched=None)
        if self.noted("found", key):
            return
        if self.masks is None:
            with self.work.step("looking for features", n) as advance:
                matching.extract_features(
                    self.database,
                    self.photographs,
                    sfm.extraction_size,
                    sfm.max_features,
                    advance,
                )
        else:
            self._copy_masked_features(self.masks)
        self.note(found=key)

    def _copy_masked_features(self, masks: Sequence[ViewMask | None]) -> None:
        if self.whole is None:
            raise ValueError("features inside of masks are taken from those of whole images")
        self.whole.extract_features()
        size = self.work.options.sfm.extraction_size
        matching.copy_masked_features(
            self.whole.database, self.database, self.photographs, masks, size
        )

    def _create_database(self) -> None:
        for path in self.database.parent.glob(f"{self.database.name}*"):
            path.unlink()
        lenses = None
        if self.known is not None:
            lenses = self.known.lens_groups()
        rigs = None
        if self.of_panoramas:
            rigs = panoramas.rigs_of(self.photographs)
        camera_model = self.work.options.sfm.camera
        create_database(self.database, self.photographs, camera_model, lenses, rigs)

    def _match(self) -> None:
        key = self.keys()["matches"]
        if self.noted("matched", key):
            return
        if not self.noted("matches", key):
            with load_pycolmap().Database.open(str(self.database)) as database:
                database.clear_two_view_geometries()
                database.clear_matches()
            self.note(matches=key, matched=None)
        n = len(self.photographs)
        pairs = self.chosen_pairs()
        self.match_pairs(pairs, f"comparing pairs{self.where}")
        if self.matcher != "exhaustive":
            # Of the first round alone, so that a call that resumes makes the same choice.
            verified = matching.verified_matches(self.database)
            matches = {pair: verified[pair] for pair in pairs if pair in verified}
            further = second_round(n, matches).difference(pairs)
            self.match_pairs(sorted(further), f"comparing loose photographs{self.where}")
        self.note(matched=key)

    def chosen_pairs(self) -> list[Pair]:
        """Return the pairs of image indices that the matcher compares first. Ascending"""
        pairs = pairs_to_match(self.database, len(self.photographs), self.matcher)
        if self.matcher == "exhaustive":
            return pairs
        return sorted(recorded_pairs(self.photographs).union(pairs))

    def match_pairs(self, pairs: Sequence[Pair], title: str) -> None:
        """Match pairs of image indices that are not in the database yet."""
        if not pairs:
            return
        seed = self.work.options.random_seed
        with self.work.step(title, len(pairs)) as advance:
            matching.match_pairs(self.database, pairs, seed, advance)

    def _map(self) -> Models:
        key = self.keys()["models"]
        for step, folder in (("models", self.models), ("kept", self.kept_models)):
            models = self._noted_models(step, key, folder)
            if models is not None:
                return models
        models = self._noted_models("mapped", key, self.models)
        if models is None:
            self.note(models=None, mapped=None)
            models = self._map_matches()
            self.note(mapped=key)
        models = self._add_left_out(models)
        self.note(models=key)
        return models

    def _noted_models(self, step: str, key: str, folder: Path) -> Models | None:
        """Read the models that an earlier call noted; None if there are none, or damaged ones."""
        if not self.noted(step, key) or not folder.is_dir():
            return None
        try:
            return mapping.read_models(folder)
        except UserError as error:
            self.work.console.info(f"registering photographs again: {error}")
            self.note(models=None, mapped=None, kept=None)
            return None

    def keep_models(self) -> None:
        """Copy the models, so that a later call finds them after others took their place."""
        key = self.keys()["models"]
        if self.noted("models", key):
            with replaced_folder(self.kept_models) as fresh:
                shutil.copytree(self.models, fresh)
            self.note(kept=key, models=None, mapped=None)

    def _map_matches(self) -> Models:
        """Register the images by the matches that the database has."""
        n = len(self.photographs)
        title = "registering photographs"
        poses = None
        if self.known is not None:
            title = "triangulating points"
            poses = [(camera.rotation, camera.center) for camera in self.known.cameras]
        elif self.mapper == "global":
            self.work.console.info(f"placing {n} photographs at once, which shows no progress")
        with self.work.step(f"{title}{self.where}", n) as advance:
            models = mapping.map_photographs(
                self.database, self.names, self.models, self.mapping_options, poses, advance
            )
        is_automatic = self.mapper == "global" and self.work.options.sfm.mapper == "auto"
        if is_automatic and poses is None and self._is_doubtful(models):
            return self._map_one_by_one(models)
        return models

    def _is_doubtful(self, models: Models) -> bool:
        """Whether models lack many images that match others, or their reprojection error is large.

        A few are added to the model by :meth:`_add_left_out`.
        """
        if models.largest is None or self._error(models) > FINE_ERROR:
            return True
        matches = matching.verified_matches(self.database)
        n_missing = len(connected_images(self.left_out(models), matches))
        is_completed = self.matcher != "exhaustive"
        n_allowed = _FEW_LEFT_OUT * len(self.photographs) if is_completed else 0
        return n_missing > n_allowed

    def _error(self, models: Models) -> float:
        """Mean reprojection error in pixels of the size at which features are extracted."""
        if models.largest is None:
            return math.inf
        longest_side = max(max(item.width, item.height) for item in self.photographs)
        scale = min(1.0, self.work.options.sfm.extraction_size / longest_side)
        return models.largest.compute_mean_reprojection_error() * scale

    def _map_one_by_one(self, models: Models) -> Models:
        """Register the images incrementally; return the better models, which are in the folder."""
        n = len(self.photographs)
        self.work.console.info(
            f"{models.n_registered} of {n} photographs are placed at once, reprojection error "
            f"{self._error(models):.2f} px: trying one after the other"
        )
        folder = self.models.with_name(f"{self.models.name}_one_by_one")
        options = replace(self.mapping_options, mapper="incremental")
        with self.work.step(f"registering photographs one by one{self.where}", n) as advance:
            incremental = mapping.map_photographs(
                self.database, self.names, folder, options, None, advance
            )
        is_better = incremental.n_registered > models.n_registered
        if incremental.n_registered == models.n_registered:
            is_better = self._error(incremental) < self._error(models)
        if is_better:
            with replaced_folder(self.models) as fresh:
                shutil.copytree(folder, fresh)
        shutil.rmtree(folder)
        return incremental if is_better else models

    def _add_left_out(self, models: Models) -> Models:
        """Compare images that are not registered with others, and register them if they match.

        Except among thousands with all others, so that a choice of pairs leaves out no image that
        all pairs would have registered; see :func:`pairs_of_left_out`.
        """
        left_out = self.left_out(models)
        if self.matcher == "exhaustive" or self.known is not None or not left_out:
            return models
        n = len(self.photographs)
        # With most of the images left out there is no model that they could be added to.
        is_lost = 2 * len(left_out) > n
        pairs = pairs_of_left_out(self.database, range(n) if is_lost else left_out, n)
        self.match_pairs(pairs, f"comparing photographs that are left out{self.where}")
        if not connected_images(left_out, matching.verified_matches(self.database)):
            return models
        if is_lost:
            return self._map_matches()
        return self.continued(models)

    def continued(self, models: Models) -> Models:
        """Add further images to the largest model, one by one."""
        start = models.largest
        n = len(self.photographs)
        with self.work.step(f"registering photographs that are left out{self.where}", n) as advance:
            return mapping.map_photographs(
                self.database,
                self.names,
                self.models,
                self.mapping_options,
                None,
                advance,
                start,
            )

    def left_out(self, models: Models) -> list[int]:
        """Return the indices of the images that the largest model does not register."""
        registered = set(models.registered[0]) if models.registered else set()
        return [index for index, name in enumerate(self.names) if name not in registered]

    @property
    def names(self) -> list[str]:
        """Of the images."""
        return [photograph.name for photograph in self.photographs]

    @property
    def mapping_options(self) -> MappingOptions:
        """Settings of the mapper."""
        return MappingOptions(
            mapper=self.mapper,
            seed=self.work.options.random_seed,
            keeps_lenses=self.of_panoramas,
            keeps_focal=self.keeps_focal,
        )
