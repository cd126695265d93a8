# SPDX-License-Identifier: Apache-2.0
"""How much memory this process uses, has used at most, and could still take.

On a CUDA device the figures are those of torch's allocator there, else the resident set. What
``psutil`` does not know is read here: the peaks of Linux and macOS, and limits of containers.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_PROC_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUPS = Path("/sys/fs/cgroup")
_RESET_RESIDENT_PEAK = "5"
_NO_MEMORY = (
    "DefaultCPUAllocator: not enough memory",  # Windows
    "DefaultCPUAllocator: can't allocate memory",  # elsewhere
    "CUDA error: out of memory",  # the driver, outside torch's allocator
    "Failed to allocate",  # Warp
)


@dataclass(frozen=True)
class MemoryUsage:
    current: int
    peak: int
    kind: str


def memory_usage(device: torch.device | str) -> MemoryUsage:
    """Current and peak memory: torch's allocations on CUDA, the resident set elsewhere."""
    device = torch.device(device)
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        most = torch.cuda.max_memory_allocated(device)
        return MemoryUsage(used, most, "CUDA")
    current, peak = _resident_bytes()
    return MemoryUsage(current, max(current, peak), "RSS")


def reset_peak(device: torch.device | str) -> bool:
    """Start a new peak measurement; False where the system offers no way (macOS, Windows)."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR_REFS.write_text(_RESET_RESIDENT_PEAK)
    except OSError:
        return False
    return True


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Bytes to be had without swapping, within limits of a container; None if unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    try:
        limits = [psutil.virtual_memory().available, *_cgroup_room(_CGROUPS)]
    except (OSError, psutil.Error):
        return None
    return max(0, min(limits))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed; only torch's CUDA allocator has a type."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(words in message for words in _NO_MEMORY)


def release_cached(device: torch.device | str) -> None:
    """Give back what torch's allocator keeps of freed memory, in other sizes than wanted now."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def trim_heap() -> None:
    """Return free pages between used ones, which glibc keeps, to the system."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # musl has no such function


def format_bytes(n_bytes: int) -> str:
    """Bytes for people, in powers of 1024: ``"512 B"``, ``"1.50 GiB"``."""
    if abs(n_bytes) < 1024:
        return f"{n_bytes} B"
    value = n_bytes / 1024
    units = ["TiB", "GiB", "MiB", "KiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    digits = max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f} {units[-1]}"


def _resident_bytes() -> tuple[int, int]:
    """Current and peak resident set in bytes; zeros where the system does not say."""
    try:
        now = psutil.Process().memory_info()
    except (OSError, psutil.Error):
        return 0, 0
    if sys.platform == "win32":
        return now.rss, now.peak_wset
    # The one that ``reset_peak`` starts anew, where there is one.
    peak = _entry(_PROC_STATUS, "VmHWM:")
    if peak is not None:
        return now.rss, 1024 * peak
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return now.rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _entry(path: Path, name: str) -> int | None:
    """The number behind a name in a file of the system; None where there is none."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    words = (line.split() for line in lines)
    return next((int(found[1]) for found in words if found[:1] == [name]), None)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_room(root: Path) -> list[int]:
    """Bytes left under the memory limits of control groups (version 2, then 1) seen at ``root``."""
    rooms = []
    for folder, limit_name, usage_name, cache_name in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read_number(folder / limit_name)
        usage = _read_number(folder / usage_name)
        if limit is not None and usage is not None:
            rooms.append(limit - usage + (_entry(folder / "memory.stat", cache_name) or 0))
    return rooms
