# SPDX-License-Identifier: Apache-2.0
"""Functions for Warp kernels: rotations, random bits, and warp shuffles, votes and sums.

On a GPU each function is an instruction or a few. On the CPU the lanes of a block are fibers that
wait for each other, so kernels written with these functions add up in the same order on both. All
lanes of a warp must call them together; a block of fibers is one warp.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false

import warp as wp

# Typed here: inside a kernel such a literal is a signed integer, and a compiler warns.
_MULTIPLIER_1 = wp.constant(wp.uint32(0x7FEB352D))
_MULTIPLIER_2 = wp.constant(wp.uint32(0x846CA68B))

WARP_LANES = 32
TEAM_LANES = 16  # lanes of half a warp
SUM_COLUMNS = 16  # columns that :func:`sum_columns` adds up at once
Columns = wp.types.vector(length=SUM_COLUMNS, dtype=wp.float32)
_SWAP_CUDA = "__shfl_xor_sync(0xffffffffu, value, distance)"
_SWAP_SOURCE = "lane ^ distance"  # lane whose value is returned


@wp.func
def hashed(x: wp.uint32) -> wp.uint32:
    """Hash a number to 32 bits: two rounds of xor, shift and multiply."""
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
    """Read four neighbours in a row, in one load of 16 bytes on a GPU.

    The array has no gaps, its rows are multiples of four values, the column is one, and its memory
    was allocated for it: a view may begin anywhere.
    """


@wp.func
def rotation_matrix(q: wp.vec4) -> wp.mat33:
    """Rotation of a unit quaternion stored as wxyz."""
    w = q[0]
    x = q[1]
    y = q[2]
    z = q[3]
    return wp.mat33(
        1.0 - 2.0 * (y * y + z * z),
        2.0 * (x * y - w * z),
        2.0 * (x * z + w * y),
        2.0 * (x * y + w * z),
        1.0 - 2.0 * (x * x + z * z),
        2.0 * (y * z - w * x),
        2.0 * (x * z - w * y),
        2.0 * (y * z + w * x),
        1.0 - 2.0 * (x * x + y * y),
    )


@wp.func
def rotation_gradient(q: wp.vec4, g: wp.mat33) -> wp.vec4:
    """Gradient with respect to the quaternion, given the one with respect to its matrix."""
    w = q[0]
    x = q[1]
    y = q[2]
    z = q[3]
    gw = x * (g[2, 1] - g[1, 2]) + y * (g[0, 2] - g[2, 0]) + z * (g[1, 0] - g[0, 1])
    gx = (
        y * (g[0, 1] + g[1, 0])
        + z * (g[0, 2] + g[2, 0])
        + w * (g[2, 1] - g[1, 2])
        - 2.0 * x * (g[1, 1] + g[2, 2])
    )
    gy = (
        x * (g[0, 1] + g[1, 0])
        + z * (g[1, 2] + g[2, 1])
        + w * (g[0, 2] - g[2, 0])
        - 2.0 * y * (g[0, 0] + g[2, 2])
    )
    gz = (
        x * (g[0, 2] + g[2, 0])
        + y * (g[1, 2] + g[2, 1])
        + w * (g[1, 0] - g[0, 1])
        - 2.0 * z * (g[0, 0] + g[1, 1])
    )
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
    """Return ``v[j]``; indexing by a computed number would move the vector to memory on a GPU."""
    value = v[0]
    if j == 1:
        value = v[1]
    if j == 2:
        value = v[2]
    return value


@wp.func
def column(m: wp.mat33, j: int) -> wp.vec3:
    """Return a column of a matrix; ``j`` may be computed."""
    return wp.vec3(
        pick(wp.vec3(m[0, 0], m[0, 1], m[0, 2]), j),
        pick(wp.vec3(m[1, 0], m[1, 1], m[1, 2]), j),
        pick(wp.vec3(m[2, 0], m[2, 1], m[2, 2]), j),
    )


@wp.func
def add_at(v: wp.vec3, j: int, x: float) -> wp.vec3:
    """Return the vector with ``v[j] += x``; ``j`` may be computed."""
    result = wp.vec3(v[0], v[1], v[2])
    for k in range(3):
        if k == j:
            result[k] += x
    return result


@wp.func
def add_to_column(m: wp.mat33, j: int, x: wp.vec3) -> wp.mat33:
    """Return the matrix with a vector added to a column; ``j`` may be computed."""
    result = m
    for r in range(3):
        for c in range(3):
            if c == j:
                result[r, c] += x[r]
    return result


def _exchange(type_name: str, cuda: str, source: str) -> str:
    """C++ body of a function that returns another lane's value."""
    return f"""
#if defined(__CUDA_ARCH__)
return {cuda};
#else
static {type_name} values[{WARP_LANES}];
values[lane] = value;
WP_TILE_SYNC();
const {type_name} other = values[{source}];
WP_TILE_SYNC();
return other;
#endif
"""


@wp.func_native(_exchange("float", _SWAP_CUDA, _SWAP_SOURCE))
def swap_floats(value: float, lane: int, distance: int) -> float:
    """Return the value of the lane whose number differs in the bits of ``distance``."""


@wp.func_native(_exchange("int", _SWAP_CUDA, _SWAP_SOURCE))
def swap_ints(value: int, lane: int, distance: int) -> int:
    """Return the value of the lane whose number differs in the bits of ``distance``."""


@wp.func_native(_exchange("int", "__shfl_sync(0xffffffffu, value, source)", "source"))
def read_lane(value: int, lane: int, source: int) -> int:
    """Return the value of the lane ``source``."""


@wp.func_native(f"""
#if defined(__CUDA_ARCH__)
return (int)__ballot_sync(0xffffffffu, yes != 0);
#else
static int values[{WARP_LANES}];
values[lane] = yes;
WP_TILE_SYNC();
int bits = 0;
for (int i = 0; i < {WARP_LANES}; i++) bits |= (values[i] != 0) << i;
WP_TILE_SYNC();
return bits;
#endif
""")
def lanes_where(yes: int, lane: int) -> int:
    """Return one bit for each lane, set where ``yes`` is not zero."""


@wp.func_native("""
#if defined(__CUDA_ARCH__)
return __ffs(bits) - 1;
#else
return __builtin_ctz(bits);
#endif
""")
def lowest_bit(bits: int) -> int:
    """Return the number of the lowest set bit; there must be one."""


# The factor is -1 / (2 ln 2).
@wp.func_native("""
#if defined(__CUDA_ARCH__)
float y;
asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * -0.72134752f));
return y;
#else
return ::expf(-0.5f * x);
#endif
""")
def gauss(x: float) -> float:
    """Return e^(-x/2); on a GPU to two units in the last place, plus rounding of the exponent."""


@wp.func_native("""
#if defined(__CUDA_ARCH__)
float y;
asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
return y;
#else
return 1.0f / x;
#endif
""")
def reciprocal_fast(x: float) -> float:
    """Return 1 / x; on a GPU to one unit in the last place."""


@wp.func
def max_over_lanes(value: int, lane: int) -> int:
    """Return the largest value of all lanes, in all lanes."""
    largest = value
    for step in range(5):
        largest = wp.max(largest, swap_ints(largest, lane, 1 << step))
    return largest


@wp.func
def or_over_lanes(bits: int, lane: int) -> int:
    """Return the bits that any lane has, in all lanes."""
    union = bits
    for step in range(5):
        union = union | swap_ints(union, lane, 1 << step)
    return union


def _folded(half: int, distance: int) -> wp.Function:
    """Make a step of :func:`sum_columns`: twice as many columns as ``half`` become ``half``."""
    HALF = wp.constant(half)
    DISTANCE = wp.constant(distance)

    @wp.func
    def fold(values: Columns, lane: int) -> Columns:
        v = values
        upper = (lane & DISTANCE) != 0
        for c in range(HALF):
            sent = wp.where(upper, v[c], v[c + HALF])
            retained = wp.where(upper, v[c + HALF], v[c])
            v[c] = retained + swap_floats(sent, lane, DISTANCE)
        return v

    return fold


_fold_16 = _folded(8, 16)
_fold_8 = _folded(4, 8)
_fold_4 = _folded(2, 4)
_fold_2 = _folded(1, 2)
_fold_team_8 = _folded(8, 8)
_fold_team_4 = _folded(4, 4)
_fold_team_2 = _folded(2, 2)
_fold_team_1 = _folded(1, 1)


@wp.func
def sum_columns(values: Columns, lane: int) -> float:
    """Return sums of 16 columns over all lanes, each in two of the lanes, in 16 exchanges.

    In every step a lane retains one half of its columns, sends the other half to its partner, and
    adds what it receives; a tree for each column would take 80 exchanges.
    """
    v = _fold_2(_fold_4(_fold_8(_fold_16(values, lane), lane), lane), lane)
    return v[0] + swap_floats(v[0], lane, 1)


@wp.func
def sum_columns_of_team(values: Columns, lane: int) -> float:
    """Return sums of 16 columns over half a warp, each in the lane of its number there.

    Either half has its own sums, in 15 exchanges.
    """
    folded = _fold_team_4(_fold_team_8(values, lane), lane)
    return _fold_team_1(_fold_team_2(folded, lane), lane)[0]
