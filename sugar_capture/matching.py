# SPDX-License-Identifier: Apache-2.0
"""Features of images, the pairs of images to match, and their matches."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.images import COUNTS, decode_mask
from sugar_capture.feature_database import database_name
from sugar_capture.photographs import Photograph, read_grey
from sugar_utils.libraries import load_pycolmap
from sugar_utils.memory import available_bytes

if TYPE_CHECKING:
    import pycolmap

_BYTES_PER_PIXEL = 256  # most that a SIFT extractor holds, first octave at twice the size
_FALLBACK_MEMORY = 2 << 30  # bytes, where the free memory is unknown
Matcher = Literal["auto", "exhaustive", "sequential", "similar"]
MAX_EXHAUSTIVE = 150  # images up to which all pairs are matched
COMPARED_FEATURES = 256  # features of an image by which similar ones are found
MAX_RATIO = 0.8  # most: distance of the best match over that of the second best (Lowe 2004)
_PART = 64  # pairs that are matched between two calls of ``advance``
_BLOCK = 32  # images that are compared at once
_DESCRIPTOR_SIZE = 128
# Similar images and neighbours in order of each image: for videos, and for other captures.
_SIMILAR_IN_ORDER = 10
_NEIGHBOURS_IN_ORDER = 10
_SIMILAR_UNORDERED = 30
_NEIGHBOURS_UNORDERED = 3


class _Features(NamedTuple):
    """The features of one image."""

    index: int  # of the image
    keypoints: np.ndarray  # x, y, scale and orientation, in pixels of the file, (N, 4) float32
    descriptors: pycolmap.FeatureDescriptors


def extract_features(
    path: Path,
    photographs: Sequence[Photograph],
    masks: Sequence[ViewMask | None],
    longest_side: int,
    max_features: int,
    advance: Callable[[int], None],
) -> None:
    """Extract the features of all images that have none in the database yet, several at a time.

    Args:
        path: The database.
        masks: Of each image; features are kept where they count.
        longest_side: Size in pixels at which features are extracted; keypoints are in pixels of
            the file.
    """
    pycolmap = load_pycolmap()
    options = pycolmap.FeatureExtractionOptions()
    options.use_gpu = False
    options.num_threads = 1
    options.max_image_size = longest_side
    options.sift.max_num_features = max_features

    def extract(index: int) -> _Features:
        return _features_of(index, photographs[index], masks[index], longest_side, options)

    with pycolmap.Database.open(str(path)) as database:
        n = len(photographs)
        remaining = [index for index in range(n) if not database.exists_descriptors(index + 1)]
        n_done = n - len(remaining)
        advance(n_done)
        for features in _in_order(extract, remaining, _n_workers(longest_side)):
            _write_features(database, features)
            n_done += 1
            advance(n_done)


def _n_workers(longest_side: int) -> int:
    """Return the number of extractors that fit into half of the free memory."""
    usable_bytes = (available_bytes() or _FALLBACK_MEMORY) // 2
    bytes_per_worker = _BYTES_PER_PIXEL * longest_side**2
    n_workers = min(os.cpu_count() or 1, usable_bytes // bytes_per_worker)
    return max(1, n_workers)


def _write_features(database: pycolmap.Database, features: _Features) -> None:
    number = features.index + 1
    # Keypoints and descriptors or none, should the process be killed between them.
    transaction = load_pycolmap().DatabaseTransaction(database)
    if database.exists_keypoints(number):
        # The disk was full when their descriptors should have followed.
        database.update_keypoints(number, features.keypoints)
    else:
        database.write_keypoints(number, features.keypoints)
    database.write_descriptors(number, features.descriptors)
    del transaction


def _features_of(
    index: int,
    photograph: Photograph,
    mask: ViewMask | None,
    longest_side: int,
    options: pycolmap.FeatureExtractionOptions,
) -> _Features:
    pycolmap = load_pycolmap()
    grey = np.ascontiguousarray(read_grey(photograph.path, longest_side))
    height, width = grey.shape
    extractor = pycolmap.FeatureExtractor.create(options, pycolmap.Device.cpu)
    raw_keypoints, descriptors = extractor.extract_from_uint8_array(grey)
    keypoints = pycolmap.keypoints_to_matrix(raw_keypoints).reshape(-1, 4)
    if mask is not None:
        counts = decode_mask(mask, width, height, upright=True) >= COUNTS
        columns, rows = keypoints[:, :2].astype(int).T
        inside = counts[rows.clip(0, height - 1), columns.clip(0, width - 1)]
        keypoints = keypoints[inside]
        descriptors = pycolmap.FeatureDescriptors(descriptors.type, descriptors.data[inside])
    scale = np.array([photograph.width / width, photograph.height / height])
    keypoints = keypoints * np.array([*scale, scale.mean(), 1.0])
    return _Features(index, keypoints.astype(np.float32), descriptors)


def _in_order(work: Callable[[int], Any], items: Iterable[int], n_workers: int) -> Iterator[Any]:
    """Yield ``work`` of each item in order, computed on threads not far ahead of the consumer."""
    running: deque[Future] = deque()
    remaining = iter(items)
    with ThreadPoolExecutor(max_workers=n_workers) as pool:
        try:
            for item in itertools.islice(remaining, 2 * n_workers):
                running.append(pool.submit(work, item))
            while running:
                yield running.popleft().result()
                for item in itertools.islice(remaining, 1):
                    running.append(pool.submit(work, item))
        finally:
            for future in running:
                future.cancel()


def chosen_matcher(matcher: Matcher, n_photographs: int, in_order: bool) -> Matcher:
    """Resolve ``auto`` by the number of images and whether their order is that of a path."""
    if matcher != "auto":
        return matcher
    if n_photographs <= MAX_EXHAUSTIVE:
        return "exhaustive"
    return "sequential" if in_order else "similar"


def pairs_to_match(path: Path, n: int, matcher: Matcher) -> list[tuple[int, int]]:
    """Return pairs of image indices, ascending: neighbours in order, and similar images.

    Args:
        path: The database, with the features of ``n`` images.
        matcher: Not ``auto``, see :func:`chosen_matcher`.
    """
    if matcher == "exhaustive":
        return list(itertools.combinations(range(n), 2))
    n_similar = _SIMILAR_UNORDERED
    n_neighbours = _NEIGHBOURS_UNORDERED
    if matcher == "sequential":
        n_similar = _SIMILAR_IN_ORDER
        n_neighbours = _NEIGHBOURS_IN_ORDER
    largest_descriptors = []
    with load_pycolmap().Database.open(str(path)) as database:
        for number in range(1, n + 1):
            scales = database.read_keypoints(number)[:, 2]
            largest = np.argsort(-scales, kind="stable")[:COMPARED_FEATURES]
            largest_descriptors.append(database.read_descriptors(number).data[largest])
    pairs = similar_pairs(largest_descriptors, n_similar) | neighbour_pairs(n, n_neighbours)
    return sorted(pairs)


def match_pairs(
    path: Path, pairs: Sequence[tuple[int, int]], seed: int, advance: Callable[[int], None]
) -> None:
    """Match pairs of images and verify their geometry; pairs done before are skipped.

    Args:
        path: The database, with features.
        pairs: Of image indices.
    """
    pycolmap = load_pycolmap()
    verification = pycolmap.TwoViewGeometryOptions()
    verification.ransac.random_seed = seed
    matching = pycolmap.FeatureMatchingOptions()
    matching.use_gpu = False
    # With more than one, pycolmap finds a few other matches in one of some fifty runs.
    matching.num_threads = torch.get_num_threads()
    remaining = []
    with pycolmap.Database.open(str(path)) as database:
        for first, second in pairs:
            if not database.exists_two_view_geometry(first + 1, second + 1):
                remaining.append((first, second))
    n_done = len(pairs) - len(remaining)
    advance(n_done)
    with tempfile.TemporaryDirectory() as folder:
        list_path = Path(folder) / "pairs.txt"
        pairing = pycolmap.ImportedPairingOptions()
        pairing.match_list_path = str(list_path)
        for start in range(0, len(remaining), _PART):
            part = remaining[start : start + _PART]
            lines = [f"{database_name(i)} {database_name(j)}\n" for i, j in part]
            list_path.write_text("".join(lines), encoding="utf-8")
            pycolmap.match_image_pairs(
                str(path), matching, pairing, verification, pycolmap.Device.cpu
            )
            n_done += len(part)
            advance(n_done)


def verified_matches(path: Path) -> dict[tuple[int, int], int]:
    """Return the number of matches of pairs that agree with one geometry, by image indices.

    Pairs without such matches are left out.
    """
    pycolmap = load_pycolmap()
    with pycolmap.Database.open(str(path)) as database:
        keys, counts = database.read_two_view_geometry_num_inliers()
    matches = {}
    for key, count in zip(keys, counts, strict=True):
        if count > 0:
            first, second = sorted(pycolmap.pair_id_to_image_pair(key))
            matches[first - 1, second - 1] = count
    return matches


def neighbour_pairs(n: int, reach: int = 10) -> set[tuple[int, int]]:
    """Return pairs of neighbours in order: the next ``reach``, then steps of 16, 32, 64, ..."""
    powers_of_two = {1 << exponent for exponent in range(n.bit_length())}
    steps = powers_of_two | set(range(1, reach + 1))
    return {(i, i + step) for step in steps for i in range(n - step)}


def similar_pairs(descriptors: Sequence[np.ndarray], n_each: int = 30) -> set[tuple[int, int]]:
    """Return pairs of images that show the same, found by a few features of each.

    The features that cover most of an image survive a change of viewpoint best (Wu 2013,
    "Towards linear-time incremental structure from motion", section 3).

    Args:
        descriptors: Of the largest features of each image. (K, 128) uint8, K may differ
        n_each: Most similar images of each image.
    """
    scores = _common_features(descriptors)
    pairs = set()
    for i, row in enumerate(scores):
        # A stable order, so that equal scores give the same pairs everywhere.
        best = np.argsort(-row, kind="stable")[:n_each]
        for j in best[row[best] > 0].tolist():
            pairs.add((min(i, j), max(i, j)))
    return pairs


def _common_features(descriptors: Sequence[np.ndarray]) -> np.ndarray:
    """Count the features that each image has in common with each other one. (n, n) int64"""
    n = len(descriptors)
    width = max((len(rows) for rows in descriptors), default=0)
    table = np.zeros((n, width, _DESCRIPTOR_SIZE), np.float32)
    for normalized, rows in zip(table, descriptors, strict=True):
        values = rows.astype(np.float32)
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        normalized[: len(rows)] = values / np.maximum(lengths, 1e-6)
    scores = np.zeros((n, n), np.int64)
    for i in range(n):
        for first in range(i + 1, n, _BLOCK):
            block = table[first : first + _BLOCK]
            scores[i, first : first + len(block)] = _count_clear_matches(table[i], block)
    return scores + scores.T


def _count_clear_matches(features: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Count the features of one image that match clearly in each of some others.

    Args:
        features: Of length 1, or 0 for none. (K, 128)
        others: (n, K, 128)

    Returns:
        (n,) int64
    """
    n_others, width = others.shape[:2]
    if width < 2:
        return np.zeros(n_others, np.int64)
    cosines = (features @ others.reshape(-1, _DESCRIPTOR_SIZE).T).reshape(-1, n_others, width)
    two_best = np.partition(cosines, width - 2, axis=2)[..., -2:]
    # Of vectors of length 1, squared distance is 2 - 2 cos.
    second_distance = 2 - 2 * two_best[..., 0]
    first_distance = 2 - 2 * two_best[..., 1]
    is_clear = first_distance < MAX_RATIO**2 * second_distance
    is_feature = np.any(features, axis=1)[:, None]
    return (is_clear & is_feature).sum(axis=0)
