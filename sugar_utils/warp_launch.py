# SPDX-License-Identifier: Apache-2.0
"""Launching Warp kernels on torch tensors, on every core of the CPU or on the tensor's GPU.

Kernels take the index of their first work item as first argument. On the CPU the items are cut into
ranges for a thread pool (a Warp launch releases the GIL); on a GPU one launch covers them all, on
torch's current stream. No two work items write one address, so bits do not depend on the cutting.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import inspect
import linecache
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from sugar_utils.errors import UserError
from sugar_utils.files import check_writable, temporary_cache

wp.config.log_level = wp.LOG_WARNING
# They save no time here, and a run that is killed leaves 400 MB of them in the temporary folder.
wp.config.use_precompiled_headers = False

RANGES_PER_THREAD = 8  # enough for an even load where tiles differ, few enough to stay cheap
WARP_VERSION = tuple(int(part) for part in wp.__version__.split(".")[:2])
HAS_FIBERS = hasattr(wp.config, "enable_cpu_blocks")  # thread blocks on a CPU, which checks need
# CPU compiler flags without the compiler's own vectoriser; earlier versions of Warp, which serve
# drivers of CUDA 12, do not know them.
NO_VECTORISER = " -fno-slp-vectorize -fno-vectorize" if WARP_VERSION >= (1, 19) else ""
# Module options for kernels whose adjoints are written by hand.
FUSED_OPTIONS = {"enable_backward": False, "cpu_compiler_flags": "-march=native -ffp-contract=fast"}
# The same for hand-vectorised kernels; the compiler's own vectoriser only hurts there.
NATIVE_OPTIONS = {
    "enable_backward": False,
    "cpu_compiler_flags": FUSED_OPTIONS["cpu_compiler_flags"] + NO_VECTORISER,
}
# For those that must round as torch does, on every device: neither compiler contracts anything.
EXACT_OPTIONS = {
    "enable_backward": False,
    "fuse_fp": False,
    "cpu_compiler_flags": "-march=native -ffp-contract=off" + NO_VECTORISER,
}
_KERNEL_OPTIONS = frozenset(inspect.signature(wp.kernel).parameters)
_PREPARED = threading.local()  # the launches that a thread has prepared
# Warp describes every argument anew for each launch, which costs the host several times as much as
# the launch. Between two steps only places and numbers of rows change. So a launch is recorded when
# a kernel is met first, and the memory that holds its arguments is written over from then on.
MAX_ROWS = 2**31 - 1  # Warp counts rows with 32 bits; bytes between them with 64


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Send what native code writes to the standard error nowhere, for a few milliseconds."""
    try:
        kept = os.dup(2)
    except OSError:
        # Closed, as under some service managers: nothing is shown anyway.
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _start_warp() -> None:
    # It warns of a missing CUDA driver whatever the log level.
    quiet = contextlib.nullcontext if torch.cuda.is_available() else _silent_stderr
    try:
        with quiet():
            wp.init()
        check_writable(wp.config.kernel_cache_dir)
        os.listdir(wp.config.kernel_cache_dir)
    except (OSError, UserError) as error:
        reason = error.args[1] if isinstance(error, OSError) else error
        wp.config.kernel_cache_dir = str(temporary_cache("kernels"))
        warnings.warn(
            f"compiled kernels are kept in {wp.config.kernel_cache_dir}, because Warp's own folder "
            f"cannot be used ({reason}); name another one in the variable WARP_CACHE_PATH"
        )
        with quiet():
            wp.init()


# Before any module defines the first kernel or constant, which would start it, too.
_start_warp()


def native_source(module_file: str, name: str) -> str:
    """The C++ text ``native/<name>.inc`` beside a module."""
    return (Path(module_file).parent / "native" / f"{name}.inc").read_text(encoding="utf-8")


# What native bodies begin with: eight floats in one vector register.
SIMD_SOURCE = native_source(__file__, "simd")


def native_kernel(body: str, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a kernel with a C++ body of a stub, whose first parameter is the work item.

    Warp has C++ in functions only: the kernel is the one line that calls it.

    Args:
        body: May use the names of the stub's parameters.
        options: Those of ``wp.kernel``.
    """

    def kernel_of(stub: Callable[..., None]) -> Any:
        item, *others = inspect.signature(stub).parameters
        call = f"native_body({', '.join([f'{item} + wp.tid()', *others])})"
        text = f"def native({', '.join([item, *others])}):\n    {call}\n"
        # Warp reads the text of a kernel from its file.
        file = f"<kernel {stub.__module__}.{stub.__qualname__}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        names = {"native_body": wp.func_native(body)(stub), "wp": wp}
        exec(compile(text, file, "exec"), names)
        made = functools.update_wrapper(names["native"], stub)
        del made.__wrapped__
        made.__annotations__ = inspect.get_annotations(stub, eval_str=True)
        return wp.kernel(**options)(made)

    return kernel_of


@functools.lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="warp")


def known_options(**wanted: Any) -> dict[str, Any]:
    """Options of ``wp.kernel`` that tune, less those that this version of Warp does not know."""
    return {name: value for name, value in wanted.items() if name in _KERNEL_OPTIONS}


def run_ranges(work: Callable[[int, int], None], n_items: int, *, min_items: int = 1) -> None:
    """Call ``work(first, count)`` over all items from a pool of torch's number of threads."""
    threads = torch.get_num_threads()
    n_ranges = min(threads * RANGES_PER_THREAD, max(1, n_items // min_items))
    if threads == 1 or n_ranges == 1:
        work(0, n_items)
        return
    edges = [n_items * i // n_ranges for i in range(n_ranges + 1)]
    ranges = [(a, b - a) for a, b in zip(edges, edges[1:], strict=False) if b > a]
    for future in [_pool(threads).submit(work, *span) for span in ranges]:
        future.result()


def launch(
    kernel: Any,
    n_items: int,
    inputs: Sequence[Any],
    *,
    device: torch.device | None = None,
    min_items: int = 1,
    block_dim: int = 256,
) -> None:
    """Run ``kernel(first, *inputs)`` for ``n_items`` items where its tensors are; none are a no-op.

    ``device`` is needed where there is no tensor. Blocks of fewer threads suit many registers.
    """
    if n_items == 0:
        return
    if device is None:
        tensors = (x.tensor if type(x) is TypedTensor else x for x in inputs)
        device = next(x.device for x in tensors if isinstance(x, Tensor))
    if device.type == "cpu":
        _load_once(kernel)
        prepared = _prepare(kernel, 1, [0, *inputs], device="cpu")
        run_ranges(prepared.run_range, n_items, min_items=min_items)
        return
    stream = _torch_stream(device)
    prepared = _prepare(kernel, n_items, [0, *inputs], stream=stream, block_dim=block_dim)
    prepared.run(n_items, stream)


def launch_blocks(
    kernel: Any,
    n_blocks: int,
    inputs: Sequence[Any],
    *,
    device: torch.device,
    block_dim: int,
    together: int = 1,
) -> None:
    """Run a tile kernel with ``n_blocks`` blocks of ``block_dim`` threads; no blocks are a no-op.

    On the CPU the threads of a block are fibers on one core: slow, and only for checks.
    ``together`` blocks are one on a GPU, for blocks that are warps and share nothing.
    """
    if n_blocks == 0:
        return
    # On the CPU the block size takes effect only where fibers are switched on.
    if device.type != "cpu":
        stream = _torch_stream(device)
        shape = (n_blocks, block_dim)
        n_threads = together * block_dim
        prepared = _prepare(kernel, shape, inputs, stream=stream, block_dim=n_threads)
        prepared.run(shape, stream)
        return
    if not HAS_FIBERS:
        raise UserError(
            f"Warp {wp.__version__} cannot run kernels of thread blocks on a CPU; take 1.19"
        )
    arguments = [describe(x) if isinstance(x, Argument) else x for x in inputs]
    allowed = wp.config.enable_cpu_blocks
    wp.config.enable_cpu_blocks = True
    try:
        wp.launch_tiled(kernel, dim=[n_blocks], inputs=arguments, device="cpu", block_dim=block_dim)
    finally:
        wp.config.enable_cpu_blocks = allowed


def _prepare(kernel: Any, dim: Any, inputs: Sequence[Any], **how: Any) -> PreparedLaunch:
    """A launch with these arguments; this thread's own, from when it met the kernel first."""
    kept = _PREPARED.__dict__.setdefault("launches", {})
    # A stream is an argument of every launch, its device one of the recorded one. Warp's devices
    # have no hash.
    where = how["stream"].device.alias if "stream" in how else None
    key = (kernel, where, how.get("block_dim"))
    prepared = kept.get(key)
    if prepared is None:
        prepared = kept[key] = PreparedLaunch(kernel, dim, inputs, **how)
    else:
        prepared.take(inputs)
    return prepared


@contextlib.contextmanager
def on_stream_of(device: torch.device) -> Iterator[None]:
    """Let Warp's own functions work on torch's current stream; on the CPU there is none."""
    if device.type == "cpu":
        yield
        return
    with wp.ScopedStream(_torch_stream(device), sync_enter=False):
        yield


def _torch_stream(device: torch.device) -> Any:
    stream = torch.cuda.current_stream(device)
    return _warp_stream(stream.device, stream.cuda_stream)


@functools.lru_cache(maxsize=16)
def _warp_stream(device: torch.device, handle: int) -> Any:
    """Kept, because to register a stream with Warp costs more than a launch."""
    return wp.Stream(wp.device_from_torch(device), cuda_stream=handle)


@functools.cache
def _load_once(kernel: Any) -> None:
    """Compile before the pool starts: Warp's module loader is not made for several threads."""
    wp.load_module(kernel.module, device="cpu")


class TypedTensor(NamedTuple):
    """A contiguous tensor, and what Warp is to take for one element: None for its own scalars."""

    tensor: Tensor
    dtype: Any = None


as_array = TypedTensor
Argument = Tensor | TypedTensor  # a tensor that a kernel is given


def describe(given: Argument) -> Any:
    """What Warp wants to know of a tensor: address, sizes and strides; keeps nothing alive."""
    tensor, dtype = given if type(given) is TypedTensor else (given, None)
    if max(tensor.shape, default=0) > MAX_ROWS:
        shape = " x ".join(f"{side:,}" for side in tensor.shape)
        raise UserError(
            f"a buffer of {shape} has more rows than kernels can number (2^31); work on less at "
            "once: fewer Gaussians (--max_gaussians) or samples (--sdf_samples), smaller images "
            "(--resolution_factor), or more strips (--gradient_accumulation)"
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    found = wp.from_torch(tensor, dtype=dtype, requires_grad=False, return_ctype=True)
    # Warp's reference to the tensor, which would keep it alive as long as the prepared launch.
    found._ref = None
    return found


class _Array:
    """Memory that describes a tensor to a kernel."""

    def __init__(self, given: Argument) -> None:
        self.stored = describe(given)
        self._sizes = self.stored.shape
        self._known = None

    def take(self, given: Argument) -> None:
        tensor, dtype = given if type(given) is TypedTensor else (given, None)
        shape = tensor.shape
        # What has no rows is described anew.
        known = bool(shape) and (shape[1:], tensor.stride(), tensor.dtype, dtype)
        if known and known == self._known and shape[0] <= MAX_ROWS:
            self.stored.data = tensor.data_ptr()
            self._sizes[0] = shape[0]
            return
        found = describe(given)
        ctypes.memmove(ctypes.byref(self.stored), ctypes.byref(found), ctypes.sizeof(found))
        self._known = known


class _Value:
    """Memory of a number, a struct or a small vector, as Warp packed it."""

    def __init__(self, packed: Any) -> None:
        self._is_number = not isinstance(packed, (ctypes.Structure, ctypes.Array))
        self.stored = packed if self._is_number else type(packed).from_buffer_copy(packed)

    def take(self, value: Any) -> None:
        if self._is_number:
            self.stored.value = value
            return
        packed = value if isinstance(value, ctypes.Array) else value.__ctype__()
        ctypes.memmove(ctypes.byref(self.stored), ctypes.byref(packed), ctypes.sizeof(packed))


class PreparedLaunch:
    """The launch of one kernel in one way, to be repeated.

    Not for several threads at once but for :meth:`run`, while no arguments are taken.
    """

    def __init__(self, kernel: Any, dim: Any, arguments: Sequence[Any], **how: Any) -> None:
        self.kernel = kernel
        arrays = [_Array(x) if isinstance(x, Argument) else None for x in arguments]
        given = [
            x if array is None else array.stored for x, array in zip(arguments, arrays, strict=True)
        ]
        launch = wp.launch(kernel, dim, given, record_cmd=True, **how)
        self._slots = []
        # The first parameter are the bounds of the launch.
        for i, array in enumerate(arrays, start=1):
            slot = array or _Value(launch.params[i])
            launch.params[i] = slot.stored
            if launch.params_addr:
                launch.params_addr[i] = ctypes.addressof(slot.stored)
            self._slots.append(slot)
        # Kept by Warp for graphs that it records itself; here they would keep memory alive.
        launch.fwd_args = None
        self._first = _Pass(launch, dim)
        # Copied for other threads, and never launched: launching changes the bounds.
        self._template = self._first.twin()
        self._idle: deque[_Pass] = deque()

    def take(self, arguments: Sequence[Any]) -> None:
        """Arguments of the next launches, of the same kinds as those at first."""
        for slot, value in zip(self._slots, arguments, strict=True):
            slot.take(value)

    def run(self, dim: Any, stream: Any = None) -> None:
        self._first.launch(dim, stream)

    def run_range(self, first: int, count: int) -> None:
        """Launch on the CPU over some items, ``first`` being the first argument; in any thread."""
        try:
            one = self._idle.pop()
        except IndexError:
            one = self._template.twin()
        one.params[1] = ctypes.c_int32(first)
        one.launch(count, None)
        self._idle.append(one)


class _Pass:
    """A recorded launch with bounds of its own."""

    def __init__(self, launch: Any, dim: Any) -> None:
        self._launch = launch
        self._dim = dim
        self.params = launch.params

    def twin(self) -> _Pass:
        """Another, of the same arguments, that may run at the same time."""
        launch = copy.copy(self._launch)
        launch.params = list(self.params)
        return _Pass(launch, self._dim)

    def launch(self, dim: Any, stream: Any) -> None:
        if dim != self._dim:
            self._launch.set_dim(dim)
            self._dim = dim
        self._launch.launch(stream=stream)
