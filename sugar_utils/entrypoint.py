# SPDX-License-Identifier: Apache-2.0
"""Run an entry point: errors in one line, Ctrl-C, exit codes, and the output.

Entry points load the rest inside of it, because that takes seconds; so it imports nothing slow.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO

from sugar_utils.errors import UserError, printable
from sugar_utils.torchrun import is_follower

EXIT_OF_SIGNAL = {"SIGINT": 130, "SIGTERM": 143, "SIGBREAK": 149}
EXIT_BROKEN_PIPE = 141
_GONE = "it was moved or removed meanwhile; put it back, or start again"
# Errors of the system that are no defects of the program, and what helps.
_NO_DEFECTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "fix the permissions or choose another place"
    ),
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "fix the links",
    errno.EIO: "check the disk",
    errno.EMFILE: "allow more open files (ulimit -n)",
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ESTALE), _GONE),
}

Handler = Callable[[int, FrameType | None], object]  # of a signal
_SILENT_SECONDS = 2.0  # for which a process that prints nothing waits for the one that does


def run_main(main: Callable[[], int | None]) -> int:
    """Run an entry point, ``sys.exit(run_main(main))``; the exit code is its result, 0 for None.

    Errors that users can fix are printed in one line without a traceback. The exit code is then
    that of the error, 130 after Ctrl-C, 143 after a termination, 141 when the reader of the output
    left, 2 where the output could not be written. Other errors propagate.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Closed streams are replaced by one that drops everything.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Pipes on Windows know some 250 characters.
            stream.reconfigure(errors="backslashreplace")
    with _warnings_in_one_line():
        try:
            code = _guarded(main)
        except SystemExit as leaving:
            # The parser has printed its help or its error.
            code = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
            leaving.code = _flushed(code)
            raise
        return _flushed(code)


def discard(stream: IO[str]) -> None:
    """Drop everything that is written to a stream from now on, or still buffered."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def complain(line: str) -> None:
    """Print a line to the standard error, if that can be written."""
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


@contextlib.contextmanager
def signal_handler(handle: Handler, replaces: Callable[[object], bool]) -> Iterator[None]:
    """Handle the signals that stop a program, in place of handlers that may be replaced.

    Outside the main thread Python delivers no signals; the context then does nothing.

    Args:
        handle: The handler.
        replaces: Whether it may replace a handler.
    """
    previous: dict[int, Handler | int | None] = {}
    if threading.current_thread() is threading.main_thread():
        for name in EXIT_OF_SIGNAL:
            number = getattr(signal, name, None)
            if number is not None and replaces(signal.getsignal(number)):
                previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None stands for a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _guarded(main: Callable[[], int | None]) -> int:
    """Run it; a stop signal raises ``KeyboardInterrupt``, so half-written files are removed.

    Libraries may turn that into other errors: any error after a signal is a consequence of it.
    """
    signals: list[str] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        signals.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    default_handlers = (signal.default_int_handler, signal.SIG_DFL)
    with signal_handler(interrupt, lambda handler: handler in default_handlers):
        try:
            code = main() or 0
            if "sugar_utils.process_group" in sys.modules:
                from sugar_utils.process_group import leave_process_group

                leave_process_group()
            return code
        except KeyboardInterrupt:
            return _interrupted(signals[-1] if signals else "SIGINT")
        except Exception as error:
            return _interrupted(signals[-1]) if signals else report(error)


def report(error: Exception) -> int:
    """Print an error that is no defect and return its exit code; called while it is handled.

    Other errors are raised again.
    """
    if isinstance(error, UserError):
        return _report_user_error(error)
    if isinstance(error, BrokenPipeError):
        discard(sys.stdout)
        return EXIT_BROKEN_PIPE
    if _out_of_memory(error):
        reason = " ".join(str(error).split("\n")[0].split())
        details = f" ({reason})" if reason else ""
        complain(
            f"error: out of memory{details}; close other programs, ask for less (smaller images, "
            "fewer points), or use a machine with more memory"
        )
        return 2
    if not isinstance(error, OSError) or error.errno not in _NO_DEFECTS:
        raise
    if error.filename is None and _NO_DEFECTS[error.errno] == _GONE:
        raise
    if error.filename is None:
        # An error without a file name is that of a print.
        return _unwritable(error)
    complain(f"error: cannot use {error.filename}: {error.strerror}; {_NO_DEFECTS[error.errno]}")
    return 2


def _report_user_error(error: UserError) -> int:
    is_silent = is_follower() if error.silent is None else error.silent
    if is_silent:
        # torchrun ends all processes with the first that exits; let the other one print before.
        time.sleep(_SILENT_SECONDS)
    else:
        complain(f"{error.label}: {error}")
    return error.exit_code


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    if "torch" not in sys.modules:
        return False
    from sugar_utils.memory import out_of_memory

    return out_of_memory(error)


def _interrupted(name: str) -> int:
    if not is_follower():
        complain(f"stopped by {'Ctrl-C' if name == 'SIGINT' else name}")
    return EXIT_OF_SIGNAL[name]


def _flushed(code: int) -> int:
    """Flush the output; return the exit code, another one where that fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if code:
            discard(sys.stdout)
            return code
        return _unwritable(error)
    return code


def _unwritable(error: OSError) -> int:
    discard(sys.stdout)
    complain(f"error: cannot write: {error.strerror or error}; free some space for the output")
    return 2


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print each warning once, in one line without its place in the source."""
    printed = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        line = " ".join(str(message).split())
        if line not in printed and not is_follower():
            printed.add(line)
            with contextlib.suppress(OSError, ValueError):
                print(f"warning: {printable(line)}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        # Some cameras take photographs of a hundred megapixels.
        warnings.filterwarnings("ignore", message="Image size .* exceeds limit")
        yield
