# SPDX-License-Identifier: Apache-2.0
"""Types of array parameters of kernels, by their elements and number of axes."""

import warp as wp

Floats = wp.array(dtype=float)
Floats2d = wp.array2d(dtype=float)
Floats3d = wp.array3d(dtype=float)
Doubles = wp.array(dtype=wp.float64)
Doubles2d = wp.array2d(dtype=wp.float64)
Ints = wp.array(dtype=int)
Ints2d = wp.array2d(dtype=int)
Longs = wp.array(dtype=wp.int64)
Longs2d = wp.array2d(dtype=wp.int64)
Bools = wp.array(dtype=wp.bool)
Vec2s = wp.array(dtype=wp.vec2)
Vec3s = wp.array(dtype=wp.vec3)
Vec3ds = wp.array(dtype=wp.vec3d)
Vec3s2d = wp.array2d(dtype=wp.vec3)
Vec4s = wp.array(dtype=wp.vec4)
Mat44ds = wp.array(dtype=wp.mat44d)
