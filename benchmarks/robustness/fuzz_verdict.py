# SPDX-License-Identifier: Apache-2.0
"""Whether a program that was given rubbish behaved: what it said, wrote and left alone."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from plyfile import PlyData

from benchmarks.robustness.child import Outcome
from gaussian_splatting.data.colmap import read_reconstruction
from sugar_extractors.export.export_run import read_as_written
from tests.support.tiny_scene import assert_same_bits

REFUSED = {2: "error: ", 3: "error: ", 4: "error: "}
STOPPED = (130, 143)
FAULTS = ("traceback", "hang", "crash", "noise", "lost", "leftover", "wrong")
_TRACE = re.compile(r'^Traceback \(most recent|^  File "|^Exception ignored', re.MULTILINE)
_NOISE = re.compile(
    r"^(.*\.py:\d+: )?\w*Warning: |^[WEF]\d{8} |^\[[WE]\d+|^\*\*\* |terminate called|^\w+Error: ",
    re.MULTILINE,
)
_LAST_LINE = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit|Warning)\b(: |$)")
_WARNING_LINE = re.compile(r"^warning: .*\n", re.MULTILINE)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_JOURNALS = {"log.txt", "run.json", "report.html", "convert.html"}
"""What a run may change although it fails: where it notes that it was tried."""

NOT_RESULTS = {"tensorboard", "distorted"}
"""Folders of events, and of what ``convert.py`` makes on the way."""

_FALLBACK = "the checkpoint before it is tried"
_BIG = 1 << 20


@dataclass(frozen=True)
class Expectation:
    """What the judge knows of a case.

    Attributes:
        root: The world.
        before: Its files before the run.
        inputs: Parts of it that are never written to.
        lengthy: Whether being stopped is as good as ending.
        same_bits: A checkpoint and the one that it must equal after a success.
        if_fallback: Whether it must only if an earlier checkpoint was taken.
    """

    root: Path
    before: dict[str, Any]
    inputs: tuple[str, ...]
    lengthy: bool = False
    same_bits: tuple[Path, Path] | None = None
    if_fallback: bool = False


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        end: ``refused``, ``accepted`` or ``stopped``; empty where it did not end in good order.
        faults: Names out of ``FAULTS``, each with what was seen.
    """

    end: str
    faults: dict[str, str]


def snapshot(root: Path) -> dict[str, Any]:
    """Everything below a folder, by relative path: what it is, and what is in it."""
    return {path.relative_to(root).as_posix(): _state(path) for path in root.rglob("*")}


def _state(path: Path) -> Any:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "link", str(path.readlink())
    if not stat.S_ISREG(status.st_mode):
        return (stat.S_IFMT(status.st_mode),)
    if status.st_size > _BIG:
        return status.st_size, status.st_mtime_ns
    return status.st_size, hashlib.blake2b(path.read_bytes()).hexdigest()


def judge(outcome: Outcome, case: Expectation) -> Verdict:
    """Look at an outcome, and at what is in the world now."""
    faults: dict[str, str] = {}
    end = _end(outcome, case, faults)
    look_at_texts(outcome, end, faults)
    after = snapshot(case.root)
    _look_for_losses(case, after, end, faults)
    left = sorted(path for path in after if ".tmp-" in path and path not in case.before)
    if left:
        faults["leftover"] = ", ".join(left[:3])
    if end == "accepted":
        wrong = _wrong_results(case, after)
        if not case.if_fallback or _FALLBACK in outcome.out:
            wrong += _other_bits(case)
        if wrong:
            faults["wrong"] = "; ".join(wrong[:3])
    return Verdict(end, faults)


def _end(outcome: Outcome, case: Expectation, faults: dict[str, str]) -> str:
    if outcome.late:
        # It may also have been about to end.
        if case.lengthy and outcome.code in (0, *STOPPED):
            return "stopped" if outcome.code else "accepted"
        faults["hang"] = last_frame(outcome.stacks) or f"{outcome.seconds:.0f} s"
        return ""
    if outcome.code == 0:
        return "accepted"
    if outcome.code in REFUSED:
        return "refused"
    if outcome.code in STOPPED:
        return "stopped"
    if not _TRACE.search(outcome.err):
        faults["crash"] = f"exit code {outcome.code}"
    return ""


def look_at_texts(
    outcome: Outcome, end: str, faults: dict[str, str], *, warnings: bool = False
) -> None:
    """Find what no user should have to read.

    Args:
        outcome: What was said.
        end: How the process ended.
        faults: Gets what was found.
        warnings: Whether lines of warning on the standard error are in order.
    """
    both = outcome.out + "\n" + outcome.err
    if _TRACE.search(both):
        faults["traceback"] = last_frame(both)
        return
    noise = _NOISE.search(both)
    if noise:
        faults["noise"] = both[noise.start() :].split("\n")[0][:300]
    elif _CONTROL.search(both):
        at = _CONTROL.search(both).start()
        faults["noise"] = f"control character in {both[max(0, at - 60) : at + 20]!r}"
    err = _WARNING_LINE.sub("", outcome.err) if warnings else outcome.err
    if faults:
        return
    if end == "refused" and not _is_one_line(err, REFUSED[outcome.code]):
        faults["noise"] = f"not one line: {err[:300]!r}"
    elif end == "accepted" and err:
        faults["noise"] = f"on the standard error: {err[:300]!r}"


def _is_one_line(text: str, beginning: str) -> bool:
    # str.splitlines would also split at separators that terminals do not know.
    return text.startswith(beginning) and text.count("\n") == 1 and text.endswith("\n")


def last_frame(text: str) -> str:
    """Where a traceback ends, in our files if it passes them, and its last line."""
    frames = re.findall(r'^  File "(.*?)", line (\d+),? in (.*)$', text, re.MULTILINE)
    ours = [f for f in frames if "site-packages" not in f[0] and "/lib/python" not in f[0]]
    if not frames:
        return ""
    # A dump of stacks has its innermost frame first, a traceback last.
    dump = "most recent call first" in text
    path, line, name = (ours or frames)[0 if dump else -1]
    lines = [
        line
        for line in text.splitlines()
        if re.match(r"^[\w.]+(Error|Exception|Warning)?: |^[\w.]+Error$", line)
    ]
    place = "/".join(Path(path).parts[-2:])
    return f"{place}:{line} {name}: {lines[-1][:160] if lines and not dump else ''}".rstrip(": ")


def _look_for_losses(
    case: Expectation, after: dict[str, Any], end: str, faults: dict[str, str]
) -> None:
    lost = []
    for path, state in case.before.items():
        parts = Path(path).parts
        is_input = parts[0] in case.inputs
        journal = Path(path).name in _JOURNALS or NOT_RESULTS & set(parts)
        if after.get(path) != state and (is_input or (end != "accepted" and not journal)):
            lost.append(f"{path} {'changed' if path in after else 'is gone'}")
    if lost:
        faults["lost"] = "; ".join(lost[:3])


def _wrong_results(case: Expectation, after: dict[str, Any]) -> list[str]:
    """New or changed files that hold no numbers, or others than they must."""
    wrong = []
    for name, state in after.items():
        if case.before.get(name) == state or not isinstance(state[0], int) or len(state) < 2:
            continue
        what = wrong_in(case.root / name)
        if what:
            wrong.append(f"{name}: {what}")
    return wrong


def _other_bits(case: Expectation) -> list[str]:
    if case.same_bits is None:
        return []
    own, undisturbed = case.same_bits
    try:
        assert_same_bits(own, undisturbed)
    except (AssertionError, OSError) as error:
        return [f"{own.name} differs from that of an undisturbed run ({error})"]
    return []


def wrong_in(path: Path) -> str:
    """What is wrong with a result; nothing where it is of a kind that has no numbers."""
    try:
        if path.suffix == ".pt":
            return _wrong_tensors(torch.load(path, weights_only=True))
        if path.suffix == ".ply":
            return _wrong_columns(PlyData.read(str(path)))
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        if path.suffix in (".spz", ".splat") or path.name.endswith(".gltf.glb"):
            cloud = read_as_written(path, lambda line: None)
            return (
                ""
                if all(values.isfinite().all() for values in vars(cloud).values())
                else "not finite"
            )
        if path.name == "cameras.bin":
            read_reconstruction(path.parent)
        if path.suffix == ".png":
            with Image.open(path) as image:
                image.load()
        if path.suffix == ".obj" and re.search(
            r"\b(nan|inf)\b", path.read_text(encoding="utf-8"), re.IGNORECASE
        ):
            return "not finite"
    # Whatever a reader trips over is the file's fault.
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return ""


def _wrong_tensors(payload: Any) -> str:
    for name, tensor in _tensors(payload, ""):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
    return ""


def _tensors(value: Any, name: str) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")


def _wrong_columns(data: PlyData) -> str:
    for element in data.elements:
        for column in element.properties:
            values = element[column.name]
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                return f"{column.name} is not finite"
    return ""


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
