# SPDX-License-Identifier: Apache-2.0
"""How much memory this process uses, has used at most, and could still take.

On a CUDA device the figures are those of torch's allocator there; otherwise they are the resident
set of the process, asked from the system without any extra dependency.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_PROC_STATUS = Path("/proc/self/status")
_PROC_MEMINFO = Path("/proc/meminfo")
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
    """Memory of one device at one moment.

    Attributes:
        current: Bytes in use now.
        peak: Most bytes in use since the start or the last ``reset_peak``.
        kind: ``"RSS"`` or ``"CUDA"``.
    """

    current: int
    peak: int
    kind: str


def memory_usage(device: torch.device | str) -> MemoryUsage:
    """Current and peak memory: torch's allocations on CUDA, the resident set elsewhere."""
    device = torch.device(device)
    if device.type == "cuda":
        return MemoryUsage(
            current=torch.cuda.memory_allocated(device),
            peak=torch.cuda.max_memory_allocated(device),
            kind="CUDA",
        )
    current, peak = _resident_bytes()
    return MemoryUsage(current=current, peak=max(current, peak), kind="RSS")


def reset_peak(device: torch.device | str) -> bool:
    """Start a new peak measurement.

    Returns:
        False where the system offers no way to do so (macOS, Windows, some containers); the peak
        then stays that of the whole process.
    """
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
    """Bytes that can still be allocated without swapping; None where the system does not say.

    Limits of a container (cgroup) are respected.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    if sys.platform == "win32":
        return _windows_available_bytes()
    fields = _read_fields(_PROC_MEMINFO)
    if "MemAvailable" not in fields:
        return None
    limits = [fields["MemAvailable"], *_cgroup_room(_CGROUPS)]
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


def format_bytes(n_bytes: int) -> str:
    """Bytes for people, in powers of 1024: ``"512 B"``, ``"1.50 GiB"``."""
    if abs(n_bytes) < 1024:
        return f"{n_bytes} B"
    value, units = n_bytes / 1024, ["TiB", "GiB", "MiB", "KiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    digits = max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f} {units[-1]}"


def _read_fields(path: Path) -> dict[str, int]:
    """Sizes in bytes from a ``Name: 123 kB`` listing; empty where there is none."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    fields = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB" and words[1].isdigit():
            fields[words[0].rstrip(":")] = int(words[1]) * 1024
    return fields


def _resident_bytes() -> tuple[int, int]:
    """Current and peak resident set in bytes; zeros where the system does not say."""
    if sys.platform == "win32":
        return _windows_resident_bytes()
    fields = _read_fields(_PROC_STATUS)
    if "VmRSS" in fields:
        return fields["VmRSS"], fields.get("VmHWM", fields["VmRSS"])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":
        return peak * 1024, peak * 1024
    return _macos_resident_bytes() or peak, peak


def _macos_resident_bytes() -> int | None:
    """``proc_pidinfo`` with flavour PROC_PIDTASKINFO; the second field is the resident size."""
    task_info, task_info_bytes = 4, 96
    buffer = (ctypes.c_uint64 * (task_info_bytes // 8))()
    try:
        written = ctypes.CDLL(None).proc_pidinfo(
            os.getpid(), task_info, ctypes.c_uint64(0), buffer, task_info_bytes
        )
    except (OSError, AttributeError):
        return None
    return int(buffer[1]) if written == task_info_bytes else None


class _ProcessMemoryCounters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of the Windows API."""

    _fields_ = [
        ("cb", ctypes.c_uint32),
        ("PageFaultCount", ctypes.c_uint32),
        ("PeakWorkingSetSize", ctypes.c_size_t),
        ("WorkingSetSize", ctypes.c_size_t),
        ("QuotaPeakPagedPoolUsage", ctypes.c_size_t),
        ("QuotaPagedPoolUsage", ctypes.c_size_t),
        ("QuotaPeakNonPagedPoolUsage", ctypes.c_size_t),
        ("QuotaNonPagedPoolUsage", ctypes.c_size_t),
        ("PagefileUsage", ctypes.c_size_t),
        ("PeakPagefileUsage", ctypes.c_size_t),
    ]


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = [
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("ullTotalPageFile", ctypes.c_uint64),
        ("ullAvailPageFile", ctypes.c_uint64),
        ("ullTotalVirtual", ctypes.c_uint64),
        ("ullAvailVirtual", ctypes.c_uint64),
        ("ullAvailExtendedVirtual", ctypes.c_uint64),
    ]


def _windows_resident_bytes() -> tuple[int, int]:
    counters = _ProcessMemoryCounters(cb=ctypes.sizeof(_ProcessMemoryCounters))
    kernel32 = ctypes.WinDLL("kernel32")
    kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    kernel32.K32GetProcessMemoryInfo.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]
    process = kernel32.GetCurrentProcess()
    if not kernel32.K32GetProcessMemoryInfo(process, ctypes.byref(counters), counters.cb):
        return 0, 0
    return counters.WorkingSetSize, counters.PeakWorkingSetSize


def _windows_available_bytes() -> int | None:
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    if not ctypes.WinDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return status.ullAvailPhys


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_room(root: Path) -> list[int]:
    """Bytes left under the memory limits of control groups (version 2, then 1) seen at ``root``.

    File pages that the kernel can drop at once count as room.
    """
    rooms = []
    for folder, limit_name, usage_name, cache_name in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read_number(folder / limit_name)
        usage = _read_number(folder / usage_name)
        if limit is None or usage is None:
            continue
        try:
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:
            lines = []
        droppable = [int(line.split()[1]) for line in lines if line.startswith(f"{cache_name} ")]
        rooms.append(limit - usage + sum(droppable))
    return rooms
