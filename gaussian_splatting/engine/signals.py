# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and termination requests that let the current iteration finish."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = ("SIGINT", "SIGTERM", "SIGBREAK")
"""What asks a run to stop."""


class StopRequest:
    """Context in which a stop signal sets a flag that the training loop looks at.

    The first signal is noted in ``requested``, so that the loop can save a checkpoint and leave.
    A second Ctrl-C raises ``KeyboardInterrupt`` at once. The handlers found at entry are back in
    place after the context. Outside the main thread Python delivers no signals; the context then
    changes nothing.

    Attributes:
        requested: Name of the first signal received, for example ``"SIGTERM"``; None before.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                number = getattr(signal, name, None)
                if number is not None:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested is None:
            self.requested = signal.Signals(number).name
