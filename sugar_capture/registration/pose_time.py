# SPDX-License-Identifier: Apache-2.0
"""Camera poses in a limited time: sizes and numbers of features, chosen by measured speed.

Some photographs, spread over the capture, get features and are compared with each other. What that
takes tells how long all of them will take at each of a few levels. The level is noted, so that a
call that goes on has the same features.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from sugar_capture.convert_options import SfmOptions
from sugar_capture.features import matching
from sugar_capture.features.feature_database import create_database, open_database
from sugar_capture.features.photographs import Photograph
from sugar_capture.pairs.chosen_pairs import SIMILAR_UNORDERED, chosen_matcher
from sugar_capture.scene_folder import Work, note, read_record
from sugar_utils.errors import Advance

NOTE = "feature_level"
LEVELS = ((1600, 8192), (1200, 4096), (1000, 3000), (800, 2000), (640, 1500))
"""Longest sides in pixels at which features are looked for, and the most features of a photograph.

Where the last level takes too long as well, it is taken all the same.
"""
_TIMED = 6  # photographs
# Of fox: 0.64 s of CPU for the features of a photograph, 0.092 s for a pair, 0.49 s to add a
# photograph to the model with its share of the adjustments of all, 0.2 s to undistort and check it.
_MAPPING = 5.3  # in times of a pair; it grows with the features
_FINISHING = 0.3  # in times of finding features at the measured level
# Shortest training, mesh and texture, in times of finding the features of a photograph.
_SHORTEST_REST = 300
_FIRST_IMAGES = 20  # of a model, after which its end is estimated
_SLOWING = 1.5  # time of an image of a model on average, in times of that of its first ones
_SPEED_NOTE = "pose_speed"
_ADDING_NOTE = "seconds_of_added_image"
_SPEED_FIELDS = ("size", "n_features", "extraction", "matching")


@dataclass(frozen=True)
class PoseSpeed:
    """Measured times at one level."""

    size: int  # pixels
    n_features: float  # of a photograph
    extraction: float  # seconds of a photograph
    matching: float  # seconds of a pair
    adding: float | None = None  # seconds to add a photograph to a model; None: not measured yet

    def at(self, level: tuple[int, int]) -> PoseSpeed:
        """Return the times at another level."""
        size, most = level
        share = (size / self.size) ** 2
        n_features = min(most, self.n_features * share)
        feature_share = n_features / self.n_features
        return PoseSpeed(
            size,
            n_features,
            extraction=self.extraction * share,
            # Each feature of one photograph is compared with each of the other.
            matching=self.matching * feature_share**2,
            adding=self.mapping(1) * feature_share,
        )

    def seconds(self, level: tuple[int, int], n_photographs: int, n_pairs: int) -> float:
        """Return the seconds that the poses of a capture take at another level."""
        speed = self.at(level)
        finishing = self.extraction * _FINISHING
        seconds = n_photographs * (speed.extraction + finishing) + speed.mapping(n_photographs)
        return seconds + n_pairs * speed.matching

    def mapping(self, n_photographs: int) -> float:
        """Return the seconds that a model of photographs takes at the measured level."""
        adding = self.matching * _MAPPING if self.adding is None else self.adding
        return n_photographs * adding


def with_features_in_time(work: Work, photographs: Sequence[Photograph]) -> Work:
    """Return the work with image size and features that fit the time for poses.

    Flags that were given stay; without a limit of time all do. Where the time of the whole run is
    too short for poses and the shortest training, the minutes that would do are said here, before
    anything is computed.
    """
    sfm = work.options.sfm
    limit = work.options.time_limit
    is_default = (sfm.extraction_size, sfm.max_features) == LEVELS[0]
    if limit is None or not is_default or len(photographs) < 2:
        return work
    noted = read_record(work.source.root).get(NOTE)
    if noted in [list(level) for level in LEVELS]:
        return _at_level(work, (noted[0], noted[1]))
    speed = known_speed(work, photographs)
    n_pairs = expected_pairs(len(photographs), work)
    level, expected = chosen_level(speed, len(photographs), n_pairs, limit.seconds)
    note(work.source, **{NOTE: list(level)})
    size, most = level
    end = datetime.now() + timedelta(seconds=expected)
    work.console.headline(
        f"camera poses: features at {size} pixels, {most:,} of a photograph at most, about "
        f"{n_pairs:,} pairs: {expected / 60:.1f} minutes, until {end:%H:%M:%S}"
    )
    needed = expected + _SHORTEST_REST * speed.extraction
    if needed > limit.run_seconds:
        work.console.warn(
            f"camera poses take about {expected / 60:.1f} minutes and the shortest training and "
            f"mesh {(needed - expected) / 60:.1f}, so the run takes longer than "
            f"{limit.run_seconds / 60:g} minutes and may be poor",
            f"--minutes {math.ceil(needed / 60)}, fewer photographs or --frames",
        )
    return _at_level(work, level)


def chosen_level(
    speed: PoseSpeed, n_photographs: int, n_pairs: int, seconds: float
) -> tuple[tuple[int, int], float]:
    """Return the first level within a number of seconds, and its predicted seconds."""
    level = LEVELS[0]
    expected = 0.0
    for level in LEVELS:
        expected = speed.seconds(level, n_photographs, n_pairs)
        if expected <= seconds:
            break
    return level, expected


def known_speed(work: Work, photographs: Sequence[Photograph]) -> PoseSpeed:
    """Return the speed at the level of the work; it is measured once and noted."""
    sfm = work.options.sfm
    record = read_record(work.source.root)
    noted = record.get(_SPEED_NOTE)
    if isinstance(noted, list) and len(noted) == len(_SPEED_FIELDS):
        speed = PoseSpeed(**dict(zip(_SPEED_FIELDS, noted, strict=True)))
    else:
        speed = measured_speed(photographs, sfm)
        fields = [getattr(speed, name) for name in _SPEED_FIELDS]
        note(work.source, **{_SPEED_NOTE: fields})
    longest = max(max(item.width, item.height) for item in photographs)
    speed = speed.at((min(sfm.extraction_size, longest), sfm.max_features))
    adding = record.get(_ADDING_NOTE)
    return replace(speed, adding=adding) if isinstance(adding, float) else speed


def note_mapping(work: Work, n_registered: int) -> None:
    """Note what the last step took, which registered images, for later steps."""
    if n_registered:
        note(work.source, **{_ADDING_NOTE: work.steps[-1].seconds / n_registered})


def announced(advance: Advance, n: int, work: Work) -> Advance:
    """Return a function that also says, after the first images, when a model will be finished.

    Args:
        advance: Called with the number of registered images.
        n: Number of images.
    """
    start = time.monotonic()
    is_said = work.options.time_limit is None or n < 2 * _FIRST_IMAGES

    def advance_and_say(n_done: int) -> None:
        nonlocal is_said
        advance(n_done)
        if n_done >= _FIRST_IMAGES and not is_said:
            is_said = True
            seconds = time.monotonic() - start
            expected = seconds * _SLOWING * n / n_done
            end = datetime.now() + timedelta(seconds=expected - seconds)
            work.console.info(
                f"{n_done} photographs are registered after {seconds:.0f} s: all of them until "
                f"about {end:%H:%M:%S}"
            )

    return advance_and_say


def measured_speed(photographs: Sequence[Photograph], sfm: SfmOptions) -> PoseSpeed:
    """Time features of some photographs, and comparisons between them."""
    n = min(len(photographs), _TIMED)
    rows = np.linspace(0, len(photographs) - 1, n).round().astype(int)
    some = [photographs[row] for row in rows]
    longest = max(max(item.width, item.height) for item in some)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "database.db"
        create_database(path, some, sfm.camera)
        start = time.perf_counter()
        matching.extract_features(path, some, sfm.extraction_size, sfm.max_features, _ignore)
        extraction = (time.perf_counter() - start) / n
        pairs = list(itertools.combinations(range(n), 2))
        if len(pairs) > 1:
            # The first pair takes as long as three others: pycolmap builds its tables.
            matching.match_pairs(path, pairs[:1], 0, _ignore)
            pairs = pairs[1:]
        start = time.perf_counter()
        matching.match_pairs(path, pairs, 0, _ignore)
        seconds_of_pair = (time.perf_counter() - start) / len(pairs)
        n_features = _mean_features(path, n)
    size = min(sfm.extraction_size, longest)
    return PoseSpeed(size, max(1.0, n_features), extraction, seconds_of_pair)


def expected_pairs(n: int, work: Work) -> int:
    """Return about how many pairs of photographs are compared."""
    in_order = work.source.video is not None
    matcher = chosen_matcher(work.options.sfm.matcher, n, in_order)
    every_pair = n * (n - 1) // 2
    return every_pair if matcher == "exhaustive" else min(every_pair, SIMILAR_UNORDERED * n)


def _mean_features(path: Path, n: int) -> float:
    with open_database(path) as database:
        counts = [len(database.read_keypoints(number)) for number in range(1, n + 1)]
    return float(np.mean(counts))


def _at_level(work: Work, level: tuple[int, int]) -> Work:
    size, most = level
    sfm = replace(work.options.sfm, extraction_size=size, max_features=most)
    return replace(work, options=replace(work.options, sfm=sfm))


def _ignore(n_done: int) -> None:
    """Show no progress."""
