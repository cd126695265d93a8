# SPDX-License-Identifier: Apache-2.0
"""Counting the bytes that are alive in tensors while something runs, by what they are for.

Every allocation and release of torch is recorded with its address by torch's profiler, temporaries
inside operators included. Our kernels have no arrays of their own: Warp works on the memory of
tensors, so this is all there is but for the stacks of native code. An allocation belongs to the
innermost named region (:func:`region`), or autograd function of ours, in which it was made.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_PREFIX = "memory:"
_FUNCTIONS = {
    "_Project": "projection",
    "_Blend": "pixels",
    "_FusedPhotometric": "SSIM",
    "_Fields": "sampling",
}
"""Autograd functions, forward and backward alike, and what their memory is for."""

REST = "other"


@dataclass
class LiveBytes:
    """What was alive when most was.

    Attributes:
        peak: Bytes beyond those before the work.
        parts: The same by category.
    """

    peak: int = 0
    parts: dict[str, int] = field(default_factory=dict)


def region(name: str) -> contextlib.AbstractContextManager:
    """Name what is allocated inside."""
    return torch.profiler.record_function(_PREFIX + name)


@contextlib.contextmanager
def named_regions(functions: Mapping[str, Iterable[tuple[Any, str]]]) -> Iterator[None]:
    """Name what some functions allocate: category to (module or class, name of the function)."""
    with contextlib.ExitStack() as stack:
        for category, places in functions.items():
            for owner, name in places:
                wrapped = _in_region(category, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield


def _in_region(category: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with region(category):
            return function(*args, **kwargs)

    return inside


def weigh(work: Callable[[], Any], known: Callable[[], Mapping[str, Iterable[Tensor]]]) -> Any:
    """Run ``work`` and count.

    Args:
        work: What to run.
        known: Called afterwards; category to tensors that ``work`` made and that still live.

    Returns:
        What ``work`` returned, and :class:`LiveBytes`.
    """
    # Garbage of earlier work that goes during the count would be taken off it.
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        result = work()
    owners = {t.data_ptr(): name for name, tensors in known().items() for t in tensors}
    changes = _changes(profiler.profiler.kineto_results.experimental_event_tree())
    return result, _most(changes, owners)


@dataclass(frozen=True)
class _Change:
    time: int
    address: int
    n_bytes: int
    category: str


def _changes(roots: list) -> list[_Change]:
    """Allocations (positive) and releases (negative), in the order of time."""
    found, stack = [], [(root, REST) for root in roots]
    while stack:
        node, category = stack.pop()
        fields = node.extra_fields
        if hasattr(fields, "alloc_size"):
            found.append(_Change(node.start_time_ns, fields.ptr, fields.alloc_size, category))
        else:
            category = _category(node.name, category)
        stack += [(child, category) for child in node.children]
    return sorted(found, key=lambda change: change.time)


def _category(name: str, outer: str) -> str:
    if name.startswith(_PREFIX):
        return name.removeprefix(_PREFIX)
    function = name.rsplit(" ", 1)[-1].removesuffix("Backward")
    return _FUNCTIONS.get(function, outer)


def _most(changes: list[_Change], owners: Mapping[int, str]) -> LiveBytes:
    """Replay the changes; the last allocation at an owner's address is the owner's."""
    last = {c.address: i for i, c in enumerate(changes) if c.n_bytes > 0}
    alive: dict[int, tuple[str, int]] = {}
    now, most, sums = 0, LiveBytes(), Counter()
    for i, change in enumerate(changes):
        category, address = change.category, change.address
        if change.n_bytes > 0:
            if last[address] == i:
                category = owners.get(address, category)
            alive[address] = (category, change.n_bytes)
        elif address in alive:
            category, _ = alive.pop(address)
        else:
            # Made before the count began: what is released here was not counted.
            category = "released"
        now += change.n_bytes
        sums[category] += change.n_bytes
        if now > most.peak:
            most = LiveBytes(now, {name: n for name, n in sums.items() if n})
    return most
