# SPDX-License-Identifier: Apache-2.0
"""Registering the images of a capture: inside of masks, and in whole images where that fails."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sugar_capture import mapping, matching
from sugar_capture.feature_database import database_errors
from sugar_capture.ladder.climbing import Climbed, climb
from sugar_capture.mapping import Models
from sugar_capture.pairs.chosen_pairs import Pair, best_partners, connected_images
from sugar_capture.pairs.pair_checks import contradicting_pairs
from sugar_capture.registration_attempts import Attempt
from sugar_capture.registration_report import FINE_SHARE, NARROW, model_facts
from sugar_capture.scene_folder import note
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, replaced_folder
from sugar_utils.libraries import load_pycolmap
from sugar_utils.recipe import digest_of

if TYPE_CHECKING:
    import pycolmap

# Registered images that match one that is left out best. They are compared with each other in
# whole, so that there are points outside of the masks.
_WHOLE_PARTNERS = 8
_LEAST_SHARE = 0.5  # of the images that are registered inside of masks, to add others to them


@dataclass(frozen=True)
class Extension(Attempt):
    """Registration of whole images in a model that was made of masked images.

    Its database has the features of whole images and the matches inside of masks. Only images that
    are left out are compared again, and those that match them.
    """

    masked: Attempt | None = None  # the attempt whose model is added to

    @property
    def prefix(self) -> str:
        """Beginning of the names of files and notes."""
        return "extended_"

    def keys(self) -> dict[str, str]:
        """Return a digest for each step of all that its result depends on."""
        models_key = self._masked().keys()["models"]
        return {step: digest_of(key, models_key) for step, key in super().keys().items()}

    def _masked(self) -> Attempt:
        if self.masked is None:
            raise ValueError("only a model of masked images is extended")
        return self.masked

    def extend(self, models: Models) -> Models | None:
        """Add images to the largest of some models; None if no further one matches.

        Steps that an earlier call finished are skipped.
        """
        key = self.keys()["models"]
        with database_errors(self.database):
            extended = self._noted_models("models", key, self.models)
            if extended is not None:
                return extended
            left_out = self.left_out(models)
            self._write_database(left_out)
            pairs = [pair for pair in self.chosen_pairs() if not set(pair).isdisjoint(left_out)]
            self.match_pairs(pairs, "comparing whole photographs that are left out")
            if not connected_images(left_out, matching.verified_matches(self.database)):
                return None
            self._match_partners(left_out)
            extended = self._add_left_out(self.continued(self._with_all_points(models)))
            self.note(models=key)
        return extended

    def candidates(self, models: Models) -> list[int]:
        """Return the images that are not registered, but match whole images."""
        matches = matching.verified_matches(self.database)
        return connected_images(self.left_out(models), matches)

    def contradicting(self, models: Models) -> set[str]:
        """Return the names of the images whose matches contradict their poses."""
        model = models.largest
        if model is None:
            return set()
        matches = matching.verified_matches(self.database)
        return set(contradicting_pairs(model, self.database, self.names, matches))

    def _write_database(self, left_out: Collection[int]) -> None:
        """Write the features of whole images, and the matches inside of masks of all others."""
        key = self.keys()["features"]
        if self.noted("found", key) and self.database.is_file():
            return
        if self.whole is None:
            raise ValueError("an extension takes the features of whole images")
        self.whole.extract_features()
        self.note(found=None)
        for path in self.database.parent.glob(f"{self.database.name}*"):
            path.unlink()
        with atomic_path(self.database) as temporary:
            shutil.copyfile(self.whole.database, temporary)
            self._copy_matches(temporary, left_out)
        self.note(found=key)

    def _copy_matches(self, path: Path, left_out: Collection[int]) -> None:
        """Copy matches inside of masks to a database of whole images, where they have other places.

        Args:
            left_out: Images whose matches are not copied.
        """
        pycolmap = load_pycolmap()
        masked = self._masked()
        verified = matching.verified_matches(masked.database)
        with (
            pycolmap.Database.open(str(masked.database)) as source,
            pycolmap.Database.open(str(path)) as target,
        ):
            target.clear_two_view_geometries()
            target.clear_matches()
            places = self._places_in_whole_images(target, masked)
            for first, second in sorted(verified):
                if first in left_out or second in left_out:
                    continue
                geometry = source.read_two_view_geometry(first + 1, second + 1)
                rows = geometry.inlier_matches
                columns = [places[first][rows[:, 0]], places[second][rows[:, 1]]]
                geometry.inlier_matches = np.stack(columns, axis=1).astype(np.uint32)
                target.write_two_view_geometry(first + 1, second + 1, geometry)

    def _places_in_whole_images(
        self, database: pycolmap.Database, masked: Attempt
    ) -> list[np.ndarray]:
        """Return where the features inside of the mask of each image are among all of the image."""
        size = self.work.options.sfm.extraction_size
        places = []
        for index, photograph in enumerate(self.photographs):
            keypoints = database.read_keypoints(index + 1).reshape(-1, 4)
            inside = np.ones(len(keypoints), dtype=bool)
            mask = None if masked.masks is None else masked.masks[index]
            if mask is not None:
                inside = matching.are_inside(keypoints, photograph, mask, size)
            places.append(np.flatnonzero(inside))
        return places

    def _match_partners(self, left_out: Collection[int]) -> None:
        """Compare in whole, with each other, the registered images that match one left out best."""
        matches = matching.verified_matches(self.database)
        pairs: set[Pair] = set()
        for index in left_out:
            partners = best_partners(index, matches, left_out, _WHOLE_PARTNERS)
            pairs.update(itertools.combinations(sorted(partners), 2))
        with load_pycolmap().Database.open(str(self.database)) as database:
            for first, second in pairs:
                if database.exists_two_view_geometry(first + 1, second + 1):
                    database.delete_two_view_geometry(first + 1, second + 1)
                if database.exists_matches(first + 1, second + 1):
                    database.delete_matches(first + 1, second + 1)
        self.match_pairs(sorted(pairs), "comparing whole photographs beside them")

    def _with_all_points(self, models: Models) -> Models:
        """Return models with the points from matches of whole images in the largest one."""
        if models.largest is None:
            raise ValueError("there is no model to extend")
        seed = self.work.options.random_seed
        with tempfile.TemporaryDirectory() as folder:
            model = mapping.placed_model(self.database, Path(folder), models.largest, seed)
        return Models(model, models.registered)


def register_images(attempts: Sequence[Attempt]) -> Climbed:
    """Register the images in the first way, or in the second one if that registers more.

    The second one is tried if the first one leaves images out. For those that are left out then,
    further kinds of features are tried. The models that are chosen are copied to the folder in
    which programs look for them.
    """
    first = attempts[0]
    _require_mapper(first)
    models = first.run()
    chosen = first
    is_enough = models.n_registered >= FINE_SHARE * len(first.photographs)
    if not is_enough and len(attempts) > 1:
        models, chosen = _try_whole_images(models, first, attempts[1])
    climbed = climb(models, chosen)
    work = first.work
    if climbed.attempt.models != work.models:
        if chosen.models == work.models:
            chosen.keep_models()
        with replaced_folder(work.models) as fresh:
            shutil.copytree(climbed.attempt.models, fresh)
            note(work.source, models=None, mapped=None)
    return climbed


def _require_mapper(attempt: Attempt) -> None:
    pycolmap = load_pycolmap()
    if attempt.mapper == "global" and not hasattr(pycolmap, "global_mapping"):
        raise UserError(
            f"--mapper global: pycolmap {pycolmap.__version__} has none; use --mapper incremental"
        )


def _try_whole_images(
    masked_models: Models, masked: Attempt, whole: Attempt
) -> tuple[Models, Attempt]:
    """Register whole images where they add some; return the best models and their attempt.

    Those that are left out are added to the models inside of masks. All are registered anew only
    where that leaves out images which match others.
    """
    info = whole.work.console.info
    n = len(whole.photographs)
    n_masked = masked_models.n_registered
    info(f"{n_masked} of {n} photographs are registered inside the masks: trying whole ones")
    best = masked_models
    chosen = masked
    is_complete = False
    if _can_extend(masked_models, masked):
        extension = _extension(masked, whole)
        extended = extension.extend(masked_models)
        if extended is not None and _is_better(extended, masked_models, extension):
            best = extended
            chosen = extension
            n_added = best.n_registered - n_masked
            info(f"{n_added} whole photographs are added to those registered inside the masks")
        is_complete = not extension.candidates(best)
    if not is_complete:
        models = whole.run()
        n_whole = models.n_registered
        # On a narrow path the cameras hardly moved, as where an object turned before a background.
        model = models.largest
        is_wide = model is not None and model_facts(model).spread >= NARROW
        if is_wide and n_whole > best.n_registered:
            info(f"{n_whole} of {n} whole photographs are registered: these poses are taken")
            return models, whole
    if chosen is masked:
        info("no more whole photographs are registered: poses from inside the masks are taken")
    return best, chosen


def _can_extend(models: Models, attempt: Attempt) -> bool:
    """Whether a model has enough images to add others to, and its lenses are estimated."""
    if attempt.known is not None or attempt.of_panoramas:
        return False
    return models.n_registered >= _LEAST_SHARE * len(attempt.photographs)


def _extension(masked: Attempt, whole: Attempt) -> Extension:
    return Extension(
        whole.work,
        whole.photographs,
        masks=None,
        content=masked.content,
        whole=whole,
        masked=masked,
    )


def _is_better(extended: Models, models: Models, extension: Extension) -> bool:
    """Whether more images are registered, and the matches of those that were added agree."""
    if extended.n_registered <= models.n_registered:
        return False
    added = set(extended.registered[0]).difference(models.registered[0])
    return added.isdisjoint(extension.contradicting(extended))
