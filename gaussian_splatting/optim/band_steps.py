# SPDX-License-Identifier: Apache-2.0
"""Adam's step of the coefficients of colour bands 1 and up, three quarters of all values.

From a single view their gradient is an outer product, see
:mod:`gaussian_splatting.core.color_gradients`. It is formed where it is used and never stored: in
registers on a GPU, some Gaussians at a time on a CPU, where torch's vectorised step is faster than
one kernel for both.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportRedeclaration=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.core.color_gradients import ColorGradient
from gaussian_splatting.optim.adam_steps import (
    ADAM_BETAS,
    ADAM_EPS,
    MOMENTS,
    ParameterState,
    Stepped,
    by_formats,
    in_one_launch,
    rounded_to_bf16,
    step_alone,
)
from gaussian_splatting.rasterization.coefficient_gradients import coefficient_gradients
from gaussian_splatting.rasterization.projection_adjoint import basis_seen
from gaussian_splatting.rasterization.projection_kernels import Coefficients, vec3bf, view_at
from sugar_utils.warp_arrays import Floats, Ints, Vec3s, Vec3s2d
from sugar_utils.warp_launch import as_array, launch
from sugar_utils.warp_math import hashed

wp.set_module_options({"enable_backward": False, "cpu_compiler_flags": "-march=native"})

ROWS_AT_ONCE = 8192
"""Gaussians whose gradients are formed together on a CPU: 1.5 MB, which its caches hold."""

_VECTORS = {torch.float32: wp.vec3, torch.bfloat16: vec3bf}


@wp.struct
class BandSettings:
    """Numbers of one step."""

    degree: int  # at which colours were evaluated
    kept_first: float  # weights of the moments as they were, and of what is new
    new_first: float
    kept_second: float
    new_second: float
    eps: float


@wp.struct
class StoredCoefficient:
    """One coefficient of one Gaussian with its moments, of three channels."""

    value: wp.vec3
    exp_avg: wp.vec3
    exp_avg_sq: wp.vec3


@wp.func
def noise_of(seed: wp.uint32, i: int) -> wp.uint32:
    """Return random bits for an element."""
    return hashed(seed + wp.uint32(i))


@wp.func
def rounded_for(table: Vec3s2d, x: wp.vec3, noise: wp.vec3ui) -> wp.vec3:
    """Round to the type of a table: float32, or in the overload below bfloat16."""
    return x


@wp.func
def rounded_for(  # noqa: F811
    table: wp.array2d(dtype=vec3bf), x: wp.vec3, noise: wp.vec3ui
) -> wp.vec3:
    rounded = wp.vec3()
    for channel in range(3):
        rounded[channel] = rounded_to_bf16(x[channel], noise[channel])
    return rounded


@wp.func
def put(table: Vec3s2d, i: int, k: int, x: wp.vec3):
    """Store three numbers that were rounded for their table."""
    table[i, k] = x


@wp.func
def put(table: wp.array2d(dtype=vec3bf), i: int, k: int, x: wp.vec3):  # noqa: F811
    table[i, k] = vec3bf(x)


@wp.func
def stored_coefficient(
    i: int,
    k: int,
    values: Coefficients,
    exp_avg: wp.array2d(dtype=Any),
    exp_avg_sq: wp.array2d(dtype=Any),
) -> StoredCoefficient:
    """Read coefficient ``k`` of Gaussian ``i``."""
    c = StoredCoefficient()
    c.value = wp.vec3(values[i, k])
    c.exp_avg = wp.vec3(exp_avg[i, k])
    c.exp_avg_sq = wp.vec3(exp_avg_sq[i, k])
    return c


@wp.func
def put_coefficient(
    c: StoredCoefficient,
    i: int,
    k: int,
    values: Coefficients,
    exp_avg: wp.array2d(dtype=Any),
    exp_avg_sq: wp.array2d(dtype=Any),
):
    """Write coefficient ``k`` of Gaussian ``i``."""
    put(values, i, k, c.value)
    put(exp_avg, i, k, c.exp_avg)
    put(exp_avg_sq, i, k, c.exp_avg_sq)


@wp.func
def stepped_coefficient(
    c: StoredCoefficient,
    g: wp.vec3,
    s: BandSettings,
    numbers: wp.vec3i,
    item: int,
    values: Coefficients,
    moments: wp.array2d(dtype=Any),
) -> StoredCoefficient:
    """Return a coefficient after one step, rounded to what its tables can hold.

    Args:
        g: Its gradient.
        numbers: Of the step, see ``adam_steps.step_numbers``.
        item: Number of the coefficient among those of all Gaussians.
        values: Its table, of which the type alone counts; so of the moments.
    """
    step_size = wp.cast(numbers[0], wp.float32)
    root_correction = wp.cast(numbers[1], wp.float32)
    seed = wp.uint32(numbers[2])
    m = s.kept_first * c.exp_avg + s.new_first * g
    v = s.kept_second * c.exp_avg_sq + s.new_second * wp.cw_mul(g, g)
    x = c.value
    noise = wp.vec3ui()
    first_noise = wp.vec3ui()
    second_noise = wp.vec3ui()
    for channel in range(3):
        x[channel] -= step_size * m[channel] / (wp.sqrt(v[channel]) / root_correction + s.eps)
        noise[channel] = noise_of(seed, 3 * item + channel)
        first_noise[channel] = noise[channel] >> wp.uint32(16)
        second_noise[channel] = hashed(noise[channel])
    stepped = StoredCoefficient()
    stepped.value = rounded_for(values, x, noise)
    stepped.exp_avg = rounded_for(moments, m, first_noise)
    stepped.exp_avg_sq = rounded_for(moments, v, second_noise)
    return stepped


@wp.func
def color_weight(k: int, mean: wp.vec3, center: wp.vec3, degree: int, d_color: wp.vec3) -> float:
    """Return the gradient of coefficient ``k`` over that of the colour."""
    basis = basis_seen(mean, center, degree, d_color)
    weight = float(0.0)
    # Chosen one after the other: an index that is computed would send all of them to memory.
    for j in range(1, 16):
        if j == k + 1:
            weight = basis[j]
    return weight


@wp.func
def step_coefficient(
    item: int,
    s: BandSettings,
    numbers: wp.vec3i,
    record: Floats,
    means: Vec3s,
    d_colors: Vec3s,
    values: Coefficients,
    exp_avg: wp.array2d(dtype=Any),
    exp_avg_sq: wp.array2d(dtype=Any),
):
    """Step one coefficient of one Gaussian by the gradient of its colour, in its tables."""
    n_coefficients = values.shape[1]
    i = item // n_coefficients
    k = item - i * n_coefficients
    d_color = d_colors[i]
    g = color_weight(k, means[i], view_at(record).center, s.degree, d_color) * d_color
    c = stored_coefficient(i, k, values, exp_avg, exp_avg_sq)
    c = stepped_coefficient(c, g, s, numbers, item, values, exp_avg)
    put_coefficient(c, i, k, values, exp_avg, exp_avg_sq)


@wp.kernel
def step_coefficients(
    first: int,
    s: BandSettings,
    numbers: Ints,
    may_step: Ints,
    record: Floats,
    means: Vec3s,
    d_colors: Vec3s,
    values: Coefficients,
    exp_avg: wp.array2d(dtype=Any),
    exp_avg_sq: wp.array2d(dtype=Any),
):
    """Step one coefficient of one Gaussian, three numbers; compiled for every pair of types.

    Neighbouring threads have neighbouring coefficients, so that they share memory accesses; each
    evaluates the basis functions anew, which costs less than reading a gradient.
    """
    if may_step[0] == 0:
        return
    item = first + wp.tid()
    step = wp.vec3i(numbers[0], numbers[1], numbers[2])
    step_coefficient(item, s, step, record, means, d_colors, values, exp_avg, exp_avg_sq)


BAND_ARRAYS = {dtype: wp.array2d(dtype=vector) for dtype, vector in _VECTORS.items()}
"""Types of tables of coefficients, by the type of a number."""
_STEP_COEFFICIENTS = by_formats(step_coefficients, BAND_ARRAYS)


def step_bands(state: ParameterState, gradient: ColorGradient) -> None:
    """Step the coefficients of bands 1 and up, (N, K, 3), before the centres are stepped."""
    if in_one_launch(state.value.device):
        step_in_registers(state, gradient)
        return
    for start in range(0, len(state.value), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        chunk = state.rows(rows)
        step_alone(Stepped(chunk, coefficient_gradients(gradient, rows, chunk.value)))


def step_in_registers(state: ParameterState, gradient: ColorGradient) -> None:
    """Step as :func:`step_bands` does, with one launch."""
    values = state.value.detach()
    step_inputs = state.inputs()
    arguments = [
        band_settings(gradient.sh_degree),
        step_inputs.numbers,
        step_inputs.may_step,
        gradient.camera_record,
        as_array(gradient.means, wp.vec3),
        as_array(gradient.colors, wp.vec3),
        *band_arguments(values, state.moments),
    ]
    kernel = _STEP_COEFFICIENTS[values.dtype, state.moments[MOMENTS[0]].dtype]
    launch(kernel, values.shape[0] * values.shape[1], arguments)


def band_settings(degree: int) -> BandSettings:
    """Return the numbers that all coefficients of a step share.

    Args:
        degree: At which colours were evaluated.
    """
    settings = BandSettings()
    settings.degree = degree
    settings.kept_first, settings.kept_second = ADAM_BETAS
    settings.new_first = 1.0 - ADAM_BETAS[0]
    settings.new_second = 1.0 - ADAM_BETAS[1]
    settings.eps = ADAM_EPS
    return settings


def band_arguments(values: Tensor, moments: Mapping[str, Tensor]) -> list[Any]:
    """Return coefficients and both moments, (N, K, 3), as arguments of a kernel."""
    tables = [values, *[moments[name] for name in MOMENTS]]
    return [as_array(table, _VECTORS[table.dtype]) for table in tables]
