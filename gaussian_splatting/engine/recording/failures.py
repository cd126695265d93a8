# SPDX-License-Identifier: Apache-2.0
"""Why a recording failed, in one line."""

from __future__ import annotations

import traceback
from pathlib import Path

MAX_CHARACTERS = 200  # of each message
OUR_PACKAGES = ("gaussian_splatting", "sugar_")  # beginnings of the names of our modules


def reason_of(error: BaseException) -> str:
    """Name the first error, those that it led to, and the last of our lines before the first one.

    What goes wrong while launches are recorded ends the recording, and that fails, too: the last
    error is seldom the one that counts.
    """
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(earlier)
    chain.reverse()
    messages = []
    for each in chain:
        lines = str(each).splitlines() or [type(each).__name__]
        messages.append(lines[0][:MAX_CHARACTERS])
    reasons = "; then ".join(dict.fromkeys(messages))
    line = _last_line(chain[0])
    return reasons if line is None else f"{reasons} (at {line})"


def _last_line(error: BaseException) -> str | None:
    """File and line of ours that an error came from last; None where none is ours."""
    last = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(OUR_PACKAGES):
            last = f"{Path(frame.f_code.co_filename).name}:{line}"
    return last
