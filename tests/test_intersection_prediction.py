# SPDX-License-Identifier: Apache-2.0
"""Tile lists made without waiting for the number of pairs: the same bits, and views seen again."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from gaussian_splatting.components.exposures import ExposureConfig, Exposures
from gaussian_splatting.engine.stepping import RunContext, Stepper
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import (
    Rows,
    SplatGradients,
    backpropagate_rows,
    blend_rows,
    build_tile_lists,
    project,
    projection,
)
from gaussian_splatting.rasterization.projection import (
    IntersectionPrediction,
    PredictedCount,
)
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_utils.console import Console
from sugar_utils.errors import TrainingError
from tests.support.launches import EXTENT, gpu_paths
from tests.support.random_scenes import look_at, random_gaussians
from tests.support.step_scenes import Case, MadeUpPhotographs, as_cloud, make_scene, photograph
from tests.support.training import everywhere

CASE = Case("pairs", 200, 48, 36, 1, radius=6.0)


def projected():
    camera = look_at((2.5, 1.2, 0.3), width=70, height=50)
    return project(random_gaussians(250, 1, torch.float32), camera)


def guessed(projection, spare: int):
    """Tile lists with room for so many more pairs than there are; and the guess."""
    n_intersections = int(projection.tile_counts.sum())
    prediction = IntersectionPrediction()
    guess = PredictedCount(prediction, projection.camera, 250, n_intersections + spare)
    projection.prediction = guess
    return build_tile_lists(projection, blocks=True), guess


def blended_and_returned(projection, tiles):
    g = torch.Generator().manual_seed(0)
    d_pixels, d_left = torch.randn(50, 70, 3, generator=g), torch.randn(50, 70, generator=g)
    background, rows = torch.rand(3, generator=g), Rows(0, 50)
    blended = blend_rows(projection.splats, tiles, background, rows, blocks=True)
    sums = SplatGradients.zeros(projection)
    backpropagate_rows(projection.splats, tiles, blended, d_pixels, d_left, sums, blocks=True)
    return blended.pixels, sums.means2d, sums.splats


@pytest.mark.parametrize("spare", [0, 1, 700])
def test_lists_with_room_to_spare_blend_the_same_bits(spare):
    projection = projected()
    exact = build_tile_lists(projection, blocks=True)
    expected = blended_and_returned(projection, exact)
    tiles, guess = guessed(projection, spare)
    assert tiles.ids.shape[0] == exact.ids.shape[0] + spare
    assert int(guess.excess) == -spare
    assert torch.equal(tiles.offsets, exact.offsets)
    assert torch.equal(tiles.ids[: exact.ids.shape[0]], exact.ids)
    for found, value in zip(blended_and_returned(projection, tiles), expected, strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("missing", [1, 400])
def test_lists_that_are_too_short_say_so_and_write_nothing_outside(missing):
    projection = projected()
    n_intersections = int(projection.tile_counts.sum())
    assert n_intersections > 401
    tiles, guess = guessed(projection, -missing)
    assert int(guess.excess) == missing
    assert int(tiles.offsets[-1]) == tiles.ids.shape[0] == n_intersections - missing
    # The pairs that are there belong to Gaussians, and gradients are finite.
    assert int(tiles.ids.min()) >= 0
    assert int(tiles.ids.max()) < 250
    for values in blended_and_returned(projection, tiles):
        assert bool(values.isfinite().all())
    assert not guess.record(float(guess.excess))
    # Next time there is room.
    again = guess.predictor.predict(projection.camera, 250)
    assert again.capacity >= n_intersections


def test_a_forecast_follows_the_number_of_gaussians_and_knows_sizes_apart():
    prediction, camera = IntersectionPrediction(), look_at((2.5, 1.2, 0.3), width=70, height=50)
    assert prediction.predict(camera, 100) is None
    prediction.record(camera, 100, 1_000_000)
    assert prediction.predict(camera, 100).capacity > 1_090_000
    assert prediction.predict(camera, 200).capacity > 2_190_000
    assert prediction.predict(camera, 50).capacity == prediction.predict(camera, 100).capacity
    assert prediction.predict(camera.resized(35, 25), 100) is None
    prediction.record(camera, 100, projection.MAX_PREDICTION)
    assert prediction.predict(camera, 100) is None


def trained(steps: int, views_per_step: int = 1):
    """A vanilla stage after some steps on the paths of GPUs, with all that settles with a view."""
    scene, camera = make_scene(CASE)
    config = VanillaConfig(
        exposure=ExposureConfig(True, start=0),
        optimizer=OptimizerConfig(views_per_step=views_per_step),
    )
    exposures = Exposures(config.exposure, [camera.name], torch.device("cpu"), (601, 700))
    stage = VanillaStage(
        as_cloud(scene), config, everywhere(EXTENT), lambda *_: None, components=[exposures]
    )
    stepper = stepper_of(stage)
    with gpu_paths():
        for i in range(steps):
            stepper.step(601 + i, None)
    return stage


def stepper_of(stage):
    camera = make_scene(CASE)[1]
    return Stepper(
        stage,
        [camera] * 3,
        RunContext(MadeUpPhotographs(photograph), Console()),
        first=601,
        seed=0,
    )


def state_of(stage):
    parameters = {name: p.detach() for name, p in stage.model.optimizer.parameters.items()}
    more = {name: v for name, v in stage.extra_state().items() if isinstance(v, torch.Tensor)}
    return parameters | more


@pytest.mark.slow
@pytest.mark.parametrize("views_per_step", [1, 2])
@pytest.mark.parametrize("short", [False, True], ids=["enough room", "too little"])
def test_training_has_the_same_bits_with_guesses_and_without(short, views_per_step, monkeypatch):
    guess = IntersectionPrediction.predict
    record = PredictedCount.record
    recorded = []
    monkeypatch.setattr(IntersectionPrediction, "predict", lambda *_: None)
    expected = state_of(trained(4, views_per_step))
    every_other = itertools.cycle([short, False])

    def guess_short(*arguments):
        found = guess(*arguments)
        if found is not None and next(every_other):
            found.capacity = found.capacity // 3 - projection.SPARE // 3
        return found

    def record_watched(found, excess):
        recorded.append(excess)
        return record(found, excess)

    monkeypatch.setattr(IntersectionPrediction, "predict", guess_short)
    monkeypatch.setattr(PredictedCount, "record", record_watched)
    found = state_of(trained(4, views_per_step))
    missed = sum(excess > 0 for excess in recorded)
    seen_before = 4 * views_per_step - 1
    assert (missed, len(recorded)) == (seen_before if short else 0, seen_before + missed)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_view_that_is_refused_changes_nothing(monkeypatch):
    stage = trained(2)
    before = {name: value.clone() for name, value in state_of(stage).items()}
    stepper = stepper_of(stage)
    monkeypatch.setattr(VanillaStage, "accumulate", with_bad_loss(VanillaStage.accumulate))
    with gpu_paths(), pytest.raises(TrainingError, match="loss"):
        stepper.step(603, None)
    for name, value in state_of(stage).items():
        assert torch.equal(value, before[name]), name


def with_bad_loss(accumulate):
    def changed(*arguments):
        result = accumulate(*arguments)
        return replace(result, terms={"loss": result.terms["loss"] * torch.nan})

    return changed
