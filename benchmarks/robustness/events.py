# SPDX-License-Identifier: Apache-2.0
"""Counts file system events of a process, and lets something happen at one of them.

An event is an ``open``, ``write``, ``fsync``, ``replace``, ``mkdir``, ``unlink`` or ``read`` that
Python code performs, in whatever package. Installed in a forked child, never to be removed.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Happening = Callable[[int, str, Any], None]
"""(number of the event, its kind, path or descriptor) -> None; may raise what the system would."""

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT)
_CHANGES = ("fsync", "replace", "rename", "mkdir", "unlink", "remove", "rmdir", "truncate", "link")


class Events:
    """The events of a process below some folders; ``happening`` is called before each."""

    def __init__(self, roots: tuple[Path, ...], happening: Happening) -> None:
        self._roots = tuple(f"{root}/" for root in roots)
        self._happening = happening
        self._inside = threading.local()
        self._count = 0

    def add(self, kind: str, path: object) -> None:
        """Count an event and let happen what was planned for it."""
        if getattr(self._inside, "busy", False) or not self._counts(path):
            return
        self._count += 1
        self._inside.busy = True
        try:
            self._happening(self._count, kind, path)
        finally:
            self._inside.busy = False

    def _counts(self, path: Any) -> bool:
        try:
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            place = os.path.abspath(os.fsdecode(path))
        except (TypeError, ValueError, OSError):
            return False
        return f"{place}/".startswith(self._roots)


def install(events: Events) -> None:
    """Let all file access of this process go through ``events``."""
    _replace_open(events)
    for name in _CHANGES:
        setattr(os, name, _counted(getattr(os, name), name, events))
    original = os.open

    def counted(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        events.add("open" if writes else "read", path)
        return original(path, flags, *arguments, **options)

    os.open = counted


def _counted(original: Callable[..., Any], kind: str, events: Events) -> Callable[..., Any]:
    def counted(path: Any, *arguments: Any, **options: Any) -> Any:
        events.add(kind, path)
        return original(path, *arguments, **options)

    return counted


def _replace_open(events: Events) -> None:
    original = builtins.open

    class Counted(io.FileIO):
        """A file whose writes are events; the buffers above it are Python's own."""

        def __init__(self, file: Any, mode: str, closefd: bool, opener: Any) -> None:
            events.add("open", file)
            super().__init__(file, mode, closefd, opener)

        def write(self, data: Any) -> int:
            events.add("write", self.fileno())
            return super().write(data)

    def counted(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+"):
            events.add("read", file)
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = Counted(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffer
        text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode
        return text

    builtins.open = io.open = counted


def failing(number: int, error: int, *, for_good: bool) -> Happening:
    """Make one event fail, or all that change anything from one on."""

    def happen(now: int, kind: str, path: Any) -> None:
        later = for_good and now > number and kind not in ("read", "unlink", "remove", "rmdir")
        if now == number or later:
            # Operations on an open file fail without a name.
            named = () if isinstance(path, int) else (path,)
            raise OSError(error, os.strerror(error), *named)

    return happen


def doing(number: int, action: Callable[[], None]) -> Happening:
    """Do something once, before one event."""

    def happen(now: int, kind: str, path: Any) -> None:
        if now == number:
            action()

    return happen
