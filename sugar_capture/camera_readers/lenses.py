# SPDX-License-Identifier: Apache-2.0
"""Lenses and rotations of other programs as COLMAP has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from gaussian_splatting.data.cameras import nearest_rotation
from sugar_capture.camera_readers.entries import Size
from sugar_capture.camera_readers.parsing import EXPORT_AGAIN
from sugar_utils.errors import UserError
from sugar_utils.libraries import load_pycolmap

if TYPE_CHECKING:
    import pycolmap

TO_COLMAP_AXES = np.diag([1.0, -1.0, -1.0])  # from cameras that look along -z with y up
FILM_WIDTH = 36.0  # mm, to which focal lengths of RealityScan refer


@dataclass(frozen=True)
class LensParameters:
    """Intrinsics of a lens in pixels, with the distortion coefficients of OpenCV."""

    size: tuple[float, float]  # width and height of the image
    focal: tuple[float, float]  # horizontal, vertical
    middle: tuple[float, float]  # principal point, from the corner of the image
    radial: Sequence[float] = ()  # k1, k2, ... up to four; those left out are 0
    tangential: Sequence[float] = (0.0, 0.0)  # p1, p2
    is_fisheye: bool = False


def colmap_lens(lens: LensParameters, context: str) -> pycolmap.Camera:
    """Build the pycolmap.Camera of a lens, with the simplest model that has its distortion.

    Args:
        context: File and camera, for the message of an error.

    Raises:
        UserError: Size or focal length are not positive, or no model has the coefficients.
    """
    if not min(*lens.size, *lens.focal) > 0:
        raise UserError(f"{context}: has no positive size and focal length; {EXPORT_AGAIN}")
    padded = (*lens.radial, 0, 0, 0, 0)
    k1, k2, k3, k4 = padded[:4]
    p1, p2 = lens.tangential
    if k4 and not lens.is_fisheye:
        raise UserError(f"{context}: k4 is not supported; align or optimize the cameras without it")
    if lens.is_fisheye and (p1 or p2):
        model = "THIN_PRISM_FISHEYE"
        distortion = (k1, k2, p1, p2, k3, k4, 0, 0)
    elif lens.is_fisheye:
        model = "OPENCV_FISHEYE"
        distortion = (k1, k2, k3, k4)
    elif k3:
        model = "FULL_OPENCV"
        distortion = (k1, k2, p1, p2, k3, 0, 0, 0)
    elif any((k1, k2, p1, p2)):
        model = "OPENCV"
        distortion = (k1, k2, p1, p2)
    else:
        model = "PINHOLE"
        distortion = ()
    parameters = [float(value) for value in (*lens.focal, *lens.middle, *distortion)]
    camera = load_pycolmap().Camera(
        model=model,
        width=round(lens.size[0]),
        height=round(lens.size[1]),
        params=parameters,
    )
    camera.has_prior_focal_length = True
    return camera


@dataclass(frozen=True)
class RealityLens:
    """Intrinsics as RealityScan (RealityCapture) has them."""

    focal: float  # for a width of 36 mm
    u: float  # principal point from the middle of the image, in longer sides
    v: float
    radial: Sequence[float]  # k1 to k4
    t1: float  # OpenCV's p2
    t2: float  # OpenCV's p1


def reality_colmap_lens(lens: RealityLens, size: Size, context: str) -> pycolmap.Camera:
    """Build the pycolmap.Camera of a lens of RealityScan for an image of a size."""
    longer_side = max(size)
    focal = lens.focal / FILM_WIDTH * longer_side
    parameters = LensParameters(
        size=size,
        focal=(focal, focal),
        middle=(size[0] / 2 + lens.u * longer_side, size[1] / 2 + lens.v * longer_side),
        radial=lens.radial,
        tangential=(lens.t2, lens.t1),
    )
    return colmap_lens(parameters, context)


def require_rotation(matrix: ArrayLike, context: str) -> np.ndarray:
    """Return the rotation nearest to nine numbers that are one up to rounding. (3, 3)

    Raises:
        UserError: The numbers are not a rotation.
    """
    rotation = nearest_rotation(np.reshape(matrix, (3, 3)))
    if rotation is None:
        raise UserError(f"{context}: is no rotation; {EXPORT_AGAIN}")
    return rotation
