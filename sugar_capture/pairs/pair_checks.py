# SPDX-License-Identifier: Apache-2.0
"""Checking poses against matches: images whose pairs contradict their pose."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sugar_capture.features.feature_database import open_database
from sugar_utils.errors import UserError

if TYPE_CHECKING:
    import pycolmap

MAX_ERROR = 0.005  # epipolar distance as a share of the longest side; above, the pair contradicts
CONTRADICTING_SHARE = 0.5  # share of the pairs of an image that must contradict its pose
MIN_MATCHES = 30  # of a pair that is checked
MIN_PAIRS = 2  # that are checked of an image, for it to be judged


def contradicting_pairs(
    model: pycolmap.Reconstruction,
    database_path: Path,
    names: Sequence[str],
    matches: Mapping[tuple[int, int], int],
) -> dict[str, tuple[int, int]]:
    """Return the images most of whose pairs contradict their poses.

    Args:
        model: ``pycolmap.Reconstruction``.
        names: Of the images, in the order of their numbers in the database.
        matches: Verified matches of pairs of image indices.

    Returns:
        Number of contradicting pairs, and of all pairs that were checked, by name.
    """
    checker = _PairChecker(model, database_path, names)
    n_wrong = np.zeros(len(names), dtype=int)
    n_checked = np.zeros(len(names), dtype=int)
    with open_database(database_path) as database:
        for (i, j), count in matches.items():
            if count < MIN_MATCHES or not checker.are_registered(i, j):
                continue
            error = checker.error(database, i, j)
            n_checked[[i, j]] += 1
            n_wrong[[i, j]] += int(error > MAX_ERROR)
    contradicting = {}
    for name, wrong, checked in zip(names, n_wrong.tolist(), n_checked.tolist(), strict=True):
        # A wrong image adds one contradicting pair to each of its neighbours.
        if checked >= MIN_PAIRS and wrong > CONTRADICTING_SHARE * checked:
            contradicting[name] = (wrong, checked)
    return contradicting


def unproven_images(
    model: pycolmap.Reconstruction,
    added: Collection[str],
    registered: Collection[str],
    database_path: Path,
    names: Sequence[str],
    matches: Mapping[tuple[int, int], int],
) -> set[str]:
    """Return the added images that contradict their matches, or match no registered image well.

    Args:
        added: Names of images of the model.
        registered: Names of the images that they may match.
        names: Of all images, in the order of their numbers in the database.
        matches: Verified matches of pairs of image indices.
    """
    contradicting = contradicting_pairs(model, database_path, names, matches)
    well_matched = set()
    for (i, j), count in matches.items():
        pair = {names[i], names[j]}
        if count >= MIN_MATCHES and pair.issubset(registered):
            well_matched |= pair
    return {name for name in added if name in contradicting or name not in well_matched}


class _PairChecker:
    """Measures matches against the poses of a model; rays of keypoints are computed once."""

    def __init__(
        self, model: pycolmap.Reconstruction, database_path: Path, names: Sequence[str]
    ) -> None:
        self._model = model
        self._path = database_path
        self._names = names
        self._images = {model.images[n].name: model.images[n] for n in model.reg_image_ids()}
        self._rays: dict[int, np.ndarray] = {}

    def are_registered(self, i: int, j: int) -> bool:
        """Whether the model has the poses of two images."""
        return self._names[i] in self._images and self._names[j] in self._images

    def error(self, database: pycolmap.Database, i: int, j: int) -> float:
        """Return the median epipolar distance of a pair, as a share of the longest side."""
        first_rays = self._rays_of(database, i)
        second_rays = self._rays_of(database, j)
        rows = database.read_two_view_geometry(i + 1, j + 1).inlier_matches
        if not len(rows) or (rows.max(axis=0) >= (len(first_rays), len(second_rays))).any():
            raise UserError(
                f"{self._path}: damaged, the matches of {self._names[i]} and {self._names[j]} are "
                "of other features; remove it"
            )
        first_image = self._image(i)
        camera = self._model.cameras[first_image.camera_id]
        scale = camera.mean_focal_length() / max(camera.width, camera.height)
        relative_pose = self._image(j).cam_from_world() * first_image.cam_from_world().inverse()
        distance = _median_sampson_distance(
            relative_pose.matrix(), first_rays[rows[:, 0]], second_rays[rows[:, 1]]
        )
        return scale * distance

    def _image(self, index: int) -> pycolmap.Image:
        return self._images[self._names[index]]

    def _rays_of(self, database: pycolmap.Database, index: int) -> np.ndarray:
        """Keypoints at depth 1 in the axes of the camera. (N, 2)"""
        if index not in self._rays:
            keypoints = database.read_keypoints(index + 1)[:, :2].astype(np.float64)
            camera = self._model.cameras[self._image(index).camera_id]
            self._rays[index] = np.asarray(camera.cam_from_img(keypoints))
        return self._rays[index]


def _median_sampson_distance(
    relative_pose: np.ndarray, first: np.ndarray, second: np.ndarray
) -> float:
    """Return the median Sampson distance of matches from the epipolar geometry of two poses.

    Args:
        relative_pose: From the first camera to the second. (3, 4)
        first: Matched rays of the first camera. (n, 2)
        second: (n, 2)
    """
    rotation = relative_pose[:, :3]
    x, y, z = relative_pose[:, 3]
    essential = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ rotation
    ones = np.ones((len(first), 1))
    first_points = np.concatenate([first, ones], axis=1)
    second_points = np.concatenate([second, ones], axis=1)
    second_lines = first_points @ essential.T
    first_lines = second_points @ essential
    squared_second = (second_lines[:, :2] ** 2).sum(axis=1)
    squared_first = (first_lines[:, :2] ** 2).sum(axis=1)
    scale = np.sqrt(squared_second + squared_first)
    residuals = np.abs((second_points * second_lines).sum(axis=1))
    return float(np.median(residuals / np.maximum(scale, 1e-12)))
