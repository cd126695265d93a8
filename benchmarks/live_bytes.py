# SPDX-License-Identifier: Apache-2.0
"""Peak bytes of tensors while something runs.

Every allocation and release of torch is recorded by its profiler, temporaries inside operators
included. Warp works on the memory of tensors, so this is all there is but for native stacks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(work: Callable[[], Any]) -> int:
    """Run ``work``; the most bytes that were alive beyond those before it."""
    # Garbage of earlier work that is freed during the count would be subtracted.
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        work()
    changes, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        node = stack.pop()
        stack += node.children
        if hasattr(node.extra_fields, "alloc_size"):
            changes.append((node.start_time_ns, node.extra_fields.alloc_size))
    now = most = 0
    for _, n_bytes in sorted(changes, key=lambda change: change[0]):
        now += n_bytes
        most = max(most, now)
    return most
