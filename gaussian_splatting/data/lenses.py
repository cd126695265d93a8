# SPDX-License-Identifier: Apache-2.0
"""Lens models as text, and pictures freed of a lens's distortion."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from sugar_utils.colmap_library import load_pycolmap


def lens_text(lens: Any) -> str:
    """Model, size and parameters of a pycolmap camera."""
    return f"{lens.model_name} {lens.width} {lens.height} {list(lens.params)}"


def lens_of(text: str, width: int, height: int) -> Any:
    """The pycolmap camera of a :func:`lens_text`, for pictures of another size.

    Args:
        text: The lens.
        width: Width of the distorted pictures in pixels.
        height: Their height.
    """
    pycolmap = load_pycolmap()
    model, own_width, own_height, rest = text.split(" ", 3)
    # Lists of numpy's numbers name their type.
    numbers = re.findall(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?", rest.replace("float64", ""))
    lens = pycolmap.Camera(
        model=model, width=int(own_width), height=int(own_height), params=list(map(float, numbers))
    )
    if (width, height) != (lens.width, lens.height):
        lens.rescale(width, height)
    return lens


def undistort_plane(plane: np.ndarray, lens: Any) -> np.ndarray:
    """A picture as a lens without distortion would have taken it.

    Args:
        plane: (H, W) or (H, W, 3) uint8
        lens: pycolmap camera of the picture's size.
    """
    pycolmap = load_pycolmap()
    options = pycolmap.UndistortCameraOptions()
    bitmap = pycolmap.Bitmap.from_array(np.ascontiguousarray(plane))
    return pycolmap.undistort_image(options, bitmap, lens)[0].to_array()
