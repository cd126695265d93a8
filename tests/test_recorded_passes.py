# SPDX-License-Identifier: Apache-2.0
"""Passes that are recorded once and repeated train to the same bits as launches one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from gaussian_splatting.core import color_gradients
from gaussian_splatting.engine.recording import recorded_runner, recordings
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.optim.recorded_step import RecordedStep
from gaussian_splatting.rasterization import projection
from gaussian_splatting.rasterization.projection import (
    IntersectionPrediction,
    PredictedCount,
    rounded_up,
)
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_trainers import sampling as candidates
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.sampling import CandidatePrediction
from sugar_utils.errors import TrainingError
from sugar_utils.flags import AUTO
from tests.support import cpu_recorder
from tests.support.cpu_recorder import CpuRecorder, CpuRecording
from tests.support.recorded_training import (
    CASE,
    FIRST,
    SAMPLING,
    STEPS,
    Training,
    assert_same_bits,
    cameras,
    coarse_stage,
    multiview_stage,
    picture,
    refine_stage,
    sampling,
    state_of,
    trained,
    vanilla_stage,
)


def masked(camera):
    """A photograph with a mask of two values. (H, W, 4)"""
    colors = picture(camera)
    mask = torch.full_like(colors[..., :1], 255)
    mask[:10] = 0
    return torch.cat([colors, mask], dim=-1)


CASES = {
    "vanilla": {},
    "exposed": {"build": partial(vanilla_stage, exposed=True)},
    "masked": {"photographs": masked},
    "rounded": {"build": partial(vanilla_stage, optimizer=OptimizerConfig("bf16", True))},
    "coarse": {"build": coarse_stage, "first": 8_982, "steps": 24},
    "dn_consistency, auto": sampling("dn_consistency", samples=AUTO),
    "dn_consistency, half size": sampling("dn_consistency", full_res_normals=False),
    "dn_consistency, masked": sampling("dn_consistency") | {"photographs": masked},
    "density": sampling("density"),
    "density, auto": sampling("density", samples=AUTO),
    "density, auto, chunks": sampling("density", samples=AUTO, sample_chunk=150),
    "sdf, auto": sampling("sdf", samples=AUTO),
    "refined": {"build": refine_stage},
    "refined, compared": {"build": partial(refine_stage, compared=True)},
    "refined, compared, masked": {
        "build": partial(refine_stage, compared=True),
        "photographs": masked,
    },
    "multiview": {"build": multiview_stage, "first": 7_592, "steps": 24},
    "multiview, masked": {
        "build": multiview_stage,
        "first": 7_592,
        "steps": 24,
        "photographs": masked,
    },
}
"""Stages and photographs, and when a round of densification is near."""


@cache
def launched(case: str) -> tuple[Stage, list[float]]:
    """A case trained launch by launch, once for all tests, and its losses."""
    losses = []
    stage, _ = trained(None, losses=losses, **CASES[case])
    return stage, losses


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "density, auto"])
def test_training_has_the_same_bits_as_without(case, monkeypatch):
    how = CASES[case]
    stage, _ = launched(case)
    if not isinstance(stage, RefineStage):
        assert len(stage.model) != CASE.n, "nothing was densified or pruned"
    recorder = CpuRecorder()
    made = []
    mark_made = RecordedStep.mark_made
    monkeypatch.setattr(RecordedStep, "mark_made", lambda step: (made.append(1), mark_made(step)))
    recorded_stage, warnings = trained(recorder, **how)
    assert_same_bits(recorded_stage, state_of(stage))
    assert warnings == []
    # Most steps are repetitions, and those after the change have recordings of their own.
    n_steps = how.get("steps", STEPS)
    assert 1 <= len(recorder.recordings) <= STEPS // 3
    assert sum(recording.n_replays for recording in recorder.recordings) >= n_steps // 2
    assert len(made) >= n_steps // 2, "the host made the steps"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "first"),
    [(vanilla_stage, 2_592), (coarse_stage, 8_982), (multiview_stage, 7_592)],
    ids=["vanilla", "coarse", "multiview"],
)
def test_recordings_leave_gradients_of_colours_as_factors(build, first, monkeypatch):
    expected, _ = trained(None, build=build, first=first, steps=8)
    monkeypatch.setattr(color_gradients, "MIN_FACTORED", 1)
    launches_alone, _ = trained(None, build=build, first=first, steps=8)
    recorder = CpuRecorder()
    stage, warnings = trained(recorder, build=build, first=first, steps=8)
    assert warnings == []
    assert recorder.recordings
    assert_same_bits(stage, state_of(launches_alone))
    # A step in registers rounds apart from one that reads its gradient.
    for name, values in state_of(expected).items():
        torch.testing.assert_close(state_of(stage)[name], values, rtol=1e-3, atol=1e-5)


def test_a_recording_serves_views_of_different_cameras_and_photographs():
    recorder = CpuRecorder()
    stage, _ = trained(recorder, steps=8)
    (recording,) = recorder.recordings
    assert recording.n_replays >= 3
    expected, _ = trained(None, steps=8)
    assert_same_bits(stage, state_of(expected))


def test_a_repeated_pass_with_bad_numbers_changes_nothing():
    training = Training(CpuRecorder())
    with torch.no_grad():
        training.stage.model.cloud.log_scales[3] = 40.0
    before = {name: values.clone() for name, values in state_of(training.stage).items()}
    training.step()
    with pytest.raises(TrainingError, match="scales out of bounds"):
        training.check_last()
    assert_same_bits(training.stage, before)


@pytest.mark.slow
def test_a_repeated_pass_with_too_short_lists_is_made_again(monkeypatch):
    monkeypatch.setattr(projection, "MARGIN", 1.0)
    monkeypatch.setattr(projection, "SPARE", 0)
    excesses = []
    record = PredictedCount.record

    def watched(guess, excess):
        excesses.append(excess)
        return record(guess, excess)

    monkeypatch.setattr(PredictedCount, "record", watched)
    results = []
    for recorder in (None, CpuRecorder()):
        training = Training(recorder)
        with torch.no_grad():
            training.stage.model.cloud.log_scales.add_(1.0)
        excesses.clear()
        training.step()
        training.check_last()
        results.append(state_of(training.stage))
    assert [excess > 0 for excess in excesses] == [True, False]
    assert_same_bits(training.stage, results[0])
    # Later views find lists that are long enough.
    assert len(recorder.recordings) == 2


class WrongRecording(CpuRecording):
    """Its repetitions end with another gradient than the pass did."""

    def replay(self):
        super().replay()
        gradients = [result for result in self.results if result.shape == (CASE.n, 3)]
        gradients[-1].add_(1)


@pytest.mark.slow
def test_a_recording_that_gives_other_numbers_is_found_out(monkeypatch):
    expected, _ = launched("vanilla")
    monkeypatch.setattr(cpu_recorder, "CpuRecording", WrongRecording)
    # Without the step the last rows are gradients.
    monkeypatch.setattr(recorded_runner, "step_facts", lambda adam: None)
    stage, warnings = trained(CpuRecorder())
    assert_same_bits(stage, state_of(expected))
    (line,) = warnings
    assert "without CUDA graphs: a repeated pass gave other gradients" in line


@pytest.mark.slow
def test_a_pass_in_which_the_host_reads_goes_on_without_recordings(monkeypatch):
    expected, _ = launched("vanilla")
    train_on = VanillaStage.train_on

    def reads(stage, view, resources):
        result = train_on(stage, view, resources)
        float(result.terms["loss"])
        return result

    monkeypatch.setattr(VanillaStage, "train_on", reads)
    stage, warnings = trained(CpuRecorder())
    assert_same_bits(stage, state_of(expected))
    (line,) = warnings
    assert "without CUDA graphs: the host waits for a number" in line


MODES = ("dn_consistency", "density", "sdf")


def away(camera):
    """A camera that looks the other way."""
    turned = np.diag([-1.0, 1.0, -1.0])
    return replace(camera, name="view 9", rotation=turned)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_recording_serves_views_without_a_gaussian_to_sample(mode):
    views = [*cameras(), away(cameras()[0])]
    results = []
    for recorder in (None, CpuRecorder()):
        notes, losses = [], []
        how = sampling(mode, samples=AUTO, notes=notes) | {"views": views, "losses": losses}
        stage, warnings = trained(recorder, **how)
        results.append((state_of(stage), notes, losses))
        assert len(warnings) == 1
        assert "view 9 shows no Gaussian (iteration" in warnings[0]
    assert_same_bits(stage, results[0][0])
    assert results[0][1:] == results[1][1:]
    # Four of the views were sampled in the recorded part, one after another of which it was told.
    told = [note for note in notes if "shows no Gaussian to sample" in note]
    assert len(told) >= 4
    assert all("view 9" in note for note in told)
    assert sum(recording.n_replays for recording in recorder.recordings) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_rows_without_samples_change_no_bit(mode, monkeypatch):
    """The room for samples is as large as they are, or larger."""
    expected, losses = launched(f"{mode}, auto")
    exact = []
    monkeypatch.setattr(CandidatePrediction, "predict", lambda *_: None)
    stage, _ = trained(None, losses=exact, **CASES[f"{mode}, auto"])
    assert_same_bits(stage, state_of(expected))
    assert exact == losses


@pytest.mark.slow
@pytest.mark.parametrize("is_recorded", [False, True], ids=["launches", "recorded"])
def test_views_with_more_candidates_than_predicted_are_made_again(is_recorded, monkeypatch):
    views = []
    for camera, shift in zip(cameras(), (3.0, 1.5, 0.0), strict=True):
        views.append(replace(camera, translation=np.array([shift, 0.0, 0.0])))
    how = sampling("sdf", samples=AUTO) | {"views": views}
    expected = state_of(trained(None, **how)[0])
    monkeypatch.setattr(candidates, "MARGIN", 1.0)
    monkeypatch.setattr(candidates, "SPARE", 0)
    monkeypatch.setattr(candidates, "rounded_up", lambda capacity: capacity)
    excesses = []
    record = PredictedCount.record

    def watched(guess, excess):
        if isinstance(guess.predictor, CandidatePrediction):
            excesses.append(excess)
        return record(guess, excess)

    monkeypatch.setattr(PredictedCount, "record", watched)
    recorder = CpuRecorder() if is_recorded else None
    stage, warnings = trained(recorder, **how)
    assert warnings == []
    assert_same_bits(stage, expected)
    assert 1 <= sum(excess > 0 for excess in excesses) <= 4
    assert sum(excess < 0 for excess in excesses) >= how["steps"] // 2


@pytest.mark.slow
def test_a_view_whose_candidates_were_counted_on_a_wrong_depth_is_made_a_third_time(monkeypatch):
    how = CASES["sdf, auto"]
    expected = state_of(launched("sdf, auto")[0])
    failing = SAMPLING + 12
    attempts = Counter()
    train_on = CoarseStage.train_on
    predict_tiles = IntersectionPrediction.predict
    predict_candidates = CandidatePrediction.predict

    def counted(stage, view, resources):
        attempts[view.iteration] += 1
        return train_on(stage, view, resources)

    def short_lists(prediction, camera, n_gaussians):
        guess = predict_tiles(prediction, camera, n_gaussians)
        if attempts[failing] == 1 and not attempts[failing + 1]:
            guess.capacity = 1
        return guess

    def little_room(prediction, camera, n_gaussians):
        guess = predict_candidates(prediction, camera, n_gaussians)
        if attempts[failing] in (1, 2) and not attempts[failing + 1]:
            guess.capacity = 20
        return guess

    monkeypatch.setattr(CoarseStage, "train_on", counted)
    monkeypatch.setattr(IntersectionPrediction, "predict", short_lists)
    monkeypatch.setattr(CandidatePrediction, "predict", little_room)
    stage, _ = trained(None, **how)
    assert attempts.pop(failing) == 3
    assert set(attempts.values()) == {1}
    assert_same_bits(stage, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_has_the_same_bits(mode):
    expected, losses = launched(f"{mode}, auto")
    again = []
    how = CASES[f"{mode}, auto"]
    resumed, _ = trained(CpuRecorder(), losses=again, resumed_after=14, **how)
    assert_same_bits(resumed, state_of(expected))
    assert again == losses


def test_tile_lists_have_few_sizes():
    sizes = {rounded_up(n) for n in range(4_096, 65_536)}
    assert len(sizes) <= 4 * 4 + 1
    for n in (1, 5, 4_096, 1_000_003):
        assert n <= rounded_up(n) <= 1.2 * n + 1


@pytest.mark.slow
def test_few_recordings_are_held(monkeypatch):
    """Passes of many kinds would fill the memory of the GPU with recordings."""
    monkeypatch.setattr(recordings, "MAX_RECORDINGS", 1)
    views = cameras()
    views[1] = views[1].resized(40, 30)
    recorder = CpuRecorder()
    stage, _ = trained(recorder, views=views, first=FIRST + 10)
    expected, _ = trained(None, views=views, first=FIRST + 10)
    assert_same_bits(stage, state_of(expected))
    assert len(recorder.recordings) > 2
