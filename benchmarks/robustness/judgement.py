# SPDX-License-Identifier: Apache-2.0
"""Whether a program behaved: what it printed, wrote and left alone."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from plyfile import PlyData

from benchmarks.robustness.child import Outcome
from gaussian_splatting.data.colmap import read_reconstruction
from gaussian_splatting.scenes.scene_path import NOTE
from sugar_extractors.export.reading import read_as_written
from tests.support.tiny_scene import assert_same_bits

ENDS = ("refused", "accepted", "stopped")
FAULTS = ("traceback", "hang", "crash", "noise", "lost", "leftover", "wrong")
JOURNALS = {"log.txt", "run.json", "report.html", "convert.html", "times.json", "finished.json"}
"""Files that a run may change although it fails."""

NOT_RESULTS = {"tensorboard", "distorted"}
"""Folders of events, and of intermediate files of ``convert.py``."""

_TRACE = re.compile(r'^Traceback \(most recent|^  File "|^Exception ignored', re.MULTILINE)
_NOISE = re.compile(
    r"^(.*\.py:\d+: )?\w*Warning: |^[WEF]\d{8} |^\[[WE]\d+|^\*\*\* |terminate called|^\w+Error: "
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f]",
    re.MULTILINE,
)
_WARNING_LINE = re.compile(r"^warning: .*\n", re.MULTILINE)
_NOTE_LINE = re.compile(r"^note: .* is taken for --.*\n", re.MULTILINE)
_FALLBACK = "the checkpoint before it is tried"


@dataclass(frozen=True)
class Expectation:
    """The world, its :func:`snapshot` before the run, and parts that are never written to.

    Being stopped is as good as ending where a case is ``lengthy``. ``same_bits`` are a checkpoint
    and the one that it must equal after a success, or only if an earlier one was used.
    """

    root: Path
    before: dict[str, Any]
    inputs: tuple[str, ...]
    lengthy: bool = False
    same_bits: tuple[Path, Path] | None = None
    if_fallback: bool = False


@dataclass(frozen=True)
class Judgement:
    """One of ``ENDS``, or empty; names out of ``FAULTS``, each with what was found."""

    end: str
    faults: dict[str, str]


def snapshot(root: Path) -> dict[str, Any]:
    """Everything below a folder, by relative path: what it is, and its content."""
    return {path.relative_to(root).as_posix(): _state(path) for path in root.rglob("*")}


def _state(path: Path) -> Any:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "link", str(path.readlink())
    if not stat.S_ISREG(status.st_mode):
        return (stat.S_IFMT(status.st_mode),)
    if status.st_size > 1 << 20:
        return status.st_size, status.st_mtime_ns
    return status.st_size, hashlib.blake2b(path.read_bytes()).hexdigest()


def judge(outcome: Outcome, case: Expectation) -> Judgement:
    """Look at an outcome, and at what is in the world now."""
    faults: dict[str, str] = {}
    end = end_of(outcome)
    if outcome.late and not (case.lengthy and end in ("accepted", "stopped")):
        faults["hang"] = last_frame(outcome.stacks) or f"{outcome.seconds:.0f} s"
        end = ""
    elif not end and not _TRACE.search(outcome.err):
        faults["crash"] = f"exit code {outcome.code}"
    judge_output(outcome, end, faults)
    after = snapshot(case.root)
    found = {
        "lost": list(_lost(case, after, end)),
        "leftover": sorted(
            path for path in after if _is_temporary(path) and path not in case.before
        ),
        "wrong": list(_wrong_results(case, after, outcome)) if end == "accepted" else [],
    }
    return Judgement(end, faults | {k: "; ".join(what[:3]) for k, what in found.items() if what})


def _is_temporary(path: str) -> bool:
    return ".tmp-" in path or ".unpacking-" in path


def end_of(outcome: Outcome) -> str:
    """Name the end of a process by its exit code; empty: badly."""
    ends = {0: "accepted", **dict.fromkeys((2, 3, 4), "refused"), 130: "stopped", 143: "stopped"}
    return ends.get(outcome.code, "")


def judge_output(
    outcome: Outcome, end: str, faults: dict[str, str], *, warnings: bool = False
) -> None:
    """Find tracebacks, noise and errors of more than one line; ``warnings`` may allow others."""
    both = outcome.out + "\n" + outcome.err
    if _TRACE.search(both):
        faults["traceback"] = last_frame(both)
        return
    noise = _NOISE.search(both)
    if noise:
        faults["noise"] = repr(both[max(0, noise.start() - 60) : noise.start() + 200])
    err = _NOTE_LINE.sub("", outcome.err)
    if warnings:
        err = _WARNING_LINE.sub("", err)
    # str.splitlines would also split at separators that terminals do not know.
    one_line = err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    if faults:
        return
    if end == "refused" and not one_line:
        faults["noise"] = f"not one line: {err[:300]!r}"
    elif end == "accepted" and err:
        faults["noise"] = f"on the standard error: {err[:300]!r}"


def last_frame(text: str) -> str:
    """Where a traceback or a dump of stacks ends, in our files if it passes them."""
    frames = re.findall(r'^  File "(.*?)", line (\d+),? in (.*)$', text, re.MULTILINE)
    if not frames:
        return ""
    ours = [f for f in frames if "site-packages" not in f[0] and "/lib/python" not in f[0]]
    # A dump has its innermost frame first, a traceback last.
    dump = "most recent call first" in text
    path, line, name = (ours or frames)[0 if dump else -1]
    errors = re.findall(r"^(?:[\w.]+(?:Error|Exception|Warning)?: .*|[\w.]+Error)$", text, re.M)
    last = errors[-1][:160] if errors and not dump else ""
    return f"{'/'.join(Path(path).parts[-2:])}:{line} {name}: {last}".rstrip(": ")


def _lost(case: Expectation, after: dict[str, Any], end: str) -> Iterator[str]:
    for path, state in case.before.items():
        parts = Path(path).parts
        journal = parts[-1] in JOURNALS or NOT_RESULTS & set(parts)
        kept = parts[0] in case.inputs or (end != "accepted" and not journal)
        if kept and after.get(path) != state:
            yield f"{path} {'changed' if path in after else 'is gone'}"


def _wrong_results(case: Expectation, after: dict[str, Any], outcome: Outcome) -> Iterator[str]:
    """New or changed files without finite numbers, and a checkpoint that differs."""
    for name, state in after.items():
        changed = case.before.get(name) != state and isinstance(state[0], int) and len(state) > 1
        # What was unpacked is a copy of an input, which may hold what is damaged and left out.
        is_unpacked = any(f"{folder.as_posix()}/{NOTE}" in after for folder in Path(name).parents)
        if changed and not is_unpacked and (what := wrong_in(case.root / name)):
            yield f"{name}: {what}"
    if case.same_bits is None or (case.if_fallback and _FALLBACK not in outcome.out):
        return
    try:
        assert_same_bits(*case.same_bits)
    except (AssertionError, OSError) as error:
        yield f"{case.same_bits[0].name} differs from that of an undisturbed run ({error})"


def wrong_in(path: Path) -> str:
    """Return the faults of a result; empty for kinds without numbers."""
    try:
        bad = _not_finite(path)
    # Anything that a reader raises is the file's fault.
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return f"{bad} is not finite" if bad else ""


def _not_finite(path: Path) -> str:
    """Name of what is not finite in a file that can be read."""
    named: dict[str, Any] = {}
    if path.suffix == ".pt":
        named = dict(_tensors(torch.load(path, weights_only=True), "contents"))
    elif path.suffix == ".ply":
        elements = PlyData.read(str(path)).elements
        named = {
            c.name: torch.from_numpy(np.array(e[c.name]))
            for e in elements
            for c in e.properties
            if e[c.name].dtype.kind == "f"
        }
    elif path.suffix in (".spz", ".splat", ".usd") or path.name.endswith(".gltf.glb"):
        named = read_as_written(path, lambda line: None).tensors()
    elif path.suffix == ".json":
        json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    elif path.name == "cameras.bin":
        read_reconstruction(path.parent)
    elif path.suffix == ".png":
        with Image.open(path) as image:
            image.load()
    elif path.suffix == ".obj":
        text = path.read_text(encoding="utf-8")
        return "a vertex" if re.search(r"\b(nan|inf)\b", text, re.IGNORECASE) else ""
    return next((name for name, values in named.items() if not bool(values.isfinite().all())), "")


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
