# SPDX-License-Identifier: Apache-2.0
"""Adam's step of the coefficients of colour bands 1 and up, three quarters of all values.

From a single view their gradient is an outer product, see
:mod:`gaussian_splatting.color_gradients`. It is formed where it is used and never stored: in
registers on a GPU, some Gaussians at a time on a CPU, where torch's vectorised step is faster than
one kernel for both.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportRedeclaration=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import warp as wp

from gaussian_splatting.color_gradients import ColorGradient
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


@wp.func
def noise_of(seed: wp.uint32, i: int) -> wp.uint32:
    """Return random bits for an element."""
    return hashed(seed + wp.uint32(i))


@wp.func
def put_rounded(target: Vec3s2d, i: int, k: int, x: wp.vec3, noise: wp.vec3ui):
    """Store three numbers in the type of their table, float32 or in the overload bfloat16."""
    target[i, k] = x


@wp.func
def put_rounded(  # noqa: F811
    target: wp.array2d(dtype=vec3bf), i: int, k: int, x: wp.vec3, noise: wp.vec3ui
):
    rounded = wp.vec3()
    for channel in range(3):
        rounded[channel] = rounded_to_bf16(x[channel], noise[channel])
    target[i, k] = vec3bf(rounded)


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
    item = first + wp.tid()
    if may_step[0] == 0:
        return
    step_size = wp.cast(numbers[0], wp.float32)
    root_correction = wp.cast(numbers[1], wp.float32)
    n_coefficients = values.shape[1]
    i = item // n_coefficients
    k = item - i * n_coefficients
    d_color = d_colors[i]
    basis = basis_seen(means[i], view_at(record).center, s.degree, d_color)
    weight = float(0.0)
    # Chosen one after the other: an index that is computed would send all of them to memory.
    for j in range(1, 16):
        if j == k + 1:
            weight = basis[j]
    g = weight * d_color
    m = s.kept_first * wp.vec3(exp_avg[i, k]) + s.new_first * g
    v = s.kept_second * wp.vec3(exp_avg_sq[i, k]) + s.new_second * wp.cw_mul(g, g)
    x = wp.vec3(values[i, k])
    noise = wp.vec3ui()
    second_noise = wp.vec3ui()
    for channel in range(3):
        x[channel] -= step_size * m[channel] / (wp.sqrt(v[channel]) / root_correction + s.eps)
        noise[channel] = noise_of(wp.uint32(numbers[2]), 3 * item + channel)
        second_noise[channel] = hashed(noise[channel])
    put_rounded(values, i, k, x, noise)
    for channel in range(3):
        noise[channel] = noise[channel] >> wp.uint32(16)
    put_rounded(exp_avg, i, k, m, noise)
    put_rounded(exp_avg_sq, i, k, v, second_noise)


_STEP_COEFFICIENTS = by_formats(
    step_coefficients,
    {dtype: wp.array2d(dtype=vector) for dtype, vector in _VECTORS.items()},
)


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
    settings = BandSettings()
    settings.degree = gradient.sh_degree
    settings.kept_first, settings.kept_second = ADAM_BETAS
    settings.new_first = 1.0 - ADAM_BETAS[0]
    settings.new_second = 1.0 - ADAM_BETAS[1]
    settings.eps = ADAM_EPS
    values = state.value.detach()
    moments = [state.moments[name] for name in MOMENTS]
    moment_vector = _VECTORS[moments[0].dtype]
    step_inputs = state.inputs()
    arguments = [
        settings,
        step_inputs.numbers,
        step_inputs.may_step,
        gradient.camera_record,
        as_array(gradient.means, wp.vec3),
        as_array(gradient.colors, wp.vec3),
        as_array(values, _VECTORS[values.dtype]),
        *[as_array(moment, moment_vector) for moment in moments],
    ]
    kernel = _STEP_COEFFICIENTS[values.dtype, moments[0].dtype]
    launch(kernel, values.shape[0] * values.shape[1], arguments)
