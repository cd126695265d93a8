# SPDX-License-Identifier: Apache-2.0
"""Registering the images of a capture: inside of masks, and in whole images where that fails."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gaussian_splatting.data.cameras import ViewMask
from sugar_capture import mapping, matching, panoramas
from sugar_capture.feature_database import create_database, database_errors, is_whole
from sugar_capture.known_cameras import KnownCameras
from sugar_capture.mapping import MappingOptions, Models
from sugar_capture.photographs import Photograph
from sugar_capture.registration_report import FINE_SHARE, NARROW, model_facts
from sugar_capture.scene_folder import Work, digest, note
from sugar_utils.errors import UserError
from sugar_utils.files import replaced_folder
from sugar_utils.libraries import load_pycolmap


@dataclass(frozen=True)
class Attempt:
    """One way to register the images; its files and notes have a prefix of its own."""

    work: Work
    photographs: Sequence[Photograph]
    # Of each image; features are extracted where they count. None: everywhere.
    masks: Sequence[ViewMask | None] | None
    content: str  # digest of the input files
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
    def where(self) -> str:
        """Where features are extracted, for messages."""
        return "" if self.masks is None else " in the masks"

    @property
    def matcher(self) -> matching.Matcher:
        """The matcher that is used."""
        in_order = self.work.source.video is not None
        matcher = self.work.options.sfm.matcher
        return matching.chosen_matcher(matcher, len(self.photographs), in_order)

    @property
    def mapper(self) -> mapping.Mapper:
        """The mapper that is used."""
        return mapping.chosen_mapper(self.work.options.sfm.mapper, len(self.photographs))

    def keys(self) -> dict[str, str]:
        """Return a digest for each step of all that its result depends on."""
        sfm = self.work.options.sfm
        seed = self.work.options.random_seed
        features = digest(self.content, sfm.camera, sfm.extraction_size, sfm.max_features)
        matches = digest(features, self.matcher, seed)
        models = digest(matches, self.mapper, seed, self.keeps_focal)
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
            self._extract_features()
            self._match()
            return self._map()

    def _extract_features(self) -> None:
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
        masks = self.masks
        if masks is None:
            masks = [None] * n
        with self.work.step(f"looking for features{self.where}", n) as advance:
            matching.extract_features(
                self.database,
                self.photographs,
                masks,
                sfm.extraction_size,
                sfm.max_features,
                advance,
            )
        self.note(found=key)

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
        pairs = matching.pairs_to_match(self.database, len(self.photographs), self.matcher)
        seed = self.work.options.random_seed
        with self.work.step(f"comparing pairs{self.where}", len(pairs)) as advance:
            matching.match_pairs(self.database, pairs, seed, advance)
        self.note(matched=key)

    def _map(self) -> Models:
        console = self.work.console
        key = self.keys()["models"]
        n = len(self.photographs)
        if self.noted("models", key) and self.models.is_dir():
            try:
                return mapping.read_models(self.models)
            except UserError as error:
                console.info(f"registering photographs again: {error}")
        title = "registering photographs"
        poses = None
        if self.known is not None:
            title = "triangulating points"
            poses = [(camera.rotation, camera.center) for camera in self.known.cameras]
        elif self.mapper == "global":
            console.info(f"placing {n} photographs at once, which shows no progress")
        self.note(models=None)
        names = [photograph.name for photograph in self.photographs]
        options = MappingOptions(
            mapper=self.mapper,
            seed=self.work.options.random_seed,
            keeps_lenses=self.of_panoramas,
            keeps_focal=self.keeps_focal,
        )
        with self.work.step(f"{title}{self.where}", n) as advance:
            models = mapping.map_photographs(
                self.database, names, self.models, options, poses, advance
            )
        self.note(models=key)
        return models


def register_images(attempts: Sequence[Attempt]) -> tuple[Models, Attempt]:
    """Register the images in the first way, or in the second one if that registers more.

    The second one is tried if the first one leaves images out. Returns the models and the way that
    was chosen; its models are copied to the folder in which programs look for them.
    """
    first = attempts[0]
    _require_mapper(first)
    models = first.run()
    chosen = first
    is_enough = models.n_registered >= FINE_SHARE * len(first.photographs)
    if not is_enough and len(attempts) > 1:
        whole_models = _try_whole_images(models, attempts[1])
        if whole_models is not None:
            models = whole_models
            chosen = attempts[1]
    work = first.work
    if chosen.models != work.models:
        with replaced_folder(work.models) as fresh:
            shutil.copytree(chosen.models, fresh)
            note(work.source, models=None)
    return models, chosen


def _require_mapper(attempt: Attempt) -> None:
    pycolmap = load_pycolmap()
    if attempt.mapper == "global" and not hasattr(pycolmap, "global_mapping"):
        raise UserError(
            f"--mapper global: pycolmap {pycolmap.__version__} has none; use --mapper incremental"
        )


def _try_whole_images(masked_models: Models, attempt: Attempt) -> Models | None:
    """Register whole images; return their models if they are better than those inside masks."""
    info = attempt.work.console.info
    n = len(attempt.photographs)
    n_masked = masked_models.n_registered
    info(f"{n_masked} of {n} photographs are registered inside the masks: trying whole ones")
    models = attempt.run()
    n_whole = models.n_registered
    # On a narrow path the cameras hardly moved, as where an object turned before a background.
    model = models.largest
    if model is not None and n_whole > n_masked and model_facts(model).spread >= NARROW:
        info(f"{n_whole} of {n} whole photographs are registered: these poses are taken")
        return models
    info("no more whole photographs are registered: poses from inside the masks are taken")
    return None
