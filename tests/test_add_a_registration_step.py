# SPDX-License-Identifier: Apache-2.0
"""A new step of the registration is one class and one line of the list; a kind of features a line.

Nothing else has to know of it: files, notes, messages and pages follow from the entry.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sugar_capture.features.feature_kinds import SiftKind
from sugar_capture.features.matching import SiftVariant
from sugar_capture.registration import step_list
from sugar_capture.registration.capture import Capture
from sugar_capture.registration.other_features import OtherFeatures
from sugar_capture.registration.step_list import register_images, steps_of
from tests.support.registrations import AddsOne, make_capture


@pytest.fixture
def capture(tmp_path) -> Capture:
    return make_capture(tmp_path / "scan")


def test_a_step_is_one_entry_and_its_models_are_those_of_the_capture(capture, monkeypatch):
    # AddsOne would be the file, and this the line.
    step = AddsOne("guessed")
    monkeypatch.setattr(step_list, "steps_of", lambda *args: [step])
    registration = register_images(capture, in_masks=False, tries_whole=False)
    assert registration.models.n_registered == 1
    assert (capture.work.models / "0" / "images.bin").is_file()
    assert register_images(capture, False, False).models.n_registered == 1
    assert step.n_runs == 1


def test_a_kind_of_features_is_one_entry(capture, monkeypatch):
    kind = SiftKind("faint", "faint SIFT", 1.0, 1.0, SiftVariant(peak_threshold=0.001))
    monkeypatch.setattr(step_list, "kinds_up_to", lambda *args: [kind])
    *_, last = steps_of(capture, in_masks=False, tries_whole=False)
    assert isinstance(last, OtherFeatures)
    assert (last.name, last.label) == ("faint", "faint SIFT")
    last.prepare(capture, capture.start(in_masks=False))
    assert Path(capture.path("faint_features.db")).is_file()
