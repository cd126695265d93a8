# SPDX-License-Identifier: Apache-2.0
"""Holes of a mesh: which are closed, by what surface, and what photographs say about it."""
