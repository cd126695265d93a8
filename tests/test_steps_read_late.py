# SPDX-License-Identifier: Apache-2.0
"""Numbers of recorded steps are read when the next one is under way: same bits, same errors."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gaussian_splatting.core import color_gradients
from gaussian_splatting.engine.component import Component, IterationRules
from gaussian_splatting.engine.recording import recordings
from gaussian_splatting.engine.recording.recorded_runner import RecordedRunner
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import projection
from gaussian_splatting.vanilla import vanilla_run
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_utils.device import SentNumbers
from sugar_utils.errors import TrainingError
from tests.support.brief_runs import brief_vanilla
from tests.support.cpu_recorder import CpuRecorder, CpuRecording
from tests.support.launches import gpu_paths
from tests.support.recorded_training import (
    FIRST,
    Training,
    assert_same_bits,
    cameras_apart,
    multiview_stage,
    sampling,
    state_of,
    trained,
    vanilla_stage,
)
from tests.support.tiny_scene import assert_same_bits as assert_same_checkpoints

CASES = {
    "vanilla": {},
    "exposed": {"build": partial(vanilla_stage, exposed=True)},
    "dn_consistency": sampling("dn_consistency"),
    "multiview": {"build": multiview_stage, "first": 7_592},
}
STEPS = 24
SWELLS_AFTER = (13, 17, 20)  # steps


class Swelling(Component):
    """Makes all Gaussians larger before some iterations; views then touch more tiles than before.

    It may be asked twice to begin an iteration, and begins with the same model.
    """

    name = "swelling"
    obeys_step_mask = True

    def __init__(self, optimizer, iterations):
        self._optimizer = optimizer
        self._before = dict.fromkeys(iterations)

    def rules(self, iteration):
        return IterationRules(begins_with_model=iteration in self._before)

    def begin(self, iteration):
        if iteration not in self._before:
            return
        sizes = self._optimizer.leaves["log_scales"].detach()
        if self._before[iteration] is None:
            self._before[iteration] = sizes.clone()
        sizes.copy_(self._before[iteration] + 0.7)


def swelling(build, first, views, photographs):
    """A stage with a component that makes tile lists too short."""
    stage = build(views, photographs)
    iterations = [first + step for step in SWELLS_AFTER]
    stage.components = [*stage.components, Swelling(stage.model.optimizer, iterations)]
    return stage


@pytest.fixture
def made_again(monkeypatch):
    """Steps that were made again, with tile lists as long as at the last visit and no longer."""
    monkeypatch.setattr(projection, "MARGIN", 1.0)
    monkeypatch.setattr(projection, "SPARE", 0)
    monkeypatch.setattr(recordings, "rounded_up", lambda capacity: capacity)
    uncounted = []
    uncount = GroupedAdam.uncount_step
    monkeypatch.setattr(
        GroupedAdam, "uncount_step", lambda adam: (uncounted.append(1), uncount(adam))
    )
    return uncounted


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_with_too_short_lists_are_made_again_with_the_same_bits(case, made_again):
    how = {"build": vanilla_stage, "first": FIRST} | CASES[case] | {"steps": STEPS}
    how["build"] = partial(swelling, how["build"], how["first"])
    expected, _ = trained(None, **how)
    assert not made_again
    stage, warnings = trained(CpuRecorder(), **how)
    assert warnings == []
    assert len(made_again) >= 2
    assert_same_bits(stage, state_of(expected))


@pytest.mark.slow
def test_steps_that_are_made_again_do_not_wait_twice(made_again, monkeypatch):
    """Colour bands on the host, whose steps wait where a view does not show them."""
    monkeypatch.setattr(color_gradients, "MIN_FACTORED", 1)
    first = 2_602
    how = {"first": first, "steps": STEPS, "views": cameras_apart()}
    results = []
    for recorder, on_host in ((None, False), (CpuRecorder(), True)):
        optimizer = OptimizerConfig(bands_on_host=on_host)
        build = partial(swelling, partial(vanilla_stage, optimizer=optimizer), first)
        stage, warnings = trained(recorder, build=build, **how)
        assert warnings == []
        results.append(state_of(stage))
    assert len(made_again) >= 2
    assert_same_bits(stage, results[0])


@pytest.mark.slow
def test_the_next_step_is_under_way_when_the_numbers_are_read(monkeypatch):
    training = Training(CpuRecorder())
    events = []
    replay = CpuRecording.replay
    read = SentNumbers.tolist
    monkeypatch.setattr(CpuRecording, "replay", lambda self: (events.append("step"), replay(self)))
    monkeypatch.setattr(SentNumbers, "tolist", lambda self: (events.append("read"), read(self))[1])
    for _ in range(4):
        training.step()
    training.check_last()
    assert events == ["step", "step", "read", "step", "read", "step", "read", "read"]


@pytest.mark.slow
def test_bad_numbers_are_named_as_of_their_step():
    training = Training(CpuRecorder())
    training.check_last()
    bad = training.iteration
    with torch.no_grad():
        training.stage.model.cloud.log_scales[3] = 40.0
    before = {name: values.clone() for name, values in state_of(training.stage).items()}
    training.step()
    with pytest.raises(TrainingError, match=f"scales out of bounds.*at iteration {bad},"):
        training.step()
    assert_same_bits(training.stage, before)


class Counter(Component):
    """A component that keeps what it is told, whatever the numbers."""

    name = "counter"

    def after_view(self, result, model):
        assert result.step_mask is None or bool(result.step_mask)


@pytest.mark.slow
def test_a_component_that_needs_the_numbers_gets_them_at_once(made_again):
    def build(views, photographs):
        stage = vanilla_stage(views, photographs)
        stage.components.append(Counter())
        return stage

    expected, _ = trained(None, steps=24)
    stage, _ = trained(CpuRecorder(), build=build, steps=24)
    assert stage.needs_numbers
    assert not made_again, "a step was left unread"
    assert_same_bits(stage, state_of(expected))


def test_hooks_without_work_need_no_numbers():
    assert not Component().needs_numbers
    assert Counter().needs_numbers


@pytest.mark.slow
def test_a_run_saves_no_step_whose_numbers_were_not_read(scene, tmp_path, monkeypatch, made_again):
    """Checkpoints after each seventh iteration are those of a run without recordings."""
    populate = VanillaStage._population_components

    def components(stage, region):
        return [*populate(stage, region), Swelling(stage.model.optimizer, (21, 28))]

    monkeypatch.setattr(VanillaStage, "_population_components", components)
    recorder = CpuRecorder()
    saved = []
    for new_runner in (vanilla_run.step_runner, lambda compute: partial(RecordedRunner, recorder)):
        monkeypatch.setattr(vanilla_run, "step_runner", new_runner)
        output = tmp_path / str(len(saved))
        settings = {"iterations": 30, "densify_until_iter": 8}
        settings |= {"checkpoint_interval": 7, "device": "cpu"}
        with gpu_paths():
            assert brief_vanilla(scene, output, **settings) == 0
        saved.append(sorted(output.rglob("*.pt")))
    assert sum(recording.n_replays for recording in recorder.recordings) >= 10
    assert made_again
    assert len(saved[0]) >= 4
    for expected, found in zip(*saved, strict=True):
        assert expected.name == found.name
        assert_same_checkpoints(expected, found)
