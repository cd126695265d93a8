# SPDX-License-Identifier: Apache-2.0
"""The loop over the steps of a registration: what is made, what is found again, what is skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sugar_capture.convert_options import PoseTimeLimit, SfmOptions
from sugar_capture.features.feature_kinds import CONTRAST
from sugar_capture.registration import pose_time
from sugar_capture.registration.capture import Capture
from sugar_capture.registration.pose_time import LEVELS, PoseSpeed
from sugar_capture.registration.step_list import steps_of
from sugar_capture.registration.steps import RegistrationStep, register
from tests.support.registrations import N_IMAGES, AddsOne, make_capture


@pytest.fixture
def capture(tmp_path) -> Capture:
    return make_capture(tmp_path / "scan")


def registered(capture: Capture, *steps: RegistrationStep) -> int:
    return register(capture, steps, capture.start(in_masks=False)).models.n_registered


def test_each_step_adds_to_the_registration_before_it(capture):
    assert registered(capture, AddsOne("a"), AddsOne("b")) == 2


def test_a_step_that_can_add_nothing_is_skipped(capture):
    last = AddsOne("d")
    assert registered(capture, AddsOne("a"), AddsOne("b"), AddsOne("c"), last) == N_IMAGES
    assert last.n_runs == 0


def test_what_was_made_is_found_again(capture):
    assert registered(capture, AddsOne("a"), AddsOne("b")) == 2
    again = [AddsOne("a"), AddsOne("b")]
    assert registered(capture, *again) == 2
    assert [step.n_runs for step in again] == [0, 0]


def test_another_setting_makes_the_step_and_those_after_it_anew(capture):
    registered(capture, AddsOne("a"), AddsOne("b"), AddsOne("c"))
    again = [AddsOne("a"), AddsOne("b", setting=1), AddsOne("c")]
    assert registered(capture, *again) == 3
    assert [step.n_runs for step in again] == [0, 1, 1]


def test_other_photographs_make_all_steps_anew(capture):
    registered(capture, AddsOne("a"))
    step = AddsOne("a")
    registered(replace(capture, content="others"), step)
    assert step.n_runs == 1


def test_damaged_models_are_made_anew(capture):
    registered(capture, AddsOne("a"))
    (capture.path("a") / "0" / "images.bin").write_bytes(b"")
    step = AddsOne("a")
    assert registered(capture, step) == 1
    assert step.n_runs == 1


def limited(capture: Capture, seconds: float, sfm: SfmOptions | None = None) -> Capture:
    limit = PoseTimeLimit(seconds, seconds, seconds)
    options = replace(capture.work.options, time_limit=limit, sfm=sfm or SfmOptions())
    return replace(capture, work=replace(capture.work, options=options))


def test_a_step_without_time_is_named_with_what_it_might_have_added(capture, monkeypatch):
    monkeypatch.setattr(pose_time, "measured_speed", lambda *args: PoseSpeed(8, 1.0, 1.0, 1.0))
    in_time = limited(capture, 10.0)
    steps = [AddsOne("a"), AddsOne("slow", cost=100.0), AddsOne("c")]
    result = register(in_time, steps, in_time.start(in_masks=False))
    assert result.models.n_registered == 2
    (sentence,) = result.omitted
    assert "for the 2 photographs left out would take longer than is left" in sentence


def test_poses_of_fewer_features_are_completed_by_all_features(capture):
    size, most = LEVELS[2]
    sfm = SfmOptions(extraction_size=size, max_features=most)
    names = [step.name for step in steps_of(limited(capture, 10.0, sfm), False, False)]
    assert names[:6] == ["features", "pairs", "mapping", "further_pairs", "full", CONTRAST.name]
    assert "full" not in [step.name for step in steps_of(capture, False, False)]
