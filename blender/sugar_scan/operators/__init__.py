# SPDX-License-Identifier: Apache-2.0
"""Operators that the user calls: import, run, look through, export."""
