# SPDX-License-Identifier: Apache-2.0
"""Readers of the cameras that other programs computed, one file per format.

All readers have the same signature, see :class:`~.entries.CameraFormat`; :mod:`.reader_table` lists
them. Cameras are converted to COLMAP's axes (x right, y down, z forward) and to its pixels, which
count from the corner of the image.
"""
