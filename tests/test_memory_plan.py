# SPDX-License-Identifier: Apache-2.0
"""Predicted memory against measured memory, and the plans that are made of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.memory import Setting, weigh_setting
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.memory_plan import (
    HELD_BYTES,
    MemoryChoice,
    MemoryOptions,
    MemoryPlan,
    ModelLoad,
    StepLoad,
    ViewLoad,
    cheaper,
    choose,
    predict,
    predicted_bytes,
    recording_bytes,
)
from gaussian_splatting.engine.recording.cuda_graph import CudaRecorder
from gaussian_splatting.engine.recording.recordings import Recordings
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import project
from gaussian_splatting.scenes.scene import load_scene
from gaussian_splatting.train import main as train_vanilla
from sugar_scene.field_kernels import pair_bytes
from sugar_trainers.capture import SugarSize
from sugar_trainers.stage_config import DensificationLimit, MultiviewConfig
from sugar_trainers.stage_memory import predict_coarse, stage_loads
from sugar_utils.errors import UserError, say_nothing
from tests.support.brief_runs import brief_coarse
from tests.support.graph_pools import graph_pools
from tests.support.recorded_training import STAGES, trained
from tests.support.tiny_scene import run_cli, tiny_cameras, tiny_cloud

SMALL = {"n": 20_000, "width": 320, "height": 240, "samples": 20_000, "sample_chunk": 20_000}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "highest"),
    [
        (Setting("entropy", **SMALL), 1.2),
        (Setting("geometry", **SMALL, strips=3), 1.3),
        (
            Setting(
                "geometry",
                **{**SMALL, "sample_chunk": 5_000},
                full_res_normals=False,
                optimizer=OptimizerConfig("bf16", use_bfloat16=True),
            ),
            1.2,
        ),
        # Samples come from the few Gaussians near the surface, which is not known beforehand.
        (Setting("geometry", **SMALL, mode="sdf", strips=2), 2.0),
        (Setting("multiview", **{**SMALL, "samples": 8_000}, strips=2), 1.2),
        (
            Setting(
                "multiview",
                **{**SMALL, "n": 60_000, "samples": 8_000},
                optimizer=OptimizerConfig(bands_on_host=True),
            ),
            1.2,
        ),
        (Setting("refine", **SMALL, strips=2), 1.2),
    ],
    ids=["entropy", "strips", "narrow formats", "sdf", "multiview", "on the host", "refine"],
)
def test_predicted_peaks_are_enough_and_not_much_more(setting, highest):
    weight = weigh_setting(setting)
    assert weight.peak <= weight.predicted <= highest * weight.peak


def test_multiview_is_forecast_for_as_many_gaussians_as_it_may_have():
    few, many = tiny_cloud(100), tiny_cloud(400)
    camera = tiny_cameras()[0]

    def forecast(cloud, limit=None) -> float:
        views = [ViewLoad.of(project(cloud.activate(), camera))]
        config = MultiviewConfig(densification=DensificationLimit.from_flags(limit))
        load = stage_loads(cloud, config, views)(OptimizerConfig())["multiview"]
        return predicted_bytes(load, MemoryPlan())

    assert forecast(few, 100) == forecast(few)
    assert forecast(few, 400) == pytest.approx(forecast(many), rel=0.05)
    assert forecast(many) > 1.1 * forecast(few)
    # A limit below what there is drops nothing.
    assert forecast(many, 100) == forecast(many)


N, PHOTOGRAPH = 1_000_000, 3 * 1920 * 1244
FIRST = MemoryPlan(ImageSplit(), 1_000_000)
VIEW = ViewLoad(1920, 1244, N, 2_500_000)
SHAPES = {"means": 3, "sh_dc": 3, "sh_rest": 45, "opacity_logits": 1, "log_scales": 3, "quats": 4}


def loads_of(optimizer):
    tensors = {name: torch.empty(N, width, device="meta") for name, width in SHAPES.items()}
    model = ModelLoad.of(tensors, optimizer)
    load = StepLoad(N, model, VIEW, "full", 40 * N, samples=1_000_000, neighbors=16)
    return {"geometry": load}


def chosen(budget: float, options: MemoryOptions | None = None) -> MemoryChoice:
    photographs = [PHOTOGRAPH] * 100
    options = options or MemoryOptions()
    return choose(loads_of, OptimizerConfig(), FIRST, options, int(budget), photographs)


def test_gradients_of_bands_are_counted_where_they_are_formed():
    def bands_of(*names: str, n: int = N, **settings: int) -> int:
        tensors = {name: torch.empty(n, 15, 3, device="meta") for name in names}
        return ModelLoad.of(tensors, OptimizerConfig(**settings)).band_gradients

    assert bands_of("sh_rest") == 0
    assert bands_of("sh_rest", n=1000) == 1000 * 180
    assert bands_of("sh_rest", views_per_step=2) == N * 180
    assert bands_of("sh_rest", "background_sh_rest") == 2 * N * 180


def test_bands_on_the_host_are_counted_there():
    resident = loads_of(OptimizerConfig())["geometry"].model
    on_host = loads_of(OptimizerConfig(bands_on_host=True))["geometry"].model
    assert on_host.host == 3 * 180 * N
    assert on_host.parameters == resident.parameters - 180 * N
    assert on_host.moments == resident.moments - 2 * 180 * N + 4 * N
    assert resident.host == 0


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("flag", "places"), [("auto", (False, True)), ("True", (True,)), ("False", (False,))]
)
def test_a_flag_says_where_bands_may_lie(flag, places):
    options = MemoryOptions(sh_on_host=flag)
    assert options.places_of_bands(CUDA) == places
    assert options.places_of_bands(torch.device("cpu")) == (False,)
    assert not options.messages(CUDA)


def test_bands_go_to_the_host_where_they_do_not_fit(scene, monkeypatch):
    """The smaller the budget, the cheaper the plan; before a refusal the bands are on the host."""
    cloud = tiny_cloud(400)
    views = load_scene(scene.root, size_rule=SugarSize(), notify=say_nothing)
    monkeypatch.setattr(MemoryOptions, "places_of_bands", lambda *_: (False, True))
    monkeypatch.setattr("gaussian_splatting.engine.memory_plan.MIN_FACTORED", 1)
    monkeypatch.setattr("gaussian_splatting.engine.memory_plan.MIN_IMAGES", 0)
    n_bytes = 3 * 180 * len(cloud)
    places = []
    for kib in range(2_000, 100, -50):
        options = MemoryOptions(vram_budget=kib / 2**20)
        try:
            chosen = predict_coarse(cloud, MultiviewConfig(), options, views)
        except UserError:
            break
        assert chosen is not None
        places.append(chosen.host_bytes)
        assert any("lie on the host" in line for line in chosen.lines()) == (places[-1] > 0)
    assert places == sorted(places)
    assert set(places) == {0, n_bytes}


def test_room_for_samples_of_other_views_is_counted():
    load = replace(
        loads_of(OptimizerConfig())["geometry"],
        view=ViewLoad(64, 48, visible=100_000, intersections=1),
        pair_bytes=2**30,
    )
    name = "neighbor gradients"
    exact = predict(load, FIRST)[name]
    roomy = predict(replace(load, sampled_room=1.3), FIRST)[name]
    assert roomy == pytest.approx(1.3 * exact)


def test_plenty_of_memory_keeps_everything_whole_and_all_photographs():
    choice = chosen(8e9)
    assert choice.plan == FIRST
    assert choice.image_bytes == 100 * PHOTOGRAPH


def test_less_memory_takes_smaller_pieces_and_still_fits():
    whole = predicted_bytes(loads_of(OptimizerConfig())["geometry"], FIRST)
    choice = chosen(whole)
    assert choice.plan != FIRST
    assert choice.peak + choice.image_bytes <= whole
    assert choice.image_bytes >= 2 * PHOTOGRAPH


def test_photographs_in_other_memory_cost_nothing():
    whole = predicted_bytes(loads_of(OptimizerConfig())["geometry"], FIRST)
    choice = choose(loads_of, OptimizerConfig(), FIRST, MemoryOptions(), whole, [])
    assert choice.plan == FIRST
    assert choice.image_bytes == 0
    assert "photographs stay in the memory of the host" in choice.lines()[0]


def test_recorded_passes_get_what_is_left_over_and_cost_no_strips():
    load = loads_of(OptimizerConfig())["geometry"]
    whole = predicted_bytes(load, FIRST)
    more = recording_bytes(load, FIRST)

    def choice_with(budget: int) -> MemoryChoice:
        options = MemoryOptions()
        return choose(loads_of, OptimizerConfig(), FIRST, options, budget, [], records=True)

    enough = choice_with(whole + more)
    assert enough.plan == FIRST
    assert any("kept for recorded passes" in line for line in enough.lines())
    short = choice_with(whole + more - 1)
    assert short.plan == replace(FIRST, records=False)
    assert any("there are no recorded passes" in line for line in short.lines())
    # What a pass needs for a while lies there twice: recorded, and launch by launch.
    assert 0.3 * whole < more < whole


STAGES_AT_FULL_SIZE = {
    "entropy": StepLoad(N, ModelLoad(0, 0), VIEW, activation=40 * N),
    "geometry": StepLoad(
        N, ModelLoad(0, 0), VIEW, "full", activation=40 * N, samples=1_000_000, neighbors=16
    ),
    "sdf": StepLoad(
        N, ModelLoad(0, 0), VIEW, "depth", activation=40 * N, samples=1_000_000, neighbors=16
    ),
    "multiview": StepLoad(N, ModelLoad(0, 0), VIEW, "planes", activation=40 * N),
    "refine": StepLoad(N, ModelLoad(0, 0), VIEW, "planes", activation=52 * N, fixed=80 * 10**6),
}


@pytest.mark.parametrize("phase", STAGES_AT_FULL_SIZE)
@pytest.mark.parametrize("gib", [4, 6, 8])
def test_every_stage_of_a_million_gaussians_has_a_plan_for_common_cards(gib, phase):
    """1920 x 1244 pixels; what steps and recorded passes take at once is within the budget."""
    budget = gib * 2**30

    def loads(optimizer):
        model = loads_of(optimizer)["geometry"].model
        return {phase: replace(STAGES_AT_FULL_SIZE[phase], model=model)}

    options = MemoryOptions()
    choice = choose(loads, OptimizerConfig(), FIRST, options, budget, [], records=True)
    taken = choice.peak + (choice.recording_bytes if choice.plan.records else 0)
    assert taken <= budget
    assert choice.plan.records or gib < 8
    # A round of densification: one parameter at a time lies there twice, without recordings.
    model = loads(OptimizerConfig())[phase].model
    assert model.parameters + model.moments + 3 * 180 * N <= budget


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "coarse", "multiview"])
def test_recorded_passes_hold_no_more_than_is_planned(name, monkeypatch):
    """Counted in the pools of a stand-in for torch's allocator."""
    held = []
    put = Recordings.put

    def watched(recordings, key, recorded):
        put(recordings, key, recorded)
        tensors = [*recorded._gradients.dense.values()]
        tensors += [gradient.colors for gradient in recorded._gradients.of_colors]
        tensors += [recorded._result.radii, recorded._result.d_means2d]
        storages = {tensor.untyped_storage() for tensor in tensors if tensor is not None}
        n_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        held.append((sum(n_bytes.values()), len(recorded._result.radii)))

    monkeypatch.setattr(Recordings, "put", watched)
    build, first = STAGES[name]
    with graph_pools() as pools:
        stage, _ = trained(CudaRecorder(torch.device("cpu")), build=build, first=first, steps=16)
        assert pools.n_replays
    assert held
    model = ModelLoad.of(stage.model.optimizer.parameters, OptimizerConfig())
    for n_bytes, n in held:
        of_bands = model.band_gradients * n // len(stage.model)
        assert n_bytes <= HELD_BYTES * n + of_bands


def test_strips_named_by_flags_stay():
    options = MemoryOptions(gradient_accumulation=False)
    assert chosen(8e9, options).plan.split == FIRST.split
    with pytest.raises(UserError, match="fits without --gradient_accumulation") as caught:
        chosen(1.35e9, options)
    assert "\n" not in str(caught.value)


def test_a_refusal_names_the_nearest_settings_that_fit():
    with pytest.raises(UserError, match="fits with --optimizer_state fp32 --use_bfloat16 True$"):
        chosen(1.1e9)
    with pytest.raises(UserError, match="even --optimizer_state bf16 --use_bfloat16 True needs"):
        chosen(1e8)


def test_a_breakdown_names_its_parts():
    lines = chosen(8e9).lines()
    assert lines[0].startswith("memory plan: whole images, 1,000,000 samples at once")
    assert "moments 450 MiB" in lines[1]
    assert "parameters 225 MiB" in lines[1]


def test_cheaper_plans_end():
    plan, seen = FIRST, []
    while plan is not None:
        seen.append(plan)
        plan = cheaper(plan)
    assert seen[-1] == MemoryPlan(ImageSplit(32), 50_000)
    assert len(set(seen)) == len(seen) < 10


@pytest.mark.parametrize(("mode", "bytes_per_pixel"), [("object", 4), ("ignore", 26)])
def test_the_mask_of_a_photograph_is_counted(mode, bytes_per_pixel):
    load = loads_of(OptimizerConfig())["geometry"]
    masked = replace(load, view=replace(load.view, mask=mode))
    one, other = (predict(which, FIRST)["image"] for which in (load, masked))
    assert other - one == bytes_per_pixel * 1920 * 1244


def test_a_store_shrinks_at_once(scene):
    camera = scene.cameras[0]
    with ImageStore(budget_bytes=10**6) as store:
        store.get(camera)
        assert store.n_bytes == camera.width * camera.height * 3
        store.limit(0)
        assert store.n_bytes == 0


@pytest.mark.slow
def test_a_run_prints_its_plan_before_it_trains(scene, checkpoint, tmp_path, capsys):
    assert brief_coarse(scene, checkpoint, tmp_path, "--vram_budget", 1, "--verbose") == 0
    out = capsys.readouterr().out
    assert "memory plan: whole images, 100 samples at once; 1.00 GiB to use" in out
    assert "memory of geometry:" in out


def test_vanilla_training_bounds_photographs_alone(scene, tmp_path, monkeypatch, capsys):
    limits, limit = [], ImageStore.limit
    monkeypatch.setattr(
        ImageStore, "limit", lambda store, n: (limits.append(n), limit(store, n))[1]
    )
    flags = ("-s", scene.root, "-m", tmp_path / "vanilla", "--iterations", 4)
    assert run_cli(train_vanilla, *flags, "--vram_budget", 1e-5) == 0
    assert limits == [round(1e-5 * 2**30) // 2]
    assert "--vram_budget bounds photographs alone" in capsys.readouterr().out


def test_a_run_without_memory_is_refused_in_one_line(scene, checkpoint, tmp_path, capsys):
    assert brief_coarse(scene, checkpoint, tmp_path, "--vram_budget", 1e-5) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.strip()]
    assert "--vram_budget" in line
    assert "needs" in line


def test_a_gpu_is_forecast_with_its_larger_buffer_of_pairs():
    camera, cloud = tiny_cameras()[0], tiny_cloud(400)
    with torch.no_grad():
        view = ViewLoad.of(project(cloud.activate(), camera))
    # As many owners as fill the buffer of a GPU.
    view = replace(view, visible=10**6)
    model = ModelLoad.of(cloud.tensors(), OptimizerConfig())
    load = StepLoad(400, model, view, samples=10**6, neighbors=16)
    larger = replace(load, pair_bytes=pair_bytes(torch.device("cuda")))
    assert load.pair_bytes == pair_bytes(torch.device("cpu"))
    found, expected = (predicted_bytes(each, MemoryPlan()) for each in (larger, load))
    assert found - expected > 0.9 * (larger.pair_bytes - load.pair_bytes)
