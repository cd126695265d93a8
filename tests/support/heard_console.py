# SPDX-License-Identifier: Apache-2.0
"""A console for tests of what a program says."""

from __future__ import annotations

from sugar_utils.console import Console


class Heard(Console):
    """A console that keeps its messages."""

    def __init__(self) -> None:
        super().__init__(stream=Console.silent()._stream, terminal=False)
        self.lines: list[str] = []

    def info(self, message: str) -> None:
        self.lines.append(message)
