# SPDX-License-Identifier: Apache-2.0
"""The loop over the steps of a registration: what is made, what is found again, what is skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pycolmap
import pytest
from PIL import Image

from gaussian_splatting.data.colmap import write_model
from sugar_capture.convert_options import ConvertOptions, PoseTimeLimit, SfmOptions
from sugar_capture.features.feature_kinds import CONTRAST, SiftKind
from sugar_capture.features.matching import SiftVariant
from sugar_capture.features.photographs import described_photographs
from sugar_capture.registration import pose_time, step_list
from sugar_capture.registration.capture import Capture, Registration
from sugar_capture.registration.other_features import OtherFeatures
from sugar_capture.registration.pose_time import LEVELS, PoseSpeed
from sugar_capture.registration.step_list import steps_of
from sugar_capture.registration.steps import KeptStep, RegistrationStep, register
from sugar_capture.scene_folder import Work, find_source
from tests.support.heard_console import Heard

N = 3


class AddsOne(KeptStep, RegistrationStep):
    """Registers the next image, and counts how often it did."""

    label = "a stand-in"

    def __init__(self, name: str, setting: int = 0, cost: float = 1.0) -> None:
        self.name = name
        self.setting = setting
        self.cost = cost
        self.n_runs = 0

    def settings(self, capture: Capture) -> tuple[object, ...]:
        return (self.name, self.setting)

    def most_added(self, capture: Capture, before: Registration) -> int:
        return len(capture.unregistered(before.models))

    def seconds(self, capture: Capture, before: Registration, speed: PoseSpeed) -> float:
        return self.cost

    def prepare(self, capture: Capture, before: Registration) -> None:
        pass

    def run(self, capture: Capture, before: Registration) -> None:
        self.n_runs += 1
        model = pycolmap.Reconstruction()
        lens = pycolmap.Camera.create_from_model_name(1, "SIMPLE_PINHOLE", 10.0, 8, 6)
        model.add_camera_with_trivial_rig(lens)
        for number in range(1, before.models.n_registered + 2):
            image = pycolmap.Image(name=capture.names[number - 1], camera_id=1, image_id=number)
            model.add_image_with_trivial_frame(image, pycolmap.Rigid3d())
        write_model(model, self.folder(capture) / "0")


@pytest.fixture
def capture(tmp_path) -> Capture:
    folder = tmp_path / "scan" / "input"
    folder.mkdir(parents=True)
    for number in range(N):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(folder / f"{number}.png")
    source = find_source(tmp_path / "scan")
    source.work.mkdir()
    work = Work(source, ConvertOptions(tmp_path / "scan"), Heard())
    photographs = described_photographs(folder, False, lambda line: None)
    return Capture(work, photographs, [None] * N, content="photographs", masked_content="masks")


def registered(capture: Capture, *steps: RegistrationStep) -> int:
    return register(capture, steps, capture.start(in_masks=False)).models.n_registered


def test_each_step_adds_to_the_registration_before_it(capture):
    assert registered(capture, AddsOne("a"), AddsOne("b")) == 2


def test_a_step_that_can_add_nothing_is_skipped(capture):
    last = AddsOne("d")
    assert registered(capture, AddsOne("a"), AddsOne("b"), AddsOne("c"), last) == N
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


def test_a_further_kind_of_features_is_one_entry(capture, monkeypatch):
    """Nothing else has to know of it: files, notes, messages and pages follow from the entry."""
    kind = SiftKind("faint", "faint SIFT", 1.0, 1.0, SiftVariant(peak_threshold=0.001))
    monkeypatch.setattr(step_list, "kinds_up_to", lambda *args: [kind])
    *_, last = steps_of(capture, in_masks=False, tries_whole=False)
    assert isinstance(last, OtherFeatures)
    assert (last.name, last.label) == ("faint", "faint SIFT")
    last.prepare(capture, capture.start(in_masks=False))
    assert Path(capture.path("faint_features.db")).is_file()
