# SPDX-License-Identifier: Apache-2.0
"""Many cases in several processes, each forked from one that has everything loaded. Linux only."""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.rasterizer import print_table
from benchmarks.robustness.child import Limits, Outcome
from benchmarks.robustness.world import Command, make_world, run_command, warm_up
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser, integer, positive_float, positive_int

MANY_CASES = 200
"""Cases from which on it pays to run every command before."""


@dataclass(frozen=True)
class Result:
    """One case, judged: its kind, what was done, and the processes that it took."""

    case: int
    group: str
    what: str
    end: str
    faults: dict[str, str]
    outcomes: tuple[Outcome, ...]

    def title(self) -> str:
        return f"{self.group}, {self.what!r}"

    def said(self) -> str:
        return "\n".join(
            f"exit code {one.code}, {one.seconds:.1f} s\n{one.out}\n---\n{one.err}\n{one.stacks}"
            for one in self.outcomes
        )


class Worker:
    """State of a process between cases; ``run(case)`` of a campaign gives a :class:`Result`."""

    def __init__(self, seed: int, limits: Limits, own: Path) -> None:
        self.seed, self.limits, self.own = seed, limits, own
        self.root, self.notes = own / "case", own / "notes"
        self.base = self.make_base()

    @staticmethod
    def warm_up(root: Path, many_cases: bool) -> None:
        """Load what children need, before workers are forked."""
        warm_up(root, every_command=many_cases)

    def make_base(self) -> Path:
        """Make the files of which every case gets a copy."""
        return make_base(self.own)

    def clear(self) -> None:
        for folder in (self.root, self.notes):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()


_WORKER: list[Worker] = []


def campaign_parser(purpose: str, *, cases: int, seconds: float) -> argparse.ArgumentParser:
    result = Parser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--cases", type=positive_int, default=cases, help="number of cases")
    add("--seed", type=integer, default=0, help="random seed")
    add("--case", type=integer, default=None, help="run this one alone and show its output")
    add("--jobs", type=positive_int, default=os.cpu_count(), help="processes")
    add("--limit", type=positive_float, default=seconds, help="seconds until a case hangs")
    add("--json", type=Path, default=None, help="file for all results")
    return result


def run_cases(
    script: str,
    args: argparse.Namespace,
    worker: type[Worker],
    ends: Sequence[str],
    faults: Sequence[str],
) -> int:
    """Run cases, print faults and a table, write the results; 1 if there was a fault."""
    begin = functools.partial(worker, args.seed, Limits(args.limit))
    chosen = range(args.cases) if args.case is None else [args.case]
    started, results = time.monotonic(), []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        jobs, work = min(args.jobs, len(chosen)), Path(folder).resolve()
        prepare = functools.partial(worker.warm_up, many_cases=len(chosen) >= MANY_CASES)
        for result in _campaign(begin, prepare, chosen, jobs, work):
            results.append(result)
            if result.faults:
                found = "; ".join(f"{name}: {what}" for name, what in result.faults.items())
                print(
                    f"FAULT {result.title()}\n      {found}\n      python "
                    f"benchmarks/robustness/{script} --seed {args.seed} --case {result.case}",
                    flush=True,
                )
            if args.case is not None:
                print(f"{result.title()}: {result.end or 'no good end'}\n{result.said()}")
    print(f"\n{len(results)} cases in {time.monotonic() - started:.0f} s, seed {args.seed}")
    if args.json is not None:
        write_json_atomic(args.json, {"seed": args.seed, "results": list(map(asdict, results))})
    print_table(["", "cases", *ends, *faults], _table(results, ends, faults))
    return int(any(result.faults for result in results))


def _table(
    results: Sequence[Result], ends: Sequence[str], faults: Sequence[str]
) -> Iterator[list[str]]:
    for group in [*sorted({r.group for r in results}), "all"]:
        chosen = [r for r in results if group in (r.group, "all")]
        ended = Counter(r.end for r in chosen)
        found = Counter(fault for r in chosen for fault in r.faults)
        counts = [len(chosen), *(ended[end] for end in ends), *(found[fault] for fault in faults)]
        yield [group, *map(str, counts)]


def _campaign(
    begin: Callable[[Path], Worker],
    prepare: Callable[[Path], None],
    cases: Sequence[int],
    jobs: int,
    work: Path,
) -> Iterator[Result]:
    """Run cases in any order; after ``prepare``, ``begin`` makes a worker in each process."""
    prepare(work / "warm")
    # Collections of a child would copy the pages of what exists now.
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    folders = context.SimpleQueue()
    for number in range(jobs):
        folders.put(work / f"worker{number}")
    with context.Pool(jobs, _begin, (begin, folders)) as pool:
        yield from pool.imap_unordered(_run, cases)


def _begin(begin: Callable[[Path], Worker], folders: multiprocessing.SimpleQueue) -> None:
    # The defaults; the entry point of this process has handlers of its own.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _WORKER.append(begin(folders.get()))


def _run(case: int) -> Result:
    return _WORKER[0].run(case)


def make_base(own: Path) -> Path:
    """Make a world whose copies work in ``own / "case"``, because results record where they are."""

    def run(command: Command, root: Path) -> None:
        outcome = run_command(command, root, own / "notes", Limits(600.0))
        if outcome.code != 0:
            said = outcome.err or outcome.out
            raise RuntimeError(f"{command.name} fails without a fault: {said}")

    root = own / "case"
    root.mkdir(parents=True)
    make_world(root, run)
    return root.rename(own / "base")
