# SPDX-License-Identifier: Apache-2.0
"""Device code of the fields: Warp functions and kernels, launched by ``field_kernels``.

The adjoint is in ``field_adjoint``. The loops over neighbours are also written for CPU vector
registers, in ``field_cpu``.

Letters: i the Gaussian that a sample belongs to, j one of its neighbours, a an axis of j, y the
sample in the whitened coordinates of j, y = diag(1/s_j) R_j^T (x - mean_j).
"""

from __future__ import annotations

import warp as wp

from sugar_scene.fields.reference_fields import MIN_NORMAL_SCALE, MIN_WEIGHT_SUM, SAMPLE_SPREAD
from sugar_scene.geometry import MIN_SCALE
from sugar_utils.warp_math import column, four_of, pick, rotation_matrix, smallest_axis

OPTIONS = {"enable_backward": False, "cpu_compiler_flags": "-march=native -ffp-contract=fast"}

wp.set_module_options(OPTIONS)

PACK_SIZE = 16
"""Numbers per Gaussian in the packed table: one cache line."""

NEGLIGIBLE_SQUARE = 208.0
"""exp(-m / 2) is zero in float32 from here on."""


@wp.func
def vec3_of(values: wp.array2d(dtype=float), row: int) -> wp.vec3:
    return wp.vec3(values[row, 0], values[row, 1], values[row, 2])


@wp.func
def quat_of(quats: wp.array2d(dtype=float), row: int) -> wp.vec4:
    return wp.vec4(quats[row, 0], quats[row, 1], quats[row, 2], quats[row, 3])


@wp.func
def sign_of(x: float) -> float:
    """Sign with 0 for 0."""
    if x > 0.0:
        return 1.0
    if x < 0.0:
        return -1.0
    return 0.0


@wp.func
def whitening_of(packed: wp.array2d(dtype=float), row: int) -> wp.mat33:
    """A^T = diag(1/s) R^T of a packed row."""
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
    """What a packed row says."""

    mean: wp.vec3
    opacity: float
    first: wp.vec3
    second: wp.vec3
    third: wp.vec3
    direction: wp.vec3
    smallest: float
    axis: int
    normal_factor: float


@wp.func
def neighbor_of(packed: wp.array2d(dtype=float), row: int) -> Neighbor:
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
    """A point in the coordinates of a neighbour."""
    offset = x - n.mean
    return wp.vec3(wp.dot(n.first, offset), wp.dot(n.second, offset), wp.dot(n.third, offset))


@wp.kernel
def pack_rows(
    first: int,
    means: wp.array2d(dtype=float),
    quats: wp.array2d(dtype=float),
    scales: wp.array2d(dtype=float),
    opacities: wp.array(dtype=float),
    packed: wp.array2d(dtype=float),
):
    """Columns: mean, opacity, whitening (9), smallest scale, its axis, normal weight factor."""
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
    first: int, indices: wp.array(dtype=int), quats: wp.array2d(dtype=float),
    scales: wp.array2d(dtype=float), packed: wp.array2d(dtype=float),
    neighbors: wp.array2d(dtype=int), noise: wp.array2d(dtype=float), density_factor: float,
    points: wp.array2d(dtype=float), density: wp.array(dtype=float), beta: wp.array(dtype=float),
    plane_distance: wp.array(dtype=float), normal_error: wp.array(dtype=float),
    residual: wp.array2d(dtype=float),
):  # fmt: skip
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
