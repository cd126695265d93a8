# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel of the program for a device, several at a time, as a first run does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import warp as wp

# What launches kernels, so that all of them are known. The extractors need more packages.
import sugar_utils.neighbors  # noqa: F401
from benchmarks.gpu.common import Check, Finding, Setup
from gaussian_splatting.engine.runner import kernel_modules, n_workers


def compile_all(setup: Setup) -> Iterator[Finding]:
    """Seconds of all modules together and of the slowest ones; near zero where they are cached."""
    place = wp.device_from_torch(setup.place)
    modules = kernel_modules(not setup.on_cuda)

    def load(module: Any) -> tuple[float, str, str]:
        started = time.perf_counter()
        try:
            wp.force_load(place, [module])
        except Exception as error:  # What a compiler says of one must not hide the others.
            return 0.0, module.name, f"{type(error).__name__}: {str(error)[:200]}"
        return time.perf_counter() - started, module.name, ""

    started = time.perf_counter()
    with ThreadPoolExecutor(n_workers(setup.place)) as pool:
        loaded = list(pool.map(load, modules))
    seconds = time.perf_counter() - started
    for _, name, problem in loaded:
        if problem:
            yield Finding(name, False, problem)
    shown = f"{len(modules)} modules in {seconds:.1f} s, {n_workers(setup.place)} at a time"
    yield Finding("all modules", True, shown, {"seconds": seconds, "modules": len(modules)})
    for taken, name, problem in sorted(loaded, reverse=True)[:3]:
        if not problem:
            yield Finding(name.rsplit(".", 1)[-1][:34], True, f"{taken:.1f} s", {"seconds": taken})


CHECKS = (Check("kernels", compile_all, 300),)
