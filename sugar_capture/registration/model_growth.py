# SPDX-License-Identifier: Apache-2.0
"""Growing models image by image: from COLMAP's first pair, or from others where it ends early."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sugar_capture.features.feature_database import SMALL_GROUP, database_name
from sugar_capture.pairs.chosen_pairs import Pair
from sugar_capture.pairs.first_pairs import pairs_with_parallax, ranked_pairs, reachable_images
from sugar_utils.errors import Advance
from sugar_utils.libraries import load_pycolmap

if TYPE_CHECKING:
    import pycolmap

SMALLEST_MODEL = 3
_ENOUGH = 0.9  # of the images that strong pairs join with those of a model, for it to be whole
_ALIKE = 0.9  # of the images of a model that another one has too, for both to be one result
_FURTHER_MODELS = 5  # most that begin with another pair
# Of a pose that is added in the end, where COLMAP asks for 30 points and a quarter of them.
_RELAXED_POINTS = 20
_RELAXED_SHARE = 0.15
# In longest sides, of one of many lenses, where COLMAP takes 10: cut-outs of a tele lens have more.
_LONGEST_FOCAL = 30.0


@dataclass(frozen=True)
class ModelGrowth:
    """Grows models from one database; :mod:`mapping` decides which, and when to end.

    It runs on one core, because only then results are the same bits each time.
    """

    database: Path
    folder: Path  # an existing one, for files that pycolmap writes
    n: int  # number of images of the database
    seed: int
    refines_lenses: bool
    refines_focal: bool
    advance: Advance  # called with the number of registered images
    _calls: Iterator[int] = field(default_factory=itertools.count)

    def first_model(self) -> list[Any]:
        """Return the model of the pair that COLMAP begins with; empty where no pair will do."""
        options = self._options()
        options.max_num_models = 1
        return self._run(options)

    def models_of(self, numbers: Sequence[int]) -> list[Any]:
        """Return all models of some images, by their numbers."""
        options = self._options()
        options.image_names = [database_name(number - 1) for number in numbers]
        return self._run(options)

    def model_from(self, pair: Pair) -> list[Any]:
        """Return the model of a pair of image indices; empty where it is none to begin with.

        Distortion is not refined: few images, or the first ones of many, do not determine it, and
        COLMAP takes images out again whose distortion gets out of hand.
        """
        options = self._options()
        options.multiple_models = False
        options.init_num_trials = 1
        options.init_image_id1 = pair[0] + 1
        options.init_image_id2 = pair[1] + 1
        _keep_distortion(options)
        models = self._run(options)
        return [model for model in models if model.num_reg_images() >= SMALLEST_MODEL]

    def continued(self, start: Path, n_started: int, keeps_poses: bool) -> list[Any]:
        """Return a model with further images.

        Args:
            start: Folder of the model.
            n_started: Number of images that it has.
            keeps_poses: Whether what it has stays as it is.
        """
        options = self._options()
        model = load_pycolmap().Reconstruction(str(start))
        if _has_many_cameras(model):
            _keep_distortion(options)
            options.max_focal_length_ratio = _LONGEST_FOCAL
        if keeps_poses:
            options.fix_existing_frames = True
            options.constant_cameras = set(model.cameras)
        return self._run(options, start, n_started)

    def completed(self, start: Path, n_started: int) -> list[Any]:
        """Return a model with images that fewer points support, which are to be checked."""
        options = self._options()
        options.mapper.abs_pose_min_num_inliers = _RELAXED_POINTS
        options.mapper.abs_pose_min_inlier_ratio = _RELAXED_SHARE
        options.max_focal_length_ratio = _LONGEST_FOCAL
        _keep_distortion(options)
        return self._run(options, start, n_started)

    def further_models(self, first: Any, matches: Mapping[Pair, int]) -> list[Any]:
        """Return models that begin with other pairs, until one is whole or two are alike.

        Pairs outside of the models before come first, so that models of all parts are there to be
        joined.

        Args:
            first: The model before.
            matches: Verified matches of pairs of image indices.
        """
        models = []
        best = first
        remaining = list(pairs_with_parallax(self.database, ranked_pairs(matches)))
        covered = set(first.reg_image_ids()) if self._is_large(first, matches) else set()
        while remaining and len(models) < _FURTHER_MODELS:
            pair = next((pair for pair in remaining if _is_outside(pair, covered)), remaining[0])
            remaining.remove(pair)
            for model in self.model_from(pair):
                models.append(model)
                covered.update(model.reg_image_ids())
                is_result = self.is_whole(model, matches)
                if self._is_large(model, matches) and _are_alike(model, best):
                    is_result = True
                if is_result:
                    return models
                best = max(best, model, key=size_of)
        return models

    def is_whole(self, model: Any, matches: Mapping[Pair, int]) -> bool:
        """Whether a model has nearly all images that strong pairs join with its images."""
        return model.num_reg_images() >= _ENOUGH * self._reachable(model, matches)

    def _is_large(self, model: Any, matches: Mapping[Pair, int]) -> bool:
        return 2 * model.num_reg_images() >= self._reachable(model, matches)

    def _reachable(self, model: Any, matches: Mapping[Pair, int]) -> int:
        indices = [number - 1 for number in model.reg_image_ids()]
        return reachable_images(matches, indices, self.n)

    def _options(self) -> pycolmap.IncrementalPipelineOptions:
        options = load_pycolmap().IncrementalPipelineOptions()
        options.random_seed = self.seed
        options.num_threads = 1
        options.ba_refine_focal_length = self.refines_focal
        options.ba_refine_extra_params = self.refines_lenses
        options.ba_refine_sensor_from_rig = self.refines_lenses
        options.min_model_size = SMALLEST_MODEL
        # Colours come from the undistorted images, which are read anyway.
        options.extract_colors = False
        return options

    def _run(
        self,
        options: pycolmap.IncrementalPipelineOptions,
        start: Path | None = None,
        n_started: int = 0,
    ) -> list[Any]:
        registered = itertools.count(n_started + 1)

        def on_next_image() -> None:
            # Some are registered again after COLMAP took them out.
            self.advance(min(next(registered), self.n))

        def on_initial_pair() -> None:
            next(registered)
            on_next_image()

        # A folder of its own, because pycolmap takes what it finds in it for models.
        output = self.folder / f"growth_{next(self._calls)}"
        output.mkdir()
        models = load_pycolmap().incremental_mapping(
            str(self.database),
            str(output),
            str(output),
            options,
            input_path="" if start is None else str(start),
            initial_image_pair_callback=on_initial_pair,
            next_image_callback=on_next_image,
        )
        return list(models.values())


def size_of(model: Any) -> tuple[int, int]:
    """Return the numbers of images and of points of a model, by which models are compared."""
    return model.num_reg_images(), model.num_points3D()


def _has_many_cameras(model: Any) -> bool:
    """Whether a model has several cameras, of too few images each to determine distortion."""
    numbers = model.reg_image_ids()
    n_cameras = len({model.images[number].camera_id for number in numbers})
    return n_cameras > 1 and len(numbers) < SMALL_GROUP * n_cameras


def _keep_distortion(options: pycolmap.IncrementalPipelineOptions) -> None:
    options.ba_refine_extra_params = False
    options.mapper.abs_pose_refine_extra_params = False


def _is_outside(pair: Pair, covered: set[int]) -> bool:
    """Whether no image of a pair of indices is among those with some numbers."""
    return covered.isdisjoint((pair[0] + 1, pair[1] + 1))


def _are_alike(first: Any, second: Any) -> bool:
    """Whether each of two models has nearly all images of the other."""
    shared = set(first.reg_image_ids()).intersection(second.reg_image_ids())
    return len(shared) >= _ALIKE * max(first.num_reg_images(), second.num_reg_images())
