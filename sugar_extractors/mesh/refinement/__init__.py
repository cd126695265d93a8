# SPDX-License-Identifier: Apache-2.0
"""Vertices of a mesh, moved until the photographs agree."""
