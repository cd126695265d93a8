# SPDX-License-Identifier: Apache-2.0
"""From the axes of result files to those of Blender, which has z up and cameras that look along -z.

Matrices are (4, 4) float64 and act on columns.
"""

import numpy as np

from .placement import UP

_CAPTURE_TO_Y_UP = np.diag([1.0, -1.0, -1.0, 1.0])
"""A capture that was not turned has y down and z forward, as COLMAP has them."""

_Y_UP_TO_Z_UP = np.array(
    [
        [1.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, -1.0, 0.0],
        [0.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 1.0],
    ]
)

_CAMERA_AXES = np.diag([1.0, -1.0, -1.0, 1.0])
"""Cameras of results look along +z with y down, those of Blender along -z with y up."""


def file_to_blender(up: str | None) -> np.ndarray:
    """Return the matrix from the coordinates of a result to Blender's.

    Args:
        up: The word of ``transform.json``; None for the axes of the capture.
    """
    if up == UP:
        return _Y_UP_TO_Z_UP
    return _Y_UP_TO_Z_UP @ _CAPTURE_TO_Y_UP


def camera_to_file(position: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Return the matrix of a camera of Blender in the coordinates of the file.

    Args:
        position: Centre of the camera. (3,)
        rotation: From the axes of the camera to those of the file. (3, 3)
    """
    matrix = np.eye(4)
    matrix[:3, :3] = rotation
    matrix[:3, 3] = position
    return matrix @ _CAMERA_AXES
