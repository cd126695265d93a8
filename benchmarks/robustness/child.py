# SPDX-License-Identifier: Apache-2.0
"""Runs an entry point in a forked child with limits on memory and time. Linux only.

The parent has imported everything and loaded all kernels, so a child costs milliseconds. The parent
must have no other threads: one torch thread, no GPU.
"""

from __future__ import annotations

import faulthandler
import io
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sugar_utils.entrypoint import run_main

Main = Callable[[], int | None]
OUT, ERR, STACKS = "stdout.txt", "stderr.txt", "stacks.txt"
_GRACE = 60.0
"""Seconds between an interrupt and the end."""

_MEMORY = 3 << 30
"""Address space beyond the parent's."""


@dataclass(frozen=True)
class Limits:
    """Limits of a child; ``stacks`` are dumped before the time ends, which can crash it."""

    seconds: float = 30.0
    stacks: bool = True


@dataclass(frozen=True)
class Outcome:
    """End of a child; a negative code is the number of the signal that killed it."""

    code: int
    out: str
    err: str
    seconds: float
    late: bool = False
    stacks: str = ""


def run_child(
    main: Main,
    words: Sequence[str],
    folder: Path,
    notes: Path,
    limits: Limits,
    *,
    script: str = "train.py",
    prepare: Callable[[], None] | None = None,
    meanwhile: Callable[[int], None] | None = None,
) -> Outcome:
    """Run ``main`` as ``script`` would run it with the flags ``words`` in ``folder``.

    ``notes`` gets its output, and is its home and temporary folder; ``prepare`` is called in the
    child first, ``meanwhile`` in the parent with the child's process id.
    """
    notes.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_child(main, [script, *words], folder, notes, limits, prepare)
    if meanwhile is not None:
        meanwhile(pid)
    status, late = _wait(pid, started + limits.seconds)
    seconds = time.monotonic() - started
    out, err, stacks = (_text(notes / name) for name in (OUT, ERR, STACKS))
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, out, err, seconds, late, stacks if late else "")


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    return pages * os.sysconf("SC_PAGESIZE")


def limit(what: str, most: int) -> None:
    """Set a limit of this process by its name without ``RLIMIT_``."""
    import resource  # Not on Windows, where this file is still imported by checks.

    number = getattr(resource, f"RLIMIT_{what}")
    hard = resource.getrlimit(number)[1]
    resource.setrlimit(number, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _be_child(
    main: Main,
    argv: list[str],
    folder: Path,
    notes: Path,
    limits: Limits,
    prepare: Callable[[], None] | None,
) -> None:
    code = 1
    try:
        os.setsid()
        _redirect(notes)
        os.chdir(folder)
        os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = str(notes)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if limits.stacks:
            stacks = (notes / STACKS).open("w", encoding="utf-8")
            faulthandler.dump_traceback_later(max(0.1, limits.seconds - 0.2), file=stacks)
        limit("AS", address_space() + _MEMORY)
        limit("FSIZE", 1 << 30)
        limit("CORE", 0)
        sys.argv = argv
        if prepare is not None:
            prepare()
        code = _exit_code(main)
    except BaseException:
        traceback.print_exc()
    finally:
        # What the interpreter would do at exit, less what belongs to the parent.
        for leave in (threading._shutdown, sys.stdout.flush, sys.stderr.flush):
            try:
                leave()
            except BaseException:
                traceback.print_exc()
                code = code or 1
        os._exit(code & 0xFF)


def _exit_code(main: Main) -> int:
    try:
        return run_main(main)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
            return 1
        return int(leaving.code or 0)


def _redirect(notes: Path) -> None:
    """Standard streams as a shell makes them with ``< /dev/null > file 2> file``."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf-8")
    for number, stream, name in ((1, "stdout", OUT), (2, "stderr", ERR)):
        file = os.open(notes / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        setattr(sys, stream, io.TextIOWrapper(raw, "utf-8", line_buffering=number == 2))


def _wait(pid: int, deadline: float) -> tuple[int, bool]:
    """Status of the child, and whether it had to be ended."""
    handle = os.pidfd_open(pid)

    def ended(seconds: float) -> bool:
        return bool(select.select([handle], [], [], max(0.0, seconds))[0])

    try:
        late = not ended(deadline - time.monotonic())
        if late:
            os.killpg(pid, signal.SIGINT)
            if not ended(_GRACE):
                os.killpg(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1], late
    finally:
        os.close(handle)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "backslashreplace")
    except OSError:
        return ""
