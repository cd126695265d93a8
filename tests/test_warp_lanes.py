# SPDX-License-Identifier: Apache-2.0
"""Exchanges between lanes of a warp, run as fibers, against plain loops over 32 numbers."""

from __future__ import annotations

import pytest
import torch
import warp as wp

from sugar_utils.warp_launch import as_array, describe, launch_blocks
from sugar_utils.warp_math import (
    SUM_COLUMNS,
    WARP_LANES,
    Columns,
    gauss,
    lanes_where,
    lowest_bit,
    max_over_lanes,
    or_over_lanes,
    read_lane,
    reciprocal_fast,
    sum_columns,
    sum_columns_of_team,
)

OPTIONS = {"enable_backward": False, "block_dim": WARP_LANES}


@wp.kernel(module="unique", module_options=OPTIONS)
def integers(values: wp.array(dtype=int), found: wp.array2d(dtype=int)):
    warp, lane = wp.tid()
    value = values[warp * 32 + lane]
    found[warp * 32 + lane, 0] = max_over_lanes(value, lane)
    found[warp * 32 + lane, 1] = or_over_lanes(value, lane)
    found[warp * 32 + lane, 2] = lanes_where(value & 1, lane)
    found[warp * 32 + lane, 3] = read_lane(value, lane, (lane + 5) % 32)
    found[warp * 32 + lane, 4] = lowest_bit(value)


@wp.kernel(module="unique", module_options=OPTIONS)
def column_sums(rows: wp.array(dtype=Columns), found: wp.array(dtype=float)):
    warp, lane = wp.tid()
    found[lane] = sum_columns(rows[lane], lane)


@wp.kernel(module="unique", module_options=OPTIONS)
def team_sums(rows: wp.array(dtype=Columns), found: wp.array(dtype=float)):
    warp, lane = wp.tid()
    found[lane] = sum_columns_of_team(rows[lane], lane)


@wp.kernel
def fast_functions(x: wp.array(dtype=float), found: wp.array2d(dtype=float)):
    i = wp.tid()
    found[i, 0] = gauss(x[i])
    found[i, 1] = reciprocal_fast(x[i])


def run(kernel, n_warps, inputs):
    launch_blocks(kernel, n_warps, inputs, device=torch.device("cpu"), block_dim=WARP_LANES)


@pytest.mark.parametrize("seed", range(3))
def test_integers_are_those_of_all_lanes(seed):
    values = torch.randint(1, 2**31 - 1, (3, 32), generator=torch.Generator().manual_seed(seed))
    found = torch.empty(3 * 32, 5, dtype=torch.int32)
    run(integers, 3, [values.int().flatten(), found])
    for row, lanes in zip(found.view(3, 32, 5).tolist(), values.tolist(), strict=True):
        anyones = 0
        for value in lanes:
            anyones |= value
        odd = sum((value & 1) << lane for lane, value in enumerate(lanes))
        odd -= (odd >> 31) << 32  # as a signed number
        for lane, (largest, bits, where, other, lowest) in enumerate(row):
            assert (largest, bits, where) == (max(lanes), anyones, odd)
            assert other == lanes[(lane + 5) % 32]
            assert lowest == (lanes[lane] & -lanes[lane]).bit_length() - 1


def test_columns_are_added_in_the_order_of_the_exchanges():
    rows = torch.randn(32, SUM_COLUMNS, generator=torch.Generator().manual_seed(0))
    found = torch.empty(32)
    run(column_sums, 1, [as_array(rows, Columns), found])
    tree = rows
    for half in (16, 8, 4, 2, 1):
        tree = tree.view(-1, 2, half, SUM_COLUMNS)
        tree = (tree[:, 0] + tree[:, 1]).reshape(-1, SUM_COLUMNS)
    assert torch.equal(found, tree[0].repeat_interleave(2))


def test_columns_of_either_half_of_a_warp_are_added_in_the_order_of_the_exchanges():
    rows = torch.randn(32, SUM_COLUMNS, generator=torch.Generator().manual_seed(1))
    found = torch.empty(32)
    run(team_sums, 1, [as_array(rows, Columns), found])
    tree = rows.view(2, 16, SUM_COLUMNS)
    for half in (8, 4, 2, 1):
        tree = tree[:, :half] + tree[:, half:]
    assert torch.equal(found, tree.flatten())


def test_fast_functions_are_near_the_exact_ones():
    x = torch.linspace(0.01, 12.0, 1000)
    found = torch.empty(1000, 2)
    wp.launch(fast_functions, 1000, [describe(x), describe(found)], device="cpu")
    exact = torch.stack([(-x.double() / 2).exp(), 1 / x.double()], dim=1)
    assert float((found / exact - 1).abs().max()) < 2.0**-21
