# SPDX-License-Identifier: Apache-2.0
"""The pairs of images to match: all, or similar ones and neighbours in order, place and time."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from sugar_capture.features.feature_database import open_database
from sugar_capture.features.photographs import Photograph
from sugar_capture.gps.geocentric import geocentric
from sugar_capture.pairs.similar_images import (
    COMPARED_FEATURES,
    common_features,
    similar_pairs,
)

Matcher = Literal["auto", "exhaustive", "sequential", "similar"]
Pair = tuple[int, int]
MAX_EXHAUSTIVE = 60  # images up to which all pairs are matched
# Similar images and neighbours in order of each image: for videos, and for other captures.
_SIMILAR_IN_ORDER = 10
_NEIGHBOURS_IN_ORDER = 10
SIMILAR_UNORDERED = 20
_NEIGHBOURS_UNORDERED = 3
_NEIGHBOURS_IN_TIME = 3
_NEIGHBOURS_IN_PLACE = 8
_ALL_PAIRS = 50_000  # pairs of images without a pose with all others, up to which all are tried
_LEAST_PARTNERS = 6  # images that match one well; with fewer it is compared with more
_STRONG_MATCHES = 30  # verified matches of a pair that matches well
# Most verified matches of an image with all others at which no mapper registers it.
_TOO_FEW_MATCHES = 29


def chosen_matcher(matcher: Matcher, n_photographs: int, in_order: bool) -> Matcher:
    """Resolve ``auto`` by the number of images and whether their order is that of a path."""
    if matcher != "auto":
        return matcher
    if n_photographs <= MAX_EXHAUSTIVE:
        return "exhaustive"
    return "sequential" if in_order else "similar"


def pairs_to_match(path: Path, n: int, matcher: Matcher) -> list[Pair]:
    """Return pairs of image indices, ascending: neighbours in order, and similar images.

    Args:
        path: The database, with the features of ``n`` images.
        matcher: Not ``auto``, see :func:`chosen_matcher`.
    """
    if matcher == "exhaustive":
        return list(itertools.combinations(range(n), 2))
    n_similar = SIMILAR_UNORDERED
    n_neighbours = _NEIGHBOURS_UNORDERED
    if matcher == "sequential":
        n_similar = _SIMILAR_IN_ORDER
        n_neighbours = _NEIGHBOURS_IN_ORDER
    similar = similar_pairs(_largest_descriptors(path, n), n_similar)
    return sorted(similar | neighbour_pairs(n, n_neighbours))


def _largest_descriptors(path: Path, n: int) -> list[np.ndarray]:
    """Read the descriptors of the largest features of each of ``n`` images. (K, 128) uint8 each"""
    descriptors = []
    with open_database(path) as database:
        for number in range(1, n + 1):
            scales = database.read_keypoints(number)[:, 2]
            largest = np.argsort(-scales, kind="stable")[:COMPARED_FEATURES]
            descriptors.append(database.read_descriptors(number).data[largest])
    return descriptors


def pair_of(first: int, second: int) -> Pair:
    """Return the pair of two images, the smaller index first."""
    return min(first, second), max(first, second)


def neighbour_pairs(n: int, reach: int = 10) -> set[tuple[int, int]]:
    """Return pairs of neighbours in order: the next ``reach``, then steps of 16, 32, 64, ..."""
    powers_of_two = {1 << exponent for exponent in range(n.bit_length())}
    steps = powers_of_two | set(range(1, reach + 1))
    return {(i, i + step) for step in steps for i in range(n - step)}


def recorded_pairs(photographs: Sequence[Photograph]) -> set[Pair]:
    """Return pairs of images that were taken after each other, or near each other.

    Headers tell; images without a time and a place are in no pair.
    """
    return _pairs_in_time(photographs) | _pairs_in_place(photographs)


def _pairs_in_time(photographs: Sequence[Photograph]) -> set[Pair]:
    timed = [index for index, item in enumerate(photographs) if item.time is not None]
    timed.sort(key=lambda index: (photographs[index].time, index))
    pairs = set()
    for step in range(1, _NEIGHBOURS_IN_TIME + 1):
        for first, second in zip(timed, timed[step:], strict=False):
            pairs.add(pair_of(first, second))
    return pairs


def _pairs_in_place(photographs: Sequence[Photograph]) -> set[Pair]:
    located = []
    positions = []
    for index, photograph in enumerate(photographs):
        gps = photograph.gps
        if gps is not None:
            located.append(index)
            positions.append((gps.longitude, gps.latitude, gps.altitude or 0.0))
    if not located:
        return set()
    metres = geocentric(np.array(positions))
    pairs = set()
    for row, index in enumerate(located):
        distances = np.linalg.norm(metres - metres[row], axis=1)
        distances[row] = np.inf
        for column in np.argsort(distances, kind="stable")[:_NEIGHBOURS_IN_PLACE].tolist():
            other = located[column]
            if other != index:
                pairs.add(pair_of(index, other))
    return pairs


def second_round(n: int, matches: Mapping[Pair, int]) -> set[Pair]:
    """Return further pairs of images that few others match well: with partners of partners.

    Args:
        n: Number of images.
        matches: Verified matches of pairs of image indices.
    """
    partners: list[set[int]] = [set() for _ in range(n)]
    n_strong = [0] * n
    for (first, second), count in matches.items():
        partners[first].add(second)
        partners[second].add(first)
        for index in (first, second):
            n_strong[index] += int(count >= _STRONG_MATCHES)
    pairs = set()
    for index in range(n):
        if n_strong[index] >= _LEAST_PARTNERS:
            continue
        candidates = set().union(*(partners[partner] for partner in partners[index]))
        for other in candidates - partners[index] - {index}:
            pairs.add(pair_of(index, other))
    return pairs


def pairs_with(indices: Iterable[int], n: int) -> list[Pair]:
    """Return all pairs with at least one of these images. Ascending"""
    pairs = set()
    for index in indices:
        for other in range(n):
            if other != index:
                pairs.add(pair_of(index, other))
    return sorted(pairs)


def pairs_of_unregistered(path: Path, unregistered: Collection[int], n: int) -> list[Pair]:
    """Return pairs of some images with all others, or among thousands with the most similar.

    So images without a pose take no longer than all that was compared before.

    Args:
        path: The database, with the features of ``n`` images.
        unregistered: Indices of images.
        n: Number of images.
    """
    most = max(_ALL_PAIRS, SIMILAR_UNORDERED * n)
    n_each = most // max(1, len(unregistered))
    if n_each >= n - 1:
        return pairs_with(unregistered, n)
    return _pairs_with_similar(path, unregistered, range(n), n_each)


def joining_pairs(path: Path, apart: Collection[int], n: int) -> list[Pair]:
    """Return pairs of images that hang apart with the most similar ones of the others. Ascending

    Args:
        path: The database, with the features of ``n`` images.
        apart: Indices of the images that no strong pair joins with most of the others.
        n: Number of images.
    """
    if not apart:
        return []
    others = sorted(set(range(n)).difference(apart))
    return _pairs_with_similar(path, apart, others, SIMILAR_UNORDERED)


def _pairs_with_similar(
    path: Path, indices: Collection[int], others: Sequence[int], n_each: int
) -> list[Pair]:
    """Return pairs of some images with those of others that are most similar. Ascending"""
    n = max([*indices, *others]) + 1
    common = common_features(_largest_descriptors(path, n))
    candidates = np.array(others)
    pairs = set()
    for index in indices:
        ranked = candidates[np.argsort(-common[index, candidates], kind="stable")]
        for other in ranked[ranked != index][:n_each].tolist():
            pairs.add(pair_of(index, other))
    return sorted(pairs)


def connected_images(indices: Iterable[int], matches: Mapping[Pair, int]) -> list[int]:
    """Return the images with enough verified matches to be registered.

    Args:
        matches: Verified matches of pairs of image indices.
    """
    totals = dict.fromkeys(indices, 0)
    for pair, count in matches.items():
        for index in pair:
            if index in totals:
                totals[index] += count
    return [index for index, total in totals.items() if total > _TOO_FEW_MATCHES]


def _best_partners(
    index: int, matches: Mapping[Pair, int], excluded: Collection[int], n_most: int
) -> list[int]:
    """Return the images that match one best, the best first, without excluded ones.

    Args:
        matches: Verified matches of pairs of image indices.
        n_most: Of the images that are returned.
    """
    counts = {}
    for (first, second), count in matches.items():
        if index not in (first, second):
            continue
        other = second if first == index else first
        if other not in excluded:
            counts[other] = count
    return sorted(counts, key=lambda other: (-counts[other], other))[:n_most]


def pairs_among_partners(
    indices: Collection[int], matches: Mapping[Pair, int], n_most: int
) -> list[Pair]:
    """Return the pairs of images that match the same one best. Ascending

    Args:
        indices: Images whose partners are paired; they are no partners themselves.
        matches: Verified matches of pairs of image indices.
        n_most: Partners of an image.
    """
    excluded = set(indices)
    pairs: set[Pair] = set()
    for index in indices:
        partners = _best_partners(index, matches, excluded, n_most)
        pairs.update(itertools.combinations(sorted(partners), 2))
    return sorted(pairs)
