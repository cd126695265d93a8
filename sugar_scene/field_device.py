# SPDX-License-Identifier: Apache-2.0
"""Device code of the fields: Warp functions and kernels, launched by ``field_kernels``.

Letters: i the Gaussian that a sample belongs to, j one of its neighbours, a an axis of j, y the
sample in the whitened coordinates of j, y = diag(1/s_j) R_j^T (x - mean_j).
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import warp as wp

from sugar_scene.geometry import MIN_NORMAL_SCALE, MIN_SCALE, MIN_WEIGHT_SUM, SAMPLE_SPREAD
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d, Ints, Ints2d
from sugar_utils.warp_launch import FUSED_OPTIONS
from sugar_utils.warp_math import (
    add_at,
    add_to_column,
    column,
    four_of,
    pick,
    rotation_gradient,
    rotation_matrix,
    smallest_axis,
)

wp.set_module_options(FUSED_OPTIONS)

PACK_SIZE = 16  # numbers per Gaussian in the packed table: one cache line
NEGLIGIBLE_SQUARE = 208.0  # exp(-m / 2) is zero in float32 from here on

PAIR_SIZE = 11  # gradients per (i, j): mean 3, quaternion 4, scales 3, opacity 1
# Gradient that reaches row i through its samples: d/d mean, and below it d/d(R diag(1.5 s)).
PairSums = wp.types.matrix(shape=(4, 3), dtype=wp.float32)


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
    """A packed row: a neighbour of a sample's Gaussian."""

    mean: wp.vec3
    opacity: float
    first: wp.vec3  # rows of the whitening diag(1/s) R^T
    second: wp.vec3
    third: wp.vec3
    direction: wp.vec3  # row of the smallest axis: the normal divided by its scale
    smallest: float  # smallest scale
    axis: int  # its axis
    normal_factor: float  # of the weight of its normal


@wp.struct
class SampleRun:
    """The samples of one Gaussian, from ``begin`` to before ``end``."""

    begin: int
    end: int
    mean: wp.vec3  # of the Gaussian
    spread: wp.mat33  # R diag(1.5 s), which turns a draw into an offset
    density_factor: float


@wp.func
def neighbor_of(packed: Floats2d, row: int) -> Neighbor:
    """Unpack a row."""
    a = four_of(packed, row, 0)
    b = four_of(packed, row, 4)
    c = four_of(packed, row, 8)
    d = four_of(packed, row, 12)
    n = Neighbor()
    n.mean = wp.vec3(a[0], a[1], a[2])
    n.opacity = a[3]
    n.first = wp.vec3(b[0], b[1], b[2])
    n.second = wp.vec3(b[3], c[0], c[1])
    n.third = wp.vec3(c[2], c[3], d[0])
    n.smallest = d[1]
    n.axis = int(d[2])
    n.normal_factor = d[3]
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
def evaluate_samples(
    first: int,
    indices: Ints,
    quats: Floats2d,
    scales: Floats2d,
    packed: Floats2d,
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
    """Evaluate the fields at one sample; the residual is what the backward pass needs of them."""
    s = first + wp.tid()
    i = indices[s]
    rotation = rotation_matrix(quat_of(quats, i))
    spread = wp.cw_mul(vec3_of(scales, i), vec3_of(noise, s)) * wp.static(SAMPLE_SPREAD)
    own_mean = vec3_of(packed, i)
    x = own_mean + rotation * spread
    own_axis = int(packed[i, 14])
    normal = column(rotation, own_axis)

    total = float(0.0)
    smallest = float(0.0)
    weights = float(0.0)
    mean_normal = wp.vec3()
    for k in range(neighbors.shape[1]):
        j = neighbors[i, k]
        neighbor = neighbor_of(packed, j)
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
def _scale_gradient(scales: wp.vec3, yy_moment: wp.mat33) -> wp.vec3:
    """Return the scales' gradient from the moment <c y y^T>, since dy_a / ds_a = -y_a / s_a."""
    grad = wp.vec3()
    for a in range(3):
        if scales[a] >= wp.static(MIN_SCALE):
            grad[a] = -yy_moment[a, a] / scales[a]
    return grad


@wp.func
def _rotation_entries(rotation: wp.mat33, scales: wp.vec3, yy_moment: wp.mat33) -> wp.mat33:
    """Gradient of the rotation's entries: y_a = R_a . d / s_a with d = sum_b R_b s_b y_b."""
    clamped = wp.max(scales, wp.vec3(wp.static(MIN_SCALE)))
    grad = wp.mat33()
    for a in range(3):
        entries = rotation * wp.cw_mul(clamped, column(yy_moment, a)) / clamped[a]
        for r in range(3):
            grad[r, a] = entries[r]
    return grad


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
    """Sum what does not depend on neighbours: gradients of points, plane, beta and normal."""
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


@wp.func
def _sum_over_pair(
    run: SampleRun,
    j: int,
    packed: Floats2d,
    noise: Floats2d,
    residual: Floats2d,
    field_grads: Floats2d,
):
    """Sum moments over the samples near j, with c = dL/d(y^2 / 2), for the gradients of j."""
    neighbor = neighbor_of(packed, j)
    strength = run.density_factor * neighbor.opacity
    y_moment = wp.vec3()
    yy_moment = wp.mat33()
    y_noise_moment = wp.mat33()
    gauss_sum = float(0.0)
    normal_grad = wp.vec3()
    touched = int(0)
    for s in range(run.begin, run.end):
        draw = vec3_of(noise, s)
        y = whitened(neighbor, run.mean + run.spread * draw)
        square = wp.dot(y, y)
        if square < wp.static(NEGLIGIBLE_SQUARE):
            touched = 1
            gauss = wp.exp(-0.5 * square)
            gradients = four_of(field_grads, s, 0)
            error = four_of(residual, s, 0)
            density_grad = gradients[0]
            gauss_sum += density_grad * gauss
            cy = y * (-density_grad * strength * gauss)
            y_moment += cy
            yy_moment += wp.outer(cy, y)
            y_noise_moment += wp.outer(cy, draw)
            along = wp.abs(pick(y, neighbor.axis))
            weight = strength * gauss * along * neighbor.normal_factor * error[3]
            normal_grad += wp.vec3(error[0], error[1], error[2]) * (-2.0 * gradients[3] * weight)
    return y_moment, yy_moment, y_noise_moment, gauss_sum, normal_grad, touched


@wp.func
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
    quats: Floats2d,
    scales: Floats2d,
    packed: Floats2d,
    neighbors: Ints2d,
    noise: Floats2d,
    residual: Floats2d,
    field_grads: Floats2d,
    gradient_rows: Floats3d,
) -> PairSums:
    """Fill the gradient rows of all neighbours; return the gradient that reaches i."""
    mean_grad = wp.vec3()
    noise_moment = wp.mat33()
    run = SampleRun()
    run.begin = begin
    run.end = end
    run.mean = vec3_of(packed, i)
    run.spread = spread
    run.density_factor = density_factor
    for k in range(n_neighbors):
        j = neighbors[i, k]
        y_moment, yy_moment, y_noise_moment, gauss_sum, neighbor_normal_grad, touched = (
            _sum_over_pair(run, j, packed, noise, residual, field_grads)
        )
        neighbor = neighbor_of(packed, j)
        axis = neighbor.axis
        x_grad = wp.vec3()
        quat_grad = wp.vec4()
        scale_grad = wp.vec3()
        if touched == 1:
            unwhitening = wp.matrix_from_cols(neighbor.first, neighbor.second, neighbor.third)
            x_grad = unwhitening * y_moment
            mean_grad += x_grad
            noise_moment += unwhitening * y_noise_moment
            neighbor_rotation = rotation_matrix(quat_of(quats, j))
            neighbor_scales = vec3_of(scales, j)
            scale_grad = _scale_gradient(neighbor_scales, yy_moment)
            entry_grad = _rotation_entries(neighbor_rotation, neighbor_scales, yy_moment)
            sign = sign_of(wp.dot(column(neighbor_rotation, axis), normal))
            entry_grad = add_to_column(entry_grad, axis, neighbor_normal_grad * sign)
            quat_grad = rotation_gradient(quat_of(quats, j), entry_grad)
        scale_grad = add_at(scale_grad, axis, beta_share)
        _store(gradient_rows, owner, k, -x_grad, quat_grad, scale_grad, density_factor * gauss_sum)
    sums = PairSums()
    for c in range(3):
        sums[0, c] = mean_grad[c]
        for r in range(3):
            sums[1 + r, c] = noise_moment[r, c]
    return sums


@wp.func
def _own_rotation_entries(
    moment: wp.mat33, own_scales: wp.vec3, own_axis: int, normal_grad: wp.vec3
) -> wp.mat33:
    """Gradient of the rotation's entries through x = mean + R (1.5 s * noise) and the normal."""
    grad = wp.mat33()
    for r in range(3):
        for a in range(3):
            grad[r, a] = moment[r, a] * own_scales[a]
    return add_to_column(grad, own_axis, normal_grad)


@functools.cache
def sample_gradients_kernel(gradient_sums: Callable[..., Any] = _add_up_pairs) -> wp.Kernel:
    """Return the kernel of a Gaussian's samples; ``gradient_sums`` works on its neighbours."""

    @wp.kernel(module="unique", module_options=FUSED_OPTIONS)
    def add_up_samples(
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

        pairs = gradient_sums(
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

        entries = _own_rotation_entries(noise_moment, own_scales, own_axis, normal_grad)
        own_scale_grad = wp.vec3()
        for a in range(3):
            along = wp.dot(column(rotation, a), column(noise_moment, a))
            own_scale_grad[a] = along * wp.static(SAMPLE_SPREAD)
        quat_grad = rotation_gradient(quat_of(quats, i), entries)
        _store(gradient_rows, owner, n_neighbors, mean_grad, quat_grad, own_scale_grad, 0.0)

    return add_up_samples


@wp.kernel
def add_up_pairs(
    first: int,
    targets: Ints,
    order: wp.array(dtype=wp.int64),
    starts: Ints,
    per_owner: int,
    gradient_rows: Floats2d,
    mean_grads: Floats2d,
    quat_grads: Floats2d,
    scale_grads: Floats2d,
    opacity_grads: Floats,
):
    """Add each run of equal targets to its row, in the work item of the run's first entry.

    Owners without samples, which are the last, all have the same targets: without the break, one
    thread would add up their zeros.
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
        owner = pair / per_owner
        if starts[owner] == starts[owner + 1]:
            break
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
