# SPDX-License-Identifier: Apache-2.0
"""Many cases in several processes, each of them forked from one that has everything loaded.

Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from benchmarks.robustness.child import Limits
from benchmarks.robustness.fuzz_world import Command, make_world, run_command, warm_up
from sugar_utils.errors import UserError
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser, integer, positive_float, positive_int


class Worker(Protocol):
    """What a process keeps between cases."""

    def run(self, case: int) -> Any:
        """Run one case; the result must be one that can be pickled."""
        ...


_WORKER: list[Worker] = []


def campaign_parser(purpose: str, *, cases: int, seconds: float) -> argparse.ArgumentParser:
    """The flags of every campaign.

    Args:
        purpose: What ``--help`` says first.
        cases: Default of ``--cases``.
        seconds: Default of ``--limit``.
    """
    result = Parser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--cases", type=positive_int, default=cases, help="how many")
    add("--seed", type=integer, default=0, help="of everything")
    add("--case", type=integer, default=None, help="run this one alone and show what it said")
    add("--scene", default="tiny", help="tiny, or the folder of a capture to start from")
    add("--jobs", type=positive_int, default=os.cpu_count(), help="processes")
    add("--limit", type=positive_float, default=seconds, help="seconds until it counts as hanging")
    add("--json", type=Path, default=None, help="file for all results")
    add("--keep", type=Path, default=None, help="folder to work in, which stays")
    return result


def capture_of(args: argparse.Namespace) -> Path | None:
    """The capture that ``--scene`` names; None for the tiny one.

    Raises:
        UserError: It is no capture.
    """
    scene = None if args.scene == "tiny" else Path(args.scene).resolve()
    if scene is not None and not (scene / "sparse" / "0").is_dir():
        raise UserError(f"--scene {scene}: has no sparse/0; give the folder of a COLMAP capture")
    return scene


def run_cases(
    args: argparse.Namespace,
    begin: Callable[[Path], Worker],
    cases: Sequence[int],
    tell: Callable[[Any], None],
) -> list[Any]:
    """Run cases as the flags say, tell of each when it ends, print their number, keep the results.

    Args:
        args: Values of :func:`campaign_parser`.
        begin: As in :func:`campaign`.
        cases: Numbers of the cases, if it is not one alone.
        tell: Told each result, which is a dataclass.
    """
    chosen = cases if args.case is None else [args.case]
    started, results = time.monotonic(), []
    with work_folder(args.keep) as work:
        for result in campaign(begin, chosen, min(args.jobs, len(chosen)), work):
            results.append(result)
            tell(result)
    print(f"\n{len(results)} cases in {time.monotonic() - started:.0f} s, seed {args.seed}")
    if args.json is not None:
        write_json_atomic(args.json, {"seed": args.seed, "results": list(map(asdict, results))})
    return results


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
