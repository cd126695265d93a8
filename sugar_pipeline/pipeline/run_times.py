# SPDX-License-Identifier: Apache-2.0
"""Durations of the parts of a run, stored in its folder of results for later calls."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from sugar_utils.errors import UserError
from sugar_utils.files import read_json, write_json_atomic
from sugar_utils.schemas import conform

TIMES_FILE = "times.json"


class _PartTime(msgspec.Struct):
    """The time that a part of a run took to make a file."""

    made: int  # when the file was written, in nanoseconds
    seconds: float


class _TimesFile(msgspec.Struct):
    """``times.json``."""

    parts: dict[str, _PartTime]


class RunTimes:
    """Seconds of each part of a run, and their sum: the one duration that is printed of the run.

    A run that was interrupted goes on in another process, and one that is finished may be called
    again. A part that wrote nothing this time has the seconds of the process in which it did. What
    an interrupted part took is not counted.

    Args:
        path: File of the notes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._earlier: dict[str, _PartTime] = {}
        self._parts: dict[str, _PartTime] = {}
        # Notes that are damaged are written again.
        with contextlib.suppress(UserError):
            if path.is_file():
                self._earlier = conform(read_json(path), _TimesFile, path).parts

    @property
    def total(self) -> float:
        """Seconds of all parts that were added."""
        return sum(part.seconds for part in self._parts.values())

    def add(self, name: str, seconds: float, result: Path) -> float:
        """Add a part that has ended; return the seconds that its result took.

        Args:
            name: Of the part.
            seconds: That it took in this process.
            result: A file that it writes.
        """
        write_time = result.stat().st_mtime_ns if result.exists() else 0
        earlier = self._earlier.get(name)
        if earlier is not None and earlier.made == write_time:
            seconds = earlier.seconds
        self._parts[name] = _PartTime(write_time, seconds)
        return seconds

    def write(self) -> None:
        """Write the notes, where something has changed."""
        parts = {**self._earlier, **self._parts}
        if parts != self._earlier:
            write_json_atomic(self._path, msgspec.to_builtins(_TimesFile(parts)))
            self._earlier = parts
