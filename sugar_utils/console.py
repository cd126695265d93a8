# SPDX-License-Identifier: Apache-2.0
"""What a run says: to the terminal in colour, to pipes in plain lines, and to ``log.txt``.

A console that is not verbose prints headlines, warnings and how far a loop is; all else goes to the
log alone. A string is one line and no more: a path such as ``scans/[old]/fox`` is not taken for
markup, and a control character in a file's name is spelled.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import rich.console
import rich.progress
from rich.table import Table
from rich.text import Text

from sugar_utils.entrypoint import complain, discard
from sugar_utils.errors import explained, printable
from sugar_utils.files import require_regular_file

_RATE_SECONDS = 10.0  # a rate is that of the last seconds, at least so many,
_RATE_SHARE = 0.2  # and of at least this share of the iterations so far: a stall is averaged out
_REDRAW_SECONDS = 0.1
_QUIET_STEPS = 10  # lines that a loop prints where there is neither a bar nor --verbose
Listener = Callable[[str, int, int], None]


class Console(contextlib.AbstractContextManager):
    """Prints messages, tables and progress, and repeats them in a log file.

    Args:
        log_path: Log file, continued when it exists; None for no log.
        stream: Where to print; the standard output if None.
        terminal: Treat the stream as a terminal or not; found out if None.
        verbose: Print what else goes to the log alone.
        listener: Called with the name of a loop, its iteration and its last one.
    """

    def __init__(
        self,
        log_path: Path | None = None,
        *,
        stream: IO[str] | None = None,
        terminal: bool | None = None,
        plain_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        listener: Listener | None = None,
        verbose: bool = True,
    ) -> None:
        stream = sys.stdout if stream is None else stream
        if hasattr(stream, "reconfigure"):
            # A narrow code page must not end a run because an image has an accent in its name.
            stream.reconfigure(errors="replace")
        if terminal is None:
            # Variables such as FORCE_COLOR ask for colours, not for bars in a log of a build.
            terminal = bool(getattr(stream, "isatty", lambda: False)())
        self._stream = stream
        self.verbose = verbose
        self._notes: set[str] = set()
        self.rich = _Terminal(
            file=stream, force_terminal=terminal, markup=False, highlight=False, emoji=False
        )
        self.plain_seconds = plain_seconds
        self.clock = clock
        self.listener = listener
        self._log: IO[str] | None = None
        if log_path is not None:
            self.open_log(Path(log_path))

    @classmethod
    def silent(cls, listener: Listener | None = None) -> Console:
        return cls(stream=_Nowhere(), terminal=False, listener=listener)

    def with_log(self, path: Path) -> Console:
        """Another console that says the same in the same place, and has a log."""
        console = Console(path, stream=self._stream, listener=self.listener, verbose=self.verbose)
        console._notes = self._notes
        return console

    @property
    def is_terminal(self) -> bool:
        """Whether the output is a terminal: bars and colours are drawn then."""
        return self.rich.is_terminal and not self.rich.is_dumb_terminal

    def headline(self, message: str) -> None:
        """Say what everybody should read: what begins, what it made, where it is."""
        self._say(Text(printable(message)))

    def note(self, message: str) -> None:
        """Say what is noteworthy about the inputs; in a run of several stages once."""
        self._say(Text(printable(message)), printed=message not in self._notes or self.verbose)
        self._notes.add(message)

    def info(self, message: str) -> None:
        """Say what only the log, or who asked for it with ``--verbose``, needs."""
        self._say(Text(printable(message)), printed=self.verbose)

    def warn(self, message: str, advice: str | None = None) -> None:
        """Say what may be wrong and, on a line of its own, what helps."""
        self._say(Text.assemble(("warning: ", "bold yellow"), printable(message)))
        if advice is not None:
            self._say(Text(f"  what helps: {printable(advice)}"))

    def table(self, title: str, rows: Iterable[tuple[str, object]], headline: bool = False) -> None:
        """Print names and values below each other, for example the resolved configuration.

        Args:
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
        for line in (title, *(f"  {name:<{width}}  {value}" for name, value in texts)):
            self._say(Text(line), printed=printed and not self.is_terminal)

    @contextlib.contextmanager
    def progress(self, description: str, first: int, last: int) -> Iterator[Progress]:
        """A loop's bar on a terminal, below the messages; a line now and then elsewhere."""
        description = printable(description)
        with _Bar(self, description, first, last) as bar:
            progress = Progress(self, description, first, last, bar)
            try:
                yield progress
            finally:
                progress.finish()

    @contextlib.contextmanager
    def waiting(self, description: str) -> Iterator[Callable[[Mapping[str, str]], None]]:
        """Show a spinner with the elapsed time of work that does not say how far it is."""
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
        start = said = self.clock()

        def show(fields: Mapping[str, str]) -> None:
            nonlocal said
            now = self.clock()
            words = " ".join(f"{name} {value}" for name, value in fields.items())
            live.update(task, words=printable(words))
            if now - said >= self.plain_seconds:
                said = now
                self.plain_line(f"{description} {duration_text(now - start)} so far {words}")

        with live:
            yield show

    def open_log(self, path: Path) -> None:
        """Go on in a log file, appended to when it exists."""
        self.close()
        advice = "fix the permissions or choose another output folder"
        with explained(f"cannot write {path}:", advice):
            path.parent.mkdir(parents=True, exist_ok=True)
            require_regular_file(path, missing_ok=True)
            self._log = path.open("a", encoding="utf-8", newline="\n", errors="replace")

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def plain_line(self, line: str, short: str | None = None) -> None:
        """Log a line, and print it where nothing livelier is drawn.

        Args:
            short: What a console that is not verbose prints instead; None: nothing.
        """
        self._say(Text(printable(line)), printed=self.verbose and not self.is_terminal)
        if short is not None and not self.verbose and not self.is_terminal:
            self._print(Text(printable(short)))

    def _say(self, what: Text, printed: bool = True) -> None:
        if printed:
            self._print(what)
        self._write_log(what.plain)

    def _print(self, what: Text | Table) -> None:
        try:
            # Soft wrapping leaves long paths in one piece for copying and parsing.
            self.rich.print(what, soft_wrap=isinstance(what, Text))
        except BrokenPipeError:
            raise
        except OSError as error:
            # A full disk under the redirected output is no reason to end a run: its files count.
            self.rich.quiet = True
            discard(self._stream)
            message = f"the output is not continued: {error.strerror or error}"
            complain(f"warning: {message}")
            self._write_log(f"warning: {message}")

    def _write_log(self, message: str) -> None:
        if self._log is None:
            return
        stamp = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        try:
            self._log.write(f"{stamp} {message}\n")
            self._log.flush()
        except OSError as error:
            log = self._log
            self._log = None
            with contextlib.suppress(OSError):
                log.close()
            self.warn(f"{log.name} is not continued: {error.strerror or error}")


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


class _Terminal(rich.console.Console):
    """Rich's console, which leaves it to us to end the program when the reader of a pipe left."""

    def on_broken_pipe(self) -> None:
        raise


class Progress:
    """The progress of a loop: its bar, its lines in the log, and the time that is left."""

    def __init__(
        self, console: Console, description: str, first: int, last: int, bar: _Bar
    ) -> None:
        self._console = console
        self._description = description
        self._first = first
        self._last = last
        self._bar = bar
        self._marks: deque[tuple[float, int]] = deque()
        self._line_time = -math.inf
        self._bar_time = -math.inf
        self._printed_step = 0
        self._iteration: int | None = None
        self._timing: tuple[str, ...] = ()
        self._fields: Mapping[str, str] = {}
        self._is_printed = True

    @property
    def due(self) -> bool:
        """Whether the next update will show something: to be asked before fields are read."""
        now = self._console.clock()
        return self._line_is_due(now) or self._bar_is_due(now)

    def update(self, iteration: int, fields: Mapping[str, str] | None = None) -> None:
        """Report that an iteration is done; cheap enough to be called every time.

        ``fields`` are short texts to show beside; None keeps those of the last call.
        """
        now = self._console.clock()
        if self._console.listener is not None:
            self._console.listener(self._description, iteration, self._last)
        rate = self._measured_rate(iteration, now)
        if iteration != self._iteration:
            self._is_printed = False
        self._iteration = iteration
        if rate is not None:
            speed = f"{rate:.1f} it/s" if rate >= 1 else f"{1 / rate:.1f} s/it"
            left = max(0, self._last - iteration)
            self._timing = (speed, f"eta {duration_text(left / rate)}")
        if fields is not None:
            self._fields = fields
        due = iteration >= self._last or self._line_is_due(now)
        if due and not self._is_printed:
            self._print_line(now)
        if self._bar_is_due(now):
            self._bar_time = now
            self._bar.show(iteration, self._timing, self._shown_fields())

    def finish(self) -> None:
        if self._iteration is not None:
            self._bar.show(self._iteration, self._timing, self._shown_fields())
        if not self._is_printed:
            self._print_line(self._console.clock())

    def _shown_fields(self) -> Mapping[str, str]:
        return self._fields if self._console.verbose else {}

    def _measured_rate(self, iteration: int, now: float) -> float | None:
        """Iterations per second of the last while; None before there was a second iteration."""
        self._marks.append((now, iteration))
        enough = _RATE_SHARE * (iteration - self._first)
        while len(self._marks) > 2:
            then, earlier = self._marks[1]
            if now - then < _RATE_SECONDS or iteration - earlier < enough:
                break
            self._marks.popleft()
        then, earlier = self._marks[0]
        return (iteration - earlier) / (now - then) if now > then and iteration > earlier else None

    def _line_is_due(self, now: float) -> bool:
        return now - self._line_time >= self._console.plain_seconds

    def _bar_is_due(self, now: float) -> bool:
        return not self._bar.disable and now - self._bar_time >= _REDRAW_SECONDS

    def _print_line(self, now: float) -> None:
        self._line_time = now
        self._is_printed = True
        fields = (f"{name} {value}" for name, value in self._fields.items())
        count = f"{self._description} {self._iteration}/{self._last}"
        total = max(1, self._last - self._first + 1)
        step = _QUIET_STEPS * (self._iteration - self._first + 1) // total
        line = " ".join([count, *self._timing])
        printed = not self._console.verbose and step > self._printed_step
        self._printed_step = max(step, self._printed_step)
        self._console.plain_line(" ".join([line, *fields]), line if printed else None)


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

    def get_renderables(self) -> Iterator[Any]:
        yield self.make_tasks_table(self.tasks)
        if self._fields_text.plain:
            yield self._fields_text

    def show(self, iteration: int, timing: Iterable[str], fields: Mapping[str, str]) -> None:
        words = printable("  ".join(f"{name} {value}" for name, value in fields.items()))
        self._fields_text = Text(words, no_wrap=True, overflow="ellipsis", style="dim")
        self.update(
            self._task,
            completed=iteration - self._first + 1,
            count=f"{iteration}/{self._last}",
            timing=" ".join(timing),
        )


def duration_text(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
