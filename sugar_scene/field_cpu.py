# SPDX-License-Identifier: Apache-2.0
"""CPU bodies of the fields: C++ in ``native/`` that works on eight neighbours at a time.

They compute what the functions of ``field_device`` do, but add neighbours in another order.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import warp as wp

from sugar_scene.field_device import (
    PACK_SIZE,
    PAIR_SIZE,
    own_rotation_entries,
    quat_of,
    vec3_of,
)
from sugar_scene.geometry import MIN_SCALE, MIN_WEIGHT_SUM, SAMPLE_SPREAD
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d, Ints, Ints2d
from sugar_utils.warp_launch import (
    FUSED_OPTIONS,
    NATIVE_OPTIONS,
    SIMD_SOURCE,
    native_kernel,
    native_source,
)
from sugar_utils.warp_math import column, rotation_gradient, rotation_matrix

wp.set_module_options(NATIVE_OPTIONS)

# Gradient that reaches row i through its samples: d/d mean, and below it d/d(R diag(1.5 s)).
PairSums = wp.types.matrix(shape=(4, 3), dtype=wp.float32)

_CONSTANTS = f"""
constexpr int PACK_SIZE = {PACK_SIZE}, PAIR_SIZE = {PAIR_SIZE};
constexpr float MIN_SCALE = {MIN_SCALE:.9e}f, MIN_WEIGHT_SUM = {MIN_WEIGHT_SUM:.9e}f;
constexpr float SAMPLE_SPREAD = {SAMPLE_SPREAD:.9e}f;
constexpr float NEGLIGIBLE_SQUARE = 174.f;  // exp(-m / 2) is the smallest normal float there
"""


def _source(name: str) -> str:
    lanes = native_source(__file__, "neighbor_lanes")
    body = native_source(__file__, name)
    # The lanes look rows up in arrays that the body names.
    names = "const float* packed = packed_.data;\nconst int* neighbors = neighbors_.data;\n"
    return SIMD_SOURCE + _CONSTANTS + names + lanes + body


@native_kernel("const int n_neighbors = neighbors_.shape[1];\n" + _source("evaluate_owner"))
def evaluate_owners(
    owner: int,
    owners_: Ints,
    starts_: Ints,
    quats_: Floats2d,
    scales_: Floats2d,
    packed_: Floats2d,
    neighbors_: Ints2d,
    noise_: Floats2d,
    density_factor: float,
    points_: Floats2d,
    density_: Floats,
    beta_: Floats,
    plane_distance_: Floats,
    normal_error_: Floats,
    residual_: Floats2d,
):
    """Evaluate the fields at all samples of one Gaussian; outputs as of ``evaluate_samples``."""


@wp.func
def _store(
    gradient_rows: Floats3d,
    owner: int,
    k: int,
    mean: wp.vec3,
    rotation: wp.vec4,
    scale: wp.vec3,
    opacity: float,
):
    for c in range(3):
        gradient_rows[owner, k, c] = mean[c]
        gradient_rows[owner, k, 7 + c] = scale[c]
    for c in range(4):
        gradient_rows[owner, k, 3 + c] = rotation[c]
    gradient_rows[owner, k, 10] = opacity


@wp.func
def _sum_over_samples(
    begin: int,
    end: int,
    noise: Floats2d,
    residual: Floats2d,
    field_grads: Floats2d,
    has_point_grads: int,
    point_grads: Floats2d,
):
    """Sum gradients that do not depend on neighbours: points, plane, beta and normal."""
    point_sum = wp.vec3()
    point_moment = wp.mat33()
    plane_moment = wp.vec3()
    beta_grad = float(0.0)
    normal_grad = wp.vec3()
    for s in range(begin, end):
        draw = vec3_of(noise, s)
        plane_moment += draw * field_grads[s, 2]
        normal_grad += vec3_of(residual, s) * (2.0 * field_grads[s, 3])
        beta_grad += field_grads[s, 1]
        if has_point_grads == 1:
            point_grad = vec3_of(point_grads, s)
            point_sum += point_grad
            point_moment += wp.outer(point_grad, draw)
    return point_sum, point_moment, plane_moment, beta_grad, normal_grad


@wp.func_native(_source("add_up_pairs"))
def _add_up_pairs(
    owner: int,
    i: int,
    begin: int,
    end: int,
    n_neighbors: int,
    spread: wp.mat33,
    normal: wp.vec3,
    beta_share: float,
    density_factor: float,
    quats_: Floats2d,
    scales_: Floats2d,
    packed_: Floats2d,
    neighbors_: Ints2d,
    noise_: Floats2d,
    residual_: Floats2d,
    field_grads_: Floats2d,
    gradient_rows_: Floats3d,
) -> PairSums: ...


@wp.kernel(module="unique", module_options=FUSED_OPTIONS)
def add_up_samples_native(
    first: int,
    owners: Ints,
    starts: Ints,
    quats: Floats2d,
    scales: Floats2d,
    packed: Floats2d,
    neighbors: Ints2d,
    noise: Floats2d,
    residual: Floats2d,
    density_factor: float,
    has_point_grads: int,
    point_grads: Floats2d,
    field_grads: Floats2d,
    gradient_rows: Floats3d,
):
    """Backpropagate a Gaussian's samples; field_grads: density, beta, plane, normal."""
    owner = first + wp.tid()
    i = owners[owner]
    begin = starts[owner]
    end = starts[owner + 1]
    n_neighbors = neighbors.shape[1]
    rotation = rotation_matrix(quat_of(quats, i))
    own_scales = vec3_of(scales, i) * wp.static(SAMPLE_SPREAD)
    spread = rotation * wp.diag(own_scales)
    own_axis = int(packed[i, 14])
    normal = column(rotation, own_axis)

    mean_grad, noise_moment, plane_moment, beta_grad, normal_grad = _sum_over_samples(
        begin, end, noise, residual, field_grads, has_point_grads, point_grads
    )
    # The tangent plane is anchored at the mean, so shifting the mean alone changes nothing.
    noise_moment += wp.outer(normal, plane_moment)
    normal_grad += spread * plane_moment

    pairs = _add_up_pairs(
        owner,
        i,
        begin,
        end,
        n_neighbors,
        spread,
        normal,
        beta_grad / float(n_neighbors),
        density_factor,
        quats,
        scales,
        packed,
        neighbors,
        noise,
        residual,
        field_grads,
        gradient_rows,
    )
    for c in range(3):
        mean_grad[c] += pairs[0, c]
        for r in range(3):
            noise_moment[r, c] += pairs[1 + r, c]

    entries = own_rotation_entries(noise_moment, own_scales, own_axis, normal_grad)
    own_scale_grad = wp.vec3()
    for a in range(3):
        along = wp.dot(column(rotation, a), column(noise_moment, a))
        own_scale_grad[a] = along * wp.static(SAMPLE_SPREAD)
    quat_grad = rotation_gradient(quat_of(quats, i), entries)
    _store(gradient_rows, owner, n_neighbors, mean_grad, quat_grad, own_scale_grad, 0.0)
