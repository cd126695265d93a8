# SPDX-License-Identifier: Apache-2.0
"""Camera poses in a limited time: which features they take, and that a call that goes on agrees."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image

from sugar_capture.convert_options import ConvertOptions, PoseTimeLimit, SfmOptions
from sugar_capture.registration import pose_time
from sugar_capture.registration.pose_time import (
    LEVELS,
    PoseSpeed,
    chosen_level,
    with_features_in_time,
)
from sugar_capture.scene_folder import Work, find_source
from sugar_pipeline.pipeline.pipeline_flags import full_parser
from sugar_pipeline.pipeline.plan import MOST_POSE_SHARE, POSE_SHARE, convert_options
from tests.support.heard_console import Heard


class Told(Heard):
    """Remembers headlines and warnings as well."""

    def headline(self, message: str) -> None:
        self.lines.append(message)

    def warn(self, message: str, advice: str | None = None) -> None:
        self.lines.append(message)


def limited_to(seconds: float) -> PoseTimeLimit:
    return PoseTimeLimit(seconds, 2 * seconds, 3 * seconds)


SPEED = PoseSpeed(size=1600, n_features=8192, extraction=2.0, matching=0.2)


def test_a_smaller_level_takes_less_time():
    seconds = [SPEED.seconds(level, n_photographs=50, n_pairs=1225) for level in LEVELS]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0] / 5


def test_photographs_with_few_features_gain_nothing_by_a_limit_of_their_number():
    few = replace(SPEED, n_features=500.0)
    assert few.seconds((1600, 8192), 50, 1225) == few.seconds((1600, 500), 50, 1225)


@pytest.mark.parametrize("number", range(len(LEVELS)))
def test_the_first_level_that_fits_is_chosen(number):
    needed = SPEED.seconds(LEVELS[number], 50, 1225)
    assert chosen_level(SPEED, 50, 1225, needed) == (LEVELS[number], needed)


def test_no_level_fits():
    level, expected = chosen_level(SPEED, 50, 1225, 1.0)
    assert level == LEVELS[-1]
    assert expected > 1.0


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A capture of three photographs, whose speed is known."""
    folder = tmp_path / "scan" / "input"
    folder.mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (8, 6)).save(folder / f"{number}.jpg")
    source = find_source(tmp_path / "scan")
    source.work.mkdir(exist_ok=True)
    monkeypatch.setattr(pose_time, "measured_speed", lambda photographs, sfm: SPEED)
    options = ConvertOptions(source_path=tmp_path / "scan", time_limit=limited_to(20.0))
    return Work(source, options, Told())


PHOTOGRAPHS = [SimpleNamespace(width=4000, height=3000)] * 20


def features(work):
    return work.options.sfm.extraction_size, work.options.sfm.max_features


def test_a_level_is_noted_and_kept_by_a_call_that_goes_on(work, monkeypatch):
    level = features(with_features_in_time(work, PHOTOGRAPHS))
    assert level in LEVELS[1:]
    assert "camera poses: features at" in "\n".join(work.console.lines)
    monkeypatch.setattr(pose_time, "measured_speed", None)
    assert features(with_features_in_time(work, PHOTOGRAPHS)) == level


def test_too_little_time_is_said(work):
    short = replace(work, options=replace(work.options, time_limit=limited_to(0.1)))
    assert features(with_features_in_time(short, PHOTOGRAPHS)) == LEVELS[-1]
    assert "so the run takes longer than" in "\n".join(work.console.lines)


@pytest.mark.parametrize("changes", [{"time_limit": None}, {"sfm": SfmOptions(max_features=8000)}])
def test_without_a_limit_or_with_sizes_that_were_given_nothing_changes(work, changes):
    as_given = replace(work, options=replace(work.options, **changes))
    assert with_features_in_time(as_given, PHOTOGRAPHS) is as_given
    assert not work.console.lines


def test_minutes_give_poses_their_share(tmp_path):
    folder = tmp_path / "scan" / "input"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 6)).save(folder / "0.jpg")
    flags = ["-s", str(tmp_path / "scan"), "-r", "multiview"]
    options = convert_options(full_parser(None).parse_flags([*flags, "--minutes", "10"]))
    assert options is not None
    assert options.time_limit == PoseTimeLimit(600 * POSE_SHARE, 600 * MOST_POSE_SHARE, 600)
    unlimited = convert_options(full_parser(None).parse_flags(flags))
    assert unlimited is not None
    assert unlimited.time_limit is None
