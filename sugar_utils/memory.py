# SPDX-License-Identifier: Apache-2.0
"""Current, peak and available memory of this process.

On a CUDA device the figures are those of torch's allocator there, else the resident set. Figures
that ``psutil`` lacks are read here: the peaks of Linux and macOS, and limits of containers.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from sugar_utils.errors import Notify

_LEAST_SPILL = 128 * 2**20  # bytes; drivers round what they count
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
    """Memory of this process on one device, in bytes."""

    current: int
    peak: int
    kind: str  # ``CUDA``, or ``RSS`` for the resident set


def memory_usage(device: torch.device | str) -> MemoryUsage:
    """Measure current and peak memory: torch's allocations on CUDA, else the resident set."""
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
        _CLEAR_REFS.write_text(_RESET_RESIDENT_PEAK, encoding="utf-8")
    except OSError:
        return False
    return True


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Available memory in bytes, within limits of a container; None if unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        device_bytes, _ = torch.cuda.mem_get_info(device)
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return device_bytes + cached_bytes
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
    """Return memory that torch's allocator caches to the device."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def release_pinned() -> None:
    """Return page-locked memory that torch keeps for later copies to the system.

    torch has no public function for that, and some versions have none at all.
    """
    if torch.cuda.is_available():
        getattr(torch._C, "_host_emptyCache", gc.collect)()


def spilled_bytes(device: torch.device | str) -> int:
    """Bytes of a GPU's tensors that do not lie on the GPU; 0 on a CPU.

    Drivers for Windows take memory of the host where that of the GPU is used up, without an error.
    So torch has more than the driver says is used there.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    n_free, n_bytes = torch.cuda.mem_get_info(device)
    n_spilled = torch.cuda.memory_reserved(device) - (n_bytes - n_free)
    return n_spilled if n_spilled >= _LEAST_SPILL else 0


class SpillWatch:
    """Warns once that tensors of a GPU lie in the memory of the host; a run looks now and then."""

    def __init__(self, device: torch.device, warn: Notify) -> None:
        self._device = device
        self._warn = warn
        self._has_warned = False

    def look(self) -> None:
        """Return cached memory if tensors are spilled, and warn if some still are."""
        if self._has_warned or not spilled_bytes(self._device):
            return
        release_cached(self._device)
        n_spilled = spilled_bytes(self._device)
        if n_spilled:
            self._has_warned = True
            n_allocated = torch.cuda.memory_allocated(self._device)
            self._warn(
                f"{format_bytes(n_spilled)} of the GPU's {format_bytes(n_allocated)} of tensors "
                "lie in the memory of the host, which makes training many times slower: close "
                "other programs, or give a smaller --vram_budget or --max_gaussians"
            )


def trim_heap() -> None:
    """Return free pages between used ones, which glibc caches, to the system."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # musl has no such function


def format_bytes(n_bytes: int) -> str:
    """Format bytes for people, in powers of 1024: ``"512 B"``, ``"1.50 GiB"``."""
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
    """Current and peak resident set in bytes; zeros where they are unknown."""
    try:
        now = psutil.Process().memory_info()
    except (OSError, psutil.Error):
        return 0, 0
    if sys.platform == "win32":
        return now.rss, now.peak_wset
    # The peak that ``reset_peak`` resets, where there is one.
    peak = _entry(_PROC_STATUS, "VmHWM:")
    if peak is not None:
        return now.rss, 1024 * peak
    import resource  # noqa: TID251 - only where /proc is missing, which Windows is not asked

    unit = 1 if sys.platform == "darwin" else 1024
    return now.rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _entry(path: Path, name: str) -> int | None:
    """The number behind a name in a file of the system; None where there is none."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return None


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_room(root: Path) -> list[int]:
    """Bytes that remain under the limits of control groups (version 2, then 1) below ``root``."""
    version_2 = _room_below(root, "memory.max", "memory.current", "inactive_file")
    version_1 = _room_below(
        root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    )
    return [room for room in (version_2, version_1) if room is not None]


def _room_below(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Bytes that remain under one limit, file cache included; None without a limit."""
    limit = _read_number(folder / limit_name)
    usage = _read_number(folder / usage_name)
    if limit is None or usage is None:
        return None
    cache = _entry(folder / "memory.stat", cache_name) or 0
    return limit - usage + cache
