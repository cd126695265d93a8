# SPDX-License-Identifier: Apache-2.0
"""Launches of a kernel that are prepared once: repeating one only writes addresses and sizes.

Warp describes every argument anew for each launch, which costs the host several times as much as
the launch. Between two steps of a training little changes about an argument: where the tensor lies,
and how many rows it has. So a launch is recorded when a kernel is met first, and the memory that
holds its arguments is written over from then on.
"""

from __future__ import annotations

import copy
import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import warp as wp
from torch import Tensor

from sugar_utils.errors import UserError

MAX_ROWS = 2**31 - 1  # Warp counts rows with 32 bits; bytes between them with 64


class TypedTensor(NamedTuple):
    """A contiguous tensor, and what Warp is to take for one element: None for its own scalars."""

    tensor: Tensor
    dtype: Any = None


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
        self._sizes, self._known = self.stored.shape, None

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
        given = [x if array is None else array.stored
                 for x, array in zip(arguments, arrays, strict=True)]  # fmt: skip
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
        self._launch, self._dim, self.params = launch, dim, launch.params

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
