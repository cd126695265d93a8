# SPDX-License-Identifier: Apache-2.0
"""CPU bodies of the fields: C++ in ``native/`` that works on eight neighbours at a time.

They say the same as the functions of ``field_device``, but add up neighbours in another order.
"""

from __future__ import annotations

from pathlib import Path

import warp as wp

from sugar_scene.field_device import PACK_SIZE, PAIR_SIZE, PairSums, sample_gradients_kernel
from sugar_scene.geometry import MIN_SCALE, MIN_WEIGHT_SUM, SAMPLE_SPREAD
from sugar_utils.warp_launch import NATIVE_OPTIONS, SIMD_SOURCE

wp.set_module_options(NATIVE_OPTIONS)

_NATIVE = Path(__file__).parent / "native"
_CONSTANTS = f"""
constexpr int PACK_SIZE = {PACK_SIZE}, PAIR_SIZE = {PAIR_SIZE};
constexpr float MIN_SCALE = {MIN_SCALE:.9e}f, MIN_WEIGHT_SUM = {MIN_WEIGHT_SUM:.9e}f;
constexpr float SAMPLE_SPREAD = {SAMPLE_SPREAD:.9e}f;
constexpr float NEGLIGIBLE_SQUARE = 174.f;  // exp(-m / 2) is the smallest normal float there
"""


def _source(name: str) -> str:
    lanes, body = (
        (_NATIVE / f"{part}.inc").read_text(encoding="utf-8") for part in ("neighbor_lanes", name)
    )
    # The lanes look rows up in arrays that the body names.
    names = "const float* packed = packed_.data;\nconst int* neighbors = neighbors_.data;\n"
    return SIMD_SOURCE + _CONSTANTS + names + lanes + body


@wp.func_native(_source("evaluate_owner"))
def _evaluate_owner(
    i: int, begin: int, end: int, n_neighbors: int, density_factor: float,
    quats_: wp.array2d(dtype=float), scales_: wp.array2d(dtype=float),
    packed_: wp.array2d(dtype=float), neighbors_: wp.array2d(dtype=int),
    noise_: wp.array2d(dtype=float), points_: wp.array2d(dtype=float),
    density_: wp.array(dtype=float), beta_: wp.array(dtype=float),
    plane_distance_: wp.array(dtype=float), normal_error_: wp.array(dtype=float),
    residual_: wp.array2d(dtype=float),
): ...  # fmt: skip


@wp.kernel
def evaluate_owners(
    first: int, owners: wp.array(dtype=int), starts: wp.array(dtype=int),
    quats: wp.array2d(dtype=float), scales: wp.array2d(dtype=float),
    packed: wp.array2d(dtype=float), neighbors: wp.array2d(dtype=int),
    noise: wp.array2d(dtype=float), density_factor: float, points: wp.array2d(dtype=float),
    density: wp.array(dtype=float), beta: wp.array(dtype=float),
    plane_distance: wp.array(dtype=float), normal_error: wp.array(dtype=float),
    residual: wp.array2d(dtype=float),
):  # fmt: skip
    """Fields at all samples of one Gaussian; each output is that of ``evaluate_samples``."""
    owner = first + wp.tid()
    _evaluate_owner(
        owners[owner], starts[owner], starts[owner + 1], neighbors.shape[1], density_factor,
        quats, scales, packed, neighbors, noise, points, density, beta, plane_distance,
        normal_error, residual,
    )  # fmt: skip


@wp.func_native(_source("add_up_pairs"))
def _add_up_pairs(
    owner: int, i: int, begin: int, end: int, n_neighbors: int, spread: wp.mat33, normal: wp.vec3,
    beta_share: float, density_factor: float, quats_: wp.array2d(dtype=float),
    scales_: wp.array2d(dtype=float), packed_: wp.array2d(dtype=float),
    neighbors_: wp.array2d(dtype=int), noise_: wp.array2d(dtype=float),
    residual_: wp.array2d(dtype=float), field_grads_: wp.array2d(dtype=float),
    gradient_rows_: wp.array3d(dtype=float),
) -> PairSums: ...  # fmt: skip


add_up_samples_native = sample_gradients_kernel(_add_up_pairs)
