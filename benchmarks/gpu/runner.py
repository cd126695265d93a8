# SPDX-License-Identifier: Apache-2.0
"""Runs checks in processes of their own, so that a check that breaks hides no other.

A process gets a module and the names of checks in it, and writes what it finds to a journal, line
by line. It ends itself when a check takes too long. The parent never touches the device.
"""

from __future__ import annotations

import contextlib
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
RETRY_SECONDS = 60.0
KILL_SECONDS = 5.0  # in which a process that was killed is gone


@dataclass(frozen=True)
class Section:
    """Checks of one module, its tuple ``CHECKS``."""

    name: str
    module: str
    share: float  # of the whole time
    is_apart: bool = False  # whether each check has a process of its own


@dataclass
class Row:
    """One line of the table; ``what`` is empty where it is about a check as a whole."""

    section: str
    check: str
    what: str
    status: str
    shown: str
    figures: dict[str, Any] = field(default_factory=dict)


class Runner:
    """Runs the checks of one section, process after process, until a monotonic ``deadline``.

    ``setup`` has the arguments of ``common.Setup``; ``folder`` is for journals.
    """

    def __init__(
        self, section: Section, setup: dict[str, Any], deadline: float, folder: Path
    ) -> None:
        self.rows: list[Row] = []
        self._section, self._setup = section, setup
        self._deadline, self._folder = deadline, folder
        self._n_processes = 0
        folder.mkdir(exist_ok=True)

    def run(self) -> list[Row]:
        """All rows of the section."""
        left: list[str] | None = None
        while left is None or left:
            if time.monotonic() > self._deadline:
                for name in left or ["all"]:
                    self._add(name, SKIPPED, OUT_OF_TIME)
                break
            known, done, current, reason = self._one_process(left, {})
            status = SKIPPED if reason == OUT_OF_TIME else FAILED
            if current is not None:
                self._add(current, status, reason or "the process ended unexpectedly")
                done.append(current)
            elif not done:
                self._add("process", status, reason or "the process did nothing")
                break
            left = [name for name in left or known if name not in done]
        return self.rows

    def _one_process(
        self, names: Sequence[str] | None, environment: dict[str, str]
    ) -> tuple[list[str], list[str], str | None, str]:
        """Run one process: names of all checks, of those done, the unfinished one, and why."""
        self._n_processes += 1
        journal = self._folder / f"journal_{self._n_processes}.jsonl"
        output = journal.with_suffix(".txt")
        order = {
            "module": self._section.module,
            "checks": names,
            "is_apart": self._section.is_apart,
            "setup": self._setup,
            "journal": str(journal),
        }
        journal.touch()
        reason = ""
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), "--worker", json.dumps(order)],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
            code = 0
            try:
                code = process.wait(timeout=max(0.1, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                reason = OUT_OF_TIME
                process.kill()
                # A process that the driver holds ends when it lets go; the others do not wait.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=KILL_SECONDS)
        known, done, current = self._read(journal)
        return known, done, current, reason or _how_it_ended(code, output)

    def _read(self, journal: Path) -> tuple[list[str], list[str], str | None]:
        known, done, current = [], [], None
        # The last line may be incomplete.
        for line in journal.read_text(encoding="utf-8").split("\n")[:-1]:
            event = json.loads(line)
            kind, name = event["event"], event.get("check")
            if kind == "checks":
                known = event["checks"]
            elif kind == "start":
                current = name
            elif kind == "finding":
                status = OK if event["ok"] else FAILED
                self._add(name, status, event["shown"], event["what"], event["figures"])
            elif kind == "skipped":
                self._add(name, SKIPPED, event["reason"])
            elif kind == "error":
                self._add(name, FAILED, event["reason"], figures={"trace": event["trace"]})
            if kind in ("skipped", "error", "end"):
                done.append(name)
                current = None
        return known, done, current

    def _add(
        self, check: str, status: str, shown: str, what: str = "", figures: dict | None = None
    ) -> None:
        self.rows.append(Row(self._section.name, check, what, status, shown, figures or {}))

    def explain(self) -> None:
        """Run checks that broke once more with launches that block, to find the call at fault."""
        broken = [row for row in self.rows if row.status == FAILED and not row.what]
        for number, row in enumerate(broken):
            until = min(self._deadline, time.monotonic() + RETRY_SECONDS)
            if row.check == "process" or until < time.monotonic() + 10:
                continue
            again = Runner(self._section, self._setup, until, self._folder / f"again_{number}")
            *_, reason = again._one_process([row.check], {"CUDA_LAUNCH_BLOCKING": "1"})
            errors = [r for r in again.rows if r.status == FAILED]
            told = errors[0].shown if errors else reason or "passes then"
            row.shown += f" | with blocking launches: {told}"
            row.figures["blocking"] = [asdict(r) for r in errors]


def _how_it_ended(code: int, output: Path) -> str:
    """Exit code and the last line of output, which is where native code complains."""
    if code == 0:
        return ""
    text = output.read_text(encoding="utf-8", errors="replace")
    if text.startswith("Timeout (") or "\nTimeout (" in text:
        return "took too long"
    lines = [line for line in text.splitlines() if line.strip()]
    said = f": {lines[-1].strip()[:300]}" if lines else ""
    return f"the process ended with code {code}{said}"
