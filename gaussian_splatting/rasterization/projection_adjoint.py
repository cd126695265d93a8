# SPDX-License-Identifier: Apache-2.0
"""The hand-written adjoint of the projection in ``projection_kernels``."""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportRedeclaration=false

from typing import Any

import warp as wp

from gaussian_splatting.core.spherical_harmonics import (
    sh_basis,
    sh_direction_gradient,
    vec16,
)
from gaussian_splatting.rasterization.projection_kernels import (
    BLUR,
    HEADER,
    MIN_COVERAGE,
    Channels,
    Coefficients,
    View,
    by_coefficients,
    clamped_tangents,
    covariance_of,
    coverage,
    mat23,
    projection_jacobian,
    scaled_rotation,
    squared_area,
    vec3bf,
    view_at,
)
from sugar_utils.warp_arrays import Floats, Floats2d, Ints, Vec2s, Vec3s, Vec3s2d, Vec4s
from sugar_utils.warp_launch import known_options
from sugar_utils.warp_math import (
    add_to_column,
    column,
    rotation_gradient,
    rotation_matrix,
    smallest_axis,
)

wp.set_module_options({"enable_backward": False})

MAX_REGISTERS = 128
"""Of a thread of :func:`project_backward`, for 16 warps on a multiprocessor of a GPU. The compiler
would take up to 162, and spills nothing with 128; 16 bytes for the GPUs of 2018."""


@wp.func
def coverage_gradient(a: float, b: float, c: float, area: float, widened_area: float) -> wp.vec3:
    """Differentiate the root's logarithm with respect to the covariance (a, b; b, c) of the splat.

    b stands for both off-diagonal entries. Areas are squares, as in :func:`coverage`.
    """
    if area <= MIN_COVERAGE * widened_area:
        return wp.vec3()
    across = b / widened_area - b / area
    return 0.5 * wp.vec3(
        c / area - (c + BLUR) / widened_area, across, a / area - (a + BLUR) / widened_area
    )


@wp.func
def put_vector(target: Vec3s2d, i: int, k: int, v: wp.vec3):
    """Store a vector in the type of its table: float32, or in the overload below bfloat16."""
    target[i, k] = v


@wp.func
def put_vector(target: wp.array2d(dtype=vec3bf), i: int, k: int, v: wp.vec3):  # noqa: F811
    target[i, k] = vec3bf(v)


@wp.func
def clamped_gradient(i: int, column: int, splats: Floats2d, d_splats: Floats2d) -> wp.vec3:
    """Return the gradient of a colour before its clamp at zero; column is its first one."""
    d_color = wp.vec3()
    for k in range(3):
        if splats[i, column + k] > 0.0:
            d_color[k] = d_splats[i, column + k]
    return d_color


@wp.func
def color_gradient(
    i: int,
    offset: wp.vec3,
    d_color: wp.vec3,
    degree: int,
    sh_rest: wp.array2d(dtype=Any),
    d_sh_rest: wp.array2d(dtype=Any),
) -> wp.vec3:
    """Backpropagate one colour; return the gradient of the centre.

    Coefficients get theirs where ``d_sh_rest`` has room for them.
    """
    length = wp.length(offset)
    direction = offset / length
    basis = sh_basis(direction, degree)
    d_basis = vec16()
    for k in range(1, 16):
        if k < (degree + 1) * (degree + 1):
            if k <= d_sh_rest.shape[1]:
                put_vector(d_sh_rest, i, k - 1, basis[k] * d_color)
            d_basis[k] = wp.dot(wp.vec3(sh_rest[i, k - 1]), d_color)
    d_direction = sh_direction_gradient(direction, degree, d_basis)
    return (d_direction - direction * wp.dot(direction, d_direction)) / length


@wp.func
def conic_gradient(i: int, splats: Floats2d, d: wp.vec3) -> wp.vec3:
    """Return the gradient of the 2D covariance (xx, xy counted twice, yy).

    dL/dcov = -K G K for K = cov^-1, where d is the gradient of K.
    """
    k00 = splats[i, 2]
    k01 = splats[i, 3]
    k11 = splats[i, 4]
    g00 = d[0]
    g01 = 0.5 * d[1]
    g11 = d[2]
    m00 = k00 * g00 + k01 * g01
    m01 = k00 * g01 + k01 * g11
    m10 = k01 * g00 + k11 * g01
    m11 = k01 * g01 + k11 * g11
    return wp.vec3(-(m00 * k00 + m01 * k01), -(m00 * k01 + m01 * k11), -(m10 * k01 + m11 * k11))


@wp.func
def clear_gradients(
    i: int,
    d_means: Vec3s,
    d_quats: Vec4s,
    d_scales: Vec3s,
    d_opacities: Floats,
    d_features: Floats2d,
):
    """Write zeros for a culled Gaussian."""
    d_means[i] = wp.vec3()
    d_quats[i] = wp.vec4()
    d_scales[i] = wp.vec3()
    d_opacities[i] = 0.0
    for k in range(d_features.shape[1]):
        d_features[i, k] = 0.0


@wp.func
def add_jacobian_gradient(
    d_t: wp.vec3, d_jacobian: mat23, t: wp.vec3, txy: wp.vec2, view: View
) -> wp.vec3:
    """Add the gradient of the Jacobian to that of t, the centre in camera axes."""
    iz = 1.0 / t[2]
    d_t[2] = d_t[2] - iz * iz * (view.fx * d_jacobian[0, 0] + view.fy * d_jacobian[1, 1])
    across = view.fx * txy[0] * d_jacobian[0, 2] + view.fy * txy[1] * d_jacobian[1, 2]
    d_t[2] = d_t[2] + 2.0 * iz * iz * iz * across
    if t[0] * iz >= view.x_min and t[0] * iz <= view.x_max:
        d_t[0] = d_t[0] - view.fx * iz * iz * d_jacobian[0, 2]
    if t[1] * iz >= view.y_min and t[1] * iz <= view.y_max:
        d_t[1] = d_t[1] - view.fy * iz * iz * d_jacobian[1, 2]
    return d_t


@wp.kernel(**known_options(cuda_max_registers=MAX_REGISTERS))
def project_backward(
    first: int,
    record: Floats,
    channels: Channels,
    color_factor: float,
    means: Vec3s,
    quats: Vec4s,
    scales: Vec3s,
    sh_rest: Coefficients,
    radii: Ints,
    splats: Floats2d,
    d_means2d: Vec2s,
    d_splats: Floats2d,
    d_means: Vec3s,
    d_quats: Vec4s,
    d_scales: Vec3s,
    d_opacities: Floats,
    d_colors: Vec3s,
    d_sh_rest: Coefficients,
    d_features: Floats2d,
):
    """Adjoint of :func:`project_forward`; gradients of culled Gaussians are zeros.

    As in 3DGS, a camera-space x or y clamped by the linearisation limits counts as a constant.

    Args:
        color_factor: What the gradients of colours are multiplied by in ``d_colors``: with the
            constant basis function, they are those of the coefficients of band 0.
        d_colors: Gradients of the colours before their clamp at zero.
        d_sh_rest: Without columns, nothing is written to it.
    """
    i = first + wp.tid()
    d_colors[i] = wp.vec3()
    for k in range(d_sh_rest.shape[1]):
        put_vector(d_sh_rest, i, k, wp.vec3())
    if radii[i] == 0:
        clear_gradients(i, d_means, d_quats, d_scales, d_opacities, d_features)
        return
    view = view_at(record)
    mean = means[i]
    scale = scales[i]
    q = quats[i]
    t = view.rotation * mean + view.translation
    iz = 1.0 / t[2]
    rotation = rotation_matrix(q)
    txy = clamped_tangents(t, view)
    jacobian = projection_jacobian(t, txy, view)
    projection = jacobian * view.rotation
    scaled = scaled_rotation(rotation, scale)
    v = projection * scaled

    d_cov = conic_gradient(i, splats, wp.vec3(d_splats[i, 2], d_splats[i, 3], d_splats[i, 4]))
    d_opacity = d_splats[i, 5]
    if channels.antialiased > 0:
        covariance = covariance_of(v)
        a = covariance[0]
        b = covariance[1]
        c = covariance[2]
        area = squared_area(v)
        widened_area = (a + BLUR) * (c + BLUR) - b * b
        d_cov += d_opacity * splats[i, 5] * coverage_gradient(a, b, c, area, widened_area)
        d_opacity *= wp.sqrt(coverage(area, widened_area))
    d_v = mat23()
    for k in range(3):
        d_v[0, k] = 2.0 * (d_cov[0] * v[0, k] + d_cov[1] * v[1, k])
        d_v[1, k] = 2.0 * (d_cov[1] * v[0, k] + d_cov[2] * v[1, k])
    d_scaled = wp.transpose(projection) * d_v
    d_jacobian = d_v * wp.transpose(scaled) * wp.transpose(view.rotation)

    d_t = wp.vec3(
        view.fx * iz * d_means2d[i][0],
        view.fy * iz * d_means2d[i][1],
        -iz * iz * (view.fx * t[0] * d_means2d[i][0] + view.fy * t[1] * d_means2d[i][1]),
    )
    d_t = add_jacobian_gradient(d_t, d_jacobian, t, txy, view)
    if channels.depth >= 0:
        d_t[2] = d_t[2] + d_splats[i, HEADER + channels.depth]

    d_rotation = scaled_rotation(d_scaled, scale)
    d_scale = wp.vec3()
    for k in range(3):
        d_scale[k] = wp.dot(column(d_scaled, k), column(rotation, k))
    if channels.normal >= 0 or channels.plane >= 0:
        axis = smallest_axis(scale)
        facing = wp.sign(wp.dot(column(rotation, axis), view.center - mean))
        d_normal_view = wp.vec3()
        if channels.normal >= 0:
            d_normal_view[0] = d_splats[i, HEADER + channels.normal]
            d_normal_view[1] = d_splats[i, HEADER + channels.normal + 1]
        if channels.plane >= 0 and t[2] <= channels.plane_reach:
            normal_view = view.rotation * column(rotation, axis) * facing
            d_distance = d_splats[i, HEADER + channels.plane + 3]
            for k in range(3):
                d_normal_view[k] = d_normal_view[k] + d_splats[i, HEADER + channels.plane + k]
            d_normal_view += d_distance * t
            d_t += d_distance * normal_view
        d_normal = wp.transpose(view.rotation) * d_normal_view * facing
        d_rotation = add_to_column(d_rotation, axis, d_normal)

    d_mean = wp.transpose(view.rotation) * d_t
    if channels.rgb >= 0:
        d_color = clamped_gradient(i, HEADER + channels.rgb, splats, d_splats)
        offset = mean - view.center
        d_colors[i] = color_factor * d_color
        d_mean += color_gradient(i, offset, d_color, channels.sh_degree, sh_rest, d_sh_rest)
    d_means[i] = d_mean
    d_quats[i] = rotation_gradient(q, d_rotation)
    d_scales[i] = d_scale
    d_opacities[i] = d_opacity
    for k in range(channels.n_features):
        d_features[i, k] = d_splats[i, HEADER + channels.features + k]


@wp.func
def basis_seen(mean: wp.vec3, center: wp.vec3, degree: int, d_color: wp.vec3) -> vec16:
    """Return the basis functions of a Gaussian's coefficients; zeros where its colour taught none.

    Such a Gaussian may be culled, and anywhere: its direction need not be a number.
    """
    if d_color[0] == 0.0 and d_color[1] == 0.0 and d_color[2] == 0.0:
        return vec16()
    offset = mean - center
    return sh_basis(offset / wp.length(offset), degree)


@wp.kernel
def spread_colors(
    first: int,
    record: Floats,
    degree: int,
    means: Vec3s,
    d_colors: Vec3s,
    d_sh_rest: Coefficients,
):
    """Form the gradients of coefficients that :func:`project_backward` had no room for."""
    i = first + wp.tid()
    d_color = d_colors[i]
    basis = basis_seen(means[i], view_at(record).center, degree, d_color)
    for k in range(1, 16):
        if k <= d_sh_rest.shape[1]:
            put_vector(d_sh_rest, i, k - 1, basis[k] * d_color)


PROJECT_BACKWARD = by_coefficients(project_backward, "sh_rest", "d_sh_rest")
SPREAD_COLORS = by_coefficients(spread_colors, "d_sh_rest")
