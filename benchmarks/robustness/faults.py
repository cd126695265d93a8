# SPDX-License-Identifier: Apache-2.0
"""Disturbs runs and does them again: ``python benchmarks/robustness/faults.py --cases 100``.

In each case something happens in the middle of a stage (``faults_cases.py``): a write fails, a
signal comes, the disk is full, the folder is gone, memory ends, the clock jumps, another process
works in the same folder. Then the same command runs again, undisturbed, and must end with the very
bytes of a run that nothing happened to. Faults of the program make the exit code 1.

A case follows from ``--seed`` and its number, and from nothing but the moments that the machine
decides. Linux only; without the right to mount small disks, limits stand in for full ones.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

# A forked child must find no threads of a GPU's driver, and no pool of threads that are gone.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rasterizer import print_table
from benchmarks.robustness.campaign import campaign_parser, capture_of, make_base, run_cases
from benchmarks.robustness.child import Limits, Outcome
from benchmarks.robustness.faults_cases import (
    SCENARIOS,
    Place,
    Scenario,
    Undisturbed,
    count_events,
    draw_disturbance,
)
from benchmarks.robustness.faults_verdict import FAULTS, judge_again, judge_disturbed
from sugar_utils.frame import run_main


@dataclass(frozen=True)
class Result:
    """One case, judged.

    Attributes:
        case: Its number.
        scenario: What was disturbed.
        what: What happened.
        end: How it ended: accepted, refused, stopped or killed.
        faults: Names out of ``FAULTS``, each with what was seen.
        outcome: Of the disturbed run.
        again: Of the run after it.
    """

    case: int
    scenario: str
    what: str
    end: str
    faults: dict[str, str]
    outcome: Outcome
    again: Outcome


class _Worker:
    """What a process of the campaign keeps between cases."""

    def __init__(self, seed: int, limits: Limits, scene: Path | None, own: Path) -> None:
        self._seed = seed
        self._own = own
        self._place = Place(own / "case", own / "notes", limits)
        self._base = make_base(own, scene)
        self._known: dict[str, Undisturbed] = {}

    def run(self, case: int) -> Result:
        """Disturb a run, look, and do it again."""
        draw = Random(f"{self._seed}/{case}")
        scenario = SCENARIOS[case % len(SCENARIOS)]
        known = self._undisturbed(scenario)
        self._clear()
        place, folder = self._place, self._place.root / scenario.output
        scenario.prepare(place.root, self._base)
        before = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        disturbance = draw_disturbance(draw, place, scenario, known)
        with disturbance.around():
            outcome = place.run(scenario, disturbance)
        end, faults = judge_disturbed(outcome, disturbance, scenario, folder, before, known)
        if disturbance.may_lose_output and not any(folder.rglob("*.pt")):
            # What was half done is gone with the folder; the result is that of a fresh start.
            scenario.place_output(place.root, self._base)
        again = place.run(scenario, notes="again")
        judge_again(again, folder, known, faults)
        return Result(case, scenario.name, disturbance.what, end, faults, outcome, again)

    def _clear(self) -> None:
        for folder in (self._place.root, self._place.notes):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def _undisturbed(self, scenario: Scenario) -> Undisturbed:
        """Run a scenario once without a fault, to know what is right."""
        if scenario.name not in self._known:
            self._clear()
            scenario.prepare(self._place.root, self._base)
            outcome, events = count_events(self._place, scenario)
            if outcome.code != 0:
                raise RuntimeError(f"{scenario.name} fails without a fault: {outcome.err}")
            kept = self._own / "undisturbed" / scenario.name
            shutil.copytree(self._place.root / scenario.output, kept)
            n_bytes = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
            self._known[scenario.name] = Undisturbed(kept, events, outcome.seconds, n_bytes)
        return self._known[scenario.name]


def table(results: Sequence[Result]) -> list[list[str]]:
    """One row for each scenario, and their sum."""
    rows = []
    names = [s.name for s in SCENARIOS if any(r.scenario == s.name for r in results)]
    for name in [*names, "all"]:
        chosen = [r for r in results if name in (r.scenario, "all")]
        ends = Counter(r.end for r in chosen)
        faults = Counter(fault for r in chosen for fault in r.faults)
        figures = [ends[end] for end in ("accepted", "refused", "stopped", "killed")]
        rows.append([name, str(len(chosen)), *map(str, figures), *(str(faults[f]) for f in FAULTS)])
    return rows


def parser() -> argparse.ArgumentParser:
    """The flags."""
    return campaign_parser(__doc__, cases=50, seconds=60.0)


def main() -> int:
    """Run cases, print the faults and the table."""
    args = parser().parse_args()
    begin = functools.partial(_Worker, args.seed, Limits(args.limit), capture_of(args))

    def tell(result: Result) -> None:
        if result.faults:
            _report(result, args.seed)
        if args.case is not None:
            _show(result)

    results = run_cases(args, begin, range(args.cases), tell)
    header = ["scenario", "cases", "accepted", "refused", "stopped", "killed", *FAULTS]
    print_table(header, table(results))
    return int(any(result.faults for result in results))


def _report(result: Result, seed: int) -> None:
    faults = "; ".join(f"{name}: {what}" for name, what in result.faults.items())
    print(
        f"FAULT {result.scenario}: {result.what}\n      {faults}\n"
        f"      python benchmarks/robustness/faults.py --seed {seed} --case {result.case}",
        flush=True,
    )


def _show(result: Result) -> None:
    print(f"{result.scenario}: {result.what}: {result.end or 'no good end'}")
    for title, outcome in (("disturbed", result.outcome), ("again", result.again)):
        print(
            f"=== {title}: exit code {outcome.code}, {outcome.seconds:.1f} s\n{outcome.out}\n"
            f"--- standard error\n{outcome.err}\n{outcome.stacks}"
        )


if __name__ == "__main__":
    sys.exit(run_main(main))
