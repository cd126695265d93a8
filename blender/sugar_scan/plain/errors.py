# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can cause."""


class ScanError(Exception):
    """What is wrong with a file or a setting, and what to do, in one line."""
