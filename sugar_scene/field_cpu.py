# SPDX-License-Identifier: Apache-2.0
"""CPU bodies of the fields: C++ in ``native/`` that works on eight neighbours at a time.

They compute what the functions of ``field_device`` do, but add neighbours in another order.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import warp as wp

from sugar_scene.field_device import PACK_SIZE, PAIR_SIZE, PairSums, sample_gradients_kernel
from sugar_scene.geometry import MIN_SCALE, MIN_WEIGHT_SUM, SAMPLE_SPREAD
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d, Ints, Ints2d
from sugar_utils.warp_launch import NATIVE_OPTIONS, SIMD_SOURCE, native_kernel, native_source

wp.set_module_options(NATIVE_OPTIONS)

_CONSTANTS = f"""
constexpr int PACK_SIZE = {PACK_SIZE}, PAIR_SIZE = {PAIR_SIZE};
constexpr float MIN_SCALE = {MIN_SCALE:.9e}f, MIN_WEIGHT_SUM = {MIN_WEIGHT_SUM:.9e}f;
constexpr float SAMPLE_SPREAD = {SAMPLE_SPREAD:.9e}f;
constexpr float NEGLIGIBLE_SQUARE = 174.f;  // exp(-m / 2) is the smallest normal float there
"""


def _source(name: str) -> str:
    lanes = native_source(__file__, "neighbor_lanes")
    body = native_source(__file__, name)
    # The lanes look rows up in arrays that the body names.
    names = "const float* packed = packed_.data;\nconst int* neighbors = neighbors_.data;\n"
    return SIMD_SOURCE + _CONSTANTS + names + lanes + body


@native_kernel("const int n_neighbors = neighbors_.shape[1];\n" + _source("evaluate_owner"))
def evaluate_owners(
    owner: int,
    owners_: Ints,
    starts_: Ints,
    quats_: Floats2d,
    scales_: Floats2d,
    packed_: Floats2d,
    neighbors_: Ints2d,
    noise_: Floats2d,
    density_factor: float,
    points_: Floats2d,
    density_: Floats,
    beta_: Floats,
    plane_distance_: Floats,
    normal_error_: Floats,
    residual_: Floats2d,
):
    """Evaluate the fields at all samples of one Gaussian; outputs as of ``evaluate_samples``."""


@wp.func_native(_source("add_up_pairs"))
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
    quats_: Floats2d,
    scales_: Floats2d,
    packed_: Floats2d,
    neighbors_: Ints2d,
    noise_: Floats2d,
    residual_: Floats2d,
    field_grads_: Floats2d,
    gradient_rows_: Floats3d,
) -> PairSums: ...


add_up_samples_native = sample_gradients_kernel(_add_up_pairs)
