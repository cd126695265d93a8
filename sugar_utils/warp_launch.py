# SPDX-License-Identifier: Apache-2.0
"""Launch Warp kernels on torch tensors, on every core of the CPU or on the tensor's GPU.

Kernels take the index of their first work item as first argument. On the CPU the items are cut into
ranges for a thread pool (a Warp launch releases the GIL); on a GPU one launch covers them all, on
torch's current stream. No two work items write one address, so bits do not depend on the cutting.

Warp describes every argument anew for each launch, which costs the host several times as much as
the launch. Between two steps only addresses and numbers of rows change. So a launch is recorded
when a kernel is first launched, and from then on the memory of its arguments is overwritten.
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
from sugar_utils.kernel_loading import load_module, module_lock

wp.config.log_level = wp.LOG_WARNING
# Warp's headers are most of a module's time on a CPU. Precompiled for a GPU they save none, and a
# run that is killed leaves 400 MB of them in the temporary folder, 28 MB of those for a CPU.
wp.config.use_precompiled_headers = not torch.cuda.is_available()

RANGES_PER_THREAD = 8  # enough for an even load where tiles differ, few enough to stay cheap
WARP_VERSION = tuple(int(part) for part in wp.__version__.split(".")[:2])
HAS_FIBERS = hasattr(wp.config, "enable_cpu_blocks")  # thread blocks on a CPU, for tests
# CPU compiler flags that switch the compiler's vectoriser off; earlier versions of Warp, which
# serve drivers of CUDA 12, do not know them.
NO_VECTORISER = " -fno-slp-vectorize -fno-vectorize" if WARP_VERSION >= (1, 19) else ""
# Module options for kernels whose adjoints are written by hand.
FUSED_OPTIONS = {"enable_backward": False, "cpu_compiler_flags": "-march=native -ffp-contract=fast"}
# The same for hand-vectorised kernels, which the compiler's vectoriser makes slower.
NATIVE_OPTIONS = {
    "enable_backward": False,
    "cpu_compiler_flags": FUSED_OPTIONS["cpu_compiler_flags"] + NO_VECTORISER,
}
# For kernels that must round as torch does, on every device: no fused multiply-add.
EXACT_OPTIONS = {
    "enable_backward": False,
    "fuse_fp": False,
    "cpu_compiler_flags": "-march=native -ffp-contract=off" + NO_VECTORISER,
}
_KERNEL_OPTIONS = frozenset(inspect.signature(wp.kernel).parameters)
Kernel = Any  # a ``wp.Kernel``; in Warp's types, a decorated kernel is still a function
Dim = int | tuple[int, int]  # work items of a launch, or its blocks and threads of a block
_THREAD = threading.local()  # ``launches``: the prepared launches of a thread
MAX_BOUNDS = 64  # numbers of items that a recorded launch remembers
MAX_ROWS = 2**31 - 1  # Warp counts rows with 32 bits; bytes between them with 64
BLOCK_DIMS = (64, 128, 256)  # threads of a block on a GPU; the last one is what Warp compiles for
REGISTERS = 65_536  # of a multiprocessor, of every generation since 2014
BLOCKS_TOGETHER = 4  # that the registers of a multiprocessor have room for
SMALL_LAUNCH = 100_000  # items; in blocks of 256 they are fewer than three for a multiprocessor


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard what native code writes to the standard error, for a few milliseconds."""
    try:
        saved_stderr = os.dup(2)
    except OSError:
        # Closed, as under some service managers: nothing is printed anyway.
        yield
        return
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)


def _start_warp() -> None:
    """Start Warp with a folder for compiled kernels that can be written."""
    # Warp warns of a missing CUDA driver whatever the log level.
    quiet = contextlib.nullcontext if torch.cuda.is_available() else _silent_stderr
    try:
        with quiet():
            wp.init()
        folder = wp.config.kernel_cache_dir
        assert folder is not None, "Warp chooses its folder when it starts"
        check_writable(folder)
        os.listdir(folder)
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
    """Read the C++ text ``native/<name>.inc`` in the folder of a module."""
    path = Path(module_file).parent / "native" / f"{name}.inc"
    return path.read_text(encoding="utf-8")


# Beginning of native bodies: eight floats in one vector register.
SIMD_SOURCE = native_source(__file__, "simd")


def native_kernel(body: str, **options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Decorator that gives a stub a C++ body and makes it a kernel.

    The first parameter of the stub is the work item. Warp has C++ in functions only, so the kernel
    is one line that calls such a function.

    Args:
        body: C++ text; it may use the names of the stub's parameters.
        options: Keywords of ``wp.kernel``.
    """

    def kernel_of(stub: Callable[..., None]) -> Kernel:
        item, *others = inspect.signature(stub).parameters
        parameters = ", ".join([item, *others])
        arguments = ", ".join([f"{item} + wp.tid()", *others])
        text = f"def native({parameters}):\n    native_body({arguments})\n"
        # Warp reads the text of a kernel from its file.
        file = f"<kernel {stub.__module__}.{stub.__qualname__}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        names: dict[str, Any] = {"native_body": wp.func_native(body)(stub), "wp": wp}
        exec(compile(text, file, "exec"), names)
        function = names["native"]
        functools.update_wrapper(function, stub)
        del function.__wrapped__
        function.__annotations__ = inspect.get_annotations(stub, eval_str=True)
        return wp.kernel(**options)(function)

    return kernel_of


@functools.lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="warp")


def known_options(**options: object) -> dict[str, Any]:
    """Select the options of ``wp.kernel`` that this version of Warp knows."""
    return {name: value for name, value in options.items() if name in _KERNEL_OPTIONS}


def run_ranges(work: Callable[[int, int], None], n_items: int, *, min_items: int = 1) -> None:
    """Call ``work(first, count)`` over all items from a pool of torch's number of threads."""
    n_ranges = _n_ranges(n_items, min_items)
    if n_ranges == 1:
        work(0, n_items)
        return
    pool = _pool(torch.get_num_threads())
    futures = []
    for number in range(n_ranges):
        first = n_items * number // n_ranges
        end = n_items * (number + 1) // n_ranges
        if end > first:
            futures.append(pool.submit(work, first, end - first))
    for future in futures:
        future.result()


def _n_ranges(n_items: int, min_items: int) -> int:
    """Number of ranges that items are cut into on the CPU."""
    threads = torch.get_num_threads()
    if threads == 1:
        return 1
    return min(threads * RANGES_PER_THREAD, max(1, n_items // min_items))


def launch(
    kernel: Kernel,
    n_items: int,
    inputs: Sequence[object],
    *,
    device: torch.device | None = None,
    min_items: int = 1,
) -> None:
    """Run ``kernel(first, *inputs)`` for ``n_items`` items on the device of its tensors.

    Args:
        kernel: Its first parameter is the first work item of a range.
        n_items: Number of work items; nothing is launched for none.
        inputs: The other arguments.
        device: Needed where no argument is a tensor.
        min_items: Least number of items of a range on the CPU.
    """
    if n_items == 0:
        return
    if device is None:
        device = _device_of(inputs)
    if device.type == "cpu":
        _load_once(kernel)
        prepared = _prepare(kernel, 1, [0, *inputs], device="cpu")
        if _n_ranges(n_items, min_items) == 1:
            prepared.run_all(n_items)
        else:
            run_ranges(prepared.run_range, n_items, min_items=min_items)
        return
    stream = torch_stream(device)
    prepared = _prepare(kernel, n_items, [0, *inputs], stream=stream)
    prepared.run(n_items, stream, block_dim_of(kernel, n_items))


def block_dim_of(kernel: Kernel, n_items: int) -> int:
    """Threads of a block on a GPU for a kernel that does not depend on their number.

    Blocks share the registers of a multiprocessor: one that takes more than half of them leaves the
    rest idle. Few items are best spread over many multiprocessors.

    Args:
        kernel: With more than 64 registers it says how many it may have: ``cuda_max_registers``.
        n_items: Number of work items.
    """
    smallest = BLOCK_DIMS[0]
    if n_items < SMALL_LAUNCH:
        return smallest
    registers = kernel.options.get("cuda_max_registers", 1)
    n_threads = REGISTERS // registers // BLOCKS_TOGETHER
    return max((size for size in BLOCK_DIMS if size <= n_threads), default=smallest)


def _device_of(inputs: Sequence[object]) -> torch.device:
    """Device of the first tensor."""
    for value in inputs:
        if isinstance(value, TypedTensor):
            return value.tensor.device
        if isinstance(value, Tensor):
            return value.device
    raise TypeError("a kernel without tensors needs a device")


def launch_blocks(
    kernel: Kernel,
    n_blocks: int,
    inputs: Sequence[object],
    *,
    device: torch.device,
    block_dim: int,
    together: int = 1,
) -> None:
    """Run a tile kernel with blocks of threads.

    On the CPU the threads of a block are fibers on one core: slow, and only for tests.

    Args:
        kernel: The tile kernel.
        n_blocks: Number of blocks; nothing is launched for none.
        inputs: Arguments of the kernel.
        device: Where it runs.
        block_dim: Threads of a block.
        together: Blocks that are one block on a GPU, for warps that share nothing.

    Raises:
        UserError: This version of Warp has no thread blocks on a CPU.
    """
    if n_blocks == 0:
        return
    # On the CPU the block size takes effect only where fibers are switched on.
    if device.type != "cpu":
        stream = torch_stream(device)
        shape = (n_blocks, block_dim)
        n_threads = together * block_dim
        prepared = _prepare(kernel, shape, inputs, stream=stream, block_dim=n_threads)
        prepared.run(shape, stream, n_threads)
        return
    if not HAS_FIBERS:
        raise UserError(
            f"Warp {wp.__version__} cannot run kernels of thread blocks on a CPU; take 1.19"
        )
    arguments = [describe(x) if isinstance(x, Argument) else x for x in inputs]
    was_enabled = wp.config.enable_cpu_blocks
    wp.config.enable_cpu_blocks = True
    try:
        wp.launch_tiled(kernel, dim=[n_blocks], inputs=arguments, device="cpu", block_dim=block_dim)
    finally:
        wp.config.enable_cpu_blocks = was_enabled


def _prepare(
    kernel: Kernel,
    dim: Dim,
    inputs: Sequence[object],
    *,
    device: str | None = None,
    stream: wp.Stream | None = None,
    block_dim: int = BLOCK_DIMS[-1],
) -> PreparedLaunch:
    """This thread's recorded launch of a kernel, with these arguments."""
    launches = _THREAD.__dict__.setdefault("launches", {})
    # A stream is an argument of every launch, its device one of the recorded one. Warp's devices
    # have no hash.
    device_name = None if stream is None else stream.device.alias
    key = (kernel, device_name, block_dim)
    prepared = launches.get(key)
    if prepared is None:
        # Recording loads the module, unless another thread is loading it.
        with module_lock(kernel.module):
            prepared = PreparedLaunch(
                kernel, dim, inputs, device=device, stream=stream, block_dim=block_dim
            )
        launches[key] = prepared
    else:
        prepared.take(inputs)
    return prepared


@contextlib.contextmanager
def on_stream_of(device: torch.device) -> Iterator[None]:
    """Let functions of Warp work on torch's current stream; on the CPU there is none."""
    if device.type == "cpu":
        yield
        return
    with wp.ScopedStream(torch_stream(device), sync_enter=False):
        yield


def torch_stream(device: torch.device) -> wp.Stream:
    stream = torch.cuda.current_stream(device)
    return _warp_stream(stream.device, stream.cuda_stream)


@functools.lru_cache(maxsize=16)
def _warp_stream(device: torch.device, handle: int) -> wp.Stream:
    """Register a stream with Warp; cached, because that costs more than a launch."""
    return wp.Stream(wp.device_from_torch(device), cuda_stream=handle)


@functools.cache
def _load_once(kernel: Kernel) -> None:
    """Compile before the pool starts, where all modules for the CPU are compiled."""
    load_module(kernel.module, torch.device("cpu"))


class TypedTensor(NamedTuple):
    """A contiguous tensor as an array of vectors, matrices or structs."""

    tensor: Tensor
    dtype: type | None = None  # Warp's type of one element; None: the tensor's scalars


Argument = Tensor | TypedTensor  # an argument of a kernel that becomes an array


def as_array(tensor: Tensor, dtype: type | None = None) -> TypedTensor:
    """Make a kernel's argument from a tensor with elements of a Warp type."""
    return TypedTensor(tensor, dtype)


def describe(argument: Argument) -> Any:
    """Make Warp's description of a tensor: address, sizes and strides; keeps nothing alive.

    Raises:
        UserError: It has more rows than a kernel can number.
    """
    if isinstance(argument, TypedTensor):
        tensor = argument.tensor
        dtype = argument.dtype
    else:
        tensor = argument
        dtype = None
    if max(tensor.shape, default=0) > MAX_ROWS:
        shape = " x ".join(f"{side:,}" for side in tensor.shape)
        raise UserError(
            f"a buffer of {shape} has more rows than kernels can number (2^31); work on less at "
            "once: fewer Gaussians (--max_gaussians) or samples (--sdf_samples), smaller images "
            "(--resolution_factor), or more strips (--gradient_accumulation)"
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    description: Any = wp.from_torch(tensor, dtype=dtype, requires_grad=False, return_ctype=True)
    # Warp's reference to the tensor, which would keep it alive as long as the prepared launch.
    description._ref = None
    return description


class _Array:
    """Memory of a launch that describes a tensor to the kernel."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._sizes = memory.shape
        # Of the tensor that was described last; None where it had no rows, and so no layout.
        self._row_shape: torch.Size | None = None
        self._strides: tuple[int, ...] = ()
        self._dtype: torch.dtype | None = None
        self._element: type | None = None

    def take(self, argument: Argument) -> None:
        """Overwrite the memory; of a tensor of the same layout, only address and rows."""
        if isinstance(argument, TypedTensor):
            tensor, element = argument
        else:
            tensor = argument
            element = None
        shape = tensor.shape
        strides = tensor.stride()
        if (
            strides == self._strides
            and shape[1:] == self._row_shape
            and tensor.dtype is self._dtype
            and element is self._element
            and shape[0] <= MAX_ROWS
        ):
            self._memory.data = tensor.data_ptr()
            self._sizes[0] = shape[0]
            return
        is_alike = tensor.dtype is self._dtype and 0 < len(strides) == len(self._strides)
        if is_alike and element is None and self._element is None and max(shape) <= MAX_ROWS:
            # As for two kinds of splats in turn: Warp's description would take ten times as long.
            self._memory.data = tensor.data_ptr()
            n_bytes = tensor.element_size()
            for i, stride in enumerate(strides):
                self._sizes[i] = shape[i]
                self._memory.strides[i] = stride * n_bytes
        else:
            _overwrite(self._memory, describe(argument))
        self._row_shape = shape[1:] if shape else None
        self._strides = strides
        self._dtype = tensor.dtype
        self._element = element


class _Value:
    """Memory of a launch that holds a number, a struct or a small vector, as Warp packs it."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._is_number = not isinstance(memory, (ctypes.Structure, ctypes.Array))

    def take(self, value: Any) -> None:
        """Overwrite the memory by another value of the same type."""
        if self._is_number:
            self._memory.value = value
            return
        _overwrite(self._memory, value if isinstance(value, ctypes.Array) else value.__ctype__())


def _overwrite(memory: Any, packed: Any) -> None:
    """Copy the bytes of one ``ctypes`` object to another of the same type."""
    ctypes.memmove(ctypes.byref(memory), ctypes.byref(packed), ctypes.sizeof(packed))


class _Arguments:
    """All arguments of a launch in one block of memory, as a kernel on the CPU reads them.

    Its fields are those of Warp's own blocks, which Warp makes anew for each launch.
    """

    def __init__(self, layout: type[ctypes.Structure]) -> None:
        block = layout()
        self._layout = layout
        self.address = ctypes.byref(block)
        self.memories = []
        for name, kind, *_ in layout._fields_:
            self.memories.append(kind.from_buffer(block, getattr(layout, name).offset))

    @classmethod
    def of(cls, packed: Sequence[Any]) -> _Arguments:
        """Lay out arguments as Warp packed them."""
        fields = [(f"argument_{i}", type(value)) for i, value in enumerate(packed)]
        arguments = cls(type("ArgumentsStruct", (ctypes.Structure,), {"_fields_": fields}))
        for memory, value in zip(arguments.memories, packed, strict=True):
            _overwrite(memory, value)
        return arguments

    def twin(self) -> _Arguments:
        """Return memory for the same arguments, for another thread."""
        return _Arguments(self._layout)

    def follow(self, other: _Arguments, first: int) -> None:
        """Take the arguments of a twin, but for the first one."""
        ctypes.memmove(self.address, other.address, ctypes.sizeof(self._layout))
        self.memories[0].value = first


class PreparedLaunch:
    """A recorded launch of one kernel on one device, to be repeated with other arguments.

    Several threads may call :meth:`run_range` at once, but none while :meth:`take` runs.
    """

    def __init__(
        self,
        kernel: Kernel,
        dim: Dim,
        arguments: Sequence[object],
        *,
        device: str | None = None,
        stream: wp.Stream | None = None,
        block_dim: int = BLOCK_DIMS[-1],
    ) -> None:
        self.kernel = kernel
        is_array = [isinstance(value, Argument) for value in arguments]
        inputs = [describe(value) if isinstance(value, Argument) else value for value in arguments]
        launch: Any = wp.launch(
            kernel,
            dim,
            inputs,
            device=device,
            stream=stream,
            block_dim=block_dim,
            record_cmd=True,
        )
        # The first parameter are the bounds of the launch.
        self._arguments = _Arguments.of(launch.params[1:])
        self._slots: list[_Array | _Value] = []
        for number, memory in enumerate(self._arguments.memories, start=1):
            launch.params[number] = memory
            if launch.params_addr:
                launch.params_addr[number] = ctypes.addressof(memory)
            self._slots.append(_Array(memory) if is_array[number - 1] else _Value(memory))
        # Kept by Warp for graphs that it records itself; here they would keep memory alive.
        launch.fwd_args = None
        self._launch = launch
        self._dim = dim
        self._bounds: dict[Dim, Any] = {dim: launch.params[0]}
        self._idle: deque[_Arguments] = deque()

    def take(self, arguments: Sequence[Any]) -> None:
        """Set the arguments of the next launches, of the same kinds as those at first."""
        for slot, value in zip(self._slots, arguments, strict=True):
            slot.take(value)

    def run(self, dim: Dim, stream: wp.Stream | None, block_dim: int) -> None:
        """Launch with these bounds on a stream of a GPU, with so many threads in a block.

        Warp compiles a module for a number of threads, which matters to tile kernels alone: others
        run with any number, and need not be compiled for each.
        """
        if dim != self._dim:
            self._launch.set_dim(dim)
            self._dim = dim
        self._launch.block_dim = block_dim
        self._launch.launch(stream=stream)

    def run_all(self, count: int) -> None:
        """Launch on the CPU over all items, the first argument being as it was taken."""
        self._launch.hooks.forward(ctypes.byref(self._bounds_of(count)), self._arguments.address)

    def run_range(self, first: int, count: int) -> None:
        """Launch on the CPU over some items, ``first`` being the first argument; in any thread."""
        try:
            arguments = self._idle.pop()
        except IndexError:
            arguments = self._arguments.twin()
        arguments.follow(self._arguments, first)
        self._launch.hooks.forward(ctypes.byref(self._bounds_of(count)), arguments.address)
        self._idle.append(arguments)

    def _bounds_of(self, dim: Dim) -> Any:
        """Warp's description of a number of items; kept, because it costs as much as a launch."""
        bounds = self._bounds.get(dim)
        if bounds is None:
            launch = copy.copy(self._launch)
            launch.params = list(launch.params)
            launch.set_dim(dim)
            bounds = launch.params[0]
            if len(self._bounds) >= MAX_BOUNDS:
                self._bounds.clear()
            self._bounds[dim] = bounds
        return bounds
