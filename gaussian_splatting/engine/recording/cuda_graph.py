# SPDX-License-Identifier: Apache-2.0
"""Recording the launches of torch and Warp on a GPU, to repeat them in one piece.

A repetition reads and writes the same memory: what changes from one to the next has to be copied
into the tensors that were there when it was recorded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
import warp as wp

from sugar_utils.warp_launch import torch_stream

Result = TypeVar("Result")


class Recording(Protocol):
    """Work that can be repeated."""

    def replay(self) -> None:
        """Do the work again, on the current stream."""
        ...


class Recorder(Protocol):
    """Records work on a device."""

    def record(self, work: Callable[[], Result]) -> tuple[Recording, Result]:
        """Record without doing it; the tensors of the result are filled by each repetition.

        Raises:
            RuntimeError: It did something that cannot be recorded, as a read by the host.
        """
        ...


_CUT_SHORT: list[object] = []
"""Graphs of recordings that the driver ended. torch's allocator may point to them as long as the
process lives, and nothing can be recorded after one: so they are kept for all recorders."""


class CudaRecording:
    """A CUDA graph, with what Warp keeps for it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, warp_graphs: list[object]) -> None:
        self._graph = graph
        # Compiled modules and the memory of sorting, which must live as long as the graph.
        self._warp_graphs = warp_graphs

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


class CudaRecorder:
    """Records CUDA graphs on its own stream; they share a memory pool.

    So the results of one are lost when another is repeated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._recordings: weakref.WeakSet[CudaRecording] = weakref.WeakSet()

    def record(self, work: Callable[[], Result]) -> tuple[Recording, Result]:
        """See :class:`Recorder`."""
        if _CUT_SHORT:
            raise RuntimeError("the driver ended an earlier recording of this process")
        # Memory that launches one by one have left; a recording has memory of its own.
        torch.cuda.empty_cache()
        if not self._recordings:
            # torch takes no more recordings into a pool whose recordings are gone, as long as a
            # result of one is held. What is left of such a pool goes with the result.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        warp_graphs: list[object] = []
        with torch.cuda.stream(self._stream):
            # Other threads may go on: they read photographs into pinned memory.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with _known_to_warp(self._device, warp_graphs):
                    result = work()
            except BaseException:
                # The stream captures until its end is requested; the first error is reported.
                with contextlib.suppress(RuntimeError):
                    self._end(graph)
                raise
            self._end(graph)
        current.wait_stream(self._stream)
        recording = CudaRecording(graph, warp_graphs)
        self._recordings.add(recording)
        return recording, result

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording; torch's allocator is left in order also where the driver ended it.

        torch raises then before it has stopped to send allocations to the pool, and without that
        it would free nothing more in this process.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            _CUT_SHORT.append(graph)
            device = self._device.index
            number = torch.cuda.current_device() if device is None else device
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(number, self._pool)
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_releasePool(number, self._pool)
            raise


@contextlib.contextmanager
def _known_to_warp(device: torch.device, graphs: list[object]) -> Iterator[None]:
    """Switch Warp to capture mode on the current stream, so it allocates for the graph."""
    stream = torch_stream(device)
    wp.capture_begin(stream=stream, external=True)
    try:
        yield
    except BaseException:
        # After an illegal call Warp finds no graph; the error of the call is what counts.
        with contextlib.suppress(RuntimeError):
            wp.capture_end(stream=stream)
        raise
    graphs.append(wp.capture_end(stream=stream))
