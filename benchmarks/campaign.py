# SPDX-License-Identifier: Apache-2.0
"""Many cases in several processes, each of them forked from one that has everything loaded.

Linux only.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.child import Limits
from benchmarks.fuzz_world import Command, make_world, run_command, warm_up


class Worker(Protocol):
    """What a process keeps between cases."""

    def run(self, case: int) -> Any:
        """Run one case; the result must be one that can be pickled."""
        ...


_WORKER: list[Worker] = []


def campaign(
    begin: Callable[[Path], Worker], cases: Sequence[int], jobs: int, work: Path
) -> Iterator[Any]:
    """Run cases in any order.

    Args:
        begin: Makes a worker that works in a folder; called once in each process.
        cases: Numbers of the cases.
        jobs: Processes.
        work: Folder for all of them.
    """
    warm_up(work / "warm")
    # What is there now stays: collections of a child would copy its pages.
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    folders = context.SimpleQueue()
    for number in range(jobs):
        folders.put(work / f"worker{number}")
    with context.Pool(jobs, _begin, (begin, folders)) as pool:
        yield from pool.imap_unordered(_run, cases)


def _begin(begin: Callable[[Path], Worker], folders: multiprocessing.SimpleQueue) -> None:
    # As every process finds them; the frame of this one answers them in a way of its own.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _WORKER.append(begin(folders.get()))


def _run(case: int) -> Any:
    return _WORKER[0].run(case)


def make_base(own: Path, scene: Path | None = None) -> Path:
    """Make a world for copies that will lie in ``own / "case"``, because some results know where.

    Raises:
        RuntimeError: An entry point failed on files that are in order.
    """

    def run(command: Command, root: Path) -> None:
        outcome = run_command(command, root, own / "notes", Limits(600.0))
        if outcome.code != 0:
            said = outcome.err or outcome.out
            raise RuntimeError(f"{command.name} fails without a fault: {said}")

    root = own / "case"
    root.mkdir(parents=True)
    make_world(root, run, scene)
    return root.rename(own / "base")


@contextlib.contextmanager
def work_folder(kept: Path | None) -> Iterator[Path]:
    """A folder to work in: one that stays, or a temporary one."""
    if kept is None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield Path(folder).resolve()
        return
    kept.mkdir(parents=True, exist_ok=True)
    yield kept.resolve()
