# SPDX-License-Identifier: Apache-2.0
"""Maps of photographs that say what surface they show: its depth, its normals."""
