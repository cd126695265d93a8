# SPDX-License-Identifier: Apache-2.0
"""Depth maps from single photographs, by programs that are installed apart."""
