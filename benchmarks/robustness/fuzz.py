# SPDX-License-Identifier: Apache-2.0
"""Malformed input for every script: ``python benchmarks/robustness/fuzz.py --cases 1000 --seed 0``.

Each case corrupts one thing in a copy of a small world of files (``world.py``): an image, a model,
a checkpoint, a flag, a name (``targets.py``). The entry point that reads it runs in a child process
with limits on memory and time. It must end with finite results, or with one line and an exit code
of 2 to 4, and leave everything else as it was. Anything else is a fault; then the exit code is 1.

A case follows from ``--seed`` and its number alone; ``--case`` repeats one and shows its output.
Linux only.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from random import Random

if __name__ == "__main__":
    # A forked child must find no threads of a GPU driver or of a thread pool.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.robustness.campaign import campaign_parser, make_base, run_cases
from benchmarks.robustness.child import Limits, Outcome
from benchmarks.robustness.judgement import ENDS, FAULTS, Expectation, judge, snapshot
from benchmarks.robustness.targets import TURNS, corrupt, expected_bits, kind_of, parts_of
from benchmarks.robustness.world import copy_parts, run_command
from sugar_utils.flags import positive_float
from sugar_utils.frame import run_main

INPUTS = ("scene", "text", "nerf", "ngp", "vanilla", "points.ply", "cloud.ply", "mesh.ply",
          "scenes.json", "exports", "path.json")  # fmt: skip
_LENGTHY_SECONDS = 4.0


@dataclass(frozen=True)
class Result:
    """One case, judged: its kind, what was corrupted, the command that read it, the judgement."""

    case: int
    group: str
    what: str
    command: str
    end: str
    outcome: Outcome
    faults: dict[str, str] = field(default_factory=dict)

    def title(self) -> str:
        """What was run and what was done to it."""
        return f"{self.group}, {self.command}, {self.what!r}"

    def said(self) -> str:
        """Output of the process."""
        one = self.outcome
        return f"exit code {one.code}, {one.seconds:.1f} s\n{one.out}\n---\n{one.err}\n{one.stacks}"


class _Worker:
    """What a process of the campaign keeps between cases."""

    def __init__(self, seed: int, limits: Limits, own: Path) -> None:
        self._seed, self._limits, self._own = seed, limits, own
        self._base = make_base(own)

    def run(self, case: int) -> Result:
        """Corrupt, run, judge."""
        root, notes = self._own / "case", self._own / "notes"
        for folder in (root, notes):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        kind = kind_of(case)
        copy_parts(self._base, root, parts_of(kind))
        plan = corrupt(kind, root, Random(f"{self._seed}/{case}"))
        limits = self._limits
        if plan.lengthy:
            limits = replace(limits, seconds=_LENGTHY_SECONDS, stacks=False)
        same_bits = expected_bits(plan, root, self._base)
        before = snapshot(root)
        outcome = run_command(plan.command, root, notes, limits, plan.words)
        fallback = plan.same_bits == "fallback"
        expected = Expectation(root, before, INPUTS, plan.lengthy, same_bits, fallback)
        judgement = judge(outcome, expected)
        name = plan.command.name
        return Result(case, kind, plan.what, name, judgement.end, outcome, judgement.faults)


def cases_of(kinds: Sequence[str]) -> Iterator[int]:
    """Numbers of all cases of some kinds, without end."""
    return (case for case in count() if kind_of(case) in kinds)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    result = campaign_parser(__doc__, cases=300, seconds=20.0)
    kinds = list(dict.fromkeys(TURNS))
    result.add_argument("--kinds", nargs="+", choices=kinds, metavar="KIND", help=", ".join(kinds))
    result.add_argument("--memory", type=positive_float, default=3.0, help="GiB a case may use")
    return result


def main() -> int:
    """Run cases, print the faults and the table."""
    args = parser().parse_args()
    limits = Limits(args.limit, round(args.memory * 2**30))
    cases = list(islice(cases_of(args.kinds or TURNS), args.cases))
    begin = functools.partial(_Worker, args.seed, limits)
    return run_cases("fuzz.py", args, begin, cases, ENDS, FAULTS)


if __name__ == "__main__":
    sys.exit(run_main(main))
