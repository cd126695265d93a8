# SPDX-License-Identifier: Apache-2.0
"""Photographs, and their features and matches of several kinds in COLMAP's database."""
