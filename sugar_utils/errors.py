# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can fix, reported in one line instead of a traceback, and that line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ESCAPES = r'\ begins an escape in "..."'  # advice for paths of Windows in TOML and JSON
Notify = Callable[[str], None]  # gets messages worth knowing, of one line each
Advance = Callable[[int], None]  # called with the number of items that are done

# C0 and C1 controls, line and paragraph separators, what turns the direction of text, and the
# halves of characters that stand for bytes of a file name which are no UTF-8.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(Exception):
    """An error that the user can fix; the message says what, where and how.

    Entry points print the message after ``label`` and leave with ``exit_code``. ``silent`` says
    whether another process of the run has printed it; None means that the first one does.
    """

    exit_code = 2
    label = "error"
    silent: bool | None = None


class TrainingError(UserError):
    """Training met numbers it must not train on; the last good checkpoint stays."""

    exit_code = 3


CHANGED_TO = " → "  # between the values of a setting that has changed


class OtherSettings(UserError):
    """A result is in the way that was made with other settings or inputs.

    A stage knows its settings alone; who knows the flags that were typed calls :meth:`in_flags`.

    Args:
        message: With ``differences`` joined by semicolons, and ``another FLAG``.
        path: The run's folder, or the result.
        differences: Of the settings and inputs, a line for each.
        flag: That chooses another place.
    """

    def __init__(self, message: str, path: Path, differences: Sequence[str], flag: str) -> None:
        super().__init__(message)
        self.path = path
        self.differences = differences
        self.flag = flag

    def in_flags(self, lines: Sequence[str], flag: str | None = None) -> OtherSettings:
        """Return the error with the changed flags in place of the settings that follow from them.

        Args:
            lines: Of the changed flags; the settings are named where there are none.
            flag: That chooses another place; None for that of the stage.
        """
        differences = self.differences
        if lines:
            of_inputs = [line for line in differences if CHANGED_TO not in line]
            differences = [*lines, *of_inputs]
        flag = flag or self.flag
        message = str(self).replace("; ".join(self.differences), "; ".join(differences))
        message = message.replace(f"another {self.flag}", f"another {flag}")
        return OtherSettings(message, self.path, differences, flag)


def say_nothing(line: str) -> None:
    """Drop a message; a ``Notify`` for files whose messages another reader prints."""


@contextlib.contextmanager
def explained(what: str, advice: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of some kinds, ``OSError`` if none is named, into errors that a user can fix.

    Args:
        what: What cannot be done, and where. After a colon the reason follows without brackets.
        advice: How to fix it.
        kinds: Types of the errors.

    Raises:
        UserError: In place of such an error.
    """
    kinds = kinds or (OSError,)
    try:
        yield
    except kinds as error:
        reason = reason_of(error)
        problem = f"{what} {reason}" if what.endswith(":") else f"{what} ({reason})"
        raise UserError(f"{problem}; {advice}") from error


def reason_of(error: BaseException) -> str:
    """Return the message of an exception in one line; its type if it has none, or a bare key."""
    if isinstance(error, KeyError) and error.args and " " not in str(error.args[0]):
        return f"no entry {error.args[0]!r}"
    strerror = getattr(error, "strerror", None)
    return strerror or " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    r"""Escape control characters: a line end becomes ``\n``, escape ``\x1b``.

    Printed as it is, a file's name could colour the terminal, or add a line like the program's own.
    """
    return _CONTROLS.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def shortened(names: Sequence[str], limit: int = 3) -> str:
    """Join the first names, and say how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
