# SPDX-License-Identifier: Apache-2.0
"""Probes of what recording depends on, each in a process of its own: a driver may break any."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import warp as wp
from torch import Tensor

from benchmarks.gpu.common import Check, Finding, Setup, draw, equal
from benchmarks.gpu.recorded import new_recorder
from gaussian_splatting.engine.recording import cuda_graph
from gaussian_splatting.engine.recording.cuda_graph import CudaRecorder
from gaussian_splatting.engine.view_sampling import UploadedViews
from sugar_utils.memory import format_bytes
from sugar_utils.warp_arrays import Floats
from sugar_utils.warp_launch import launch, on_stream_of
from tests.support.step_scenes import MadeUpPhotographs, large_scene, photograph

N = 10_000  # numbers that are worked on
N_REPEATS = 3
N_SENT = 50  # photographs
SLACK = 8  # photographs that may be underway at a time


@wp.kernel(enable_backward=False)
def add_index(first: int, values: Floats, sums: Floats):
    """Add the number of an item to its value."""
    i = first + wp.tid()
    sums[i] = values[i] + float(i)


def _sorted_sums(values: Tensor) -> Tensor:
    """An operation of torch, a launch of Warp, and its sort."""
    sums = torch.zeros_like(values)
    launch(add_index, len(values), [values * 2.0, sums])
    keys = torch.zeros(2 * len(values), dtype=torch.int32, device=values.device)
    keys[: len(values)] = sums.int()
    rows = torch.arange(2 * len(values), dtype=torch.int32, device=values.device)
    with on_stream_of(values.device):
        wp.utils.radix_sort_pairs(wp.from_torch(keys), wp.from_torch(rows), len(values))
    return torch.stack([keys, rows])[:, : len(values)]


def _unusual_operations(values: Tensor) -> Tensor:
    """Kernels of torch that nothing here launched before."""
    is_finite = values.isfinite().all() & (values.amax() > 0)
    return torch.where(is_finite, values.flip(0).cumsum(0), values.sort().values)


def _backward(values: Tensor) -> Tensor:
    """A backward pass, which autograd makes in a thread of its own."""
    leaf = values.detach().clone().requires_grad_()
    (leaf.sin() * leaf).sum().backward()
    return torch.zeros_like(values) if leaf.grad is None else leaf.grad


def _repeats(
    work: Callable[[Tensor], Tensor], warms_up: bool
) -> Callable[[Setup], Iterator[Finding]]:
    """Make a check that records work, and repeats it with other numbers."""

    def run(setup: Setup) -> Iterator[Finding]:
        n = setup.size(N, 100)
        values = draw(n).to(setup.place)
        if warms_up:
            work(values)
        recording, result = new_recorder(setup).record(lambda: work(values))
        for number in range(N_REPEATS):
            values.copy_(draw(n, seed=number + 1))
            recording.replay()
            found = result.clone()
            yield equal(f"repetition {number + 1}", found, work(values))

    return run


def held_results(setup: Setup) -> Iterator[Finding]:
    """Drop all recordings while a result of one is held, and record again."""
    values = draw(setup.size(N, 100)).to(setup.place)
    recorder = new_recorder(setup)
    held = []
    for number in range(N_REPEATS):
        recording, result = recorder.record(lambda: values * 2.0)
        recording.replay()
        held.append(result)
        del recording
        yield equal(f"recording {number + 1}", result, values * 2.0)


def ended_recordings(setup: Setup) -> Iterator[Finding]:
    """Let the host read a number while launches are recorded, and go on afterwards."""
    setup.need_cuda()
    recorder = CudaRecorder(setup.place)
    number = torch.ones((), device=setup.place)
    message = ""
    try:
        recorder.record((number + 1).item)
    except RuntimeError as error:
        message = " ".join(str(error).split())[:200]
    yield Finding("error of the read", bool(message), message or "none was raised")
    torch.cuda.empty_cache()
    yield Finding("empty_cache", True, "works")
    yield _memory_of_photographs(setup)
    try:
        recorder.record(lambda: number + 1)
    except RuntimeError as error:
        yield Finding("next recording", True, f"refused: {error}")
    else:
        # Only where the driver did not end the first one.
        yield Finding("next recording", not cuda_graph._CUT_SHORT, "made")


def _memory_of_photographs(setup: Setup) -> Finding:
    """Send photographs ahead; memory that the allocator never reuses would grow."""
    _, camera = large_scene(100, *setup.size((1920, 1244), (48, 36)), setup.place)
    views = UploadedViews(MadeUpPhotographs(photograph), setup.place)
    begun = torch.cuda.memory_reserved(setup.place)
    for _ in range(N_SENT):
        views.send_ahead(camera, 1.0)
        views.get(camera, 1.0)[1].sum()
    torch.cuda.synchronize(setup.place)
    grown = torch.cuda.memory_reserved(setup.place) - begun
    limit = SLACK * max(photograph(camera).nbytes, 2 * 2**20)
    shown = f"{format_bytes(grown)} more for {N_SENT} photographs"
    return Finding("photographs sent ahead", grown <= limit, shown, {"bytes": grown})


CHECKS = (
    Check("torch, Warp and sort", _repeats(_sorted_sums, warms_up=True), 30),
    Check("results that are held", held_results, 30),
    Check("kernels used first", _repeats(_unusual_operations, warms_up=False), 30),
    Check("backward pass", _repeats(_backward, warms_up=True), 30),
    Check("recordings that are ended", ended_recordings, 30),
)
