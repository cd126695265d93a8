# SPDX-License-Identifier: Apache-2.0
"""Reading maps between pixels: against torch's own lookup, and the bits of its gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import grid_sample

from gaussian_splatting.core.random import generator
from sugar_scene.reprojection import bilinear, ordered_sum

HEIGHT, WIDTH = 7, 9


def case(n: int, dtype: torch.dtype, spread: float = 1.4) -> tuple[torch.Tensor, ...]:
    """A map, and points on it and beside it."""
    rng = generator(0, "lookup", n)
    values = torch.randn(HEIGHT, WIDTH, generator=rng, dtype=dtype)
    u, v = (torch.rand(2, n, generator=rng, dtype=dtype) * 2 - 1) * spread
    return values, (u + 1) * WIDTH / 2, (v + 1) * HEIGHT / 2


def torchs_own(values: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    grid = torch.stack([2 * u / WIDTH - 1, 2 * v / HEIGHT - 1], dim=-1)
    found = grid_sample(
        values[None, None], grid[None, None], padding_mode="border", align_corners=False
    )
    return found.reshape(-1)


def test_values_and_gradients_are_those_of_torchs_lookup():
    results = []
    for read in (bilinear, torchs_own):
        inputs = [x.requires_grad_() for x in case(400, torch.float64)]
        found = read(*inputs)
        (found * torch.arange(400)).sum().backward()
        results.append([found.detach(), *(x.grad for x in inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-8)


def test_gradients_match_finite_differences():
    values, u, v = (x.requires_grad_() for x in case(12, torch.float64, spread=0.8))
    assert torch.autograd.gradcheck(bilinear, (values, u, v))


def test_no_order_of_the_points_changes_a_bit_of_the_gradient():
    rng = generator(1, "lookup")
    weights, bits = torch.randn(20_000, generator=rng) * 1e3, set()
    for order in (torch.arange(20_000), torch.randperm(20_000, generator=rng)):
        values, u, v = case(20_000, torch.float32)
        values.requires_grad_()
        (bilinear(values, u[order], v[order]) * weights[order]).sum().backward()
        bits.add(values.grad.numpy().tobytes())
    assert len(bits) == 1


def test_sums_are_as_good_as_those_of_wider_floats():
    rng = generator(2, "lookup")
    values = torch.randn(50_000, generator=rng) * torch.rand(50_000, generator=rng) ** 8
    index = torch.randint(40, (50_000,), generator=rng)
    exact = torch.zeros(40, dtype=torch.float64).index_add_(0, index, values.double())
    torch.testing.assert_close(ordered_sum(values, index, 40).double(), exact, rtol=1e-6, atol=1e-6)


def test_the_edges_of_what_can_be_summed():
    index = torch.tensor([0, 2, 2])
    assert ordered_sum(torch.zeros(3), index, 3).tolist() == [0, 0, 0]
    assert ordered_sum(torch.zeros(0), index[:0], 2).tolist() == [0, 0]
    uneven, tiny = torch.tensor([1e-40, 3e38, 0.0]), torch.tensor([1e-40, 2e-40, 3e-40])
    assert ordered_sum(uneven, index, 3).tolist() == pytest.approx([0.0, 0.0, 3e38])
    assert ordered_sum(tiny, index, 3).tolist() == pytest.approx(
        [1e-40, 0.0, 5e-40], rel=1e-4, abs=0
    )
    assert ordered_sum(torch.tensor([1.0, torch.nan, 1.0]), index, 3).isnan().all()


def test_a_point_that_is_no_number_reads_none_and_disturbs_no_other():
    values, u, v = case(3, torch.float32)
    found = bilinear(values, torch.tensor([1.0, torch.nan, torch.inf]), v)
    assert found.isfinite().tolist() == [True, False, True]
