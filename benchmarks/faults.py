# SPDX-License-Identifier: Apache-2.0
"""Disturbs runs and does them again: ``python benchmarks/faults.py --cases 100 --seed 0``.

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
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

# A forked child must find no threads of a GPU's driver, and no pool of threads that are gone.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.campaign import campaign, make_base, work_folder
from benchmarks.child import Limits, Outcome
from benchmarks.faults_cases import (
    SCENARIOS,
    Place,
    Scenario,
    Undisturbed,
    count_events,
    draw_disturbance,
)
from benchmarks.faults_verdict import FAULTS, judge_again, judge_disturbed
from benchmarks.rasterizer import print_table
from sugar_utils.errors import UserError
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser, integer, positive_float, positive_int
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
    result = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--cases", type=positive_int, default=50, help="how many")
    add("--seed", type=integer, default=0, help="of everything")
    add("--case", type=integer, default=None, help="run this one alone and show what it said")
    add("--scene", default="tiny", help="tiny, or the folder of a capture to start from")
    add("--jobs", type=positive_int, default=os.cpu_count(), help="processes")
    add("--limit", type=positive_float, default=60.0, help="seconds until a run counts as hanging")
    add("--json", type=Path, default=None, help="file for all results")
    add("--keep", type=Path, default=None, help="folder to work in, which stays")
    return result


def main() -> int:
    """Run cases, print the faults and the table."""
    args = parser().parse_args()
    scene = None if args.scene == "tiny" else Path(args.scene).resolve()
    if scene is not None and not (scene / "sparse" / "0").is_dir():
        raise UserError(f"--scene {scene}: has no sparse/0; give the folder of a COLMAP capture")
    cases = list(range(args.cases)) if args.case is None else [args.case]
    begin = functools.partial(_Worker, args.seed, Limits(args.limit), scene)
    started, results = time.monotonic(), []
    with work_folder(args.keep) as work:
        for result in campaign(begin, cases, min(args.jobs, len(cases)), work):
            results.append(result)
            if result.faults:
                _report(result, args.seed)
            if args.case is not None:
                _show(result)
    print(f"\n{len(results)} cases in {time.monotonic() - started:.0f} s, seed {args.seed}")
    header = ["scenario", "cases", "accepted", "refused", "stopped", "killed", *FAULTS]
    print_table(header, table(results))
    if args.json is not None:
        write_json_atomic(args.json, {"seed": args.seed, "results": list(map(asdict, results))})
    return int(any(result.faults for result in results))


def _report(result: Result, seed: int) -> None:
    faults = "; ".join(f"{name}: {what}" for name, what in result.faults.items())
    print(
        f"FAULT {result.scenario}: {result.what}\n      {faults}\n"
        f"      python benchmarks/faults.py --seed {seed} --case {result.case}",
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
