# SPDX-License-Identifier: Apache-2.0
"""A program that runs beside Blender, whose lines are read without waiting for them."""

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from .commands import environment
from .errors import ScanError

_SECONDS_TO_SAVE = 30.0  # in which a run may save its work when it is stopped


class BackgroundProcess:
    """Owns a subprocess and a thread that reads its output.

    Args:
        words: The command line.
        folder: Where it starts; None for here.

    Raises:
        ScanError: It cannot be started.
    """

    def __init__(self, words: Sequence[str], folder: str | None = None) -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        # A signal for it must not reach Blender, whose process group it would be in on Windows.
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        try:
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                creationflags=flags,
            )
        except OSError as error:
            raise ScanError(f"{words[0]}: cannot be started ({error})") from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """Exit code, once all its lines can be read; None while it runs."""
        return None if self._reader.is_alive() else self._process.wait()

    def new_lines(self) -> list[str]:
        """Return the lines since the last call."""
        lines = []
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
        return lines

    def stop(self) -> None:
        """Ask it to save its work and end, as Ctrl-C does."""
        if self._process.poll() is None:
            name = "CTRL_BREAK_EVENT" if sys.platform == "win32" else "SIGINT"
            self._process.send_signal(getattr(signal, name))

    def end(self) -> None:
        """Stop it and wait; kill it where that takes too long."""
        self.stop()
        try:
            self._process.wait(_SECONDS_TO_SAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        """Put lines into the queue until the output ends."""
        output = self._process.stdout
        if output is not None:
            with output:
                for line in output:
                    self._lines.put(line.rstrip("\n"))
