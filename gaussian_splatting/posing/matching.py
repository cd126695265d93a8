# SPDX-License-Identifier: Apache-2.0
"""Comparing photographs: pairs chosen by their number and order, matched in parts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gaussian_splatting.posing.features import database_name
from gaussian_splatting.posing.pairs import all_pairs, neighbour_pairs, similar_pairs
from sugar_utils.colmap_library import load_pycolmap

Matcher = Literal["auto", "exhaustive", "sequential", "similar"]

MAX_EXHAUSTIVE = 150
"""Photographs up to which all pairs are compared: their number grows with the square."""

COMPARED_FEATURES = 256
"""Features of a photograph by which similar ones are found."""

_PART = 64


def chosen_matcher(matcher: Matcher, n_photographs: int, in_order: bool) -> Matcher:
    """What ``auto`` means for so many photographs.

    Args:
        matcher: As asked for.
        n_photographs: How many.
        in_order: Whether their order is that in which they were taken for sure, as in a video.
    """
    if matcher != "auto":
        return matcher
    if n_photographs <= MAX_EXHAUSTIVE:
        return "exhaustive"
    return "sequential" if in_order else "similar"


def pairs_to_match(path: Path, n: int, matcher: Matcher) -> list[tuple[int, int]]:
    """Pairs of photographs by their places in the order, ascending.

    Neighbours by name count in every way: cameras number photographs as they are taken. Similar
    ones do as well, so that a path that comes back to where it began is closed.

    Args:
        path: Database with the features of all photographs.
        n: How many.
        matcher: How to choose, not ``auto``.
    """
    if matcher == "exhaustive":
        return sorted(all_pairs(n))
    alike = similar_pairs(_largest_descriptors(path, n), 10 if matcher == "sequential" else 30)
    return sorted(alike | neighbour_pairs(n, 10 if matcher == "sequential" else 3))


def _largest_descriptors(path: Path, n: int) -> list[np.ndarray]:
    pycolmap = load_pycolmap()
    found = []
    with pycolmap.Database.open(str(path)) as database:
        for number in range(1, n + 1):
            scales = database.read_keypoints(number)[:, 2]
            largest = np.argsort(-scales, kind="stable")[:COMPARED_FEATURES]
            found.append(database.read_descriptors(number).data[largest])
    return found


def match_pairs(
    path: Path, pairs: Sequence[tuple[int, int]], seed: int, advance: Callable[[int], None]
) -> None:
    """Match pairs of photographs and check their geometry; pairs done before are skipped.

    Args:
        path: Database with features.
        pairs: Photographs by their places in the order.
        seed: Of the geometric check.
        advance: Told how many pairs are done.
    """
    pycolmap = load_pycolmap()
    verification = pycolmap.TwoViewGeometryOptions()
    verification.ransac.random_seed = seed
    matching = pycolmap.FeatureMatchingOptions()
    matching.use_gpu = False
    waiting = _unmatched(path, pairs)
    done = len(pairs) - len(waiting)
    advance(done)
    with tempfile.TemporaryDirectory() as folder:
        pairing = pycolmap.ImportedPairingOptions()
        pairing.match_list_path = str(Path(folder) / "pairs.txt")
        for first in range(0, len(waiting), _PART):
            part = waiting[first : first + _PART]
            text = "".join(f"{database_name(i)} {database_name(j)}\n" for i, j in part)
            Path(pairing.match_list_path).write_text(text, encoding="utf-8")
            _match_listed(path, matching, pairing, verification)
            done += len(part)
            advance(done)


def _match_listed(path: Path, matching: Any, pairing: Any, verification: Any) -> None:
    pycolmap = load_pycolmap()
    pycolmap.match_image_pairs(str(path), matching, pairing, verification, pycolmap.Device.cpu)


def _unmatched(path: Path, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of which the database does not say how they match, not even that they do not."""
    pycolmap = load_pycolmap()
    with pycolmap.Database.open(str(path)) as database:
        return [(i, j) for i, j in pairs if not database.exists_two_view_geometry(i + 1, j + 1)]


def _pair(key: int) -> tuple[int, int]:
    i, j = load_pycolmap().pair_id_to_image_pair(key)
    return min(i, j) - 1, max(i, j) - 1


def verified_matches(path: Path) -> dict[tuple[int, int], int]:
    """Matches that agree with one geometry, by pair of places in the order; pairs without left out.

    Args:
        path: Database.
    """
    pycolmap = load_pycolmap()
    with pycolmap.Database.open(str(path)) as database:
        keys, counts = database.read_two_view_geometry_num_inliers()
    return {_pair(key): count for key, count in zip(keys, counts, strict=True) if count > 0}
