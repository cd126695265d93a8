# SPDX-License-Identifier: Apache-2.0
"""Runs an entry point in a forked child: limits on memory and time, its own folder, its own output.

The parent has imported everything and loaded all kernels, so that a child costs milliseconds. What
is forked must have no threads: one thread for torch, and no GPU. Linux only.
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

from sugar_utils.frame import run_main

Main = Callable[[], int | None]
OUT, ERR, STACKS = "stdout.txt", "stderr.txt", "stacks.txt"
_GRACE = 60.0


@dataclass(frozen=True)
class Limits:
    """What a child may use.

    Attributes:
        seconds: By the clock; then it is interrupted and, when that does not help, killed.
        memory: Bytes of address space beyond what the parent has.
        file_size: Bytes of the largest file that it may write.
        stacks: Whether to note where it is before its time ends, which can crash it.
    """

    seconds: float = 30.0
    memory: int = 3 << 30
    file_size: int = 1 << 30
    stacks: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    Attributes:
        code: Exit code; minus the number of the signal that killed it.
        out: Standard output.
        err: Standard error.
        seconds: By the clock.
        late: Whether it went beyond its time.
        stacks: Where all its threads were shortly before that.
    """

    code: int
    out: str
    err: str
    seconds: float
    late: bool = False
    stacks: str = ""


@dataclass(frozen=True)
class Command:
    """An entry point with flags that work on the untouched world.

    Attributes:
        name: In reports.
        script: As its users call it.
        main: Its function.
        flags: Relative to the root of the world.
        needs: Parts of the world that it reads.
    """

    name: str
    script: str
    main: Main
    flags: tuple[str, ...]
    needs: tuple[str, ...]


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
    """Run ``main`` as ``script`` would with the flags ``words``.

    Args:
        main: The entry point's function.
        words: Flags and values.
        folder: Working directory.
        notes: Folder for what it prints; also its home and its place for temporary files.
        limits: What it may use.
        script: Its name in ``sys.argv``.
        prepare: Called in the child before anything else of it runs.
        meanwhile: Called in the parent with the number of the child while it runs.
    """
    notes.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_child(main, words, folder, notes, limits, script, prepare)
    if meanwhile is not None:
        meanwhile(pid)
    status, late = _wait(pid, started + limits.seconds)
    seconds = time.monotonic() - started
    code = os.waitstatus_to_exitcode(status)
    out, err, stacks = (_text(notes / name) for name in (OUT, ERR, STACKS))
    return Outcome(code, out, err, seconds, late, stacks if late else "")


def address_space() -> int:
    """Bytes of address space that this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    return pages * os.sysconf("SC_PAGESIZE")


def limit(what: str, most: int) -> None:
    """Set a limit of this process by its name without ``RLIMIT_``."""
    # Windows has no such module, and what imports this file is checked there, too.
    import resource

    number = getattr(resource, f"RLIMIT_{what}")
    hard = resource.getrlimit(number)[1]
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(number, (allowed, hard))


def _be_child(
    main: Main,
    words: Sequence[str],
    folder: Path,
    notes: Path,
    limits: Limits,
    script: str,
    prepare: Callable[[], None] | None,
) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        _redirect(notes)
        os.chdir(folder)
        os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = str(notes)
        for name, number in (("SIGINT", signal.default_int_handler), ("SIGTERM", signal.SIG_DFL)):
            signal.signal(getattr(signal, name), number)
        if limits.stacks:
            stacks = (notes / STACKS).open("w", encoding="utf-8")
            faulthandler.dump_traceback_later(max(0.1, limits.seconds - 0.2), file=stacks)
        limit("AS", address_space() + limits.memory)
        limit("FSIZE", limits.file_size)
        limit("CORE", 0)
        sys.argv = [script, *words]
        if prepare is not None:
            prepare()
        code = _exit_code(main)
    except BaseException:
        traceback.print_exc()
    finally:
        # What the interpreter would do on its way out, less what belongs to the parent.
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
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in ((1, OUT), (2, ERR)):
        file = os.open(notes / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf-8")
    sys.stdout = _writer(1, line_buffering=False)
    sys.stderr = _writer(2, line_buffering=True)


def _writer(number: int, *, line_buffering: bool) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", line_buffering=line_buffering)


def _wait(pid: int, deadline: float) -> tuple[int, bool]:
    """Status of the child, and whether it had to be ended."""
    handle = os.pidfd_open(pid)
    try:
        if _ended(handle, deadline - time.monotonic()):
            return _reap(pid), False
        os.killpg(pid, signal.SIGINT)
        if not _ended(handle, _GRACE):
            os.killpg(pid, signal.SIGKILL)
        return _reap(pid), True
    finally:
        os.close(handle)


def _ended(handle: int, seconds: float) -> bool:
    return bool(select.select([handle], [], [], max(0.0, seconds))[0])


def _reap(pid: int) -> int:
    return os.waitpid(pid, 0)[1]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "backslashreplace")
    except OSError:
        return ""
