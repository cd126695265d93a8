# SPDX-License-Identifier: Apache-2.0
"""What the doctor finds, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sugar_utils.console import Console

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: Its name.
        value: What was found.
        state: A warning costs quality or time; with a problem, training fails or runs elsewhere
            than one expects.
        advice: What to do about it; empty where nothing has to be done.
    """

    what: str
    value: str
    state: State = "ok"
    advice: str = ""

    @classmethod
    def unless(cls, fault: bool, what: str, value: str, state: State, advice: str) -> Finding:
        """In order unless there is a fault; then in that state, with that advice."""
        return cls(what, value, state, advice) if fault else cls(what, value)


def show(console: Console, title: str, findings: Iterable[Finding]) -> None:
    """Print findings below each other, each with its state and what to do."""
    rows = []
    for finding in findings:
        rows.append((finding.what, f"{finding.state:<8} {finding.value}"))
        if finding.advice:
            rows.append(("", f"         -> {finding.advice}"))
    console.table(title, rows)
