# SPDX-License-Identifier: Apache-2.0
"""Feeds the entry points rubbish: ``python benchmarks/robustness/fuzz.py --cases 1000 --seed 0``.

Each case spoils one thing in a copy of a small world of files (``fuzz_world.py``): a photograph, a
model, a checkpoint, a flag, a name. The entry point that reads it then runs in a child process
with a limit on memory and time, and has to end in good order: the work done with finite results,
or one line that says what is wrong and an exit code of 2 to 4, with all that was there before
still there. Everything else is a fault and makes the exit code 1.

A case follows from ``--seed`` and its number alone; ``--case`` repeats one and shows what it said.
``--kinds`` chooses kinds by name; ``--json`` keeps everything. Linux only.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from random import Random

# A forked child must find no threads of a GPU's driver, and no pool of threads that are gone.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rasterizer import print_table
from benchmarks.robustness.campaign import campaign_parser, capture_of, make_base, run_cases
from benchmarks.robustness.child import Limits, Outcome
from benchmarks.robustness.fuzz_kinds import TURNS, expects_same_bits, kind_of, parts_of, spoil
from benchmarks.robustness.fuzz_verdict import FAULTS, Expectation, Verdict, judge, snapshot
from benchmarks.robustness.fuzz_world import copy_parts, run_command
from sugar_utils.flags import positive_float
from sugar_utils.frame import run_main

INPUTS = ("scene", "text", "nerf", "ngp", "vanilla", "points.ply", "cloud.ply", "mesh.ply",
          "scenes.json", "exports", "path.json")  # fmt: skip
_LENGTHY_SECONDS = 4.0


@dataclass(frozen=True)
class Settings:
    """What all cases share.

    Attributes:
        seed: Of everything.
        limits: Of each case.
        scene: A capture in place of the tiny one.
    """

    seed: int
    limits: Limits
    scene: Path | None = None


@dataclass(frozen=True)
class Result:
    """One case, judged.

    Attributes:
        case: Its number.
        kind: Its kind.
        what: What was spoiled.
        command: Who read it.
        verdict: What became of it.
        outcome: How the process ended.
    """

    case: int
    kind: str
    what: str
    command: str
    verdict: Verdict
    outcome: Outcome


@dataclass
class _Worker:
    """What a process of the campaign keeps between cases."""

    settings: Settings
    own: Path

    def __post_init__(self) -> None:
        self.base = make_base(self.own, self.settings.scene)

    def run(self, case: int) -> Result:
        """Spoil, run, judge."""
        root, notes = self.own / "case", self.own / "notes"
        for folder in (root, notes):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        kind, draw = kind_of(case), Random(f"{self.settings.seed}/{case}")
        copy_parts(self.base, root, parts_of(kind))
        plan = spoil(kind, root, draw)
        limits = self.settings.limits
        if plan.lengthy:
            limits = replace(limits, seconds=_LENGTHY_SECONDS, stacks=False)
        same_bits = expects_same_bits(plan, root, self.base)
        before = snapshot(root)
        outcome = run_command(plan.command, root, notes, limits, plan.words)
        fallback = plan.same_bits == "fallback"
        expected = Expectation(root, before, INPUTS, plan.lengthy, same_bits, fallback)
        verdict = judge(outcome, expected)
        return Result(case, kind, plan.what, plan.command.name, verdict, outcome)


def cases_of(kinds: Sequence[str], first: int = 0) -> Iterator[int]:
    """Numbers of all cases of some kinds, without end."""
    return (case for case in count(first) if kind_of(case) in kinds)


def table(results: Sequence[Result]) -> list[list[str]]:
    """One row for each kind, and their sum."""
    rows = []
    kinds = [kind for kind in dict.fromkeys(TURNS) if any(r.kind == kind for r in results)]
    for kind in [*kinds, "all"]:
        of_kind = [r for r in results if kind in (r.kind, "all")]
        ends = Counter(r.verdict.end for r in of_kind)
        faults = Counter(fault for r in of_kind for fault in r.verdict.faults)
        figures = [len(of_kind), *(ends[end] for end in ("refused", "accepted", "stopped"))]
        rows.append([kind, *map(str, figures), *(str(faults[fault]) for fault in FAULTS)])
    return rows


def report(result: Result, seed: int) -> None:
    """What went wrong in a case, and how to repeat it."""
    faults = "; ".join(f"{name}: {what}" for name, what in result.verdict.faults.items())
    print(
        f"FAULT {result.kind}, {result.command}, {result.what!r}\n"
        f"      {faults}\n"
        f"      python benchmarks/robustness/fuzz.py --seed {seed} --case {result.case}",
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    """The flags."""
    result = campaign_parser(__doc__, cases=300, seconds=20.0)
    kinds = list(dict.fromkeys(TURNS))
    result.add_argument(
        "--kinds", nargs="+", default=None, choices=kinds, metavar="KIND",
        help=f"out of: {', '.join(kinds)}",
    )  # fmt: skip
    result.add_argument("--memory", type=positive_float, default=3.0, help="GiB a case may use")
    return result


def main() -> int:
    """Run cases, print the faults and the table."""
    args = parser().parse_args()
    limits = Limits(args.limit, round(args.memory * 2**30))
    begin = functools.partial(_Worker, Settings(args.seed, limits, capture_of(args)))
    cases = list(islice(cases_of(args.kinds or TURNS), args.cases))

    def tell(result: Result) -> None:
        if result.verdict.faults:
            report(result, args.seed)
        if args.case is not None:
            _show(result)

    results = run_cases(args, begin, cases, tell)
    print_table(["kind", "cases", "refused", "accepted", "stopped", *FAULTS], table(results))
    return int(any(result.verdict.faults for result in results))


def _show(result: Result) -> None:
    outcome = result.outcome
    print(
        f"{result.kind}: {result.what!r}, read by {result.command}: exit code {outcome.code}, "
        f"{outcome.seconds:.1f} s, {result.verdict.end or 'no good end'}\n"
        f"--- standard output\n{outcome.out}\n--- standard error\n{outcome.err}\n{outcome.stacks}"
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
