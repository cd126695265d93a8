# SPDX-License-Identifier: Apache-2.0
"""Feeds the entry points rubbish: ``python benchmarks/fuzz.py --cases 1000 --seed 0``.

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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from random import Random

# A forked child must find no threads of a GPU's driver, and no pool of threads that are gone.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.campaign import campaign, make_base, work_folder
from benchmarks.child import Limits, Outcome
from benchmarks.fuzz_kinds import TURNS, expects_same_bits, kind_of, parts_of, spoil
from benchmarks.fuzz_verdict import FAULTS, Expectation, Verdict, judge, snapshot
from benchmarks.fuzz_world import copy_parts, run_command
from benchmarks.rasterizer import print_table
from sugar_utils.errors import UserError
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser, integer, positive_float, positive_int
from sugar_utils.frame import run_main

INPUTS = ("scene", "text", "nerf", "ngp", "vanilla", "points.ply", "cloud.ply", "mesh.ply",
          "scenes.json")  # fmt: skip
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
        f"      python benchmarks/fuzz.py --seed {seed} --case {result.case}",
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    """The flags."""
    result = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--cases", type=positive_int, default=300, help="how many")
    add("--seed", type=integer, default=0, help="of everything")
    add("--case", type=integer, default=None, help="run this one alone and show what it said")
    add("--kinds", nargs="+", default=None, choices=list(dict.fromkeys(TURNS)), metavar="KIND",
        help=f"out of: {', '.join(dict.fromkeys(TURNS))}")  # fmt: skip
    add("--scene", default="tiny", help="tiny, or the folder of a capture to start from")
    add("--jobs", type=positive_int, default=os.cpu_count(), help="processes")
    add("--limit", type=positive_float, default=20.0, help="seconds until a case counts as hanging")
    add("--memory", type=positive_float, default=3.0, help="GiB that a case may use")
    add("--json", type=Path, default=None, help="file for all results")
    add("--keep", type=Path, default=None, help="folder to work in, which stays")
    return result


def main() -> int:
    """Run cases, print the faults and the table."""
    args = parser().parse_args()
    scene = None if args.scene == "tiny" else Path(args.scene).resolve()
    if scene is not None and not (scene / "sparse" / "0").is_dir():
        raise UserError(f"--scene {scene}: has no sparse/0; give the folder of a COLMAP capture")
    wanted = cases_of(args.kinds or TURNS)
    cases = list(islice(wanted, args.cases)) if args.case is None else [args.case]
    limits = Limits(args.limit, round(args.memory * 2**30))
    jobs = min(args.jobs, len(cases))
    with work_folder(args.keep) as work:
        settings = Settings(args.seed, limits, scene)
        started, results = time.monotonic(), []
        begin = functools.partial(_Worker, settings)
        for result in campaign(begin, cases, jobs, work):
            results.append(result)
            if result.verdict.faults:
                report(result, args.seed)
            if args.case is not None:
                _show(result)
    print(f"\n{len(results)} cases in {time.monotonic() - started:.0f} s, seed {args.seed}")
    print_table(["kind", "cases", "refused", "accepted", "stopped", *FAULTS], table(results))
    if args.json is not None:
        write_json_atomic(args.json, {"seed": args.seed, "results": list(map(asdict, results))})
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
