# SPDX-License-Identifier: Apache-2.0
"""Messages of a run: on the terminal in colour, in pipes as plain lines, and in ``log.txt``.

A console that is not verbose prints headlines, warnings and the progress of loops; all else goes to
the log alone. A string is always one line: a path such as ``scans/[old]/fox`` is not taken for
markup, and control characters in a file's name are escaped.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import rich.console
import rich.progress
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sugar_utils.entrypoint import complain, discard
from sugar_utils.errors import explained, printable
from sugar_utils.files import require_regular_file

# A rate is that of the last seconds, at least so many, and of at least this share of the iterations
# so far: a stall is averaged out.
_RATE_SECONDS = 10.0
_RATE_SHARE = 0.2
_REDRAW_SECONDS = 0.1
_KEPT_LINES = 10_000  # of messages before there is a log
_QUIET_STEPS = 10  # lines that a loop prints where there is neither a bar nor --verbose

Listener = Callable[[str, int, int], None]  # gets the name of a loop, its iteration and its last


@dataclass(frozen=True)
class Pace:
    """When a console prints the progress of a loop as lines."""

    plain_seconds: float = 10.0  # between two lines
    clock: Callable[[], float] = time.monotonic  # the time in seconds
    silent_seconds: float = 30.0  # after which something that prints nothing is reported


class Console(contextlib.AbstractContextManager):
    """Prints messages, tables and progress, and repeats them in a log file.

    Args:
        log_path: Log file, continued when it exists; None for no log.
        stream: Where to print; the standard output if None.
        terminal: Whether the stream is a terminal; if None, the stream is asked.
        pace: When to print the progress of a loop.
        listener: Called with the progress of loops.
        verbose: Print also what else goes to the log alone.
    """

    def __init__(
        self,
        log_path: Path | None = None,
        *,
        stream: IO[str] | None = None,
        terminal: bool | None = None,
        pace: Pace = Pace(),
        listener: Listener | None = None,
        verbose: bool = True,
    ) -> None:
        self._stream: IO[str] = sys.stdout if stream is None else stream
        reconfigure = getattr(self._stream, "reconfigure", None)
        if reconfigure is not None:
            # A narrow code page must not end a run because an image has an accent in its name.
            reconfigure(errors="replace")
        if terminal is None:
            # Variables such as FORCE_COLOR ask for colours, not for bars in a log of a build.
            terminal = hasattr(self._stream, "isatty") and self._stream.isatty()
        self.verbose = verbose
        self._notes: set[str] = set()
        self.rich = _Terminal(
            file=self._stream,
            force_terminal=terminal,
            # In a notebook rich would show its output below the cell, whatever the stream.
            force_jupyter=False if isinstance(self._stream, _Nowhere) else None,
            markup=False,
            highlight=False,
            emoji=False,
        )
        self.pace = pace
        self.listener = listener
        self._log: IO[str] | None = None
        self._kept_lines: deque[str] = deque(maxlen=_KEPT_LINES)  # for a log that is opened later
        if log_path is not None:
            self.open_log(Path(log_path))

    @classmethod
    def silent(cls, listener: Listener | None = None) -> Console:
        """Make a console that prints nothing."""
        return cls(stream=_Nowhere(), terminal=False, listener=listener)

    def with_log(self, path: Path) -> Console:
        """Make a console that prints to the same stream, and has a log."""
        console = Console(path, stream=self._stream, listener=self.listener, verbose=self.verbose)
        console._notes = self._notes
        return console

    @property
    def is_terminal(self) -> bool:
        """Whether the output is a terminal: bars and colours are drawn then."""
        return self.rich.is_terminal and not self.rich.is_dumb_terminal

    def headline(self, message: str) -> None:
        """Print a headline: the start of a stage, its result and the result's path."""
        self._say(Text(printable(message)))

    def note(self, message: str) -> None:
        """Print a note about the inputs, once in a run of several stages."""
        is_new = message not in self._notes
        self._say(Text(printable(message)), printed=is_new or self.verbose)
        self._notes.add(message)

    def info(self, message: str) -> None:
        """Log details; printed only with ``--verbose``."""
        self._say(Text(printable(message)), printed=self.verbose)

    def warn(self, message: str, advice: str | None = None) -> None:
        """Print a warning and, on its own line, the advice."""
        self._say(Text.assemble(("warning: ", "bold yellow"), printable(message)))
        if advice is not None:
            self._say(Text(f"  what helps: {printable(advice)}"))

    def table(self, title: str, rows: Iterable[tuple[str, object]], headline: bool = False) -> None:
        """Print names and values below each other, for example the resolved configuration.

        Args:
            title: Line above the table.
            rows: Names and values.
            headline: Print it even if the console is not verbose.
        """
        printed = headline or self.verbose
        title = printable(title)
        texts = [(printable(name), printable(str(value))) for name, value in rows]
        width = max((len(name) for name, _ in texts), default=0)
        if self.is_terminal and printed:
            table = Table(title=Text(title), title_justify="left", show_header=False)
            table.add_column(style="cyan", no_wrap=True)
            table.add_column(overflow="fold")
            for name, value in texts:
                table.add_row(Text(name), Text(value))
            self._print(table)
        printed_as_lines = printed and not self.is_terminal
        self._say(Text(title), printed=printed_as_lines)
        for name, value in texts:
            self._say(Text(f"  {name:<{width}}  {value}"), printed=printed_as_lines)

    @contextlib.contextmanager
    def progress(self, description: str, first: int, last: int) -> Iterator[Progress]:
        """Show the progress of a loop: a bar below the messages, lines where it is no terminal."""
        description = printable(description)
        with _Bar(self, description, first, last) as bar:
            progress = Progress(self, description, first, last, bar)
            try:
                yield progress
            finally:
                progress.finish()

    @contextlib.contextmanager
    def waiting(self, description: str) -> Iterator[Callable[[Mapping[str, str]], None]]:
        """Show a spinner with the elapsed time; yields a function that shows fields next to it."""
        description = printable(description)
        column = rich.progress.TextColumn
        live = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            column("{task.description}", markup=False),
            rich.progress.TimeElapsedColumn(),
            column("{task.fields[words]}", markup=False, style="dim"),
            console=self.rich,
            transient=True,
            disable=not self.is_terminal,
        )
        task = live.add_task(description, total=None, words="")
        start = self.pace.clock()
        last_line = start

        def show(fields: Mapping[str, str]) -> None:
            nonlocal last_line
            now = self.pace.clock()
            words = " ".join(f"{name} {value}" for name, value in fields.items())
            live.update(task, words=printable(words))
            if now - last_line >= self.pace.plain_seconds:
                last_line = now
                self.plain_line(f"{description} {clock_text(now - start)} so far {words}")

        with live:
            yield show

    @contextlib.contextmanager
    def reporting(self, line: Callable[[float], str]) -> Iterator[None]:
        """Print a line every half minute while something goes on that may print nothing itself.

        Args:
            line: Returns it, given the seconds since the beginning; called in a thread.
        """
        ended = threading.Event()
        start = self.pace.clock()

        def report() -> None:
            while not ended.wait(self.pace.silent_seconds):
                self.headline(line(self.pace.clock() - start))

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def open_log(self, path: Path) -> None:
        """Log to a file, from the first message that is in no log yet; appended to if it exists."""
        self.close()
        advice = "fix the permissions or choose another output folder"
        with explained(f"cannot write {path}:", advice):
            path.parent.mkdir(parents=True, exist_ok=True)
            require_regular_file(path, missing_ok=True)
            self._log = path.open("a", encoding="utf-8", newline="\n", errors="replace")
        lines = "".join(self._kept_lines)
        self._kept_lines.clear()
        self._append(lines)

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def plain_line(self, line: str, short: str | None = None) -> None:
        """Log a line, and print it where there is no terminal with a bar.

        Args:
            line: The line.
            short: Printed instead by a console that is not verbose; None: nothing.
        """
        self._say(Text(printable(line)), printed=self.verbose and not self.is_terminal)
        if short is not None and not self.verbose and not self.is_terminal:
            self._print(Text(printable(short)))

    def _say(self, text: Text, printed: bool = True) -> None:
        if printed:
            self._print(text)
        self._write_log(text.plain)

    def _print(self, content: Text | Table) -> None:
        try:
            # Soft wrapping leaves long paths in one piece for copying and parsing.
            self.rich.print(content, soft_wrap=isinstance(content, Text))
        except BrokenPipeError:
            raise
        except OSError as error:
            # A full disk under the redirected output is no reason to end a run: its files matter.
            self.rich.quiet = True
            discard(self._stream)
            message = f"the output is not continued: {error.strerror or error}"
            complain(f"warning: {message}")
            self._write_log(f"warning: {message}")

    def _write_log(self, message: str) -> None:
        stamp = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        self._append(f"{stamp} {message}\n")

    def _append(self, lines: str) -> None:
        """Add lines to the log, or keep them for one that is opened later."""
        if self._log is None:
            self._kept_lines.append(lines)
            return
        try:
            self._log.write(lines)
            self._log.flush()
        except OSError as error:
            log = self._log
            self._log = None
            with contextlib.suppress(OSError):
                log.close()
            self.warn(f"{log.name} is not continued: {error.strerror or error}")


class _Nowhere(io.StringIO):
    """A stream that drops all text."""

    def write(self, text: str) -> int:
        return len(text)


class _Terminal(rich.console.Console):
    """Rich's console; errors about a closed pipe reach the entry point."""

    def on_broken_pipe(self) -> None:
        """Raise the error again; called while it is handled."""
        raise


class Progress:
    """The progress of a loop: its bar, its lines in the log, and the remaining time."""

    def __init__(
        self, console: Console, description: str, first: int, last: int, bar: _Bar
    ) -> None:
        self._console = console
        self._description = description
        self._first = first
        self._last = last
        self._bar = bar
        self._marks: deque[tuple[float, int]] = deque()  # recent times and iterations
        self._line_time = -math.inf
        self._bar_time = -math.inf
        self._printed_step = 0
        self._iteration: int | None = None
        self._timing: tuple[str, ...] = ()
        self._fields: Mapping[str, str] = {}
        self._is_printed = True

    @property
    def due(self) -> bool:
        """Whether the next update will show something, so that its fields are worth reading."""
        now = self._console.pace.clock()
        return self._line_is_due(now) or self._bar_is_due(now)

    def update(self, iteration: int, fields: Mapping[str, str] | None = None) -> None:
        """Report that an iteration is done; cheap enough to be called every time.

        Args:
            iteration: Its number.
            fields: Short texts to show, by name; None: those of the last call.
        """
        now = self._console.pace.clock()
        if self._console.listener is not None:
            self._console.listener(self._description, iteration, self._last)
        rate = self._measured_rate(iteration, now)
        if iteration != self._iteration:
            self._is_printed = False
        self._iteration = iteration
        if rate is not None:
            speed = f"{rate:.1f} it/s" if rate >= 1 else f"{1 / rate:.1f} s/it"
            n_remaining = max(0, self._last - iteration)
            self._timing = (speed, f"eta {clock_text(n_remaining / rate)}")
        if fields is not None:
            self._fields = fields
        line_is_due = iteration >= self._last or self._line_is_due(now)
        if line_is_due and not self._is_printed:
            self._print_line(iteration, now)
        if self._bar_is_due(now):
            self._bar_time = now
            self._bar.show(iteration, self._timing, self._bar_fields())

    def finish(self) -> None:
        """Show the last iteration, if that is not done."""
        if self._iteration is None:
            return
        self._bar.show(self._iteration, self._timing, self._bar_fields())
        if not self._is_printed:
            self._print_line(self._iteration, self._console.pace.clock())

    def _bar_fields(self) -> Mapping[str, str]:
        return self._fields if self._console.verbose else {}

    def _measured_rate(self, iteration: int, now: float) -> float | None:
        """Recent iterations per second; None before there was a second iteration."""
        self._marks.append((now, iteration))
        least_iterations = _RATE_SHARE * (iteration - self._first)
        while len(self._marks) > 2:
            mark_time, mark_iteration = self._marks[1]
            is_recent = now - mark_time < _RATE_SECONDS
            if is_recent or iteration - mark_iteration < least_iterations:
                break
            self._marks.popleft()
        mark_time, mark_iteration = self._marks[0]
        seconds = now - mark_time
        n_iterations = iteration - mark_iteration
        return n_iterations / seconds if seconds > 0 and n_iterations > 0 else None

    def _line_is_due(self, now: float) -> bool:
        return now - self._line_time >= self._console.pace.plain_seconds

    def _bar_is_due(self, now: float) -> bool:
        return not self._bar.disable and now - self._bar_time >= _REDRAW_SECONDS

    def _print_line(self, iteration: int, now: float) -> None:
        self._line_time = now
        self._is_printed = True
        count = f"{self._description} {iteration}/{self._last}"
        line = " ".join([count, *self._timing])
        fields = [f"{name} {value}" for name, value in self._fields.items()]
        total = max(1, self._last - self._first + 1)
        step = _QUIET_STEPS * (iteration - self._first + 1) // total
        short = None
        if not self._console.verbose and step > self._printed_step:
            short = line
        self._printed_step = max(step, self._printed_step)
        self._console.plain_line(" ".join([line, *fields]), short)


class _Bar(rich.progress.Progress):
    """The live bar and, below it, one line of fields cut to the width of the terminal."""

    def __init__(self, console: Console, description: str, first: int, last: int) -> None:
        self._fields_text = Text()
        self._first = first
        self._last = last
        column = rich.progress.TextColumn
        super().__init__(
            column("{task.description}", markup=False),
            rich.progress.BarColumn(bar_width=None),
            column("{task.fields[count]}", markup=False),
            column("{task.fields[timing]}", markup=False),
            console=console.rich,
            expand=True,
            disable=not console.is_terminal,
        )
        total = max(1, last - first + 1)
        self._task = self.add_task(description, total=total, count="", timing="")

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bar, and the line of fields if there are any."""
        yield self.make_tasks_table(self.tasks)
        if self._fields_text.plain:
            yield self._fields_text

    def show(self, iteration: int, timing: Iterable[str], fields: Mapping[str, str]) -> None:
        """Draw the bar at an iteration."""
        words = printable("  ".join(f"{name} {value}" for name, value in fields.items()))
        self._fields_text = Text(words, no_wrap=True, overflow="ellipsis", style="dim")
        self.update(
            self._task,
            completed=iteration - self._first + 1,
            count=f"{iteration}/{self._last}",
            timing=" ".join(timing),
        )


def clock_text(seconds: float) -> str:
    """Format the time of something that goes on as ``m:ss`` or ``h:mm:ss``.

    Lines of progress end in it, and programs that start a run read it there.
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
