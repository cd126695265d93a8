# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can cause or fix, reported in one line instead of a traceback."""


class UserError(Exception):
    """Something the user can put right; the message says what, where and how.

    Raised by whatever reads or checks input, so docstrings do not repeat it function by function.

    Entry points print the message after ``label`` and leave with ``exit_code``. ``silent`` says
    whether another process of the run has printed it; None means that all know it, so that the
    first one does.
    """

    exit_code = 2
    label = "error"
    silent: bool | None = None


class TrainingError(UserError):
    """Training met numbers it must not train on; the last good checkpoint is kept."""

    exit_code = 3
