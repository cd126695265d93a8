# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can cause or mend, reported in one line instead of a traceback."""


class UserError(Exception):
    """Something the user can put right; the message says what, where and how.

    Entry points print the message after ``label`` and leave with ``exit_code``.
    """

    exit_code = 2
    label = "error"


class TrainingError(UserError):
    """Training met numbers it must not train on; the last good checkpoint is kept."""

    exit_code = 3
