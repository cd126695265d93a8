# SPDX-License-Identifier: Apache-2.0
"""Initial pairs, and the largest possible model, from the graph of verified pairs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from sugar_capture.features.feature_database import open_database
from sugar_capture.pairs.chosen_pairs import Pair
from sugar_capture.pairs.pair_checks import MIN_MATCHES
from sugar_utils.libraries import load_pycolmap

if TYPE_CHECKING:
    import pycolmap

_LEAST_INLIERS = 100  # of a first pair, as COLMAP asks for
_LEAST_ANGLE = np.deg2rad(4.0)  # median angle of the rays of a first pair
_MOST_FORWARD = 0.95  # of the motion along the line of sight, as COLMAP allows
_MOST_COUNTED = 200  # matches of a pair; two copies of one image are no better a beginning


def strong_pairs(matches: Mapping[Pair, int]) -> dict[Pair, int]:
    """Return the pairs with enough verified matches to register an image by one of them."""
    return {pair: count for pair, count in matches.items() if count >= MIN_MATCHES}


def reachable_images(matches: Mapping[Pair, int], start: Collection[int], n: int) -> int:
    """Return the number of images that strong pairs join with any of some images, with those.

    Args:
        matches: Verified matches of pairs of image indices.
        n: Number of images.
    """
    labels = _parts(matches, n)
    return int(np.isin(labels, labels[sorted(start)]).sum())


def images_apart(matches: Mapping[Pair, int], n: int) -> list[int]:
    """Return the images that strong pairs do not join with most of the others. Ascending

    Args:
        matches: Verified matches of pairs of image indices.
        n: Number of images.
    """
    labels = _parts(matches, n)
    return np.flatnonzero(labels != np.bincount(labels).argmax()).tolist()


def _parts(matches: Mapping[Pair, int], n: int) -> np.ndarray:
    """Return the number of the part of the graph of strong pairs of each image. (n,)"""
    pairs = np.array(sorted(strong_pairs(matches)), dtype=int).reshape(-1, 2)
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    _, labels = connected_components(graph, directed=False)
    return labels


def ranked_pairs(matches: Mapping[Pair, int]) -> list[Pair]:
    """Return pairs of image indices that a model may begin with, the best embedded first.

    A model grows where third images match both of its first ones, not where two match best.

    Args:
        matches: Verified matches of pairs of image indices.
    """
    strong = strong_pairs(matches)
    partners: dict[int, dict[int, int]] = {}
    for (first, second), count in strong.items():
        partners.setdefault(first, {})[second] = count
        partners.setdefault(second, {})[first] = count
    strengths = {}
    for (first, second), count in strong.items():
        if count < _LEAST_INLIERS:
            continue
        shared = partners[first].keys() & partners[second].keys()
        strength = min(count, _MOST_COUNTED)
        for third in shared:
            strength += min(partners[first][third], partners[second][third], _MOST_COUNTED)
        strengths[first, second] = strength
    return sorted(strengths, key=lambda pair: (-strengths[pair], pair))


def pairs_with_parallax(database_path: Path, pairs: Collection[Pair]) -> Iterator[Pair]:
    """Yield the pairs with enough sideways motion to triangulate points."""
    with open_database(database_path) as database:
        cameras = {camera.camera_id: camera for camera in database.read_all_cameras()}
        for first, second in pairs:
            if _has_parallax(database, cameras, first + 1, second + 1):
                yield first, second


def _has_parallax(
    database: pycolmap.Database, cameras: Mapping[int, pycolmap.Camera], first: int, second: int
) -> bool:
    """Whether the motion between two images, by their numbers, is not only forward or tiny."""
    geometry = database.read_two_view_geometry(first, second)
    if geometry.F is None and geometry.E is None and geometry.H is None:
        return True  # The mapper looks for the motion itself.
    lenses = []
    keypoints = []
    for number in (first, second):
        lenses.append(cameras[database.read_image(number).camera_id])
        keypoints.append(database.read_keypoints(number)[:, :2].astype(np.float64))
    is_known = load_pycolmap().estimate_two_view_geometry_pose(
        lenses[0], keypoints[0], lenses[1], keypoints[1], geometry
    )
    pose = geometry.cam2_from_cam1
    if not is_known or pose is None:
        return False
    motion = pose.translation
    forward = abs(motion[2]) / max(float(np.linalg.norm(motion)), 1e-12)
    return geometry.tri_angle >= _LEAST_ANGLE and forward <= _MOST_FORWARD
