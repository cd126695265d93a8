# SPDX-License-Identifier: Apache-2.0
"""Depth where half of the light is left, against sums of blending weights in float64."""

from __future__ import annotations

import pytest
import torch

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.rasterization.render import median_depth
from tests.support.random_scenes import look_at, random_gaussians
from tests.support.reference_rasterizer import project_reference, rasterize_reference


def as_double(gaussians: Gaussians) -> Gaussians:
    return Gaussians(*(t.double() for t in gaussians.tensors()))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_gaussian_that_leaves_less_than_half_of_the_light_is_found(seed):
    gaussians = random_gaussians(60, seed, torch.float32)
    camera = look_at((2.5, 1.2, 0.3), width=37, height=29)
    found = median_depth(gaussians, camera).double()
    exact = as_double(gaussians)
    # Each Gaussian blends a channel of its own: its weight in every pixel.
    weights = rasterize_reference(exact, camera, features=torch.eye(60).double()).features
    depths, order = project_reference(exact, camera).depths.float().sort(stable=True)
    taken = weights[..., order].cumsum(dim=-1)
    reached = taken > 0.5
    expected = torch.where(
        reached.any(dim=-1), depths[reached.int().argmax(dim=-1)].double(), torch.inf
    )
    # Rounding decides where a sum lands on one half.
    sure = ((taken - 0.5).abs() > 1e-5).all(dim=-1)
    assert sure.float().mean() > 0.95
    assert 0.1 < expected.isfinite().float().mean() < 1.0
    torch.testing.assert_close(found[sure], expected[sure], rtol=1e-6, atol=0)


def test_the_median_lies_on_a_surface_where_the_mean_lies_between_two():
    near, far = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([-1.0, 0.0, 0.0])
    disc = torch.tensor([0.001, 0.5, 0.5])
    gaussians = Gaussians(
        means=torch.stack([near, far]),
        quats=torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 2),
        scales=torch.stack([disc, disc]),
        opacities=torch.tensor([0.45, 0.9]),
        sh_dc=torch.zeros(2, 1, 3),
        sh_rest=torch.zeros(2, 15, 3),
    )
    camera = look_at((3.0, 0.0, 0.0), width=21, height=21, focal=20.0)
    middle = median_depth(gaussians, camera)[10, 10]
    assert float(middle) == pytest.approx(4.0, abs=1e-3)
    gaussians.opacities[0] = 0.6
    assert float(median_depth(gaussians, camera)[10, 10]) == pytest.approx(3.0, abs=1e-3)


def test_nothing_is_infinitely_far():
    empty = Gaussians(*(t[:0] for t in random_gaussians(1, 0, torch.float32).tensors()))
    assert bool(median_depth(empty, look_at((3.0, 0.0, 0.0), width=8, height=6)).isinf().all())
