# SPDX-License-Identifier: Apache-2.0
"""What needs NumPy and the standard library alone: files, axes, command lines, progress."""
