# SPDX-License-Identifier: Apache-2.0
"""The backward pass of the fields as a GPU does it: its kernels run as fibers on the CPU."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from sugar_scene import field_kernels, field_sums_cuda
from sugar_scene.field_device import PAIR_SIZE
from sugar_scene.field_kernels import evaluate_fields
from sugar_scene.field_sums_cuda import RUN_SAMPLES, launch_rows
from sugar_utils.neighbors import nearest_neighbors
from tests.support.field_reference import evaluate_fields_reference
from tests.test_fields import assert_close_to_largest, clustered_scene, run

COUNTS = (0, 1, 31, 32, 0, 33, 2, 5_000, 127, 128, 129, 0)
"""Samples of each Gaussian."""

CPU = torch.device("cpu")
AS_ON_A_GPU = functools.partial(evaluate_fields, native=False)


def owned_samples(counts: tuple[int, ...], seed: int = 3) -> tuple[Tensor, Tensor]:
    """Gaussian of each sample, rising, and standard normal draws."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return indices, torch.randn(len(indices), 3, generator=generator)


def make_scene(n: int, n_neighbors: int) -> tuple[tuple[Tensor, ...], Tensor]:
    scene = clustered_scene(n, seed=12)
    return scene, nearest_neighbors(scene[0], n_neighbors).indices


@pytest.mark.slow
@pytest.mark.parametrize("count", [*sorted(set(COUNTS)), COUNTS], ids=str)
@pytest.mark.parametrize("n_neighbors", [4, 16])
def test_gradients_match_double_precision_for_any_number_of_samples(count, n_neighbors):
    # Owners of some samples beside others without any.
    counts = count if isinstance(count, tuple) else (0, count, 0, 3) + (0,) * 16
    scene, neighbors = make_scene(max(len(counts), 20), n_neighbors)
    indices, noise = owned_samples(counts)
    inputs = (scene, neighbors, indices, noise)
    _, expected = run(evaluate_fields_reference, *inputs, dtype=torch.float64)
    evaluate = functools.partial(AS_ON_A_GPU, n_owners=len(counts))
    _, grads = run(evaluate, *inputs)
    for name, double_grads in expected.items():
        tolerance = 2e-3 if name == "normal_error" else 5e-5
        for actual, grad in zip(grads[name], double_grads, strict=True):
            assert_close_to_largest(actual, grad, tolerance)


@pytest.mark.parametrize("n_neighbors", [3, 16, 17])
def test_bits_depend_neither_on_launches_nor_on_a_bound_of_the_owners(n_neighbors, monkeypatch):
    counts = (0, 1, 31, 32, 33, 0, 300, 5)
    scene, neighbors = make_scene(24, n_neighbors)
    indices, noise = owned_samples(counts)
    row_bytes = (n_neighbors + 1) * PAIR_SIZE * 4
    results = []
    # The last chunks of a loose bound hold no samples; one run to a launch is the other extreme.
    for runs_together, n_owners in ((100, None), (100, None), (100, 90), (3, 90), (2, 8), (1, 8)):
        monkeypatch.setattr(field_kernels, "PAIR_BYTES", runs_together * row_bytes)
        evaluate = functools.partial(AS_ON_A_GPU, n_owners=n_owners)
        _, grads = run(evaluate, scene, neighbors, indices, noise)
        results.append([grad for field in grads.values() for grad in field])
    for grads in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, results[0], strict=True))


def test_runs_are_short_and_hold_all_samples_of_one_gaussian_each():
    indices, _ = owned_samples(COUNTS)
    for n_owners in (None, len(COUNTS)):
        owners, starts = field_kernels._short_runs(indices.int(), n_owners)
        lengths = starts.diff()
        assert int(lengths.max()) == RUN_SAMPLES
        assert starts[0] == 0
        assert torch.equal(owners.repeat_interleave(lengths).long(), indices)
        # Runs without samples are the last ones.
        filled = lengths > 0
        assert torch.equal(filled, filled.sort(descending=True).values)
        assert len(owners) <= len(COUNTS) + len(indices) // RUN_SAMPLES


def test_a_run_without_samples_leaves_its_gradient_rows_alone():
    scene, neighbors = make_scene(20, 4)
    indices, noise = owned_samples((2, 1, 3))
    chunks = []
    launch_runs = field_sums_cuda.launch_runs

    def recording(n_runs, inputs, device):
        rows, n_filled = inputs[-2:]
        rows.fill_(7.0)
        launch_runs(n_runs, inputs, device)
        chunks.append((rows.clone(), int(n_filled)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field_sums_cuda, "launch_runs", recording)
        leaves = [tensor.requires_grad_() for tensor in scene]
        fields = AS_ON_A_GPU(*leaves, neighbors, indices, noise, n_owners=5)
        fields.density.sum().backward()
    ((rows, n_filled),) = chunks
    assert n_filled == 3
    assert rows.shape == (5, 5, PAIR_SIZE)
    assert not (rows[:3] == 7.0).any()
    assert (rows[3:] == 7.0).all()


def test_rows_of_a_target_are_added_one_after_the_other():
    lengths = (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 65, 200, 1, 1)
    per_run = 5
    generator = torch.Generator().manual_seed(1)
    n_entries = sum(lengths)
    n_runs = n_entries // per_run
    n_pairs = n_runs * per_run
    targets = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[:n_pairs]
    targets = targets[torch.randperm(n_pairs, generator=generator)].int()
    rows = torch.randn(n_pairs, PAIR_SIZE, generator=generator)
    grads = torch.randn(len(lengths), PAIR_SIZE, generator=generator)
    for n_filled in (n_runs, n_runs // 2, 1, 0):
        expected = grads.clone()
        for pair in range(n_filled * per_run):
            expected[targets[pair]] += rows[pair]
        parts = [grads[:, :3], grads[:, 3:7], grads[:, 7:10], grads[:, 10]]
        parts = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        ordered, order = targets.sort(stable=True)
        filled = torch.tensor([n_filled], dtype=torch.int32)
        launch_rows(n_pairs, [ordered, order, filled, per_run, rows, *parts], CPU)
        found = torch.cat([*parts[:3], parts[3][:, None]], dim=1)
        assert torch.equal(found, expected)
