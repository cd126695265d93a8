# SPDX-License-Identifier: Apache-2.0
"""Draws of samples: who may be drawn, in which order, and how often."""

import torch

from sugar_scene.sampling import draw_samples
from sugar_utils.random import generator


def test_only_masked_gaussians_are_drawn_and_they_come_sorted():
    mask = torch.zeros(1000, dtype=torch.bool)
    mask[::7] = True
    indices, noise = draw_samples(mask, 5000, generator(0, "samples", 1))
    assert indices.dtype == torch.int64
    assert indices.shape == (5000,)
    assert noise.shape == (5000, 3)
    assert mask[indices].all()
    assert (indices.diff() >= 0).all()


def test_draws_are_uniform_and_noise_is_standard_normal():
    mask = torch.ones(50, dtype=torch.bool)
    indices, noise = draw_samples(mask, 100_000, generator(3, "samples"))
    counts = indices.bincount(minlength=50)
    assert (counts - 2000).abs().max() < 5 * 2000**0.5
    assert noise.mean(dim=0).abs().max() < 0.02
    assert (noise.std(dim=0) - 1).abs().max() < 0.02
    # Sorting the draws must not sort the noise.
    assert abs(torch.corrcoef(torch.stack([indices.float(), noise[:, 0]]))[0, 1]) < 0.02


def test_the_same_seed_draws_the_same_and_another_does_not():
    mask = torch.ones(100, dtype=torch.bool)
    first, again, other = (draw_samples(mask, 64, generator(s, "samples", 9)) for s in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_more_gaussians_than_a_categorical_draw_allows():
    n = 2**24 + 100
    mask = torch.zeros(n, dtype=torch.bool)
    mask[-1] = True
    indices, _ = draw_samples(mask, 3, generator(0))
    assert indices.tolist() == [n - 1] * 3


def test_empty_mask_draws_nothing():
    indices, noise = draw_samples(torch.zeros(9, dtype=torch.bool), 100, generator(0))
    assert indices.shape == (0,)
    assert noise.shape == (0, 3)
