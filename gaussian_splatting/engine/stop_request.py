# SPDX-License-Identifier: Apache-2.0
"""Signals that ask a run to stop in order."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from sugar_utils.entrypoint import EXIT_OF_SIGNAL, signal_handler

SIGNALS = tuple(EXIT_OF_SIGNAL)
"""Names of the signals; their places are exchanged by the processes of a run."""


class StopRequest:
    """Context in which the first stop signal sets ``requested`` to its name.

    A second Ctrl-C raises ``KeyboardInterrupt`` at once.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._handlers = signal_handler(self._handle, lambda handler: True)

    def __enter__(self) -> StopRequest:
        self._handlers.__enter__()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handlers.__exit__(exception_type, exception, traceback)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = self.requested or signal.Signals(number).name
