# SPDX-License-Identifier: Apache-2.0
"""Warp kernels that turn 3D Gaussians into 2D splats; the adjoint is in ``projection_adjoint``.

A splat is one row of floats:

    0 1     centre in pixels; the middle of pixel (column, row) is at (column, row)
    2 3 4   conic: inverse covariance xx, xy, yy in 1/px^2
    5       opacity
    6       largest exponent that is blended: where alpha is 1/255, or the splat's cutoff before it
    7 8     half extents in pixels of the region up to it; negative where there is none
    9 ...   blended channels: colour, depth, normal x and y, plane, then free features

The plane of a Gaussian goes through its centre, square to its smallest axis: the normal in camera
axes towards the camera, and its product with the centre, n . t = d for every point of the plane.

EWA projection after Zwicker et al. 2001 as used by 3DGS (Kerbl et al. 2023, section 4).
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportRedeclaration=false

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.core.spherical_harmonics import (
    sh_basis,
)
from gaussian_splatting.data.cameras import Camera
from sugar_utils.device import float32_tensor, upload
from sugar_utils.warp_arrays import Floats, Floats2d, Ints, Vec3s, Vec3s2d, Vec4s
from sugar_utils.warp_math import (
    column,
    rotation_matrix,
    smallest_axis,
)

wp.set_module_options({"enable_backward": False})

LOW_PASS = 0.3
"""Added to both variances of a projected Gaussian, so that none is thinner than a pixel. px^2"""

FRUSTUM_MARGIN = 0.3
"""Margin around the image, in half fields of view, inside of which the projection is linearised
at the centre itself."""

TILE = 16  # side of a square tile in pixels
ALPHA_MAX = 0.99
ALPHA_MIN = 1.0 / 255.0
TRANSMITTANCE_MIN = 1e-4

SPLAT_HEADER = 9
HEADER = wp.constant(SPLAT_HEADER)
INVERSE_ALPHA_MIN = wp.constant(1.0 / ALPHA_MIN)
BLUR = wp.constant(LOW_PASS)
TILE_SIDE = wp.constant(float(TILE))
UNBOUNDED = wp.constant(1.0e9)
mat23 = wp.types.matrix(shape=(2, 3), dtype=wp.float32)
Coefficients = wp.array2d(dtype=Any)
Rects = wp.array(dtype=wp.vec4i)
vec3bf = wp.types.vector(length=3, dtype=wp.bfloat16)
MIN_COVERAGE = wp.constant(0.000025)
"""Smallest squared share of an antialiased splat: opacities shrink to 0.005 at most, as in 3DGS.
Below it, as for flat splats seen edge-on, the share is a constant."""


@wp.struct
class View:
    """Pose, intrinsics and size of one camera, as a kernel argument."""

    rotation: wp.mat33  # world to camera
    translation: wp.vec3  # world to camera, world units
    center: wp.vec3  # camera centre, world units
    fx: float  # focal lengths and principal point in pixels
    fy: float
    cx: float
    cy: float
    x_min: float  # limits of the linearisation, see :class:`LinearisationLimits`
    x_max: float
    y_min: float
    y_max: float
    width: int  # of the image in pixels
    height: int
    tiles_x: int  # tiles across and down
    tiles_y: int
    near: float  # Gaussians nearer than this along the view axis are culled, world units


class LinearisationLimits(NamedTuple):
    """Range of x/z and y/z in which covariances are projected at the centre itself."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float


def linearisation_limits(camera: Camera) -> LinearisationLimits:
    """Return the image plus 0.3 half fields of view on each side, as in 3DGS."""
    tan_x, tan_y = camera.tan_half_fov
    margin_x = FRUSTUM_MARGIN * tan_x
    margin_y = FRUSTUM_MARGIN * tan_y
    return LinearisationLimits(
        x_min=-camera.cx / camera.fx - margin_x,
        x_max=(camera.width - camera.cx) / camera.fx + margin_x,
        y_min=-camera.cy / camera.fy - margin_y,
        y_max=(camera.height - camera.cy) / camera.fy + margin_y,
    )


def n_tiles(camera: Camera) -> tuple[int, int]:
    """Return the tiles across and down; the last ones may be partial."""
    return -(-camera.width // TILE), -(-camera.height // TILE)


def make_view(camera: Camera) -> View:
    """Return a camera as an argument of kernels."""
    limits = linearisation_limits(camera)
    view = View()
    view.rotation = wp.mat33(*camera.rotation.ravel().tolist())
    view.translation = wp.vec3(*camera.translation.tolist())
    view.center = wp.vec3(*camera.center.tolist())
    view.fx = camera.fx
    view.fy = camera.fy
    view.cx = camera.cx
    view.cy = camera.cy
    view.x_min = limits.x_min
    view.x_max = limits.x_max
    view.y_min = limits.y_min
    view.y_max = limits.y_max
    view.width = camera.width
    view.height = camera.height
    view.tiles_x, view.tiles_y = n_tiles(camera)
    view.near = camera.near
    return view


# Among a camera's numbers; the lens are focal lengths and principal point.
ROTATION_IN_RECORD = slice(0, 9)
TRANSLATION_IN_RECORD = slice(9, 12)
CENTER_IN_RECORD = slice(12, 15)
LENS_IN_RECORD = slice(15, 19)


@functools.lru_cache(maxsize=8192)
def camera_record(camera: Camera, device: torch.device) -> Tensor:
    """Return the numbers of a camera in the memory of a device, where kernels read them.

    A launch that was recorded reads what is there when it is repeated, while a struct among its
    arguments would stay what it was. (28,) float32, the fields of :class:`View` in their order
    """
    view = make_view(camera)
    numbers = np.concatenate([np.ravel(getattr(view, name)) for name in View.vars])
    return upload(float32_tensor(numbers), device)


@wp.func
def view_at(record: Floats) -> View:
    """Read a camera from the numbers of :func:`camera_record`."""
    view = View()
    for row in range(3):
        for k in range(3):
            view.rotation[row, k] = record[3 * row + k]
        view.translation[row] = record[9 + row]
        view.center[row] = record[12 + row]
    view.fx = record[15]
    view.fy = record[16]
    view.cx = record[17]
    view.cy = record[18]
    view.x_min = record[19]
    view.x_max = record[20]
    view.y_min = record[21]
    view.y_max = record[22]
    view.width = int(record[23])
    view.height = int(record[24])
    view.tiles_x = int(record[25])
    view.tiles_y = int(record[26])
    view.near = record[27]
    return view


@wp.struct
class Channels:
    """Columns of the channels that a splat carries, -1 where there are none, and settings."""

    rgb: int
    depth: int
    normal: int
    plane: int
    plane_reach: float  # maximum depth of Gaussians whose planes are carried, world units
    features: int
    n_features: int
    sh_degree: int
    antialiased: int  # 1 where opacities shrink as splats are widened
    cutoff: float  # exponent at which splats end at the latest


@wp.func
def squared_area(v: mat23) -> float:
    """Return the determinant of v v^T, without the cancellation of a difference of products."""
    xy = v[0, 0] * v[1, 1] - v[0, 1] * v[1, 0]
    yz = v[0, 1] * v[1, 2] - v[0, 2] * v[1, 1]
    zx = v[0, 2] * v[1, 0] - v[0, 0] * v[1, 2]
    return xy * xy + yz * yz + zx * zx


@wp.func
def coverage(area: float, widened_area: float) -> float:
    """Return the area of a splat over that of the widened one, squared; both areas are squares.

    Widened splats keep their sum over the pixels if opacities shrink by its root (Mip-Splatting, Yu
    et al., CVPR 2024, section 5.2).
    """
    return wp.max(area / widened_area, MIN_COVERAGE)


@wp.func
def clamped_tangents(t: wp.vec3, view: View) -> wp.vec2:
    """Return the camera-space x and y at which the projection is linearised."""
    return wp.vec2(
        wp.clamp(t[0] / t[2], view.x_min, view.x_max) * t[2],
        wp.clamp(t[1] / t[2], view.y_min, view.y_max) * t[2],
    )


@wp.func
def projection_jacobian(t: wp.vec3, txy: wp.vec2, view: View) -> mat23:
    """Return the Jacobian of the projection at (txy, t.z), pixels per world unit."""
    iz = 1.0 / t[2]
    return mat23(
        view.fx * iz,
        0.0,
        -view.fx * txy[0] * iz * iz,
        0.0,
        view.fy * iz,
        -view.fy * txy[1] * iz * iz,
    )


@wp.func
def scaled_rotation(r: wp.mat33, s: wp.vec3) -> wp.mat33:
    """Return R diag(s), whose square is the covariance."""
    return wp.mat33(
        r[0, 0] * s[0],
        r[0, 1] * s[1],
        r[0, 2] * s[2],
        r[1, 0] * s[0],
        r[1, 1] * s[1],
        r[1, 2] * s[2],
        r[2, 0] * s[0],
        r[2, 1] * s[1],
        r[2, 2] * s[2],
    )


@wp.func
def sh_color(
    i: int, direction: wp.vec3, degree: int, sh_dc: Vec3s2d, sh_rest: Coefficients
) -> wp.vec3:
    """Return the colour before the clamp at zero."""
    basis = sh_basis(direction, degree)
    color = basis[0] * sh_dc[i, 0] + wp.vec3(0.5, 0.5, 0.5)
    # Unrolled: a computed index would send the basis to memory on a GPU.
    for k in range(1, 16):
        if k < (degree + 1) * (degree + 1):
            color += basis[k] * wp.vec3(sh_rest[i, k - 1])
    return color


@wp.func
def tile_range(p: float, radius: float, extent: float, n: int) -> wp.vec2i:
    """Return the first and past-the-last tile along one axis of the 3DGS square ``p +- radius``.

    Tiles that alpha >= 1/255 does not reach are left out, which changes nothing in the image.
    """
    limit = float(n)
    lo = wp.clamp((p - radius) / TILE_SIDE, 0.0, limit)
    hi = wp.clamp((p + radius + TILE_SIDE - 1.0) / TILE_SIDE, 0.0, limit)
    tight_lo = wp.clamp(wp.floor(wp.ceil(p - extent) / TILE_SIDE), 0.0, limit)
    tight_hi = wp.clamp(wp.floor(wp.floor(p + extent) / TILE_SIDE) + 1.0, 0.0, limit)
    return wp.vec2i(wp.max(int(lo), int(tight_lo)), wp.min(int(hi), int(tight_hi)))


@wp.func
def covariance_of(v: mat23) -> wp.vec3:
    """Return xx, xy and yy of the covariance v v^T. px^2"""
    return wp.vec3(
        v[0, 0] * v[0, 0] + v[0, 1] * v[0, 1] + v[0, 2] * v[0, 2],
        v[0, 0] * v[1, 0] + v[0, 1] * v[1, 1] + v[0, 2] * v[1, 2],
        v[1, 0] * v[1, 0] + v[1, 1] * v[1, 1] + v[1, 2] * v[1, 2],
    )


@wp.func
def visible_extent(opacity: float, xx: float, yy: float, cutoff: float) -> wp.vec3:
    """Return the largest visible exponent, and half extents in pixels; columns 6 to 8 of a splat.

    xx and yy are the variances of the splat, cutoff is that of :class:`Channels`.
    """
    limit = float(0.0)
    extent_x = float(-1.0e6)
    extent_y = float(-1.0e6)
    if opacity * INVERSE_ALPHA_MIN > 1.0:
        # A hair more than the exact bound: the pixel test decides, this only saves work.
        limit = wp.log(INVERSE_ALPHA_MIN * opacity) * 1.0001 + 1.0e-4
        limit = wp.min(limit, cutoff)
        extent_x = wp.sqrt(2.0 * limit * xx) + 1.0e-3
        extent_y = wp.sqrt(2.0 * limit * yy) + 1.0e-3
    return wp.vec3(limit, extent_x, extent_y)


@wp.func
def put_normal(
    i: int,
    mean: wp.vec3,
    t: wp.vec3,
    normal: wp.vec3,
    view: View,
    channels: Channels,
    splats: Floats2d,
):
    """Write the channels of a Gaussian's normal and plane; t is its centre in camera axes."""
    facing = wp.sign(wp.dot(normal, view.center - mean))
    normal_view = view.rotation * normal * facing
    if channels.normal >= 0:
        splats[i, HEADER + channels.normal] = normal_view[0]
        splats[i, HEADER + channels.normal + 1] = normal_view[1]
    if channels.plane >= 0 and t[2] <= channels.plane_reach:
        for k in range(3):
            splats[i, HEADER + channels.plane + k] = normal_view[k]
        splats[i, HEADER + channels.plane + 3] = wp.dot(normal_view, t)


@wp.func
def project_one(
    i: int,
    view: View,
    channels: Channels,
    means: Vec3s,
    quats: Vec4s,
    scales: Vec3s,
    opacities: Floats,
    sh_dc: Vec3s2d,
    sh_rest: Coefficients,
    features: Floats2d,
    splats: Floats2d,
    radii: Ints,
    depths: Floats,
    tile_rects: Rects,
):
    """Fill the row of one Gaussian, with zeros if it is culled."""
    for k in range(splats.shape[1]):
        splats[i, k] = 0.0
    radii[i] = 0
    tile_rects[i] = wp.vec4i(0, 0, 0, 0)
    mean = means[i]
    t = view.rotation * mean + view.translation
    depths[i] = t[2]
    if not (t[2] > view.near):
        return
    scale = scales[i]
    opacity = opacities[i]
    rotation = rotation_matrix(quats[i])
    txy = clamped_tangents(t, view)
    v = projection_jacobian(t, txy, view) * view.rotation * scaled_rotation(rotation, scale)
    covariance = covariance_of(v)
    a = covariance[0] + BLUR
    b = covariance[1]
    c = covariance[2] + BLUR
    det = a * c - b * b
    # Written so that a NaN anywhere in the position, shape or opacity culls the Gaussian.
    if not (det > 0.0 and det < 1.0e30 and wp.isfinite(opacity)):
        return
    if channels.antialiased > 0:
        opacity = opacity * wp.sqrt(coverage(squared_area(v), det))
    px = view.fx * t[0] / t[2] + view.cx - 0.5
    py = view.fy * t[1] / t[2] + view.cy - 0.5
    middle = 0.5 * (a + c)
    radius = wp.ceil(3.0 * wp.sqrt(middle + wp.sqrt(wp.max(0.1, middle * middle - det))))
    extent = visible_extent(opacity, a, c, channels.cutoff)
    square_x = tile_range(px, radius, UNBOUNDED, view.tiles_x)
    square_y = tile_range(py, radius, UNBOUNDED, view.tiles_y)
    if square_x[1] <= square_x[0] or square_y[1] <= square_y[0]:
        return
    radii[i] = int(wp.min(radius, 1.0e9))
    tiles_x = tile_range(px, radius, extent[1], view.tiles_x)
    tiles_y = tile_range(py, radius, extent[2], view.tiles_y)
    if tiles_x[1] > tiles_x[0] and tiles_y[1] > tiles_y[0]:
        tile_rects[i] = wp.vec4i(tiles_x[0], tiles_x[1], tiles_y[0], tiles_y[1])
    splats[i, 0] = px
    splats[i, 1] = py
    splats[i, 2] = c / det
    splats[i, 3] = -b / det
    splats[i, 4] = a / det
    splats[i, 5] = opacity
    for k in range(3):
        splats[i, 6 + k] = extent[k]
    if channels.rgb >= 0:
        direction = wp.normalize(mean - view.center)
        color = sh_color(i, direction, channels.sh_degree, sh_dc, sh_rest)
        for k in range(3):
            splats[i, HEADER + channels.rgb + k] = wp.max(color[k], 0.0)
    if channels.depth >= 0:
        splats[i, HEADER + channels.depth] = t[2]
    if channels.normal >= 0 or channels.plane >= 0:
        normal = column(rotation, smallest_axis(scale))
        put_normal(i, mean, t, normal, view, channels, splats)
    for k in range(channels.n_features):
        splats[i, HEADER + channels.features + k] = features[i, k]


@wp.kernel
def project_forward(
    first: int,
    record: Floats,
    channels: Channels,
    means: Vec3s,
    quats: Vec4s,
    scales: Vec3s,
    opacities: Floats,
    sh_dc: Vec3s2d,
    sh_rest: Coefficients,
    features: Floats2d,
    splats: Floats2d,
    radii: Ints,
    depths: Floats,
    tile_rects: Rects,
):
    """Project Gaussians; see :func:`project_one`."""
    i = first + wp.tid()
    project_one(
        i,
        view_at(record),
        channels,
        means,
        quats,
        scales,
        opacities,
        sh_dc,
        sh_rest,
        features,
        splats,
        radii,
        depths,
        tile_rects,
    )


def by_coefficients(kernel: wp.Kernel, *names: str) -> dict[type, wp.Kernel]:
    """Return the overloads of a kernel by the type of its coefficients of bands 1 and up.

    Args:
        names: Arguments of that type.
    """
    overloads = {}
    for vector in (wp.vec3, vec3bf):
        argument_types = dict.fromkeys(names, wp.array2d(dtype=vector))
        overloads[vector] = wp.overload(kernel, argument_types)
    return overloads


PROJECT_FORWARD = by_coefficients(project_forward, "sh_rest")
