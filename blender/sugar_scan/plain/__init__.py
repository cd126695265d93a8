# SPDX-License-Identifier: Apache-2.0
"""Modules that need NumPy and the standard library alone: files, axes, commands, progress."""
