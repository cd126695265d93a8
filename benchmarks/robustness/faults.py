# SPDX-License-Identifier: Apache-2.0
"""Disturbs runs and repeats them: ``python benchmarks/robustness/faults.py --cases 100 --seed 0``.

In each case something happens in the middle of a stage (``disturbances.py``): writes fail as on a
full disk, a signal arrives, the folder is deleted, memory ends, another process works in the same
folder. Files must be complete or absent, and what was there must be there
or have a successor. Then the same command runs again, undisturbed, and must end with the bytes of a
run that was not disturbed. Anything else is a fault; then the exit code is 1.

A case follows from ``--seed`` and its number, except for timing. Linux only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from random import Random

if __name__ == "__main__":
    # A forked child must find no threads of a GPU driver or of a thread pool.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sugar_utils  # noqa: F401  before torch

# isort: split
from benchmarks.robustness.campaign import Result, Worker, campaign_parser, run_cases
from benchmarks.robustness.child import Limits, Outcome
from benchmarks.robustness.disturbances import SCENARIOS, Disturbance, Place, Scenario, Undisturbed
from benchmarks.robustness.judgement import JOURNALS, NOT_RESULTS, end_of, judge_output, wrong_in
from gaussian_splatting.engine.checkpoint import load_payload
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from tests.support.tiny_scene import assert_same_bits

ENDS = ("accepted", "refused", "stopped", "killed")
FAULTS = ("traceback", "hang", "crash", "noise", "torn", "lost", "again", "differs", "leftover")


# Python 3.11 waits forever for a thread that could not allocate its first objects.
_WAITS_FOR_THREAD = re.compile(
    r'(File ".*threading\.py", line \d+ in wait\n *){1,2}File '
    r'".*threading\.py", line \d+ in start\n'
)


class _Worker(Worker):
    def __init__(self, seed: int, limits: Limits, own: Path) -> None:
        super().__init__(seed, limits, own)
        self._place = Place(self.root, self.notes, limits)
        self._known: dict[str, Undisturbed] = {}

    def run(self, case: int) -> Result:
        draw, scenario = Random(f"{self.seed}/{case}"), SCENARIOS[case % len(SCENARIOS)]
        known = self._undisturbed(scenario)
        self.clear()
        place, folder = self._place, self.root / scenario.output
        scenario.prepare(self.root, self.base)
        files = [path for path in folder.rglob("*") if path.is_file()]
        before = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        disturbance = place.disturbance(draw, scenario, known)
        outcome = place.run(scenario, disturbance)
        end, faults = judge_disturbed(outcome, disturbance, scenario, folder, before, known)
        if disturbance.may_lose_output and not any(folder.rglob("*.pt")):
            # Half of the work is gone with the folder; the result is that of a fresh start.
            scenario.place_output(self.root, self.base)
        again = place.run(scenario, notes="again")
        judge_again(again, folder, known, faults)
        return Result(case, scenario.name, disturbance.what, end, faults, (outcome, again))

    def _undisturbed(self, scenario: Scenario) -> Undisturbed:
        """Run a scenario once without a disturbance, to know what is right."""
        if scenario.name not in self._known:
            self.clear()
            scenario.prepare(self.root, self.base)
            outcome, events = self._place.count_events(scenario)
            if outcome.code != 0:
                raise RuntimeError(f"{scenario.name} fails without a fault: {outcome.err}")
            kept = self.own / "undisturbed" / scenario.name
            shutil.copytree(self.root / scenario.output, kept)
            self._known[scenario.name] = Undisturbed(kept, events, outcome.seconds)
        return self._known[scenario.name]


def judge_disturbed(
    outcome: Outcome,
    disturbance: Disturbance,
    scenario: Scenario,
    folder: Path,
    before: dict[str, bytes],
    undisturbed: Undisturbed,
) -> tuple[str, dict[str, str]]:
    """Judge the end of a disturbed run and the files that it left.

    ``before`` has the contents of the files that were in its output ``folder``.
    """
    faults: dict[str, str] = {}
    end = end_of(outcome)
    waits = disturbance.takes_memory and bool(_WAITS_FOR_THREAD.search(outcome.stacks))
    if waits:
        end = "killed"
    elif outcome.late:
        faults["hang"] = f"{outcome.seconds:.0f} s"
    elif outcome.code < 0 and disturbance.may_be_killed:
        end = "killed"
    elif not end:
        faults["crash"] = f"exit code {outcome.code}"
    for one in disturbance.others if waits else (outcome, *disturbance.others):
        if one.code >= 0:
            judge_output(one, end_of(one), faults, warnings=True)
    torn = {path.name: _torn(path) for path in _results(folder).values()}
    if any(torn.values()):
        faults["torn"] = "; ".join(f"{name}: {why}" for name, why in torn.items() if why)[:300]
    lost = _lost(scenario, folder, before, undisturbed)
    if lost and not disturbance.may_lose_output:
        faults["lost"] = lost
    return end, faults


def judge_again(
    outcome: Outcome, folder: Path, undisturbed: Undisturbed, faults: dict[str, str]
) -> None:
    """Add what is wrong with the repeated run, and with its results."""
    if outcome.code != 0 or outcome.late:
        faults["again"] = f"exit code {outcome.code}: {(outcome.err or outcome.out)[-300:]!r}"
        return
    judge_output(outcome, "accepted", faults, warnings=True)
    if different := differences(undisturbed.folder, folder):
        faults["differs"] = "; ".join(different[:3])
    left = [path.name for path in folder.rglob("*") if ".tmp-" in path.name]
    if left or (folder / ".replacing").exists():
        faults["leftover"] = ", ".join(left[:3]) or ".replacing"


def _results(folder: Path) -> dict[str, Path]:
    """Files that are complete or absent, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and ".tmp-" not in path.name and not NOT_RESULTS & set(path.parts)
    }


def _torn(path: Path) -> str:
    """Why a file is not complete; empty where it is."""
    try:
        if path.suffix == ".pt":
            load_payload(path)
    except (UserError, OSError, ValueError) as error:
        return str(error)[:200]
    return wrong_in(path)


def _lost(
    scenario: Scenario, folder: Path, before: dict[str, bytes], undisturbed: Undisturbed
) -> str:
    """Return files that were there before and have no successor."""
    now = _results(folder)
    kept = {name for name, path in now.items() if before.get(name) == path.read_bytes()}
    checkpoints = [name for name in before if name.endswith(".pt")]
    if any(name not in kept for name in before if name.startswith("input/")):
        return "an input image"
    if scenario.start == "half" and checkpoints:
        newest = max(int(Path(name).stem) for name in checkpoints)
        found = [int(path.stem) for name, path in now.items() if name.endswith(".pt")]
        return "" if found and max(found) >= newest else f"checkpoint {newest} and later ones"
    important = [name for name in before if Path(name).suffix in (".pt", ".ply", ".obj")]
    gone = [name for name in important if name not in kept]
    if scenario.start != "replace" or not gone:
        return ""
    if checkpoints:
        new = [name for name in now if name.endswith(".pt") and name not in kept]
        return "" if new else "the old run is gone and the new one has no checkpoint"
    wrong = [name for name in gone if _differs(undisturbed.folder / name, folder / name)]
    return f"neither the old nor the new {', '.join(wrong)}" if wrong else ""


def differences(expected: Path, found: Path) -> list[str]:
    """Results that are not the same, apart from what records time and place."""
    names, others = _results(expected), _results(found)
    last = max((int(Path(name).stem) for name in names if name.endswith(".pt")), default=-1)
    wrong = []
    for name in sorted({*names, *others}):
        path = Path(name)
        if path.name in JOURNALS or path.name.endswith(".lock"):
            continue
        if name not in others or name not in names:
            if path.suffix != ".pt" or int(path.stem) == last:
                wrong.append(f"{name} is {'missing' if name in names else 'unexpected'}")
        elif _differs(expected / name, found / name):
            wrong.append(f"{name} differs")
    return wrong


def _differs(expected: Path, found: Path) -> bool:
    if not (expected.is_file() and found.is_file()):
        return True
    if expected.suffix == ".pt":
        try:
            assert_same_bits(expected, found)
        except (AssertionError, RuntimeError):
            return True
        return False
    if expected.suffix == ".json":
        note = json.loads(expected.read_text(encoding="utf-8"))
        if "files" in note:
            other = json.loads(found.read_text(encoding="utf-8"))
            return any(note[key] != other.get(key) for key in ("settings", "inputs", "files"))
    return expected.read_bytes() != found.read_bytes()


def main() -> int:
    args = campaign_parser(__doc__, cases=50, seconds=60.0).parse_args()
    return run_cases("faults.py", args, _Worker, ENDS, FAULTS)


if __name__ == "__main__":
    sys.exit(run_main(main))
