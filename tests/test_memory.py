# SPDX-License-Identifier: Apache-2.0
"""Memory figures follow real allocations and respect container limits."""

import mmap
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sugar_utils import memory
from sugar_utils.memory import (
    SpillWatch,
    available_bytes,
    format_bytes,
    memory_usage,
    release_pinned,
    reset_peak,
    spilled_bytes,
    trim_heap,
)

MIB = 2**20


def test_peak_follows_an_allocation_and_can_be_reset():
    if not reset_peak("cpu"):
        pytest.skip("this system cannot reset the resident peak")
    before = memory_usage("cpu")
    assert before.kind == "RSS"
    # Mapped, not torch.ones: an allocator may hand out pages that earlier tests left resident.
    with mmap.mmap(-1, 64 * MIB) as block:
        for _ in range(64):
            block.write(b"x" * MIB)
        during = memory_usage("cpu")
    assert during.current - before.current > 50 * MIB
    after = memory_usage("cpu")
    assert after.peak - before.current > 50 * MIB
    assert after.peak >= after.current
    assert reset_peak(torch.device("cpu"))
    assert memory_usage("cpu").peak < after.peak - 30 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps gaps")
def test_gaps_between_what_is_kept_go_back_to_the_system():
    large, kept = [], []
    for _ in range(1_000):
        large.append(np.ones(60_000, np.uint8))
        # So large that earlier tests have not left as many gaps for them elsewhere.
        kept.append(np.ones(30_000, np.uint8))
    large.clear()
    before = memory_usage("cpu").current
    trim_heap()
    assert before - memory_usage("cpu").current > 30 * MIB
    assert all(array.all() for array in kept)


def test_reset_failure_is_reported_and_harmless(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    assert reset_peak("cpu") is False


@pytest.mark.skipif(sys.platform != "linux", reason="reads the system's own listing")
def test_without_proc_the_peak_still_comes_from_getrusage(monkeypatch, tmp_path):
    expected = memory_usage("cpu").peak
    monkeypatch.setattr(memory, "_PROC_STATUS", tmp_path / "absent")
    assert memory_usage("cpu").peak >= expected * 0.5


def test_available_memory_is_positive_and_below_the_total():
    available = available_bytes()
    if available is None:
        pytest.skip("this system does not tell")
    assert 0 < available < 2**50


def test_a_system_that_does_not_tell_stops_nothing(monkeypatch):
    def refused(*_):
        raise OSError("no /proc here")

    monkeypatch.setattr(memory.psutil, "virtual_memory", refused)
    monkeypatch.setattr(memory.psutil, "Process", refused)
    assert available_bytes() is None
    assert memory_usage("cpu").peak == 0


@pytest.mark.skipif(sys.platform == "win32", reason="control groups are a Linux matter")
def test_container_limit_bounds_the_available_memory(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{70 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {20 * MIB}\n")
    system = SimpleNamespace(available=8888888 * 1024)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: system)
    assert available_bytes("cpu") == 50 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes("cpu") == 8888888 * 1024


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * MIB, "1.50 GiB"),
        (23 * MIB, "23.0 MiB"),
        (700 * MIB, "700 MiB"),
        (3 * 2**50, "3072 TiB"),
    ],
)
def test_bytes_for_people(n_bytes, text):
    assert format_bytes(n_bytes) == text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_peak_counts_torch_allocations():
    reset_peak("cuda")
    before = memory_usage("cuda").current
    block = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda")
    del block
    usage = memory_usage("cuda")
    assert usage.kind == "CUDA"
    assert usage.peak - before >= 32 * MIB
    assert available_bytes("cuda") > 0


GIB = 2**30


class Driver:
    """A GPU of 8 GiB whose driver takes what is missing from the host."""

    def __init__(self, monkeypatch, *, others: int) -> None:
        self.reserved = 0
        self.allocated = 0
        self._others = others  # bytes of other programs
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 8 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(memory, "release_cached", self.release)

    @property
    def free(self) -> int:
        return max(0, 8 * GIB - self._others - self.reserved)

    def release(self, device) -> None:
        self.reserved = self.allocated


def test_tensors_that_the_driver_keeps_on_the_host_are_named_once(monkeypatch):
    driver = Driver(monkeypatch, others=GIB)
    warnings = []
    watch = SpillWatch(torch.device("cuda", 0), warnings.append)
    driver.reserved = 7 * GIB
    driver.allocated = 6 * GIB
    watch.look()
    assert spilled_bytes("cuda") == 0
    driver.reserved = 10 * GIB
    # What is cached only goes back without a word.
    watch.look()
    assert not warnings
    driver.allocated = driver.reserved = 10 * GIB
    watch.look()
    watch.look()
    (line,) = warnings
    assert "2.00 GiB of the GPU's 10.0 GiB of tensors lie in the memory of the host" in line
    assert "--vram_budget" in line


def test_nothing_is_spilled_on_a_cpu():
    watch = SpillWatch(torch.device("cpu"), pytest.fail)
    watch.look()
    assert spilled_bytes("cpu") == 0


def test_pinned_blocks_go_back_where_torch_can_return_them(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append(1), raising=False)
    release_pinned()
    assert calls == [1]
    monkeypatch.delattr(torch._C, "_host_emptyCache")
    release_pinned()
    assert calls == [1]
