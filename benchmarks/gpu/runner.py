# SPDX-License-Identifier: Apache-2.0
"""Runs checks in processes of their own, so that what breaks in one of them hides no other.

A process gets the name of a module and of checks in it, and writes what it finds to a journal,
line by line as it finds it. The watching process never touches the device.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("check.py")
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
OUT_OF_TIME = "out of time: give more --minutes, or run again, now that kernels are compiled"
POLL_SECONDS = 0.05
RETRY_SECONDS = 60.0
START_SECONDS = 90.0
"""How long a process may take to import everything and name its checks."""


def missing_packages(names: Sequence[str]) -> list[str]:
    """Those that are not installed."""
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


@dataclass(frozen=True)
class Section:
    """Checks that share a module.

    Attributes:
        name: As ``--sections`` takes it.
        module: Has the tuple ``CHECKS``.
        share: Of the whole time; what earlier sections leave over is added.
        needs: Packages beyond torch, NumPy, warp, Pillow and psutil, as they are imported.
    """

    name: str
    module: str
    share: float
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Those of them that are not installed."""
        return missing_packages(self.needs)


@dataclass
class Row:
    """One line of the table.

    Attributes:
        section: Name of the section.
        check: Name of the check.
        what: What was looked at.
        status: ``ok``, ``FAILED`` or ``skipped``.
        shown: A figure or a reason.
        figures: The same and more for programs.
    """

    section: str
    check: str
    what: str
    status: str
    shown: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Progress:
    """What the journal of a process has told so far.

    Attributes:
        checks: Names and limits in seconds of all checks of the section; None before it said so.
        done: Names of those that ended, in whatever way.
        current: The one at work.
        since: When it, or the process, began. Monotonic seconds.
    """

    checks: dict[str, float] | None = None
    done: list[str] = field(default_factory=list)
    current: str | None = None
    since: float = field(default_factory=time.monotonic)


class Runner:
    """Runs the checks of one section, process after process.

    Args:
        section: The section.
        setup: Arguments of ``common.Setup``.
        deadline: When no check may run any more. Monotonic seconds
        folder: For journals, of nobody else.
    """

    def __init__(
        self, section: Section, setup: dict[str, Any], deadline: float, folder: Path
    ) -> None:
        self.rows: list[Row] = []
        self._section = section
        self._setup = setup
        self._deadline = deadline
        self._folder = folder
        self._n_processes = 0
        folder.mkdir(exist_ok=True)

    def run(self) -> list[Row]:
        """All rows of the section."""
        if self._section.missing:
            self.rows.append(self._row("all", SKIPPED, f"needs {', '.join(self._section.missing)}"))
            return self.rows
        progress = Progress()
        while progress.checks is None or set(progress.checks) - set(progress.done):
            if time.monotonic() > self._deadline:
                rest = [c for c in progress.checks or ["all"] if c not in progress.done]
                self.rows += [self._row(name, SKIPPED, OUT_OF_TIME) for name in rest]
                break
            left, n_done = None, len(progress.done)
            if progress.checks is not None:
                left = [name for name in progress.checks if name not in progress.done]
            reason = self._one_process(progress, left, {})
            progress.since = time.monotonic()
            if progress.current is not None:
                # It neither ended nor reported: a crash, or it was stopped.
                if reason == OUT_OF_TIME:
                    self.rows.append(self._row(progress.current, SKIPPED, reason))
                else:
                    self._fail(progress.current, reason or "the process ended without a word")
                progress.done.append(progress.current)
                progress.current = None
            elif reason != OUT_OF_TIME and (reason or len(progress.done) == n_done):
                self._fail("process", reason or "the process did nothing")
                if len(progress.done) == n_done:
                    break
        return self.rows

    def _one_process(
        self, progress: Progress, names: Sequence[str] | None, environment: dict[str, str]
    ) -> str:
        """Run one process until it ends; why it did, if that was no good reason."""
        self._n_processes += 1
        journal = self._folder / f"journal_{self._n_processes}.jsonl"
        output = journal.with_suffix(".txt")
        order = {
            "module": self._section.module, "checks": names, "setup": self._setup,
            "journal": str(journal),
        }  # fmt: skip
        journal.touch()
        with output.open("wb") as sink, journal.open(encoding="utf-8") as told:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), "--worker", json.dumps(order)],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
            try:
                stopped = self._follow(process, told, progress)
            finally:
                _kill(process)
            self._read(told, progress)
        if stopped:
            return stopped
        return "" if process.returncode == 0 else _how_it_ended(process.returncode, output)

    def _follow(self, process: subprocess.Popen, told: Any, progress: Progress) -> str:
        """Wait for the end; the reason if the process had to be stopped."""
        while process.poll() is None:
            self._read(told, progress)
            now = time.monotonic()
            limit = (progress.checks or {}).get(progress.current or "", START_SECONDS)
            if now - progress.since > limit:
                return f"stopped after {limit:g} s"
            if now > self._deadline:
                return OUT_OF_TIME
            time.sleep(POLL_SECONDS)
        return ""

    def _read(self, told: Any, progress: Progress) -> None:
        while True:
            place, line = told.tell(), told.readline()
            if not line.endswith("\n"):
                # Nothing more, or a line that is still being written.
                told.seek(place)
                return
            event = json.loads(line)
            kind, name = event["event"], event.get("check")
            if kind == "checks":
                progress.checks = progress.checks or event["checks"]
                progress.since = time.monotonic()
            elif kind == "start":
                progress.current, progress.since = name, time.monotonic()
            elif kind == "finding":
                status = OK if event["ok"] else FAILED
                row = self._row(name, status, event["shown"])
                row.what, row.figures = event["what"], event["figures"]
                self.rows.append(row)
            elif kind == "skipped":
                self.rows.append(self._row(name, SKIPPED, event["reason"]))
            elif kind == "error":
                self._fail(name, event["reason"], event["trace"])
            if kind in ("skipped", "error", "end"):
                progress.done.append(name)
                progress.current, progress.since = None, time.monotonic()

    def _row(self, check: str, status: str, shown: str) -> Row:
        return Row(self._section.name, check, "", status, shown)

    def _fail(self, check: str, reason: str, trace: str = "") -> None:
        row = self._row(check, FAILED, reason)
        row.figures = {"trace": trace} if trace else {}
        self.rows.append(row)

    def explain(self) -> None:
        """Run checks that broke once more with launches that block, to find the call at fault."""
        broken = [row for row in self.rows if row.status == FAILED and not row.what]
        for number, row in enumerate(broken):
            now = time.monotonic()
            until = min(self._deadline, now + RETRY_SECONDS)
            if row.check == "process" or until < now + 10:
                continue
            folder = self._folder / f"again_{number}"
            again = Runner(self._section, self._setup, until, folder)
            reason = again._one_process(Progress(), [row.check], {"CUDA_LAUNCH_BLOCKING": "1"})
            errors = [r for r in again.rows if r.status == FAILED]
            told = errors[0].shown if errors else reason or "passes then"
            row.shown += f" | with blocking launches: {told}"
            row.figures["blocking"] = [asdict(r) for r in errors]


def _kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def _how_it_ended(code: int, output: Path) -> str:
    """Exit code and the last line of output, which is where native code complains."""
    lines = [
        x for x in output.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()
    ]
    said = f": {lines[-1].strip()[:300]}" if lines else ""
    return f"the process ended with code {code}{said}"
