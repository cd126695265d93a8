# SPDX-License-Identifier: Apache-2.0
"""Colour bands on the host, whose steps wait until a Gaussian is in view: the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting.components.densification import Region
from gaussian_splatting.components.poses import PoseConfig, PoseRefinement
from gaussian_splatting.core import color_gradients
from gaussian_splatting.engine.component import Component
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.recording.recorded_runner import RecordedRunner
from gaussian_splatting.engine.stage import StepResources
from gaussian_splatting.engine.step_runner import plain_runner
from gaussian_splatting.engine.stepping import RunContext, Stepper
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.optim import adam, band_steps, late_bands, row_storage
from gaussian_splatting.optim.host_memory import host_empty
from gaussian_splatting.optim.late_bands import LateBands
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.optim.recorded_step import RecordedStep, step_facts
from gaussian_splatting.optim.row_storage import DeviceRows, HostRows
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_scene.reprojection import NeighborViews
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.multiview_stage import MultiviewStage, comparison_rule
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.stage_config import CoarseConfig, MultiviewConfig, RefineConfig
from sugar_trainers.view_comparison import ViewComparer
from sugar_utils.console import Console
from tests.support.cpu_recorder import CpuRecorder
from tests.support.launches import gpu_paths
from tests.support.recorded_training import CASE, EXTENT, cameras_apart
from tests.support.step_scenes import (
    MadeUpPhotographs,
    as_cloud,
    make_scene,
    make_wall,
    photograph,
)
from tests.support.training import parameters_and_moments

FORMATS = [OptimizerConfig(s, use_bfloat16=half) for s in ("fp32", "bf16") for half in (0, 1)]


def vanilla(optimizer, components=()):
    config = VanillaConfig(optimizer=optimizer)
    return VanillaStage(
        as_cloud(make_scene(CASE)[0]),
        config,
        Region(EXTENT),
        lambda *_: None,
        components=components,
    )


def coarse(optimizer):
    config = CoarseConfig("dn_consistency", sdf_samples=100, optimizer=optimizer)
    return CoarseStage(as_cloud(make_scene(CASE)[0]), config, Region(EXTENT), lambda message: None)


def multiview(optimizer):
    config = MultiviewConfig(multiview_pixels=100, optimizer=optimizer)
    views = cameras_apart()
    photographs = MadeUpPhotographs(photograph)
    comparer = ViewComparer(
        NeighborViews(views, EXTENT),
        photographs,
        EXTENT,
        comparison_rule(config),
        device=torch.device("cpu"),
    )
    cloud = as_cloud(make_scene(CASE)[0])
    return MultiviewStage(cloud, config, Region(EXTENT), views, comparer, lambda message: None)


def refine(optimizer):
    cloud = bind_to_mesh(*make_wall(60), 1, EXTENT)
    return RefineStage(cloud, RefineConfig(optimizer=optimizer), EXTENT)


STAGES = {
    "vanilla": (vanilla, 2_590),  # a round of densification follows iteration 2600
    "coarse": (coarse, 9_101),
    "multiview": (multiview, 7_701),
    "refine": (refine, 4_001),
}


def stepper_of(stage, first, new_runner=plain_runner):
    context = RunContext(MadeUpPhotographs(photograph), Console(), new_runner=new_runner)
    return Stepper(stage, cameras_apart(), context, first=first, seed=0)


def train(stage, first, steps=24, new_runner=plain_runner):
    """The stage after some steps, each with one view."""
    stepper = stepper_of(stage, first, new_runner)
    for iteration in range(first, first + steps):
        stage.begin(iteration)
        stepper.step(iteration, None)
    stepper.check_last()
    return stage


def assert_same(stage, expected):
    found = parameters_and_moments(stage)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(found[key], values), key


@pytest.fixture
def factored(monkeypatch):
    """Factors are kept and stepped in registers, as on a GPU."""
    monkeypatch.setattr(color_gradients, "MIN_FACTORED", 1)
    monkeypatch.setattr(adam, "in_one_launch", lambda device: True)
    monkeypatch.setattr(band_steps, "in_one_launch", lambda device: True)
    monkeypatch.setattr(row_storage, "ROWS_PER_PIECE", 64)


@pytest.fixture
def as_on_a_gpu(factored, monkeypatch):
    """The same; returns how many rows each step had in view."""
    shares = []
    catch_up = LateBands.catch_up_in_view

    def watched(self, radii):
        shares.append(float((radii > 0).float().mean()))
        catch_up(self, radii)

    monkeypatch.setattr(LateBands, "catch_up_in_view", watched)
    return shares


@pytest.mark.parametrize("name", STAGES)
def test_bands_on_the_host_train_to_the_same_bits(name, as_on_a_gpu):
    make, first = STAGES[name]
    expected = parameters_and_moments(train(make(OptimizerConfig()), first))
    assert not as_on_a_gpu
    stage = train(make(OptimizerConfig(bands_on_host=True)), first)
    assert len(as_on_a_gpu) >= 23
    if name != "refine":
        assert 0 < np.median(as_on_a_gpu) < 0.9
    assert_same(stage, expected)


@pytest.mark.parametrize("config", FORMATS, ids=str)
def test_rounded_bands_have_the_same_bits(config, as_on_a_gpu):
    expected = parameters_and_moments(train(vanilla(config), 2_601))
    stage = train(vanilla(replace(config, bands_on_host=True)), 2_601)
    assert as_on_a_gpu
    assert_same(stage, expected)


def test_more_steps_than_may_wait(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(late_bands, "MAX_WAITING", 5)
    numbers_waiting = []
    catch_up = LateBands.catch_up

    def watched(self):
        numbers_waiting.append(int(self._n_waiting))
        catch_up(self)

    monkeypatch.setattr(LateBands, "catch_up", watched)
    expected = parameters_and_moments(train(vanilla(OptimizerConfig()), 2_601))
    stage = train(vanilla(OptimizerConfig(bands_on_host=True)), 2_601)
    assert 5 in numbers_waiting
    assert_same(stage, expected)


def test_steps_wait_until_a_gaussian_is_in_view(as_on_a_gpu):
    stage = vanilla(OptimizerConfig(bands_on_host=True))
    stepper = stepper_of(stage, 2_601)
    for iteration in range(2_601, 2_613):
        stepper.step(iteration, None)
    waiting = stage.model.optimizer.leaves["sh_rest"].detach().clone()
    caught_up = stage.model.optimizer.parameters["sh_rest"].detach()
    lacking = (waiting != caught_up).flatten(1).any(dim=1)
    assert 0.1 < float(lacking.float().mean()) < 0.9


def test_a_view_is_rendered_with_all_steps(as_on_a_gpu):
    stage = train(vanilla(OptimizerConfig(bands_on_host=True)), 2_601, steps=9)
    twin = train(vanilla(OptimizerConfig()), 2_601, steps=9)
    for camera in cameras_apart():
        found = stage.render(camera, geometry=False).image
        expected = twin.render(camera, geometry=False).image
        assert torch.equal(found, expected)


def test_a_resumed_run_has_the_same_bits(as_on_a_gpu):
    expected = parameters_and_moments(train(vanilla(OptimizerConfig()), 2_601))
    optimizer = OptimizerConfig(bands_on_host=True)
    stage = vanilla(optimizer)
    stepper = stepper_of(stage, 2_601)
    for iteration in range(2_601, 2_611):
        stepper.step(iteration, None)
    state = stage.model.state()
    other = vanilla(optimizer)
    other.model.restore(state)
    stepper = stepper_of(other, 2_601)
    for iteration in range(2_611, 2_625):
        stepper.step(iteration, None)
    assert_same(other, expected)


def test_several_views_of_a_step_leave_nothing_waiting(as_on_a_gpu):
    config = OptimizerConfig(views_per_step=2)
    expected = parameters_and_moments(train(vanilla(config), 2_601, steps=6))
    stage = train(vanilla(replace(config, bands_on_host=True)), 2_601, steps=6)
    assert not as_on_a_gpu
    assert_same(stage, expected)


def test_learned_poses_leave_nothing_waiting(as_on_a_gpu):
    def stage(on_host):
        poses = PoseRefinement(cameras_apart(), EXTENT, PoseConfig())
        return vanilla(OptimizerConfig(bands_on_host=on_host), [poses])

    expected = parameters_and_moments(train(stage(False), 2_601, steps=6))
    assert_same(train(stage(True), 2_601, steps=6), expected)
    assert not as_on_a_gpu


class Recorded:
    """Trains with recorded passes, on the paths of GPUs; says how many passes were repeated."""

    def __init__(self):
        self._recorder = CpuRecorder()
        self.is_recording = False
        self.warnings = []

    @property
    def n_replays(self):
        return sum(recording.n_replays for recording in self._recorder.recordings)

    def train(self, stage, first, steps=24):
        with gpu_paths():
            stage = train(stage, first, steps, lambda _: self.runner())
        assert self.warnings == []
        return stage

    def runner(self):
        return RecordedRunner(self, self.warnings.append)

    def record(self, work):
        self.is_recording = True
        try:
            return self._recorder.record(work)
        finally:
            self.is_recording = False


@pytest.fixture
def counted(monkeypatch):
    """The steps that may wait, as the host counts them, after each; never less than there are."""
    counts = []
    count_step = LateBands.count_step

    def watched(self):
        count_step(self)
        assert int(self._n_waiting) <= self._most_waiting
        counts.append(self._most_waiting)

    monkeypatch.setattr(LateBands, "count_step", watched)
    return counts


def launched(stage, first, steps=24):
    """The numbers of a stage after steps on the paths of GPUs, launch by launch."""
    with gpu_paths():
        return parameters_and_moments(train(stage, first, steps))


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_steps_of_recorded_passes_wait_too(name, factored, counted, monkeypatch):
    monkeypatch.setattr(late_bands, "MAX_WAITING", 5)
    made = []
    mark_made = RecordedStep.mark_made
    monkeypatch.setattr(RecordedStep, "mark_made", lambda step: (made.append(1), mark_made(step)))
    make, first = STAGES[name]
    expected = launched(make(OptimizerConfig()), first)
    recorded = Recorded()
    stage = recorded.train(make(OptimizerConfig(bands_on_host=True)), first)
    assert recorded.n_replays >= 8
    assert len(made) >= 8, "the host made the steps"
    assert len(counted) >= 20
    assert counted.count(0) >= 2, "the memory for numbers of steps was never full"
    assert_same(stage, expected)


@pytest.mark.slow
@pytest.mark.parametrize("config", FORMATS, ids=str)
def test_recorded_steps_of_rounded_bands_have_the_same_bits(config, factored, counted):
    expected = launched(vanilla(config), 2_601)
    recorded = Recorded()
    assert_same(recorded.train(vanilla(replace(config, bands_on_host=True)), 2_601), expected)
    assert recorded.n_replays >= 8
    assert max(counted) > 15, "steps of recorded passes do not wait"


class Reader(Component):
    """Has gradients formed in some iterations, as a component does that reads them."""

    name = "reader"
    obeys_step_mask = True

    def before_view(self, view):
        return replace(view, gradients_are_read=view.iteration % 3 == 0)


@pytest.mark.slow
def test_recorded_passes_without_late_steps_begin_with_all_of_them(factored, counted, monkeypatch):
    """Those launches belong to no recording, which would make them without the host's knowledge."""
    catch_up = LateBands.catch_up

    def watched(self):
        assert not (recorded.is_recording and self._most_waiting)
        catch_up(self)

    monkeypatch.setattr(LateBands, "catch_up", watched)
    recorded = Recorded()
    expected = launched(vanilla(OptimizerConfig(), [Reader()]), 2_590, 36)
    stage = recorded.train(vanilla(OptimizerConfig(bands_on_host=True), [Reader()]), 2_590, 36)
    assert recorded.n_replays >= 8
    assert max(counted) == 2
    assert_same(stage, expected)


@pytest.mark.slow
def test_steps_wait_after_degrees_without_bands(factored, counted):
    """While colours do not depend on the direction, recorded steps leave the bands alone."""
    expected = launched(vanilla(OptimizerConfig()), 985)
    recorded = Recorded()
    stage = recorded.train(vanilla(OptimizerConfig(bands_on_host=True)), 985)
    assert recorded.n_replays >= 8
    assert counted
    assert_same(stage, expected)


@pytest.mark.slow
def test_a_resumed_recorded_run_has_the_same_bits(factored):
    expected = launched(vanilla(OptimizerConfig()), 2_601)
    optimizer = OptimizerConfig(bands_on_host=True)
    recorded = Recorded()
    stage = recorded.train(vanilla(optimizer), 2_601, steps=10)
    other = vanilla(optimizer)
    other.model.restore(stage.model.state())
    with gpu_paths():
        stepper = stepper_of(other, 2_601, lambda _: recorded.runner())
        for iteration in range(2_611, 2_625):
            stepper.step(iteration, None)
        stepper.check_last()
    assert recorded.n_replays >= 8
    assert_same(other, expected)


def test_a_step_with_bad_numbers_does_not_wait(factored):
    stage = train(vanilla(OptimizerConfig(bands_on_host=True)), 2_601, steps=6)
    optimizer = stage.model.optimizer
    camera = cameras_apart()[0]
    view = TrainingView(camera, photograph(camera), 2_607)
    stage.accumulate(view, StepResources(stage.memory_plan, is_only_view=True))
    bands = optimizer.late_bands
    known = (optimizer.leaves["sh_rest"], bands._n_waiting, bands._n_made, bands._is_in_view)
    before = [values.detach().clone() for values in known]
    are_bad = torch.zeros(1, dtype=torch.bool)
    optimizer.update(optimizer.stepping(), optimizer.next_inputs()._replace(step_mask=are_bad))
    for values, expected in zip(known, before, strict=True):
        assert torch.equal(values, expected)
    assert 0 < float(bands._is_in_view.float().mean()) < 1


def test_a_recorded_step_depends_on_where_it_notes_steps(factored):
    optimizer = train(vanilla(OptimizerConfig(bands_on_host=True)), 2_601, steps=2).model.optimizer
    facts = step_facts(optimizer)
    assert facts == step_facts(optimizer)
    optimizer._late = None
    assert facts != step_facts(optimizer)


def test_bands_beside_a_background_lie_on_the_device():
    config = OptimizerConfig(bands_on_host=True)
    assert config.lies_on_host("sh_rest", ["means", "sh_rest"])
    assert not config.lies_on_host("means", ["means", "sh_rest"])
    assert not config.lies_on_host("sh_rest", ["sh_rest", "background_sh_rest"])
    model = TrainableCloud(as_cloud(make_scene(CASE)[0]), VanillaConfig().rates, EXTENT, config)
    assert "sh_rest" not in model.optimizer.resident
    assert "sh_rest" in model.optimizer.parameters


def test_rows_on_the_host_are_those_on_the_device(monkeypatch):
    monkeypatch.setattr(row_storage, "ROWS_PER_PIECE", 7)
    device = torch.device("cpu")
    values = torch.randn(30, 15, 3, generator=torch.Generator().manual_seed(0))
    more = values[:4] * 2
    keep = torch.arange(30) % 3 > 0
    on_device = DeviceRows()
    on_host = HostRows()
    for storage_type in (torch.float32, torch.bfloat16):
        stored = on_host.copied(values, storage_type, device)
        expected = on_device.copied(values, storage_type, device)
        assert torch.equal(stored, expected)
        assert stored.data_ptr() != values.data_ptr()
        longer = on_host.extended(stored, more)
        assert torch.equal(longer, on_device.extended(expected, more))
        kept = on_host.selected(stored, keep)
        assert torch.equal(kept, on_device.selected(expected, keep))
        assert not on_host.zeros_like(stored, torch.bfloat16).any()


def test_the_number_of_rows_on_the_host_changes_in_place(monkeypatch):
    """Memory is taken anew only where a quarter more rows than at the last time are needed."""
    monkeypatch.setattr(row_storage, "ROWS_PER_PIECE", 64)
    taken = []

    def watched(shape, *how):
        taken.append(shape[0])
        return host_empty(shape, *how)

    monkeypatch.setattr(row_storage, "host_empty", watched)
    draws = torch.Generator().manual_seed(0)
    values = torch.randn(1000, 15, 3, generator=draws)
    storage = HostRows()
    rows = storage.copied(values, torch.float32, torch.device("cpu"))
    for _ in range(20):
        more = torch.randn(round(0.06 * len(rows)), 15, 3, generator=draws)
        values = torch.cat([values, more])
        rows = storage.extended(rows, more)
        assert torch.equal(rows, values)
        keep = torch.rand(len(rows), generator=draws) > 0.02
        values = values[keep]
        rows = storage.selected(rows, keep)
        assert torch.equal(rows, values)
        assert rows.is_contiguous()
    assert len(rows) > 2000
    assert len(taken) <= 5
    assert taken[-1] <= 1.25 * 1.06 * len(rows)


def test_all_rows_may_go_and_others_come():
    storage = HostRows()
    rows = storage.copied(torch.ones(5, 15, 3), torch.float32, torch.device("cpu"))
    none = storage.selected(rows, torch.zeros(5, dtype=torch.bool))
    assert none.shape == (0, 15, 3)
    more = torch.full((7, 15, 3), 2.0)
    assert torch.equal(storage.extended(none, more), more)
