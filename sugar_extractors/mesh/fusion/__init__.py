# SPDX-License-Identifier: Apache-2.0
"""Depth of views becomes a surface: on voxels, or on tetrahedra."""
