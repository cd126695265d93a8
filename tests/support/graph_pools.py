# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of torch and the pools of memory behind them, as far as recordings depend on them.

The rules are those of torch's ``CUDACachingAllocator`` and ``CUDAGraph``:

- A pool is used by the graphs that were recorded into it. When the last one is gone its memory is
  freed, but not while a tensor lies in it; and until then nothing can be recorded into it.
- A recording is underway from its begin until its memory has been taken out of the allocator, which
  a recording that the driver ended does not come to.
- While one is underway, cached memory cannot be freed.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gaussian_splatting.engine.recording import cuda_graph
from tests.support.cpu_recorder import CpuRecording, recording_into

REFUSED = "it->second->use_count > 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp"
UNDERWAY = "captures_underway.empty() INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


class GraphPools:
    """The allocator: how many graphs use each pool, and what lies in it."""

    def __init__(self) -> None:
        self.use_counts: Counter[int] = Counter()
        self.underway: set[int] = set()
        self.n_replays = 0
        self.is_invalidated = False  # whether the driver ends the recording underway
        self._numbers = itertools.count()
        self._known: set[int] = set()
        self._tensors: defaultdict[int, list[weakref.ref]] = defaultdict(list)

    def new_pool(self) -> int:
        """Return the handle of a pool without memory."""
        return next(self._numbers)

    def tensors(self, pool: int) -> list[torch.Tensor]:
        """Tensors that lie in a pool and are in use."""
        tensors = [reference() for reference in self._tensors[pool]]
        return [tensor for tensor in tensors if tensor is not None]

    def begin(self, pool: int) -> None:
        """Begin to allocate from a pool."""
        is_left_over = pool in self._known and self.use_counts[pool] == 0
        if is_left_over and self.tensors(pool):
            raise RuntimeError(REFUSED)
        self._known.add(pool)
        self.use_counts[pool] += 1
        self.underway.add(pool)

    def stop_allocating(self, device: int, pool: int) -> None:
        """End to allocate from a pool, as ``_cuda_endAllocateToPool`` does."""
        self.underway.remove(pool)

    def release(self, device: int, pool: int) -> None:
        """Give up the use of a pool, as ``_cuda_releasePool`` does."""
        self.use_counts[pool] -= 1

    def hold(self, pool: int, tensors: list[torch.Tensor]) -> None:
        """Note what lies in a pool."""
        self._tensors[pool] += [weakref.ref(tensor) for tensor in tensors]

    def empty_cache(self) -> None:
        """Free cached memory."""
        if self.underway:
            raise RuntimeError(UNDERWAY)


def graph_class(pools: GraphPools) -> type:
    """Return what stands in for ``torch.cuda.CUDAGraph``."""

    class Graph:
        """Records on the CPU; its results lie in a pool."""

        def __init__(self) -> None:
            self._recording = CpuRecording()
            self._contexts = contextlib.ExitStack()
            self._pool = -1
            self._is_complete = False

        def capture_begin(self, pool: int, capture_error_mode: str) -> None:
            pools.begin(pool)
            self._pool = pool
            self._contexts.enter_context(recording_into(self._recording))

        def capture_end(self) -> None:
            self._contexts.close()
            if pools.is_invalidated:
                raise RuntimeError(INVALIDATED)
            pools.stop_allocating(0, self._pool)
            allocated = self._recording.allocated
            results = self._recording.results
            inside = [t for t in results if t.untyped_storage().data_ptr() in allocated]
            pools.hold(self._pool, inside)
            self._is_complete = True

        def replay(self) -> None:
            pools.n_replays += 1
            self._recording.replay()

        def __del__(self) -> None:
            if self._is_complete:
                pools.release(0, self._pool)

    return Graph


@contextlib.contextmanager
def graph_pools() -> Iterator[GraphPools]:
    """Let :class:`cuda_graph.CudaRecorder` record on the CPU, with pools as on a GPU."""
    pools = GraphPools()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", lambda device: stream),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "graph_pool_handle", pools.new_pool),
        (torch.cuda, "empty_cache", pools.empty_cache),
        (torch.cuda, "CUDAGraph", graph_class(pools)),
        (torch._C, "_cuda_endAllocateToPool", pools.stop_allocating),
        (torch._C, "_cuda_releasePool", pools.release),
        (cuda_graph, "torch_stream", lambda device: stream),
        (cuda_graph.wp, "capture_begin", lambda **how: None),
        (cuda_graph.wp, "capture_end", lambda **how: None),
        (cuda_graph, "_CUT_SHORT", []),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, replacement in replacements:
            patch.setattr(owner, name, replacement, raising=False)
        yield pools
