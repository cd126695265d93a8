# SPDX-License-Identifier: Apache-2.0
"""CPU tile kernels: C++ bodies in ``native/`` compiled by Warp for a given number of channels."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import warp as wp

from gaussian_splatting.rasterization.projection import MIN_ITEMS
from sugar_utils.warp_launch import NATIVE_OPTIONS, SIMD_SOURCE, launch

Floats = wp.array(dtype=float)
Floats2d = wp.array2d(dtype=float)
Floats3d = wp.array3d(dtype=float)
Ints = wp.array(dtype=int)
Ints2d = wp.array2d(dtype=int)

wp.set_module_options(NATIVE_OPTIONS)

_NATIVE = Path(__file__).parent / "native"


def _source(name: str) -> str:
    return (_NATIVE / f"{name}.inc").read_text(encoding="utf-8")


@wp.func_native(_source("sort_splats"))
def _sort_splats_body(
    n: int, depths_: Floats, counts_: Ints, order_: Ints, spare_: Ints, first_pairs_: Ints,
    total_: wp.array(dtype=wp.int64),
): ...  # fmt: skip


@wp.kernel
def sort_splats(
    first: int, n: int, depths: Floats, counts: Ints, order: Ints, spare: Ints, first_pairs: Ints,
    total: wp.array(dtype=wp.int64),
):  # fmt: skip
    """Sort splats by depth and lay out their runs of pairs; one work item does it all."""
    _sort_splats_body(n, depths, counts, order, spare, first_pairs, total)


@wp.func_native(_source("sort_pairs"))
def _sort_pairs_body(
    n_pairs: int, n_tiles: int, counts_: Ints, order_: Ints, pair_tiles_: Ints, offsets_: Ints,
    cursor_: Ints, ids_: Ints, places_: Ints,
): ...  # fmt: skip


@wp.kernel
def sort_pairs(
    first: int, n_pairs: int, n_tiles: int, counts: Ints, order: Ints, pair_tiles: Ints,
    offsets: Ints, cursor: Ints, ids: Ints, places: Ints,
):  # fmt: skip
    """Scatter the pairs to their tiles, where they stay in order; one work item does it all."""
    _sort_pairs_body(n_pairs, n_tiles, counts, order, pair_tiles, offsets, cursor, ids, places)


class TileKernels:
    """Kernels for splats of some channels, and how they are launched."""

    def __init__(self, n_channels: int) -> None:
        common = f"constexpr int CHANNELS = {n_channels};\n" + SIMD_SOURCE + _source("common")
        header = f"constexpr int CHANNELS = {n_channels}, HEADER = 9, STRIDE = HEADER + CHANNELS;\n"
        self.forward = _forward_kernel(common)
        self.backward = _backward_kernel(common)
        self.sum_pairs = _sum_kernel(header + "typedef unsigned long long size;\n")

    def launch_forward(self, n_tiles: int, inputs: list[Any]) -> None:
        launch(self.forward, n_tiles, inputs)

    def launch_backward(self, n_tiles: int, inputs: list[Any]) -> None:
        """Fill the rows of the pairs in some tiles."""
        launch(self.backward, n_tiles, inputs)

    def launch_sums(self, n_splats: int, inputs: list[Any]) -> None:
        """Add the rows of each splat's pairs to its gradients."""
        launch(self.sum_pairs, n_splats, inputs, min_items=MIN_ITEMS)


tile_kernels = functools.cache(TileKernels)


def _forward_kernel(common: str) -> Any:
    @wp.func_native(common + _source("blend_forward"))
    def forward_body(
        tile: int, width: int, top_row: int, end_row: int, tiles_x: int, offsets_: Ints, ids_: Ints,
        splats_: Floats2d, background_: Floats, image_: Floats3d, transmittance_: Floats2d,
        last_: Ints2d,
    ): ...  # fmt: skip

    @wp.kernel(module="unique", module_options=NATIVE_OPTIONS)
    def forward(
        first: int, first_tile: int, width: int, top_row: int, end_row: int, tiles_x: int,
        offsets: Ints, ids: Ints, splats: Floats2d, background: Floats, image: Floats3d,
        transmittance: Floats2d, last: Ints2d,
    ):  # fmt: skip
        forward_body(
            first_tile + first + wp.tid(), width, top_row, end_row, tiles_x, offsets, ids, splats,
            background, image, transmittance, last,
        )  # fmt: skip

    return forward


def _backward_kernel(common: str) -> Any:
    @wp.func_native(common + _source("blend_backward"))
    def backward_body(
        first_tile: int, tile: int, width: int, top_row: int, end_row: int, tiles_x: int,
        offsets_: Ints, ids_: Ints, splats_: Floats2d, background_: Floats,
        transmittance_: Floats2d, last_: Ints2d, d_image_: Floats3d, d_transmittance_: Floats2d,
        gradient_sums_: Floats2d,
    ): ...  # fmt: skip

    @wp.kernel(module="unique", module_options=NATIVE_OPTIONS)
    def backward(
        first: int, first_tile: int, width: int, top_row: int, end_row: int, tiles_x: int,
        offsets: Ints, ids: Ints, splats: Floats2d, background: Floats, transmittance: Floats2d,
        last: Ints2d, d_image: Floats3d, d_transmittance: Floats2d, gradient_sums: Floats2d,
    ):  # fmt: skip
        backward_body(
            first_tile, first_tile + first + wp.tid(), width, top_row, end_row, tiles_x, offsets,
            ids, splats, background, transmittance, last, d_image, d_transmittance, gradient_sums,
        )  # fmt: skip

    return backward


def _sum_kernel(header: str) -> Any:
    @wp.func_native(header + _source("sum_pairs"))
    def sum_pairs_body(
        i: int, first_tile: int, end_tile: int, offsets_: Ints, first_pairs_: Ints, counts_: Ints,
        places_: Ints, gradient_sums_: Floats2d, d_means2d_: Floats2d, d_splats_: Floats2d,
    ): ...  # fmt: skip

    @wp.kernel(module="unique", module_options=NATIVE_OPTIONS)
    def sum_pairs(
        first: int, first_tile: int, end_tile: int, offsets: Ints, first_pairs: Ints, counts: Ints,
        places: Ints, gradient_sums: Floats2d, d_means2d: Floats2d, d_splats: Floats2d,
    ):  # fmt: skip
        sum_pairs_body(
            first + wp.tid(), first_tile, end_tile, offsets, first_pairs, counts, places,
            gradient_sums, d_means2d, d_splats,
        )  # fmt: skip

    return sum_pairs
