# SPDX-License-Identifier: Apache-2.0
"""CPU tile kernels: C++ bodies in ``native/`` compiled by Warp for a given number of channels."""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import functools

import warp as wp

from gaussian_splatting.rasterization.blend_inputs import BackwardInputs, ForwardInputs, SumInputs
from gaussian_splatting.rasterization.projection import MIN_ITEMS
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d, Ints, Ints2d
from sugar_utils.warp_launch import (
    NATIVE_OPTIONS,
    SIMD_SOURCE,
    launch,
    native_kernel,
    native_source,
)

wp.set_module_options(NATIVE_OPTIONS)

_source = functools.partial(native_source, __file__)


@native_kernel(_source("sort_splats"))
def sort_splats(
    item: int,
    depths_: Floats,
    counts_: Ints,
    order_: Ints,
    spare_: Ints,
    first_intersections_: Ints,
    total_: wp.array(dtype=wp.int64),
):
    """Sort splats by depth and lay out their runs of intersections; one work item does it all."""


@native_kernel(_source("sort_intersections"))
def sort_intersections(
    item: int,
    counts_: Ints,
    order_: Ints,
    intersection_tiles_: Ints,
    offsets_: Ints2d,
    ids_: Ints,
    places_: Ints,
):
    """Sort intersections by tile, stably; one work item does it all.

    The first row of ``offsets_`` is the start of each tile's run, the second is working memory.
    """


class TileKernels:
    """Kernels of the CPU for splats of some number of channels; see :class:`BlendKernels`."""

    def __init__(self, n_channels: int) -> None:
        # One module, because each has to compile Warp's headers, too.
        module = wp.get_module(f"{__name__}.channels_{n_channels}")
        module.options.update(NATIVE_OPTIONS)
        common = f"constexpr int CHANNELS = {n_channels};\n" + SIMD_SOURCE + _source("common")
        header = f"constexpr int CHANNELS = {n_channels}, HEADER = 9, STRIDE = HEADER + CHANNELS;\n"
        header += "typedef unsigned long long size;\n"

        @native_kernel(common + _source("blend_forward"), module=module)
        def forward(
            item: int,
            first_tile: int,
            width: int,
            top_row: int,
            end_row: int,
            tiles_x: int,
            front_transmittance: float,
            offsets_: Ints,
            ids_: Ints,
            splats_: Floats2d,
            background_: Floats,
            image_: Floats3d,
            transmittance_: Floats2d,
            last_: Ints2d,
        ): ...

        @native_kernel(common + _source("blend_backward"), module=module)
        def backward(
            item: int,
            first_tile: int,
            width: int,
            top_row: int,
            end_row: int,
            tiles_x: int,
            offsets_: Ints,
            ids_: Ints,
            splats_: Floats2d,
            background_: Floats,
            transmittance_: Floats2d,
            last_: Ints2d,
            d_image_: Floats3d,
            d_transmittance_: Floats2d,
            gradient_sums_: Floats2d,
        ): ...

        @native_kernel(header + _source("sum_gradient_rows"), module=module)
        def sum_gradient_rows(
            i: int,
            first_tile: int,
            end_tile: int,
            offsets_: Ints,
            first_intersections_: Ints,
            counts_: Ints,
            places_: Ints,
            gradient_sums_: Floats2d,
            d_means2d_: Floats2d,
            d_splats_: Floats2d,
        ): ...

        self.forward = forward
        self.backward = backward
        self.sum_gradient_rows = sum_gradient_rows

    def launch_forward(self, n_tiles: int, inputs: ForwardInputs) -> None:
        """Blend the pixels of some tiles."""
        launch(self.forward, n_tiles, inputs)

    def launch_backward(self, n_tiles: int, inputs: BackwardInputs) -> None:
        """Fill the gradient rows of all intersections in some tiles."""
        launch(self.backward, n_tiles, inputs)

    def launch_sums(self, n_splats: int, inputs: SumInputs) -> None:
        """Add the rows of each splat's intersections to its gradients."""
        launch(self.sum_gradient_rows, n_splats, inputs, min_items=MIN_ITEMS)


tile_kernels = functools.cache(TileKernels)
