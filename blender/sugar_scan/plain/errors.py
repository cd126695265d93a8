# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can cause."""


class ScanError(Exception):
    """Says in one line which file or setting is wrong, and what helps."""
