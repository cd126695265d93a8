# SPDX-License-Identifier: Apache-2.0
"""What must be true after a fault, and after the work was done again."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from benchmarks.robustness.child import Outcome
from benchmarks.robustness.faults_cases import Disturbance, Scenario, Undisturbed
from benchmarks.robustness.fuzz_verdict import (
    NOT_RESULTS,
    REFUSED,
    STOPPED,
    look_at_texts,
    wrong_in,
)
from gaussian_splatting.engine.checkpoint import load_payload
from sugar_utils.errors import UserError
from tests.support.tiny_scene import assert_same_bits

FAULTS = ("traceback", "hang", "crash", "noise", "torn", "lost", "again", "differs", "leftover")
_JOURNALS = ("log.txt", "report.html", "run.json", "convert.html")


def judge_disturbed(
    outcome: Outcome,
    disturbance: Disturbance,
    scenario: Scenario,
    folder: Path,
    before: dict[str, bytes],
    undisturbed: Undisturbed,
) -> tuple[str, dict[str, str]]:
    """How a disturbed run ended, and what is wrong with that and with what it left.

    Args:
        outcome: Of the process.
        disturbance: What happened to it.
        scenario: What it was.
        folder: Its output.
        before: Contents of the files that were there.
        undisturbed: What it does when nothing happens.
    """  # fmt: skip
    faults: dict[str, str] = {}
    end = _end(outcome, disturbance, faults)
    for one in (outcome, *disturbance.others):
        if one.code >= 0:
            look_at_texts(one, _named(one), faults, warnings=True)
    torn = {path.name: _torn(path) for path in _results(folder)}
    if any(torn.values()):
        faults["torn"] = "; ".join(f"{name}: {why}" for name, why in torn.items() if why)[:300]
    if not disturbance.may_lose_output:
        lost = _lost(scenario, folder, before, undisturbed)
        if lost:
            faults["lost"] = lost
    return end, faults


def judge_again(
    outcome: Outcome, folder: Path, undisturbed: Undisturbed, faults: dict[str, str]
) -> None:
    """Add what is wrong with the run that came after, and with its results."""
    if outcome.code != 0 or outcome.late:
        faults["again"] = f"exit code {outcome.code}: {(outcome.err or outcome.out)[-300:]!r}"
        return
    look_at_texts(outcome, "accepted", faults, warnings=True)
    different = differences(undisturbed.folder, folder)
    if different:
        faults["differs"] = "; ".join(different[:3])
    left = [path.name for path in folder.rglob("*") if ".tmp-" in path.name]
    if left or (folder / ".replacing").exists():
        faults["leftover"] = ", ".join(left[:3]) or ".replacing"


def _named(outcome: Outcome) -> str:
    if outcome.code == 0:
        return "accepted"
    if outcome.code in REFUSED:
        return "refused"
    return "stopped" if outcome.code in STOPPED else ""


def _end(outcome: Outcome, disturbance: Disturbance, faults: dict[str, str]) -> str:
    end = _named(outcome)
    if outcome.late:
        faults["hang"] = f"{outcome.seconds:.0f} s"
    elif outcome.code < 0 and disturbance.may_be_killed:
        end = "killed"
    elif not end:
        faults["crash"] = f"exit code {outcome.code}"
    return end


def _results(folder: Path) -> list[Path]:
    """Files under their final names."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".tmp-" not in path.name and not NOT_RESULTS & set(path.parts)
    ]


def _torn(path: Path) -> str:
    """Why a file is not complete; empty where it is."""
    try:
        if path.suffix == ".pt":
            load_payload(path)
        if path.suffix == ".png":
            with Image.open(path) as image:
                image.load()
    except (UserError, OSError, ValueError, SyntaxError) as error:
        return str(error)[:200]
    return wrong_in(path)


def _lost(
    scenario: Scenario, folder: Path, before: dict[str, bytes], undisturbed: Undisturbed
) -> str:
    """What was there before and has no successor."""
    now = {path.relative_to(folder).as_posix(): path for path in _results(folder)}
    checkpoints = [name for name in before if name.endswith(".pt")]
    taken = [name for name in before if name.startswith("input/")]
    if any(name not in now or before[name] != now[name].read_bytes() for name in taken):
        return "a photograph as it was taken"
    if scenario.start == "half" and checkpoints:
        newest = max(int(Path(name).stem) for name in checkpoints)
        found = [int(path.stem) for name, path in now.items() if name.endswith(".pt")]
        return "" if found and max(found) >= newest else f"checkpoint {newest} and later ones"
    if scenario.start != "replace":
        return ""
    kept = [name for name in now if before.get(name) == now[name].read_bytes()]
    important = [name for name in before if Path(name).suffix in (".pt", ".ply", ".obj")]
    if all(name in kept for name in important):
        return ""
    if checkpoints:
        new = [n for n in now if n.endswith(".pt") and n not in kept]
        return "" if new else "the old run is gone and the new one has no checkpoint"
    others = [name for name in important if name not in kept]
    wrong = [name for name in others if _differs(undisturbed.folder / name, folder / name)]
    return f"neither the old nor the new {', '.join(wrong)}" if wrong else ""


def differences(expected: Path, found: Path) -> list[str]:
    """Results that are not the same; what tells of time and place is left out."""
    names = {path.relative_to(expected).as_posix() for path in _results(expected)}
    others = {path.relative_to(found).as_posix() for path in _results(found)}
    wrong = []
    last = max((int(Path(n).stem) for n in names if n.endswith(".pt")), default=-1)
    for name in sorted(names | others):
        path = Path(name)
        if path.name in _JOURNALS or path.name.endswith(".lock"):
            continue
        in_between = path.suffix == ".pt" and int(path.stem) != last
        if name not in others or name not in names:
            if not in_between:
                wrong.append(f"{name} is {'missing' if name in names else 'too much'}")
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
    if expected.suffix == ".json" and "files" in (
        note := json.loads(expected.read_text(encoding="utf-8"))
    ):
        other = json.loads(found.read_text(encoding="utf-8"))
        return any(note[key] != other.get(key) for key in ("settings", "inputs", "files"))
    return expected.read_bytes() != found.read_bytes()
