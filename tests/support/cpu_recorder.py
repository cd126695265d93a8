# SPDX-License-Identifier: Apache-2.0
"""A recorder of launches on the CPU: what a CUDA graph does, and what it refuses, without a GPU.

It keeps each operation of torch and each launch of Warp with the tensors it had, and does them
again in the same order, results written to where they lay at first. Like a CUDA graph it knows
nothing of what the host did in between; unlike one, it also does the work while it records.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch
import warp as wp
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sugar_utils.warp_launch import PreparedLaunch
from tests.support.launches import ALLOCATIONS, READS, launch_name, shape_depends_on_values

Result = TypeVar("Result")
Repeat = Callable[[], object]


class CpuRecording:
    """Operations and launches in their order."""

    def __init__(self) -> None:
        self.repeats: list[Repeat] = []
        self.nodes: list[str] = []  # of a graph, named by operation or kernel
        self.results: list[Tensor] = []  # of all operations
        self.allocated: set[int] = set()  # addresses of memory that operations took
        self.n_replays = 0

    def replay(self) -> None:
        """Do all again."""
        self.n_replays += 1
        with torch.no_grad():
            for repeat in self.repeats:
                repeat()

    def keep(self, name: str, repeat: Repeat, n_nodes: int = 1) -> None:
        """Add an operation or a launch."""
        self.nodes += [name] * n_nodes
        self.repeats.append(repeat)


class CpuRecorder:
    """Records as a GPU would, see ``gaussian_splatting.engine.recording.cuda_graph``."""

    def __init__(self) -> None:
        self.recordings: list[CpuRecording] = []

    def record(self, work: Callable[[], Result]) -> tuple[CpuRecording, Result]:
        """Record, and do, some work."""
        recording = CpuRecording()
        with recording_into(recording):
            result = work()
        self.recordings.append(recording)
        return recording, result


@contextlib.contextmanager
def recording_into(recording: CpuRecording) -> Iterator[None]:
    """Record what is done in the context."""
    with _Forbidden(), _Operations(recording), _launches(recording):
        yield


class _Forbidden(TorchFunctionMode):
    """Refuses what waits for the device, or copies from memory that is not pinned."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS:
            raise RuntimeError(f"the host reads a tensor in a recorded pass: {name}")
        if func in (torch.tensor, torch.as_tensor, torch.from_numpy):
            raise RuntimeError(f"a recorded pass copies numbers of the host: {name}")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Keeps what reaches torch's dispatcher, the backward pass included."""

    def __init__(self, recording: CpuRecording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" or shape_depends_on_values(name, args, kwargs):
            raise RuntimeError(f"the host waits for a number in a recorded pass: {name}")
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        # Launches know addresses only: the tensors that they read are held here.
        self._recording.results += tensors
        if not func.is_view and not func._schema.is_mutable:
            self._recording.allocated.update(t.untyped_storage().data_ptr() for t in tensors)
        repeat = _repeat_of(func, args, kwargs, tensors)
        if repeat is not None:
            self._recording.keep(name, repeat, _n_nodes(name, args, tensors))
        return result


def _n_nodes(name: str, args: tuple, results: list[Tensor]) -> int:
    """Return how many nodes an operation is at least; torch may take more kernels for it."""
    if not any(tensor.numel() for tensor in results):
        return 0
    if name in ("stack", "cat") and len({tensor.dtype for tensor in args[0]}) > 1:
        # Tensors of one type are joined by one kernel, others by a copy of each.
        return len(args[0])
    return 1


def _repeat_of(func: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Repeat | None:
    """The operation once more, into its results of the first time; None where nothing is done."""
    name = func.overloadpacket.__name__
    if func.is_view or name in ALLOCATIONS:
        return None
    if func._schema.is_mutable:
        return lambda: func(*args, **kwargs)

    def repeat() -> None:
        again = pytree.tree_leaves(func(*args, **kwargs))
        for tensor, value in zip(tensors, (x for x in again if isinstance(x, Tensor)), strict=True):
            tensor.copy_(value)

    return repeat


@contextlib.contextmanager
def _launches(recording: CpuRecording) -> Iterator[None]:
    """Keep launches of Warp, with a copy of their arguments."""
    run_all = PreparedLaunch.run_all
    run_range = PreparedLaunch.run_range
    launch_tiled = wp.launch_tiled
    sort = wp.utils.radix_sort_pairs

    def watched_run_all(prepared: PreparedLaunch, count: int) -> None:
        run_all(prepared, count)
        keep(prepared, 0, count)

    def watched_run_range(prepared: PreparedLaunch, first: int, count: int) -> None:
        run_range(prepared, first, count)
        keep(prepared, first, count)

    def keep(prepared: PreparedLaunch, first: int, count: int) -> None:
        arguments = prepared._arguments.twin()
        arguments.follow(prepared._arguments, first)
        bounds = prepared._bounds_of(count)
        forward = prepared._launch.hooks.forward
        name = launch_name(run_range, (prepared,))
        # A GPU has no ranges: all items are one launch.
        n_nodes = int(first == 0)
        recording.keep(name, lambda: forward(ctypes.byref(bounds), arguments.address), n_nodes)

    def watched_launch_tiled(*args: Any, **kwargs: Any) -> None:
        launch_tiled(*args, **kwargs)

        def repeat() -> None:
            with mock.patch.object(wp.config, "enable_cpu_blocks", True):
                launch_tiled(*args, **kwargs)

        recording.keep(launch_name(launch_tiled, args), repeat)

    def watched_sort(*args: Any, **kwargs: Any) -> None:
        sort(*args, **kwargs)
        recording.keep(launch_name(sort, args), lambda: sort(*args, **kwargs))

    with (
        mock.patch.object(PreparedLaunch, "run_all", watched_run_all),
        mock.patch.object(PreparedLaunch, "run_range", watched_run_range),
        mock.patch.object(wp, "launch_tiled", watched_launch_tiled),
        mock.patch.object(wp.utils, "radix_sort_pairs", watched_sort),
    ):
        yield
