# SPDX-License-Identifier: Apache-2.0
"""Load modules of Warp kernels, ahead of their first launch or at it; new ones are compiled.

A module that one thread loads is waited for by the others, because Warp would compile it once for
each of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import warp as wp


@functools.cache
def _locks() -> dict[wp.Module, threading.Lock]:
    """The locks of modules that were loaded or are about to be."""
    return {}


_locks()  # once, before there are threads that would each make their own


def module_lock(module: wp.Module) -> threading.Lock:
    """The lock that a thread holds while it loads a module; all threads get the same one."""
    return _locks().setdefault(module, threading.Lock())


@functools.cache
def _cpu_loader() -> ThreadPoolExecutor:
    """The one thread that loads modules for the CPU.

    The compiler for CPUs takes one module at a time whatever the number of threads, and what it
    precompiles of Warp's headers, most of a module's time, serves the thread that asked for it.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="kernels")


def _forget_threads() -> None:
    """Make locks and threads anew in a process that was forked, where no other thread goes on."""
    _cpu_loader.cache_clear()
    _locks.cache_clear()
    _locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def load_module(module: wp.Module, device: torch.device) -> None:
    """Compile or load a module for a device, or wait for the thread that does.

    Raises:
        Exception: It does not compile; Warp has no class of its own for that.
    """
    if device.type == "cpu":
        _cpu_loader().submit(_load, module, "cpu").result()
    else:
        _load(module, wp.device_from_torch(device))


def _load(module: wp.Module, place: str | wp.Device) -> None:
    with module_lock(module):
        wp.force_load(place, [module])


@contextlib.contextmanager
def loading_ahead(
    modules: Sequence[wp.Module], device: torch.device, workers: int = 1
) -> Iterator[None]:
    """Load modules in the background while something else is done.

    Those that were not begun by its end are left to their first launch. So is the error of a module
    that does not compile: nothing may ever launch its kernels.

    Args:
        modules: Loaded in this order.
        device: Where their kernels will run.
        workers: Modules that are loaded at once on a GPU.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="kernels-ahead")
    for module in modules:
        pool.submit(load_module, module, device)
    try:
        yield
    except BaseException:
        # An error is not kept waiting.
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown(cancel_futures=True)
