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
from gaussian_splatting.rasterization.projection_kernels import view_at
from sugar_utils.warp_arrays import Bools, Floats, Floats2d, Ints, Vec3s
from sugar_utils.warp_launch import as_array, launch
from sugar_utils.warp_math import hashed

wp.set_module_options({"enable_backward": False, "cpu_compiler_flags": "-march=native"})

ROWS_AT_ONCE = 8192
"""Gaussians whose gradients are formed together on a CPU: 1.5 MB, which its caches hold."""

CHANNELS = wp.constant(3)
Table = wp.array2d(dtype=Any)
"""Of coefficients or of one of their moments, a row of 3 K numbers for each Gaussian."""


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
class StoredNumber:
    """One number of a coefficient with its moments."""

    value: float
    exp_avg: float
    exp_avg_sq: float


@wp.func
def rounded_for(table: Floats2d, x: float, noise: wp.uint32) -> float:
    """Round to the type of a table: float32, or in the overload below bfloat16."""
    return x


@wp.func
def rounded_for(  # noqa: F811
    table: wp.array2d(dtype=wp.bfloat16), x: float, noise: wp.uint32
) -> float:
    return rounded_to_bf16(x, noise)


@wp.func
def put(table: Floats2d, i: int, column: int, x: float):
    """Store a number that was rounded for its table."""
    table[i, column] = x


@wp.func
def put(table: wp.array2d(dtype=wp.bfloat16), i: int, column: int, x: float):  # noqa: F811
    table[i, column] = wp.bfloat16(x)


@wp.func
def stored_number(i: int, column: int, values: Table, exp_avg: Table, exp_avg_sq: Table):
    """Read a number of Gaussian ``i``."""
    n = StoredNumber()
    n.value = float(values[i, column])
    n.exp_avg = float(exp_avg[i, column])
    n.exp_avg_sq = float(exp_avg_sq[i, column])
    return n


@wp.func
def put_number(
    n: StoredNumber, i: int, column: int, values: Table, exp_avg: Table, exp_avg_sq: Table
):
    """Write a number of Gaussian ``i``."""
    put(values, i, column, n.value)
    put(exp_avg, i, column, n.exp_avg)
    put(exp_avg_sq, i, column, n.exp_avg_sq)


@wp.func
def stepped_number(
    n: StoredNumber,
    g: float,
    s: BandSettings,
    numbers: wp.vec3i,
    element: int,
    values: Table,
    moments: Table,
) -> StoredNumber:
    """Return a number after one step, rounded to what its tables can hold.

    Args:
        g: Its gradient.
        numbers: Of the step, see ``adam_steps.step_numbers``.
        element: Its index among the numbers of all Gaussians.
        values: Its table, of which the type alone counts; so of the moments.
    """
    step_size = wp.cast(numbers[0], wp.float32)
    root_correction = wp.cast(numbers[1], wp.float32)
    m = s.kept_first * n.exp_avg + s.new_first * g
    v = s.kept_second * n.exp_avg_sq + s.new_second * (g * g)
    x = n.value - step_size * m / (wp.sqrt(v) / root_correction + s.eps)
    noise = hashed(wp.uint32(numbers[2]) + wp.uint32(element))
    stepped = StoredNumber()
    stepped.value = rounded_for(values, x, noise)
    stepped.exp_avg = rounded_for(moments, m, noise >> wp.uint32(16))
    stepped.exp_avg_sq = rounded_for(moments, v, hashed(noise))
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
def step_number(
    i: int,
    column: int,
    g: float,
    s: BandSettings,
    numbers: wp.vec3i,
    values: Table,
    exp_avg: Table,
    exp_avg_sq: Table,
):
    """Step one number of Gaussian ``i`` by its gradient ``g``, in its tables."""
    n = stored_number(i, column, values, exp_avg, exp_avg_sq)
    element = i * values.shape[1] + column
    n = stepped_number(n, g, s, numbers, element, values, exp_avg)
    put_number(n, i, column, values, exp_avg, exp_avg_sq)


@wp.kernel
def step_coefficients(
    first: int,
    s: BandSettings,
    numbers: Ints,
    step_mask: Bools,
    record: Floats,
    means: Vec3s,
    d_colors: Vec3s,
    values: Table,
    exp_avg: Table,
    exp_avg_sq: Table,
):
    """Step one coefficient of one Gaussian, three numbers; compiled for every pair of types.

    Neighbouring threads have neighbouring coefficients, so that they share memory accesses; each
    evaluates the basis functions anew, which costs less than reading a gradient.
    """
    if not step_mask[0]:
        return
    item = first + wp.tid()
    n_coefficients = values.shape[1] // CHANNELS
    i = item // n_coefficients
    k = item - i * n_coefficients
    d_color = d_colors[i]
    weight = color_weight(k, means[i], view_at(record).center, s.degree, d_color)
    step = wp.vec3i(numbers[0], numbers[1], numbers[2])
    for channel in range(CHANNELS):
        g = weight * d_color[channel]
        step_number(i, CHANNELS * k + channel, g, s, step, values, exp_avg, exp_avg_sq)


BAND_ARRAYS = {
    torch.float32: wp.array2d(dtype=float),
    torch.bfloat16: wp.array2d(dtype=wp.bfloat16),
}
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
        step_inputs.step_mask,
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
    """Return coefficients and both moments, (N, K, 3), as tables of a kernel."""
    return [table.flatten(1) for table in (values, *[moments[name] for name in MOMENTS])]
