# SPDX-License-Identifier: Apache-2.0
"""Work of the host for a step on a GPU, counted on a CPU, stays within limits."""

from __future__ import annotations

import pytest
import torch

from gaussian_splatting.data.images import composited
from tests.support.cpu_recorder import CpuRecorder, CpuRecording
from tests.support.launches import count, counting

LIMITS = {
    "dn_consistency": (18, 118, 1),
    "density": (17, 102, 1),
    "sdf": (17, 368, 1),
    "entropy": (12, 72, 1),
    "vanilla": (12, 44, 1),
    "multiview": (22, 157, 1),
}
"""Launches of Warp, operations of torch and waits of the host in one iteration."""


@pytest.mark.slow
@pytest.mark.parametrize("phase", LIMITS)
def test_a_step_stays_within_its_limits(phase):
    launches, operations, _, waits = count(phase).totals()
    assert all(a <= b for a, b in zip((launches, operations, waits), LIMITS[phase], strict=True)), (
        launches,
        operations,
        waits,
    )
    # What is not counted would pass unseen.
    assert launches > 10
    assert operations > 40
    assert waits > 0


RECORDED_LIMITS = {
    "vanilla": (48, 14),
    "random background": (48, 16),
    "entropy": (84, 6),
    "dn_consistency": (140, 8),
    "density": (121, 8),
    "sdf": (388, 8),
    "multiview": (156, 21),
}
"""Nodes of the graph of a recorded step, and operations of torch beside it in one iteration."""


@pytest.mark.slow
@pytest.mark.parametrize("phase", RECORDED_LIMITS)
def test_the_host_does_little_beside_a_repeated_step(phase, monkeypatch):
    replays = []
    # Operations of a repetition are the device's.
    monkeypatch.setattr(CpuRecording, "replay", lambda recording: replays.append(recording))
    launches, operations, _, waits = count(phase, CpuRecorder()).totals()
    assert len(replays) >= 3
    max_nodes, max_operations = RECORDED_LIMITS[phase]
    assert 20 < len(replays[-1].nodes) <= max_nodes
    assert launches == 0
    assert 0 < operations <= max_operations
    assert waits == 1


CUT_OUT_LIMITS = {"vanilla": (31, 1), "dn_consistency": (25, 1), "multiview": (46, 2)}
"""Operations beside a recorded step whose photograph has a mask of an object, and waits. With
several views, the pixels that are compared are drawn among those of the mask, which are counted."""


@pytest.mark.slow
@pytest.mark.parametrize("phase", CUT_OUT_LIMITS)
def test_the_host_does_not_wait_for_the_background_of_an_object(phase, monkeypatch):
    monkeypatch.setattr(CpuRecording, "replay", lambda recording: None)
    launches, operations, _, waits = count(phase, CpuRecorder(), is_cut_out=True).totals()
    assert launches == 0
    max_operations, max_waits = CUT_OUT_LIMITS[phase]
    assert operations <= max_operations
    assert waits == max_waits


def test_an_object_is_put_on_its_background_by_few_operations():
    photograph = torch.zeros(360, 480, 4, dtype=torch.uint8)
    with counting() as counts:
        composited(photograph, photograph[0, 0, :3])
    assert counts.operations.total() <= 8


def test_waits_and_views_are_told_apart_from_operations():
    values, mask = torch.arange(6.0), torch.tensor([True, False] * 3)
    with counting() as counts:
        values.view(2, 3)[0]
        values.tolist()
        float(values.sum())
        values[mask]
        mask.nonzero()
        values[torch.tensor([1, 2], device="cpu")]
    assert counts.waits.total() == 4
    assert counts.operations["index"] == 2
    assert set(counts.free) >= {"view", "select"}
    assert counts.launches.total() == 0
