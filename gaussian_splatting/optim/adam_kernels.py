# SPDX-License-Identifier: Apache-2.0
"""Warp kernels of one Adam step on parameters and moments in small storage types.

A kernel reads value, gradient and moments of an element in the type they are stored in, steps in
float32, and writes them back. The step uses the new moments before they are rounded.

Rounding is stochastic, because a moment changes by less than its spacing: a number goes to one of
its two neighbours with a probability that keeps the mean. The random bits are a hash of the seed
of the step and the number of the element, so they depend neither on threads nor on the past.

Storage types beyond float32:

- bfloat16, for values, gradients and moments;
- first moment in 8 bits: ``sign * (c / 127)^2`` times the largest magnitude of the row,
  ``c`` in 0..127;
- second moment in 8 bits: a float of 4 exponent and 4 mantissa bits times the largest of the row;
  16 octaves, and nothing else of such a row is stored as zero, since its root divides.

The largest of a row is kept in bfloat16, rounded up; a row whose largest is below 1e-33 is all
zero. Block-wise 8-bit moments follow Dettmers et al., ICLR 2022; the maps are our own.
"""

from __future__ import annotations

from typing import Any

import warp as wp

from sugar_utils.warp_math import hashed

wp.set_module_options({"enable_backward": False, "cpu_compiler_flags": "-march=native"})

SIGNED_LEVELS = 127.0
_LOW_SHIFT = 19
_LEVEL_OFFSET = (127 << 4) - 255  # leading 12 bits of the float32 1.0 minus the code of 1
_SMALLEST_SCALE = 1e-33

# Typed here: inside a kernel such a literal is a signed integer, and a compiler warns.
_DROPPED_BITS = wp.constant(wp.uint32(0xFFFF))
_KEPT_BITS = wp.constant(wp.uint32(0xFFFF0000))


@wp.struct
class StepSettings:
    """What all elements of one step share."""

    seed: wp.uint32
    width: int
    sparse: int  # 1 where rows that were not seen sit out
    beta1: float
    beta2: float
    step_size: float
    root_correction: float
    eps: float


@wp.func_native("""
union { float number; unsigned int bits; } pun;
pun.number = x;
return pun.bits;
""")
def bits_of(x: float) -> wp.uint32: ...


@wp.func_native("""
union { float number; unsigned int bits; } pun;
pun.bits = bits;
return pun.number;
""")
def float_of(bits: wp.uint32) -> float: ...


@wp.func
def noise_of(seed: wp.uint32, element: int) -> wp.uint32:
    """Random bits of one element in one step."""
    return hashed(seed + wp.uint32(element))


@wp.func
def rounded_to_bf16(x: float, noise: wp.uint32) -> float:
    """One of the two bfloat16 next to x, with mean x; the low 16 bits of ``noise`` decide."""
    return float_of((bits_of(x) + (noise & _DROPPED_BITS)) & _KEPT_BITS)


@wp.func
def scale_of(largest: float) -> float:
    """The smallest bfloat16 that is not below the largest magnitude of a row."""
    if largest < wp.static(_SMALLEST_SCALE):
        return 0.0
    return float_of((bits_of(largest) + _DROPPED_BITS) & _KEPT_BITS)


@wp.func
def put(target: wp.array(dtype=float), i: int, x: float, noise: wp.uint32):
    target[i] = x


@wp.func
def put(target: wp.array(dtype=wp.bfloat16), i: int, x: float, noise: wp.uint32):  # noqa: F811
    target[i] = wp.bfloat16(rounded_to_bf16(x, noise))


@wp.func
def signed_level(code: wp.int8) -> float:
    """Share of the row's largest magnitude, in [-1, 1]."""
    c = float(code) / SIGNED_LEVELS
    return c * wp.abs(c)


@wp.func
def signed_code(share: float, noise: float) -> wp.int8:
    """Code of a share in [-1, 1]: the level below, or with ``noise`` in [0, 1) the one above."""
    square = wp.min(wp.abs(share), 1.0) * (SIGNED_LEVELS * SIGNED_LEVELS)
    below = wp.floor(wp.sqrt(square))
    code = below
    if square - below * below > noise * (2.0 * below + 1.0):
        code = below + 1.0
    return wp.int8(wp.sign(share) * wp.min(code, SIGNED_LEVELS))


@wp.func
def positive_level(code: wp.uint8) -> float:
    """Share of the row's largest value, in [0, 1]; code 0 is 0."""
    if code == wp.uint8(0):
        return 0.0
    return float_of(wp.uint32(int(code) + wp.static(_LEVEL_OFFSET)) << wp.uint32(_LOW_SHIFT))


@wp.func
def positive_code(share: float, noise: wp.uint32) -> wp.uint8:
    """Code of a share in [0, 1]; ``noise`` of 19 bits is added below the last bit kept."""
    if share <= 0.0:
        return wp.uint8(0)
    leading = (bits_of(wp.min(share, 1.0)) + noise) >> wp.uint32(_LOW_SHIFT)
    # Never 0: a second moment that vanished would make the next step infinite.
    return wp.uint8(wp.clamp(int(leading) - wp.static(_LEVEL_OFFSET), 1, 255))


@wp.func
def share_of(x: float, largest: float) -> float:
    if largest > 0.0:
        return x / largest
    return 0.0


@wp.func
def update_of(m: float, v: float, s: StepSettings) -> float:
    """What the step takes off a value."""
    return s.step_size * m / (wp.sqrt(v) / s.root_correction + s.eps)


@wp.kernel
def step_elements(
    first: int, s: StepSettings, seen: wp.array(dtype=wp.uint8), grads: wp.array(dtype=Any),
    values: wp.array(dtype=Any), exp_avg: wp.array(dtype=Any), exp_avg_sq: wp.array(dtype=Any),
):  # fmt: skip
    """One element per work item; moments in float32 or bfloat16."""
    i = first + wp.tid()
    if s.sparse == 1 and seen[i // s.width] == wp.uint8(0):
        return
    g = float(grads[i])
    m = s.beta1 * float(exp_avg[i]) + (1.0 - s.beta1) * g
    v = s.beta2 * float(exp_avg_sq[i]) + (1.0 - s.beta2) * g * g
    noise = noise_of(s.seed, i)
    put(values, i, float(values[i]) - update_of(m, v, s), noise)
    put(exp_avg, i, m, noise >> wp.uint32(16))
    put(exp_avg_sq, i, v, hashed(noise))


@wp.kernel
def step_rows(
    first: int, s: StepSettings, seen: wp.array(dtype=wp.uint8), grads: wp.array(dtype=Any),
    values: wp.array(dtype=Any), exp_avg: wp.array(dtype=wp.int8),
    exp_avg_scale: wp.array(dtype=wp.bfloat16), exp_avg_sq: wp.array(dtype=wp.uint8),
    exp_avg_sq_scale: wp.array(dtype=wp.bfloat16),
):  # fmt: skip
    """One row per work item; moments in 8 bits with one scale per row."""
    row = first + wp.tid()
    if s.sparse == 1 and seen[row] == wp.uint8(0):
        return
    m_scale = float(exp_avg_scale[row])
    v_scale = float(exp_avg_sq_scale[row])
    m_largest = float(0.0)
    v_largest = float(0.0)
    for i in range(row * s.width, (row + 1) * s.width):
        g = float(grads[i])
        m = s.beta1 * signed_level(exp_avg[i]) * m_scale + (1.0 - s.beta1) * g
        v = s.beta2 * positive_level(exp_avg_sq[i]) * v_scale + (1.0 - s.beta2) * g * g
        m_largest = wp.max(m_largest, wp.abs(m))
        v_largest = wp.max(v_largest, v)
    m_largest = scale_of(m_largest)
    v_largest = scale_of(v_largest)
    for i in range(row * s.width, (row + 1) * s.width):
        g = float(grads[i])
        m = s.beta1 * signed_level(exp_avg[i]) * m_scale + (1.0 - s.beta1) * g
        v = s.beta2 * positive_level(exp_avg_sq[i]) * v_scale + (1.0 - s.beta2) * g * g
        noise = noise_of(s.seed, i)
        put(values, i, float(values[i]) - update_of(m, v, s), noise)
        exp_avg[i] = signed_code(share_of(m, m_largest), float(noise >> wp.uint32(16)) / 65536.0)
        low_bits = hashed(noise) >> wp.uint32(32 - _LOW_SHIFT)
        exp_avg_sq[i] = positive_code(share_of(v, v_largest), low_bits)
    exp_avg_scale[row] = wp.bfloat16(m_largest)
    exp_avg_sq_scale[row] = wp.bfloat16(v_largest)


@wp.kernel
def encode_rows(
    first: int, width: int, keep_scales: int, exp_avg: wp.array(dtype=Any),
    exp_avg_sq: wp.array(dtype=Any), m_codes: wp.array(dtype=wp.int8),
    m_scale: wp.array(dtype=wp.bfloat16), v_codes: wp.array(dtype=wp.uint8),
    v_scale: wp.array(dtype=wp.bfloat16),
):  # fmt: skip
    """Moments to the nearest 8-bit codes, with given scales or those of the rows."""
    row = first + wp.tid()
    if keep_scales == 0:
        m_largest = float(0.0)
        v_largest = float(0.0)
        for i in range(row * width, (row + 1) * width):
            m_largest = wp.max(m_largest, wp.abs(float(exp_avg[i])))
            v_largest = wp.max(v_largest, float(exp_avg_sq[i]))
        m_scale[row] = wp.bfloat16(scale_of(m_largest))
        v_scale[row] = wp.bfloat16(scale_of(v_largest))
    for i in range(row * width, (row + 1) * width):
        m_codes[i] = signed_code(share_of(float(exp_avg[i]), float(m_scale[row])), 0.5)
        half = wp.uint32(1) << wp.uint32(_LOW_SHIFT - 1)
        v_codes[i] = positive_code(share_of(float(exp_avg_sq[i]), float(v_scale[row])), half)


@wp.kernel
def decode_rows(
    first: int, width: int, m_codes: wp.array(dtype=wp.int8), m_scale: wp.array(dtype=wp.bfloat16),
    v_codes: wp.array(dtype=wp.uint8), v_scale: wp.array(dtype=wp.bfloat16),
    exp_avg: wp.array(dtype=wp.bfloat16), exp_avg_sq: wp.array(dtype=wp.bfloat16),
):  # fmt: skip
    """8-bit codes to moments in bfloat16."""
    i = first + wp.tid()
    row = i // width
    exp_avg[i] = wp.bfloat16(signed_level(m_codes[i]) * float(m_scale[row]))
    exp_avg_sq[i] = wp.bfloat16(positive_level(v_codes[i]) * float(v_scale[row]))


_floats, _halves = wp.array(dtype=float), wp.array(dtype=wp.bfloat16)
_TYPES = ((False, _floats), (True, _halves))

STEP_ELEMENTS = {
    (half_values, half_moments): wp.overload(
        step_elements,
        {"grads": values, "values": values, "exp_avg": moments, "exp_avg_sq": moments},
    )
    for half_values, values in _TYPES
    for half_moments, moments in _TYPES
}
"""By whether values (and gradients), and whether moments, are bfloat16."""

STEP_ROWS = {
    half: wp.overload(step_rows, {"grads": values, "values": values}) for half, values in _TYPES
}
"""By whether values (and gradients) are bfloat16."""

ENCODE_ROWS = {
    half: wp.overload(encode_rows, {"exp_avg": moments, "exp_avg_sq": moments})
    for half, moments in _TYPES
}
"""By whether the given moments are bfloat16."""
