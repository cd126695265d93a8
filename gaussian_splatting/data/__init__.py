# SPDX-License-Identifier: Apache-2.0
"""Captures and the files that 3DGS programs exchange: cameras, photographs, COLMAP, PLY."""
