# SPDX-License-Identifier: Apache-2.0
"""What the kernels need to know of a camera, and the constants of the splatting contract."""

from __future__ import annotations

from typing import Any

import warp as wp

from gaussian_splatting.data.cameras import Camera

NEAR = 0.2
"""Gaussians whose centre is not farther than this along the view axis are culled. World units"""

LOW_PASS = 0.3
"""Added to both variances of a projected Gaussian, so that none is thinner than a pixel. px^2"""

FRUSTUM_MARGIN = 0.3
"""How far outside the image, in half fields of view, the projection is linearised in place."""

TILE = 16  # side of a square tile in pixels
ALPHA_MAX = 0.99
ALPHA_MIN = 1.0 / 255.0
TRANSMITTANCE_MIN = 1e-4


@wp.struct
class View:
    """Pose, intrinsics and size of one camera, as a kernel argument."""

    rotation: wp.mat33
    translation: wp.vec3
    center: wp.vec3
    fx: float
    fy: float
    cx: float
    cy: float
    x_min: float
    x_max: float
    y_min: float
    y_max: float
    width: int
    height: int
    tiles_x: int
    tiles_y: int


def linearisation_limits(camera: Camera) -> tuple[float, float, float, float]:
    """Range of x/z and y/z at which a projected covariance is evaluated: the image plus 0.3 half
    fields of view on every side, for a centred principal point the +-1.3 tan(FoV/2) of 3DGS.
    """
    tan_x, tan_y = camera.tan_half_fov
    margin_x, margin_y = FRUSTUM_MARGIN * tan_x, FRUSTUM_MARGIN * tan_y
    return (
        -camera.cx / camera.fx - margin_x,
        (camera.width - camera.cx) / camera.fx + margin_x,
        -camera.cy / camera.fy - margin_y,
        (camera.height - camera.cy) / camera.fy + margin_y,
    )


def n_tiles(camera: Camera) -> tuple[int, int]:
    """Tiles across and down, the last ones possibly partial."""
    return -(-camera.width // TILE), -(-camera.height // TILE)


def make_view(camera: Camera) -> Any:
    """Fill the kernel argument for one camera."""
    view = View()
    view.rotation = wp.mat33(*(float(v) for v in camera.rotation.ravel()))
    view.translation = wp.vec3(*(float(v) for v in camera.translation))
    view.center = wp.vec3(*(float(v) for v in camera.center))
    view.fx, view.fy, view.cx, view.cy = camera.fx, camera.fy, camera.cx, camera.cy
    view.x_min, view.x_max, view.y_min, view.y_max = linearisation_limits(camera)
    view.width, view.height = camera.width, camera.height
    view.tiles_x, view.tiles_y = n_tiles(camera)
    return view
