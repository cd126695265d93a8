# SPDX-License-Identifier: Apache-2.0
"""Small things for Warp kernels: rotations by quaternion and their adjoint, random bits."""

import warp as wp

# Typed here: inside a kernel such a literal is a signed integer, and a compiler warns.
_MULTIPLIER_1 = wp.constant(wp.uint32(0x7FEB352D))
_MULTIPLIER_2 = wp.constant(wp.uint32(0x846CA68B))


@wp.func
def hashed(x: wp.uint32) -> wp.uint32:
    """32 bits that look random: two rounds of xor, shift and multiply."""
    y = (x ^ (x >> wp.uint32(16))) * _MULTIPLIER_1
    y = (y ^ (y >> wp.uint32(15))) * _MULTIPLIER_2
    return y ^ (y >> wp.uint32(16))


@wp.func_native("""
const float* at = (const float*)(values.data) + (size_t)row * values.shape[1] + column;
#if defined(__CUDA_ARCH__)
const float4 four = *(const float4*)at;
return wp::vec_t<4, wp::float32>(four.x, four.y, four.z, four.w);
#else
return wp::vec_t<4, wp::float32>(at[0], at[1], at[2], at[3]);
#endif
""")
def four_of(values: wp.array2d(dtype=float), row: int, column: int) -> wp.vec4:
    """Four neighbours in a row, in one load of 16 bytes on a GPU.

    The array has no gaps, its rows are multiples of four values, the column is one, and its memory
    was allocated for it: a view may begin anywhere.
    """
    ...


@wp.func
def rotation_matrix(q: wp.vec4) -> wp.mat33:
    """Rotation of a unit quaternion stored as wxyz."""
    w = q[0]
    x = q[1]
    y = q[2]
    z = q[3]
    return wp.mat33(
        1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z), 2.0 * (x * z + w * y),
        2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - w * x),
        2.0 * (x * z - w * y), 2.0 * (y * z + w * x), 1.0 - 2.0 * (x * x + y * y),
    )  # fmt: skip


@wp.func
def rotation_gradient(q: wp.vec4, g: wp.mat33) -> wp.vec4:
    """Gradient with respect to the quaternion, given the one with respect to its matrix."""
    w = q[0]
    x = q[1]
    y = q[2]
    z = q[3]
    gw = x * (g[2, 1] - g[1, 2]) + y * (g[0, 2] - g[2, 0]) + z * (g[1, 0] - g[0, 1])
    gx = (
        y * (g[0, 1] + g[1, 0]) + z * (g[0, 2] + g[2, 0]) + w * (g[2, 1] - g[1, 2])
        - 2.0 * x * (g[1, 1] + g[2, 2])
    )  # fmt: skip
    gy = (
        x * (g[0, 1] + g[1, 0]) + z * (g[1, 2] + g[2, 1]) + w * (g[0, 2] - g[2, 0])
        - 2.0 * y * (g[0, 0] + g[2, 2])
    )  # fmt: skip
    gz = (
        x * (g[0, 2] + g[2, 0]) + y * (g[1, 2] + g[2, 1]) + w * (g[1, 0] - g[0, 1])
        - 2.0 * z * (g[0, 0] + g[1, 1])
    )  # fmt: skip
    return wp.vec4(2.0 * gw, 2.0 * gx, 2.0 * gy, 2.0 * gz)


@wp.func
def smallest_axis(s: wp.vec3) -> int:
    """Index of the smallest scale; the first one on ties."""
    axis = 0
    smallest = s[0]
    if s[1] < smallest:
        axis = 1
        smallest = s[1]
    if s[2] < smallest:
        axis = 2
    return axis


@wp.func
def pick(v: wp.vec3, j: int) -> float:
    """``v[j]``; as an index, a computed one would send the vector to memory on a GPU."""
    found = v[0]
    if j == 1:
        found = v[1]
    if j == 2:
        found = v[2]
    return found


@wp.func
def column(m: wp.mat33, j: int) -> wp.vec3:
    """Column of a matrix; ``j`` may be computed."""
    return wp.vec3(
        pick(wp.vec3(m[0, 0], m[0, 1], m[0, 2]), j),
        pick(wp.vec3(m[1, 0], m[1, 1], m[1, 2]), j),
        pick(wp.vec3(m[2, 0], m[2, 1], m[2, 2]), j),
    )


@wp.func
def add_at(v: wp.vec3, j: int, x: float) -> wp.vec3:
    """With ``v[j] += x``; ``j`` may be computed."""
    result = wp.vec3(v[0], v[1], v[2])
    for k in range(3):
        if k == j:
            result[k] += x
    return result


@wp.func
def add_to_column(m: wp.mat33, j: int, x: wp.vec3) -> wp.mat33:
    """With a vector added to a column; ``j`` may be computed."""
    result = m
    for r in range(3):
        for c in range(3):
            if c == j:
                result[r, c] += x[r]
    return result
