# SPDX-License-Identifier: Apache-2.0
"""Recording of CUDA graphs by torch's rules for their memory, which a stand-in keeps on the CPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gaussian_splatting.core import color_gradients, device_checks
from gaussian_splatting.engine.checks import host_bands_check, recorder_check
from gaussian_splatting.engine.checks.small_training import CheckFailed
from gaussian_splatting.engine.recording import cuda_graph
from gaussian_splatting.engine.recording.cuda_graph import CudaRecorder
from gaussian_splatting.engine.recording.failures import reason_of
from gaussian_splatting.engine.recording.recorded_runner import CHECK, RecordedRunner, step_runner
from gaussian_splatting.engine.recording.recordings import MAX_MISSES, PassKey, Recordings
from gaussian_splatting.engine.step_runner import PlainRunner
from gaussian_splatting.optim import host_memory
from gaussian_splatting.optim.late_bands import LateBands
from gaussian_splatting.optim.recorded_step import RecordedStep
from gaussian_splatting.rasterization.compute import Compute
from gaussian_splatting.rasterization.projection import IntersectionPrediction
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.multiview_stage import MultiviewStage
from sugar_utils.errors import UserError
from sugar_utils.libraries import run_alone
from tests.support.graph_pools import INVALIDATED, GraphPools, graph_pools
from tests.support.launches import gpu_paths
from tests.support.recorded_training import CASE, STAGES, assert_same_bits, state_of, trained
from tests.support.step_scenes import make_scene

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
KINDS = {"vanilla": VanillaStage, "coarse": CoarseStage, "multiview": MultiviewStage}


@pytest.fixture
def pools():
    with graph_pools() as pools:
        yield pools


def doubled(value: float):
    """Work to record."""
    source = torch.full((3,), value)
    return lambda: source * 2


def test_a_pool_with_something_in_use_takes_no_further_recording():
    pools = GraphPools()
    pools.begin(0)
    held = torch.ones(3)
    pools.hold(0, [held])
    pools.stop_allocating(0, 0)
    pools.release(0, 0)
    with pytest.raises(RuntimeError, match="use_count > 0"):
        pools.begin(0)
    del held
    pools.begin(0)


def test_a_result_that_is_held_does_not_hinder_the_next_recording(pools):
    recorder = CudaRecorder(CPU)
    recording, held = recorder.record(doubled(1.0))
    del recording
    other, result = recorder.record(doubled(2.0))
    other.replay()
    assert torch.equal(result, torch.full((3,), 4.0))
    assert torch.equal(held, torch.full((3,), 2.0))


def test_recordings_share_a_pool_while_one_is_there(pools):
    recorder = CudaRecorder(CPU)
    kept = [recorder.record(doubled(number)) for number in (1.0, 2.0, 3.0)]
    assert sorted(pools.use_counts.values()) == [3]
    kept.clear()
    recorder.record(doubled(4.0))
    assert max(pools.use_counts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "multiview"])
def test_recording_goes_on_after_a_round_of_densification(name, pools):
    build, first = STAGES[name]
    steps = 24
    expected, _ = trained(None, build=build, first=first, steps=steps)
    stage, warnings = trained(CudaRecorder(CPU), build=build, first=first, steps=steps, totals=[])
    assert warnings == []
    assert len(pools.use_counts) >= 2, "no recording after the round"
    assert pools.n_replays >= steps // 2
    assert_same_bits(stage, state_of(expected))


def test_what_the_loop_holds_lies_in_no_pool(pools):
    """So the memory of recordings is free when the number of Gaussians changes."""
    build, first = STAGES["vanilla"]
    totals = []
    stage, _ = trained(CudaRecorder(CPU), build=build, first=first + 10, steps=12, totals=totals)
    assert pools.n_replays >= 5
    assert totals[-1].unread is None
    stage.model.optimizer.zero_grad()
    storages = {value.untyped_storage().data_ptr() for value in totals[-1].terms.values()}
    in_pools = {
        tensor.untyped_storage().data_ptr()
        for pool in pools.use_counts
        for tensor in pools.tensors(pool)
    }
    assert not storages & in_pools


def test_a_recording_that_the_driver_ended_leaves_the_allocator_in_order(pools):
    recorder = CudaRecorder(CPU)
    kept, _ = recorder.record(doubled(1.0))

    def illegal():
        pools.is_invalidated = True
        raise RuntimeError("the host reads a tensor")

    with pytest.raises(RuntimeError, match="the host reads a tensor"):
        recorder.record(illegal)
    pools.is_invalidated = False
    assert not pools.underway
    assert sorted(pools.use_counts.values()) == [1], "the pool is not released"
    torch.cuda.empty_cache()
    assert len(cuda_graph._CUT_SHORT) == 1, "torch may point to the graph"
    kept.replay()
    # The process has had enough, whatever the stage.
    with pytest.raises(RuntimeError, match="an earlier recording of this process"):
        CudaRecorder(CPU).record(doubled(2.0))


def test_a_recording_that_python_ended_is_not_the_last(pools):
    recorder = CudaRecorder(CPU)
    with pytest.raises(ZeroDivisionError):
        recorder.record(lambda: 1 / 0)
    assert not pools.underway
    recorder.record(doubled(1.0))


def test_the_first_error_is_the_one_that_is_raised(pools, monkeypatch):
    def end(**how):
        raise RuntimeError("CUDA graph capture failed")

    monkeypatch.setattr(cuda_graph.wp, "capture_end", end)

    def illegal():
        pools.is_invalidated = True
        raise RuntimeError("the host waits for a number")

    with pytest.raises(RuntimeError, match="the host waits for a number"):
        CudaRecorder(CPU).record(illegal)


def test_reasons_name_the_chain_and_our_line():
    def fail():
        try:
            # Raises in a line of the product.
            Recordings().capacity([], 1, int)
        except TypeError as error:
            raise RuntimeError("capture failed\nand much more") from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    reason = reason_of(caught.value)
    assert reason.startswith("unhashable type: 'list'")
    assert "; then capture failed (at recordings.py:" in reason
    assert "much more" not in reason


@pytest.mark.slow
def test_a_run_goes_on_without_recordings_after_one_was_ended(pools, monkeypatch):
    build, first = STAGES["vanilla"]
    expected, _ = trained(None, build=build, first=first)
    train_on = VanillaStage.train_on

    def illegal(stage, view, resources):
        result = train_on(stage, view, resources)
        if pools.underway:
            pools.is_invalidated = True
            raise RuntimeError("a copy from memory that is not pinned")
        return result

    monkeypatch.setattr(VanillaStage, "train_on", illegal)
    stage, warnings = trained(CudaRecorder(CPU), build=build, first=first)
    (line,) = warnings
    assert "without CUDA graphs: a copy from memory that is not pinned" in line
    assert INVALIDATED not in line or "; then" in line
    assert not pools.underway
    assert_same_bits(stage, state_of(expected))


class Full:
    """A recorder without memory for more recordings than some; others end by running out."""

    def __init__(self, recorder: CudaRecorder, n: int) -> None:
        self._recorder = recorder
        self._n = n

    def record(self, work):
        if len(self._recorder._recordings) >= self._n:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._recorder.record(work)


@pytest.mark.slow
def test_a_recording_that_runs_out_of_memory_takes_no_strips(pools):
    build, first = STAGES["vanilla"]
    expected, _ = trained(None, build=build, first=first)
    stage, warnings = trained(Full(CudaRecorder(CPU), 0), build=build, first=first)
    (line,) = warnings
    assert "without CUDA graphs: there is no memory to hold one" in line
    assert_same_bits(stage, state_of(expected))


@pytest.mark.slow
def test_recordings_go_before_strips_are_taken(pools, monkeypatch):
    """A pass that runs out of memory is made again after the recordings were dropped."""
    build, first = STAGES["vanilla"]
    first += 10
    expected, _ = trained(None, build=build, first=first)
    strips = set()
    train_on = VanillaStage.train_on
    run = RecordedRunner.run

    def watched(stage, view, resources):
        strips.add(resources.memory.split.strips)
        return train_on(stage, view, resources)

    def short(self, stage, view, resources):
        if view.iteration == first + 9 and len(self._recordings):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, stage, view, resources)

    monkeypatch.setattr(VanillaStage, "train_on", watched)
    monkeypatch.setattr(RecordedRunner, "run", short)
    stage, warnings = trained(CudaRecorder(CPU), build=build, first=first)
    assert strips == {1}
    assert any("out of memory in iteration" in line for line in warnings)
    assert_same_bits(stage, state_of(expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "coarse", "multiview"])
def test_no_recording_is_held_while_the_number_of_gaussians_changes(name, pools, monkeypatch):
    build, first = STAGES[name]
    held = []
    stage_class = KINDS[name]
    begin = stage_class.begin

    def watched(stage, iteration):
        n_before = len(stage.model)
        n_held = sum(pools.use_counts.values())
        begin(stage, iteration)
        if len(stage.model) != n_before:
            held.append(n_held)

    monkeypatch.setattr(stage_class, "begin", watched)
    trained(CudaRecorder(CPU), build=build, first=first, steps=24)
    assert held
    assert not any(held)


@pytest.mark.parametrize("n_sizes", [1, 2, 3])
def test_at_most_a_twentieth_of_the_passes_is_recorded_anew(n_sizes):
    """Three hundred views in random order, which show two to four times as much as others."""
    draws = random.Random(0)
    views = []
    for row in range(300):
        camera = replace(make_scene(CASE)[1], name=f"view {row}", width=48 + row % n_sizes)
        views.append((camera, 2 ** draws.uniform(0, 2)))
    prediction = IntersectionPrediction()
    recordings = Recordings()
    n_gaussians = 10_000
    n_recorded = 0
    n_passes = 0
    for step in range(6_000):
        if step % 300 == 0:
            draws.shuffle(views)
        if step % 100 == 0:
            n_gaussians = round(1.05 * n_gaussians)
            recordings.follow(n_gaussians)
        camera, shown = views[step % 300]
        guess = prediction.predict(camera, n_gaussians)
        prediction.record(camera, n_gaussians, round(shown * 20 * n_gaussians))
        if guess is None:
            continue
        n_passes += 1
        kind = camera.width
        largest = partial(prediction.largest, camera, n_gaussians)
        recordings.capacity(kind, guess.capacity, largest)
        key = PassKey(kind, None, None)
        if recordings.find(key) is None and recordings.is_due(key):
            recordings.make_room(key)
            recordings.put(key, object())
            n_recorded += 1
    assert n_passes == 5_700
    assert 57 <= n_recorded <= MAX_MISSES * n_passes
    assert recordings.misses is None


def test_too_many_kinds_of_passes_are_found_out():
    draws = random.Random(0)
    recordings = Recordings()
    for _ in range(1_000):
        kind = draws.randrange(16)
        key = PassKey(kind, None, None)
        recordings.capacity(kind, 100, lambda: 100)
        if recordings.find(key) is None and recordings.is_due(key):
            recordings.make_room(key)
            recordings.put(key, object())
    assert recordings.misses is not None
    assert recordings.misses > 100


def test_what_is_not_expected_twice_is_not_recorded():
    recordings = Recordings()
    key = PassKey("rare", None, None)
    recordings.capacity("rare", 100, lambda: 100)
    assert not recordings.is_due(key)
    assert recordings.is_due(key)
    recordings.follow("other parameters")
    recordings.capacity("rare", 100, lambda: 100)
    assert not recordings.is_due(key)


@pytest.mark.slow
def test_the_check_passes_where_recording_works(pools):
    with gpu_paths():
        recorder_check.check(CPU)
    assert pools.n_replays >= 8
    assert not pools.underway


@pytest.mark.slow
def test_the_check_finds_a_recorder_that_gives_other_numbers(pools, monkeypatch):
    monkeypatch.setattr(cuda_graph.CudaRecording, "replay", lambda recording: None)
    with gpu_paths(), pytest.raises(CheckFailed, match="differ from those"):
        recorder_check.check(CPU)


@pytest.mark.slow
def test_the_check_finds_an_allocator_that_a_failure_leaves_in_disorder(pools, monkeypatch):
    def read(recorder, work):
        pools.is_invalidated = True
        return record(recorder, work)

    record = CudaRecorder.record
    fail = recorder_check._fail_to_record

    def broken(recorder, device):
        monkeypatch.setattr(CudaRecorder, "record", read)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: None)
        fail(recorder, device)

    monkeypatch.setattr(recorder_check, "_fail_to_record", broken)
    with gpu_paths(), pytest.raises(RuntimeError, match="captures_underway"):
        recorder_check.check(CPU)


class Card:
    """A GPU with a driver, as far as checks ask for them."""

    def __init__(self, monkeypatch, folder) -> None:
        self.runs: list[str] = []
        self.error: Exception | None = None
        monkeypatch.setattr(device_checks.wp.config, "kernel_cache_dir", str(folder))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
        monkeypatch.setattr(device_checks, "driver_version", lambda: self.driver)
        monkeypatch.setattr(device_checks, "run_alone", self.run)
        self.driver = "600.1"

    def run(self, module, arguments, waiting):
        self.runs.append(module)
        if self.error is not None:
            raise self.error


def test_a_check_is_made_once_for_each_driver(tmp_path, monkeypatch):
    card = Card(monkeypatch, tmp_path)
    for _ in range(3):
        assert device_checks.obstacle(CHECK, GPU) is None
    assert card.runs == [CHECK]
    card.driver = "601.0"
    assert device_checks.obstacle(CHECK, GPU) is None
    assert len(card.runs) == 2


def test_a_check_that_fails_is_made_again(tmp_path, monkeypatch):
    card = Card(monkeypatch, tmp_path)
    card.error = UserError("recorder_check failed: means differ")
    assert "means differ" in device_checks.obstacle(CHECK, GPU)
    card.error = None
    assert device_checks.obstacle(CHECK, GPU) is None


def test_a_run_whose_check_fails_makes_every_launch(tmp_path, monkeypatch):
    card = Card(monkeypatch, tmp_path)
    card.error = UserError("recorder_check failed: means differ")
    compute = Compute(GPU)
    warnings = []
    runner = step_runner(compute)(warnings.append)
    assert isinstance(runner, PlainRunner)
    (line,) = warnings
    assert "without CUDA graphs" in line
    assert "means differ" in line


def test_the_check_of_bands_on_the_host_passes_where_they_give_the_same_bits(pools, monkeypatch):
    monkeypatch.setattr(color_gradients, "MIN_FACTORED", color_gradients.MIN_FACTORED)
    with gpu_paths():
        host_bands_check.check(CPU)
    assert pools.n_replays >= 4


def test_the_check_of_bands_on_the_host_finds_a_recording_with_other_steps(pools, monkeypatch):
    monkeypatch.setattr(color_gradients, "MIN_FACTORED", color_gradients.MIN_FACTORED)
    monkeypatch.setattr(RecordedStep, "send_numbers", lambda step: None)
    with gpu_paths(), pytest.raises(CheckFailed, match="differ from those"):
        host_bands_check.check(CPU)


def test_the_check_of_bands_on_the_host_finds_steps_that_are_not_made(pools, monkeypatch):
    monkeypatch.setattr(color_gradients, "MIN_FACTORED", color_gradients.MIN_FACTORED)
    monkeypatch.setattr(LateBands, "step", lambda bands, state, gradient: None)
    with gpu_paths(), pytest.raises(CheckFailed, match="differ from those"):
        host_bands_check.check(CPU)


def test_memory_on_the_host_may_exceed_what_one_dimension_counts(monkeypatch):
    class Array:
        ptr = 4096

        def numpy(self):
            return np.full((1, 1), host_memory._PROBE)

    shapes = []

    def empty(shape, **how):
        shapes.append(shape)
        return Array()

    mapped = SimpleNamespace(view=lambda *shape: mapped)
    monkeypatch.setattr(host_memory.wp, "empty", empty)
    monkeypatch.setattr(host_memory.torch, "as_tensor", lambda *_, **how: mapped)
    monkeypatch.setattr(host_memory, "_check_reach", lambda *_: None)
    assert host_memory.host_empty((12_000_000, 15, 3), torch.float32, GPU) is mapped
    assert shapes == [(12_000_000, 180)]


@pytest.mark.slow
def test_the_check_is_a_program(tmp_path):
    """Without a GPU it fails, by one line."""
    with pytest.raises(UserError, match="recorder_check failed"):
        run_alone(CHECK, ["cuda:0"])
