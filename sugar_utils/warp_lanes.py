# SPDX-License-Identifier: Apache-2.0
"""What the 32 lanes of a GPU's warp tell each other, and its fast functions; fibers do the same.

On a GPU each function is an instruction or a few. On the CPU the lanes of a block are fibers that
wait for each other, so kernels written with these functions add up in the same order on both. All
lanes of a warp must call them together; a block of fibers is one warp.
"""

import warp as wp

WARP_LANES = 32

SUM_COLUMNS = 16
"""How many columns :func:`sum_columns` adds up at once."""

Columns = wp.types.vector(length=SUM_COLUMNS, dtype=wp.float32)


def _exchange(type_name: str, cuda: str, source: str) -> str:
    """Body of a function that returns another lane's value."""
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


@wp.func_native(
    _exchange("float", "__shfl_xor_sync(0xffffffffu, value, distance)", "lane ^ distance")
)
def swap_floats(value: float, lane: int, distance: int) -> float:
    """The value of the lane whose number differs in the bits of ``distance``."""
    ...


@wp.func_native(
    _exchange("int", "__shfl_xor_sync(0xffffffffu, value, distance)", "lane ^ distance")
)
def swap_ints(value: int, lane: int, distance: int) -> int:
    """The same for integers."""
    ...


@wp.func_native(_exchange("int", "__shfl_sync(0xffffffffu, value, source)", "source"))
def read_lane(value: int, lane: int, source: int) -> int:
    """The value of lane ``source``."""
    ...


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
    """One bit for each lane, set where ``yes`` is not zero."""
    ...


@wp.func_native("""
#if defined(__CUDA_ARCH__)
return __ffs(bits) - 1;
#else
return __builtin_ctz(bits);
#endif
""")
def lowest_bit(bits: int) -> int:
    """Number of the lowest set bit; there must be one."""
    ...


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
    """e^(-x/2); on a GPU to two units in the last place, and what rounding the exponent adds."""
    ...


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
    """1 / x; on a GPU to one unit in the last place."""
    ...


@wp.func
def max_over_lanes(value: int, lane: int) -> int:
    """The largest of all lanes, in all lanes."""
    largest = value
    for step in range(5):
        largest = wp.max(largest, swap_ints(largest, lane, 1 << step))
    return largest


@wp.func
def or_over_lanes(bits: int, lane: int) -> int:
    """The bits that any lane has, in all lanes."""
    found = bits
    for step in range(5):
        found = found | swap_ints(found, lane, 1 << step)
    return found


def _folded(half: int, distance: int) -> wp.Function:
    """A step of :func:`sum_columns`: twice as many columns as ``half`` become ``half``."""
    HALF = wp.constant(half)
    DISTANCE = wp.constant(distance)

    @wp.func
    def fold(values: Columns, lane: int) -> Columns:
        v = values
        upper = (lane & DISTANCE) != 0
        for c in range(HALF):
            given = wp.where(upper, v[c], v[c + HALF])
            v[c] = wp.where(upper, v[c + HALF], v[c]) + swap_floats(given, lane, DISTANCE)
        return v

    return fold


_fold_16 = _folded(8, 16)
_fold_8 = _folded(4, 8)
_fold_4 = _folded(2, 4)
_fold_2 = _folded(1, 2)


@wp.func
def sum_columns(values: Columns, lane: int) -> float:
    """Sums of 16 columns over all lanes, each in two of them, in 16 exchanges.

    In every step a lane keeps one half of its columns, gives the other half to its partner, and
    adds what it is given; a tree for each column would take 80 exchanges.

    Args:
        values: One row of each lane.
        lane: Own number.

    Returns:
        The sum of column ``lane / 2``.
    """
    v = _fold_2(_fold_4(_fold_8(_fold_16(values, lane), lane), lane), lane)
    return v[0] + swap_floats(v[0], lane, 1)
