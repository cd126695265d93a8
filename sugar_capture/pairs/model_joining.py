# SPDX-License-Identifier: Apache-2.0
"""Two models of one capture become one, by the points that both have of the same features."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sugar_capture.features.feature_database import open_database
from sugar_capture.pairs.chosen_pairs import Pair
from sugar_utils.libraries import load_pycolmap

_LEAST_POINTS = 30  # that both models have, to find how one lies in the other
_LEAST_SHARE = 0.5  # of these points, which must agree
_TOLERANCE = 0.03  # distance of points that agree, in times of that to a camera


class _CommonPoints(NamedTuple):
    """Points of two models that the same feature shows, or two features that match."""

    source: np.ndarray  # (N, 3)
    target: np.ndarray  # (N, 3)
    distances: np.ndarray  # from the points of the target to a camera that sees them, (N,)


def aligned_to(
    source: Any, target: Any, database_path: Path, pairs: Collection[Pair], seed: int
) -> Any | None:
    """Return a model moved to where another one has the same points; None if they do not agree.

    Args:
        source: ``pycolmap.Reconstruction``, as is the target.
        pairs: Of image indices, whose matches count beside the images that both models have.
    """
    points = _common_points(source, target, database_path, pairs)
    if len(points.source) < _LEAST_POINTS:
        return None
    pycolmap = load_pycolmap()
    options = pycolmap.RANSACOptions()
    options.random_seed = seed
    options.max_error = _TOLERANCE * float(np.median(points.distances))
    found = pycolmap.estimate_sim3d_robust(points.source, points.target, options)
    if found is None or found["num_inliers"] < max(
        _LEAST_POINTS, _LEAST_SHARE * len(points.source)
    ):
        return None
    aligned = copy.deepcopy(source)
    aligned.transform(found["tgt_from_src"])
    return aligned


def _common_points(
    source: Any, target: Any, database_path: Path, pairs: Collection[Pair]
) -> _CommonPoints:
    ids_of_source = {number: _point_ids(source, number) for number in source.reg_image_ids()}
    ids_of_target = {number: _point_ids(target, number) for number in target.reg_image_ids()}
    seen: dict[tuple[int, int], int] = {}  # points of both models to an image of the target
    for number in sorted(ids_of_source.keys() & ids_of_target.keys()):
        for ids in zip(ids_of_source[number], ids_of_target[number], strict=True):
            seen.setdefault((int(ids[0]), int(ids[1])), number)
    with open_database(database_path) as database:
        for first, second in _in_both_orders(pairs):
            if first in ids_of_source and second in ids_of_target:
                rows = _matches(database, first, second)
                ids_of_rows = (ids_of_source[first][rows[:, 0]], ids_of_target[second][rows[:, 1]])
                for ids in zip(*ids_of_rows, strict=True):
                    seen.setdefault((int(ids[0]), int(ids[1])), second)
    known = sorted(ids for ids in seen if min(ids) >= 0)
    from_source = [source.points3D[ids[0]].xyz for ids in known]
    from_target = [target.points3D[ids[1]].xyz for ids in known]
    centers = [target.images[seen[ids]].projection_center() for ids in known]
    target_points = np.array(from_target).reshape(-1, 3)
    distances = np.linalg.norm(target_points - np.array(centers).reshape(-1, 3), axis=1)
    return _CommonPoints(np.array(from_source).reshape(-1, 3), target_points, distances)


def _in_both_orders(pairs: Collection[Pair]) -> Iterator[Pair]:
    """Yield the numbers of the images of pairs of indices, each pair also turned around."""
    for first, second in sorted(pairs):
        yield first + 1, second + 1
        yield second + 1, first + 1


def _matches(database: Any, first: int, second: int) -> np.ndarray:
    """Return the verified matches of two images: rows of keypoints of the first and second."""
    return database.read_two_view_geometry(first, second).inlier_matches


def _point_ids(model: Any, number: int) -> np.ndarray:
    """Return the number of the point of each keypoint of an image; -1 where it has none. (N,)"""
    points = model.images[number].points2D
    return np.array([point.point3D_id if point.has_point3D() else -1 for point in points], int)
