# SPDX-License-Identifier: Apache-2.0
"""Device code of the fields: Warp functions and kernels, launched by ``field_kernels``.

Letters: i the Gaussian that a sample belongs to, j one of its neighbours, a an axis of j, y the
sample in the whitened coordinates of j, y = diag(1/s_j) R_j^T (x - mean_j).
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import warp as wp

from sugar_scene.geometry import MIN_NORMAL_SCALE, MIN_SCALE, MIN_WEIGHT_SUM, SAMPLE_SPREAD
from sugar_utils.warp_arrays import Floats, Floats2d, Ints, Ints2d, Longs
from sugar_utils.warp_launch import FUSED_OPTIONS
from sugar_utils.warp_math import (
    add_to_column,
    column,
    four_of,
    pick,
    reciprocal_fast,
    rotation_matrix,
    smallest_axis,
)

wp.set_module_options(FUSED_OPTIONS)

PACK_SIZE = 16  # numbers per Gaussian in the packed table: one cache line
# The same without what a GPU computes again: three loads of 16 bytes, in two sectors of 32.
COMPACT_SIZE = 12
NEGLIGIBLE_SQUARE = 208.0  # exp(-m / 2) is zero in float32 from here on

PAIR_SIZE = 11  # gradients per (i, j): mean 3, quaternion 4, scales 3, opacity 1


@wp.func
def vec3_of(values: Floats2d, row: int) -> wp.vec3:
    """Read three numbers of a row."""
    return wp.vec3(values[row, 0], values[row, 1], values[row, 2])


@wp.func
def quat_of(quats: Floats2d, row: int) -> wp.vec4:
    """Read a quaternion, wxyz."""
    return wp.vec4(quats[row, 0], quats[row, 1], quats[row, 2], quats[row, 3])


@wp.func
def sign_of(x: float) -> float:
    """Return 1, -1 or, of zero, 0."""
    if x > 0.0:
        return 1.0
    if x < 0.0:
        return -1.0
    return 0.0


@wp.func
def whitening_of(packed: Floats2d, row: int) -> wp.mat33:
    """Read A^T = diag(1/s) R^T of a packed row."""
    return wp.mat33(
        packed[row, 4],
        packed[row, 5],
        packed[row, 6],
        packed[row, 7],
        packed[row, 8],
        packed[row, 9],
        packed[row, 10],
        packed[row, 11],
        packed[row, 12],
    )


@wp.struct
class Neighbor:
    """A neighbour of a sample's Gaussian."""

    mean: wp.vec3
    opacity: float
    first: wp.vec3  # rows of the whitening diag(1/s) R^T
    second: wp.vec3
    third: wp.vec3
    direction: wp.vec3  # row of the smallest axis: the normal divided by its scale
    smallest: float  # smallest scale
    axis: int  # its axis
    normal_factor: float  # of the weight of its normal


@wp.func
def normal_factor_of(smallest: float) -> float:
    """Return the factor of |y_axis| that makes it |(x - mean) . n| / floor^2."""
    floor = wp.max(smallest, wp.static(MIN_NORMAL_SCALE))
    return wp.max(smallest, wp.static(MIN_SCALE)) * reciprocal_fast(floor * floor)


@wp.func
def compact_scales_of(compact: Floats2d, row: int) -> wp.vec3:
    """Read the scales of a compact row."""
    c = four_of(compact, row, 8)
    return wp.vec3(c[0], c[1], c[2])


@wp.func
def neighbor_of(compact: Floats2d, row: int) -> Neighbor:
    """Unpack a compact row."""
    a = four_of(compact, row, 0)
    scales = compact_scales_of(compact, row)
    rotation = rotation_matrix(four_of(compact, row, 4))
    n = Neighbor()
    n.mean = wp.vec3(a[0], a[1], a[2])
    n.opacity = a[3]
    n.first = column(rotation, 0) * reciprocal_fast(wp.max(scales[0], wp.static(MIN_SCALE)))
    n.second = column(rotation, 1) * reciprocal_fast(wp.max(scales[1], wp.static(MIN_SCALE)))
    n.third = column(rotation, 2) * reciprocal_fast(wp.max(scales[2], wp.static(MIN_SCALE)))
    n.axis = smallest_axis(scales)
    n.smallest = pick(scales, n.axis)
    n.normal_factor = normal_factor_of(n.smallest)
    n.direction = n.first
    if n.axis == 1:
        n.direction = n.second
    if n.axis == 2:
        n.direction = n.third
    return n


@wp.func
def whitened(n: Neighbor, x: wp.vec3) -> wp.vec3:
    """Return a point in the whitened coordinates of a neighbour."""
    offset = x - n.mean
    return wp.vec3(wp.dot(n.first, offset), wp.dot(n.second, offset), wp.dot(n.third, offset))


@wp.kernel
def pack_rows(
    first: int,
    means: Floats2d,
    quats: Floats2d,
    scales: Floats2d,
    opacities: Floats,
    packed: Floats2d,
):
    """Pack a Gaussian: mean, opacity, whitening (9), smallest scale, its axis, normal factor."""
    i = first + wp.tid()
    rotation = rotation_matrix(quat_of(quats, i))
    axis = smallest_axis(vec3_of(scales, i))
    smallest = pick(vec3_of(scales, i), axis)
    for c in range(3):
        packed[i, c] = means[i, c]
        inverse = 1.0 / wp.max(scales[i, c], wp.static(MIN_SCALE))
        for r in range(3):
            packed[i, 4 + 3 * c + r] = rotation[r, c] * inverse
    packed[i, 3] = opacities[i]
    packed[i, 13] = smallest
    packed[i, 14] = float(axis)
    floor = wp.max(smallest, wp.static(MIN_NORMAL_SCALE))
    # |(x - mean) . n| / floor^2 = |y_axis| times this.
    packed[i, 15] = wp.max(smallest, wp.static(MIN_SCALE)) / (floor * floor)


@wp.kernel
def pack_compact_rows(
    first: int,
    means: Floats2d,
    quats: Floats2d,
    scales: Floats2d,
    opacities: Floats,
    compact: Floats2d,
):
    """Pack a Gaussian for a GPU: mean, opacity, quaternion, scales, 0."""
    i = first + wp.tid()
    for c in range(3):
        compact[i, c] = means[i, c]
        compact[i, 8 + c] = scales[i, c]
    compact[i, 3] = opacities[i]
    for c in range(4):
        compact[i, 4 + c] = quats[i, c]
    compact[i, 11] = 0.0


@wp.kernel
def evaluate_samples(
    first: int,
    n_used: Ints,
    indices: Ints,
    quats: Floats2d,
    scales: Floats2d,
    compact: Floats2d,
    neighbors: Ints2d,
    noise: Floats2d,
    density_factor: float,
    points: Floats2d,
    density: Floats,
    beta: Floats,
    plane_distance: Floats,
    normal_error: Floats,
    residual: Floats2d,
):
    """Evaluate the fields at one sample; the residual is saved for the backward pass.

    Rows that are not used are like a point on a flat surface, where no term has an error.
    """
    s = first + wp.tid()
    if s >= n_used[0]:
        for c in range(3):
            points[s, c] = 0.0
        for c in range(4):
            residual[s, c] = 0.0
        density[s] = 1.0
        beta[s] = 0.0
        plane_distance[s] = 0.0
        normal_error[s] = 0.0
        return
    i = indices[s]
    rotation = rotation_matrix(quat_of(quats, i))
    spread = wp.cw_mul(vec3_of(scales, i), vec3_of(noise, s)) * wp.static(SAMPLE_SPREAD)
    own_mean = vec3_of(compact, i)
    x = own_mean + rotation * spread
    own_axis = smallest_axis(vec3_of(scales, i))
    normal = column(rotation, own_axis)

    total = float(0.0)
    smallest = float(0.0)
    weights = float(0.0)
    mean_normal = wp.vec3()
    for k in range(neighbors.shape[1]):
        j = neighbors[i, k]
        neighbor = neighbor_of(compact, j)
        smallest += neighbor.smallest
        y = whitened(neighbor, x)
        square = wp.dot(y, y)
        if square < wp.static(NEGLIGIBLE_SQUARE):
            opacity = density_factor * neighbor.opacity * wp.exp(-0.5 * square)
            total += opacity
            sign = sign_of(wp.dot(neighbor.direction, normal))
            along = wp.abs(pick(y, neighbor.axis))
            weight = opacity * along * neighbor.normal_factor * wp.abs(sign)
            weights += weight
            length = wp.max(neighbor.smallest, wp.static(MIN_SCALE))
            mean_normal += neighbor.direction * (weight * length * sign)
    inverse = 1.0 / wp.max(weights, wp.static(MIN_WEIGHT_SUM))
    error = normal - mean_normal * inverse
    for c in range(3):
        points[s, c] = x[c]
        residual[s, c] = error[c]
    residual[s, 3] = inverse
    density[s] = total
    beta[s] = smallest / float(neighbors.shape[1])
    plane_distance[s] = wp.dot(x - own_mean, normal)
    normal_error[s] = wp.dot(error, error)


@wp.func
def own_rotation_entries(
    moment: wp.mat33, own_scales: wp.vec3, own_axis: int, normal_grad: wp.vec3
) -> wp.mat33:
    """Gradient of the rotation's entries through x = mean + R (1.5 s * noise) and the normal."""
    grad = wp.mat33()
    for r in range(3):
        for a in range(3):
            grad[r, a] = moment[r, a] * own_scales[a]
    return add_to_column(grad, own_axis, normal_grad)


@wp.kernel
def add_up_pairs(
    first: int,
    targets: Ints,
    order: Longs,
    gradient_rows: Floats2d,
    mean_grads: Floats2d,
    quat_grads: Floats2d,
    scale_grads: Floats2d,
    opacity_grads: Floats,
):
    """Add each run of equal targets to its row, in the work item of the run's first entry.

    For the CPU; ``field_sums_cuda`` has the kernel for GPUs.
    """
    entry = first + wp.tid()
    row = targets[entry]
    if entry > 0 and targets[wp.max(entry - 1, 0)] == row:
        return
    mean = vec3_of(mean_grads, row)
    quat = quat_of(quat_grads, row)
    scale = vec3_of(scale_grads, row)
    opacity = opacity_grads[row]
    while entry < targets.shape[0] and targets[wp.min(entry, targets.shape[0] - 1)] == row:
        pair = int(order[entry])
        mean += vec3_of(gradient_rows, pair)
        for c in range(4):
            quat[c] += gradient_rows[pair, 3 + c]
        for c in range(3):
            scale[c] += gradient_rows[pair, 7 + c]
        opacity += gradient_rows[pair, 10]
        entry += 1
    for c in range(3):
        mean_grads[row, c] = mean[c]
        scale_grads[row, c] = scale[c]
    for c in range(4):
        quat_grads[row, c] = quat[c]
    opacity_grads[row] = opacity
