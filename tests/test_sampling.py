# SPDX-License-Identifier: Apache-2.0
"""Draws of samples: who may be drawn, in which order, and how often."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import ndtri

from gaussian_splatting.core.random import derive_seed
from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.training_views import TrainingView
from sugar_scene.geometry import SampleRule, draw_counted_samples, halves_of
from sugar_trainers import sampling
from sugar_trainers.sampling import CandidatePrediction, SampleDraws
from sugar_trainers.stage_config import CoarseConfig
from sugar_utils.flags import AUTO
from tests.support.random_scenes import look_at
from tests.support.samples import draw_samples


def test_only_masked_gaussians_are_drawn_and_they_come_sorted():
    mask = torch.zeros(1000, dtype=torch.bool)
    mask[::7] = True
    indices, noise = draw_samples(mask, 5000, derive_seed(0, "samples", 1))
    assert indices.dtype == torch.int64
    assert indices.shape == (5000,)
    assert noise.shape == (5000, 3)
    assert mask[indices].all()
    assert (indices.diff() >= 0).all()


def test_draws_are_uniform_and_noise_is_standard_normal():
    mask = torch.ones(50, dtype=torch.bool)
    indices, noise = draw_samples(mask, 100_000, derive_seed(3, "samples"))
    counts = indices.bincount(minlength=50)
    assert (counts - 2000).abs().max() <= 2
    assert noise.mean(dim=0).abs().max() < 0.02
    assert (noise.std(dim=0) - 1).abs().max() < 0.02
    together = torch.corrcoef(torch.cat([indices.float()[:, None], noise], dim=1).T)
    assert (together - torch.eye(4)).abs().max() < 0.02
    expected = torch.distributions.Normal(0, 1).cdf(torch.linspace(-3, 3, 13))
    found = torch.stack([(noise < x).float().mean() for x in torch.linspace(-3, 3, 13)])
    assert (found - expected).abs().max() < 0.005


def test_fewer_draws_than_gaussians_leave_none_out_on_average():
    mask = torch.ones(1_000, dtype=torch.bool)
    drawn = torch.zeros(1_000)
    for seed in range(400):
        drawn += draw_samples(mask, 100, seed)[0].bincount(minlength=1_000)
    assert abs(float(drawn.mean()) - 40) < 1e-3
    assert (drawn - 40).abs().max() < 5 * 40**0.5


def hashed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


@pytest.mark.parametrize("n_candidates", [7, 5_000_000])
def test_draws_are_those_of_integers_alone(n_candidates):
    """Nothing in them rounds, so they are the same bits on every device."""
    seed, n = derive_seed(5, "samples", 2), 20_000
    numbers = np.arange(n, dtype=np.uint32)
    own = hashed(hashed(numbers ^ np.uint32(seed & 0xFFFFFFFF)) + np.uint32(seed >> 32))
    expected = [
        (i * n_candidates + (int(u) * n_candidates >> 32)) // n for i, u in enumerate(own.tolist())
    ]
    second, third = hashed(own + np.uint32(0x9E3779B9)), hashed(own + np.uint32(0x3C6EF372))
    ranks = np.stack([second >> 16, second & 0xFFFF, third >> 16], axis=1).astype(np.float64)
    indices, noise = draw_samples(torch.ones(n_candidates, dtype=torch.bool), n, seed)
    assert indices.tolist() == expected
    torch.testing.assert_close(
        noise, torch.from_numpy(ndtri((ranks + 0.5) / 65_536)).float(), rtol=2e-5, atol=1e-6
    )


def test_the_mean_over_stratified_draws_is_quieter_than_over_independent_ones():
    mask, values = torch.ones(300, dtype=torch.bool), torch.linspace(0, 1, 300) ** 2
    means = torch.stack([values[draw_samples(mask, 1_000, s)[0]].mean() for s in range(60)])
    assert float(means.std()) < 0.2 * float(values.std()) / 1_000**0.5
    assert abs(float(means.mean() - values.mean())) < 1e-3


def test_the_same_seed_draws_the_same_and_another_does_not():
    mask = torch.ones(100, dtype=torch.bool)
    first, again, other = (draw_samples(mask, 64, derive_seed(s, "samples", 9)) for s in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_more_gaussians_than_a_categorical_draw_allows():
    n = 2**24 + 100
    mask = torch.zeros(n, dtype=torch.bool)
    mask[-1] = True
    indices, _ = draw_samples(mask, 3, derive_seed(0))
    assert indices.tolist() == [n - 1] * 3


def test_empty_mask_draws_nothing():
    indices, noise = draw_samples(torch.zeros(9, dtype=torch.bool), 100, derive_seed(0))
    assert indices.shape == (0,)
    assert noise.shape == (0, 3)


def drawn_on_device(mask, rule, capacity, seed=4):
    return draw_counted_samples(mask, mask.sum(), halves_of(derive_seed(seed)), rule, capacity)


@pytest.mark.parametrize("rule", [SampleRule(4, 10_000), SampleRule(4, 90), SampleRule(300, 300)])
@pytest.mark.parametrize("capacity", [50, 77, 100])
def test_room_to_spare_changes_no_draw_and_holds_zeros(rule, capacity):
    mask = torch.arange(100) % 2 == 0
    n = rule.number(50)
    expected = draw_samples(mask, n, derive_seed(4))
    drawn = drawn_on_device(mask, rule, capacity)
    assert len(drawn.indices) == rule.number(capacity)
    assert drawn.n_used.tolist() == [n]
    assert torch.equal(drawn.is_used, torch.arange(len(drawn.indices)) < n)
    assert torch.equal(drawn.indices[:n], expected[0])
    assert torch.equal(drawn.noise[:n], expected[1])
    assert not drawn.indices[n:].any()
    assert not drawn.noise[n:].any()


def test_more_candidates_than_there_is_room_for_are_not_drawn():
    mask = torch.ones(100, dtype=torch.bool)
    drawn = drawn_on_device(mask, SampleRule(4, 10_000), 30)
    assert drawn.n_used.tolist() == [120]
    assert drawn.indices.unique().tolist() == list(range(30))


@pytest.mark.parametrize("rule", [SampleRule(4, 10_000), SampleRule(300, 300)])
def test_an_empty_mask_uses_no_row(rule):
    drawn = drawn_on_device(torch.zeros(9, dtype=torch.bool), rule, 5)
    assert drawn.n_used.tolist() == [0]
    assert not drawn.is_used.any()
    assert not drawn.indices.any()


def view_of(name, iteration=9_101):
    camera = look_at((1.2, 0.6, 0.4), width=32, height=24, focal=60.0)
    return TrainingView(replace(camera, name=name), None, iteration)


def test_on_a_cpu_every_view_has_exact_numbers():
    draws = SampleDraws(CoarseConfig(sdf_samples=AUTO), torch.device("cpu"), print)
    for n in (40, 10, 60):
        mask = torch.arange(100) < n
        view = view_of("view")
        samples = draws.draw(mask, view, draws.seed(view))
        assert len(samples.indices) == 4 * n
        assert samples.total == 4 * n
        assert samples.used is None
        assert samples.guess is None


def test_on_a_gpu_the_host_knows_the_number_of_the_first_view_only(monkeypatch):
    monkeypatch.setattr(sampling, "counts_on_device", lambda device: True)
    monkeypatch.setattr(sampling, "SPARE", 0)
    notes = []
    draws = SampleDraws(CoarseConfig(sdf_samples=AUTO), torch.device("cpu"), notes.append)
    rooms = []
    for n in (40, 10, 60, 30, 0):
        mask = torch.arange(100) < n
        view = view_of(f"view of {n}")
        samples = draws.draw(mask, view, draws.seed(view))
        guess = samples.guess
        rooms.append(len(samples.indices) // 4)
        if guess is None:
            continue
        assert float(guess.excess) == n - guess.capacity
        assert guess.record(float(guess.excess)) == (n <= guess.capacity)
        draws.note(ViewResult(view, {}, torch.zeros(0), predicted=[guess]))
        assert int(samples.total) == max(1, 4 * min(n, guess.capacity))
    # As many as in any view before, and a tenth more, rounded up; no more than there are.
    assert rooms[0] == 40
    assert 44 <= rooms[1] == rooms[2] <= 53
    assert 66 <= rooms[3] == rooms[4] <= 80
    (note,) = notes
    assert "iteration 9101: view of 0 shows no Gaussian to sample" in note


def test_candidates_of_another_number_of_gaussians_predict_nothing():
    prediction = CandidatePrediction()
    camera = view_of("view").camera
    assert prediction.predict(camera, 100) is None
    prediction.record(camera, 100, 90)
    assert prediction.predict(camera, 100).capacity == 100
    assert prediction.predict(camera, 70) is None
    prediction.record(camera, 70, 5)
    assert prediction.predict(camera, 70).capacity == 70
