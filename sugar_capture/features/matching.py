# SPDX-License-Identifier: Apache-2.0
"""Features of images, and the matches of pairs of images."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from gaussian_splatting.data.cameras import ViewMask, reduced_size
from gaussian_splatting.data.images import COUNTS, decode_mask
from sugar_capture.features.feature_database import database_name, open_database
from sugar_capture.features.photographs import Photograph, read_grey
from sugar_utils.errors import Advance
from sugar_utils.libraries import load_pycolmap
from sugar_utils.memory import available_bytes

if TYPE_CHECKING:
    import pycolmap

_BYTES_PER_PIXEL = 256  # most that a SIFT extractor holds, first octave at twice the size
_FALLBACK_MEMORY = 2 << 30  # bytes, where the free memory is unknown
_PART = 64  # pairs that are matched between two calls of ``advance``
# Pixels along the shorter side of an image. On smaller ones pycolmap's affine detector ends the
# process with a segmentation fault (measured with 4.2.1); they show nothing anyway.
_LEAST_AFFINE_SIDE = 16
_DESCRIPTOR_SIZE = 128  # numbers of SIFT

ImagePairs = Sequence[tuple[int, int]]
"""Pairs of indices of images."""


class Features(NamedTuple):
    """The features of one image."""

    index: int  # of the image
    keypoints: np.ndarray  # x, y, scale and orientation, in pixels of the file, (N, 4) float32
    descriptors: pycolmap.FeatureDescriptors


@dataclass(frozen=True)
class SiftVariant:
    """Settings of SIFT; the defaults are those of every capture."""

    affine: bool = False  # of elliptic regions instead of round ones (Mikolajczyk, IJCV 2004)
    peak_threshold: float | None = None  # least contrast of a feature; None: COLMAP's
    features_factor: int = 1  # on the most features of an image
    # Changes the grey pixels before, (H, W) uint8, and keeps the places of what they show.
    prepare: Callable[[np.ndarray], np.ndarray] | None = None

    def options(self, longest_side: int, max_features: int) -> pycolmap.FeatureExtractionOptions:
        """Return pycolmap's options for an image of at most this size."""
        options = load_pycolmap().FeatureExtractionOptions()
        options.use_gpu = False
        options.num_threads = 1
        options.max_image_size = longest_side
        options.sift.max_num_features = max_features * self.features_factor
        options.sift.estimate_affine_shape = self.affine
        if self.peak_threshold is not None:
            options.sift.peak_threshold = self.peak_threshold
        return options


PLAIN_SIFT = SiftVariant()


def extract_features(
    path: Path,
    photographs: Sequence[Photograph],
    longest_side: int,
    max_features: int,
    advance: Advance,
    indices: Sequence[int] | None = None,
    variant: SiftVariant = PLAIN_SIFT,
) -> None:
    """Extract the features of images that have none in the database yet, several at a time.

    Args:
        path: The database.
        longest_side: Size in pixels at which features are extracted; keypoints are in pixels of
            the file.
        indices: Of the images; None for all.
    """
    options = variant.options(longest_side, max_features)

    def extract(index: int) -> Features:
        grey = np.ascontiguousarray(read_grey(photographs[index].path, longest_side))
        if variant.prepare is not None:
            grey = np.ascontiguousarray(variant.prepare(grey))
        return _features_of(index, photographs[index], grey, options)

    if indices is None:
        indices = range(len(photographs))
    add_features(path, indices, extract, n_workers_at(longest_side), advance)


def add_features(
    path: Path,
    indices: Sequence[int],
    extract: Callable[[int], Features],
    n_workers: int,
    advance: Advance,
) -> None:
    """Write the features of images that have none in the database yet.

    Args:
        path: The database.
        indices: Of the images.
        extract: Returns the features of an image; called on several threads.
    """
    with open_database(path) as database:
        remaining = [index for index in indices if not database.exists_descriptors(index + 1)]
        n_done = len(indices) - len(remaining)
        advance(n_done)
        for features in _in_order(extract, remaining, n_workers):
            _write_features(database, features)
            n_done += 1
            advance(n_done)


def n_workers_at(longest_side: int) -> int:
    """Return the number of extractors that fit into half of the free memory."""
    usable_bytes = (available_bytes() or _FALLBACK_MEMORY) // 2
    bytes_per_worker = _BYTES_PER_PIXEL * longest_side**2
    n_workers = min(os.cpu_count() or 1, usable_bytes // bytes_per_worker)
    return max(1, n_workers)


def _write_features(database: pycolmap.Database, features: Features) -> None:
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
    grey: np.ndarray,
    options: pycolmap.FeatureExtractionOptions,
) -> Features:
    pycolmap = load_pycolmap()
    height, width = grey.shape
    if options.sift.estimate_affine_shape and min(height, width) < _LEAST_AFFINE_SIDE:
        return _no_features(index)
    extractor = pycolmap.FeatureExtractor.create(options, pycolmap.Device.cpu)
    raw_keypoints, descriptors = extractor.extract_from_uint8_array(grey)
    keypoints = pycolmap.keypoints_to_matrix(raw_keypoints).reshape(-1, 4)
    scale = np.array([photograph.width / width, photograph.height / height])
    keypoints = keypoints * np.array([*scale, scale.mean(), 1.0])
    return Features(index, keypoints.astype(np.float32), descriptors)


def _no_features(index: int) -> Features:
    pycolmap = load_pycolmap()
    keypoints = np.zeros((0, 4), np.float32)
    descriptors = np.zeros((0, _DESCRIPTOR_SIZE), np.uint8)
    kind = pycolmap.FeatureExtractorType.SIFT
    return Features(index, keypoints, pycolmap.FeatureDescriptors(kind, descriptors))


def copy_masked_features(
    source: Path,
    path: Path,
    photographs: Sequence[Photograph],
    masks: Sequence[ViewMask | None],
    longest_side: int,
    indices: Sequence[int] | None = None,
) -> None:
    """Copy the features that lie inside of masks, of images that have none there yet.

    Args:
        source: The database with the features of the whole images.
        path: The database that gets those in the masks.
        masks: Of each image; features are kept where they count.
        longest_side: Size in pixels at which features were extracted.
        indices: Of the images; None for all.
    """
    pycolmap = load_pycolmap()
    with (
        open_database(source) as whole,
        open_database(path) as masked,
    ):
        for index in range(len(photographs)) if indices is None else indices:
            if masked.exists_descriptors(index + 1):
                continue
            photograph = photographs[index]
            mask = masks[index]
            keypoints = whole.read_keypoints(index + 1).reshape(-1, 4)
            descriptors = whole.read_descriptors(index + 1)
            if mask is not None:
                inside = are_inside(keypoints, photograph, mask, longest_side)
                keypoints = keypoints[inside]
                descriptors = pycolmap.FeatureDescriptors(
                    descriptors.type, descriptors.data[inside]
                )
            _write_features(masked, Features(index, keypoints, descriptors))


def are_inside(
    keypoints: np.ndarray, photograph: Photograph, mask: ViewMask, longest_side: int
) -> np.ndarray:
    """Whether each keypoint lies where a mask counts. (N,) bool"""
    width, height = reduced_size(photograph.width, photograph.height, longest_side)
    counts = decode_mask(mask, width, height, upright=True) >= COUNTS
    shares = np.array([width / photograph.width, height / photograph.height])
    columns, rows = (keypoints[:, :2] * shares).astype(int).T
    return counts[rows.clip(0, height - 1), columns.clip(0, width - 1)]


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


def match_pairs(path: Path, pairs: ImagePairs, seed: int, advance: Advance) -> None:
    """Match pairs of images and verify their geometry; pairs done before are skipped.

    Args:
        path: The database, with features.
        pairs: Of image indices.
    """
    pycolmap = load_pycolmap()
    verification = _verification(seed)
    matching = pycolmap.FeatureMatchingOptions()
    matching.use_gpu = False
    # With more than one, pycolmap finds a few other matches in one of some fifty runs.
    matching.num_threads = torch.get_num_threads()
    remaining = []
    with open_database(path) as database:
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
            _write_pairs(list_path, part)
            pycolmap.match_image_pairs(
                str(path), matching, pairing, verification, pycolmap.Device.cpu
            )
            n_done += len(part)
            advance(n_done)


def verify_pairs(path: Path, pairs: ImagePairs, seed: int) -> None:
    """Verify the geometry of pairs whose matches are in a database.

    Args:
        pairs: Of image indices, without a verified geometry.
    """
    pycolmap = load_pycolmap()
    verification = _verification(seed)
    with tempfile.TemporaryDirectory() as folder:
        list_path = Path(folder) / "pairs.txt"
        _write_pairs(list_path, pairs)
        pycolmap.verify_matches(str(path), str(list_path), verification)


def _verification(seed: int) -> pycolmap.TwoViewGeometryOptions:
    """Return the options by which the geometry of all pairs is verified."""
    options = load_pycolmap().TwoViewGeometryOptions()
    options.ransac.random_seed = seed
    return options


def _write_pairs(path: Path, pairs: ImagePairs) -> None:
    lines = [f"{database_name(i)} {database_name(j)}\n" for i, j in pairs]
    path.write_text("".join(lines), encoding="utf-8")


def verified_matches(path: Path) -> dict[tuple[int, int], int]:
    """Return the number of matches of pairs that agree with one geometry, by image indices.

    Pairs without such matches are left out.
    """
    pycolmap = load_pycolmap()
    with open_database(path) as database:
        keys, counts = database.read_two_view_geometry_num_inliers()
    matches = {}
    for key, count in zip(keys, counts, strict=True):
        if count > 0:
            first, second = sorted(pycolmap.pair_id_to_image_pair(key))
            matches[first - 1, second - 1] = count
    return matches
