# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels before a stage begins, several at a time; otherwise each waits for its turn.

The first run on a machine compiles every kernel, on a GPU in tens of seconds. Later ones find them
in Warp's cache and only load them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from typing import Any

import torch
import warp as wp

from gaussian_splatting.rasterization.blend_cpu import tile_kernels
from gaussian_splatting.rasterization.blend_cuda import block_kernels
from sugar_utils.console import Console

ROOMS = ("gaussian_splatting", "sugar_utils", "sugar_scene", "sugar_trainers", "sugar_extractors",
         "sugar_pipeline")  # fmt: skip

RENDERED_CHANNELS = (3, 6)
"""Colour, and colour with normals: blending has kernels of its own for each number of channels."""

WORKERS_CPU, WORKERS_GPU = 2, 8
"""Modules that are compiled at once; the compiler for CPUs mostly waits for itself."""

PATIENCE = 1.5
"""Seconds after which it is said that kernels are being compiled; loading takes less."""


def compile_ahead(device: torch.device, console: Console, channels: Sequence[int] = ()) -> None:
    """Compile or load the kernels of all modules of ours that have been imported.

    A kernel that does not compile says so where it is first used.

    Args:
        device: Where they will run.
        console: Is told how far it is, unless it is done at once.
        channels: Numbers of channels that are blended besides RENDERED_CHANNELS.
    """
    place = "cpu" if device.type == "cpu" else wp.device_from_torch(device)
    modules = kernel_modules(device.type == "cpu", channels)
    with ThreadPoolExecutor(n_workers(device), thread_name_prefix="compile") as pool:
        loaded = [pool.submit(wp.force_load, place, [module]) for module in modules]
        if wait(loaded, timeout=PATIENCE).not_done:
            with console.progress("compiling kernels, once", 1, len(loaded)) as progress:
                for n_done, _ in enumerate(as_completed(loaded), start=1):
                    progress.update(n_done)


def n_workers(device: torch.device) -> int:
    """Modules to compile at once for a device."""
    most = WORKERS_CPU if device.type == "cpu" else WORKERS_GPU
    return min(most, os.cpu_count() or 1)


def kernel_modules(on_cpu: bool, channels: Sequence[int] = ()) -> list[Any]:
    """Warp's modules of kernels that a device of a kind may be given, in the order of names.

    Those that are made on demand, by a function, are blending's; the few others compile at their
    first use.
    """
    blend = tile_kernels if on_cpu else block_kernels
    numbers = (*RENDERED_CHANNELS, *channels)
    made = [kernel.module for n in numbers for kernel in vars(blend(n)).values()]
    named = _imported_modules("_cuda" if on_cpu else "_cpu")
    modules = {module.name: module for module in (*named, *made)}
    return [modules[name] for name in sorted(modules)]


def _imported_modules(left_out: str) -> Iterator[Any]:
    """Warp's modules that bear the name of one of ours, without those of another device."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ROOMS and not name.endswith(left_out):
            kernels = (value for value in vars(module).values() if isinstance(value, wp.Kernel))
            yield from {kernel.module for kernel in kernels if kernel.module.name == name}
