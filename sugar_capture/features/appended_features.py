# SPDX-License-Identifier: Apache-2.0
"""One database of several kinds of features: each step appends its own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import KDTree

from sugar_capture.features import matching
from sugar_capture.features.feature_database import open_database
from sugar_utils.files import atomic_path
from sugar_utils.libraries import load_pycolmap

if TYPE_CHECKING:
    import pycolmap

SAME_PLACE = 0.5  # pixels of the extraction size: features that near are one keypoint


def append_features(
    source: Path,
    features: Path,
    target: Path,
    pixel_sizes: Mapping[int, float],
    seed: int,
) -> None:
    """Write a database with the features and matches of two others.

    A feature at the place of one that an image has already becomes the same keypoint. So what is
    matched by it hangs at the points that a model has, and nothing counts twice. Only keypoints
    are appended: descriptors of two kinds cannot be compared.

    Args:
        source: Database of a model, which is copied.
        features: Database of a step, with features and matches of some of the images.
        target: Database that is written, complete or not at all.
        pixel_sizes: Of each image with features of the step: pixels of the file per pixel at which
            they were extracted.
    """
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)
        with (
            open_database(features) as step,
            open_database(temporary) as merged,
        ):
            pairs = _matched_pairs(step)
            indices = sorted({index for pair in pairs for index in pair})
            places = {}
            for index in indices:
                places[index] = _append_keypoints(step, merged, index, pixel_sizes[index])
            for pair in pairs:
                _join_matches(step, merged, pair, places)
        if pairs:
            matching.verify_pairs(temporary, pairs, seed)


def _matched_pairs(database: pycolmap.Database) -> list[tuple[int, int]]:
    """Return the pairs of image indices that have matches, verified or not. Ascending"""
    pairs = []
    for key, count in zip(*database.read_num_matches(), strict=True):
        if count > 0:
            first, second = sorted(load_pycolmap().pair_id_to_image_pair(key))
            pairs.append((first - 1, second - 1))
    return sorted(pairs)


def _append_keypoints(
    step: pycolmap.Database, merged: pycolmap.Database, index: int, pixel_size: float
) -> np.ndarray:
    """Append the keypoints of a step to those of an image; return the new index of each. (N,)"""
    new = step.read_keypoints(index + 1)[:, :4]
    old = merged.read_keypoints(index + 1)[:, :4]
    places = np.arange(len(new)) + len(old)
    if len(old) and len(new):
        distances, nearest = KDTree(old[:, :2]).query(new[:, :2])
        is_old = distances <= SAME_PLACE * pixel_size
        places = np.where(is_old, nearest, len(old) + np.cumsum(~is_old) - 1)
        new = new[~is_old]
    merged.update_keypoints(index + 1, np.concatenate([old, new]).astype(np.float32))
    return places


def _join_matches(
    step: pycolmap.Database,
    merged: pycolmap.Database,
    pair: tuple[int, int],
    places: Mapping[int, np.ndarray],
) -> None:
    """Merge the matches of a pair from both databases; they are verified again later."""
    first = pair[0] + 1
    second = pair[1] + 1
    rows = step.read_matches(first, second)
    columns = [places[pair[0]][rows[:, 0]], places[pair[1]][rows[:, 1]]]
    matches = [np.stack(columns, axis=1).astype(np.uint32)]
    if merged.exists_matches(first, second):
        matches.append(merged.read_matches(first, second))
        merged.delete_matches(first, second)
    if merged.exists_two_view_geometry(first, second):
        # Matches of masked images are there as inliers alone.
        matches.append(merged.read_two_view_geometry(first, second).inlier_matches)
        merged.delete_two_view_geometry(first, second)
    merged.write_matches(first, second, np.unique(np.concatenate(matches), axis=0))


def images_with_features(path: Path, indices: Sequence[int], least: int) -> list[int]:
    """Return the images with at least ``least`` features in a database."""
    with open_database(path) as database:
        return [i for i in indices if database.num_keypoints_for_image(i + 1) >= least]
