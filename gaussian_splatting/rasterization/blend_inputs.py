# SPDX-License-Identifier: Apache-2.0
"""Arguments of the blending kernels by name, in the order in which kernels list them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from sugar_utils.warp_launch import TypedTensor


class ForwardInputs(NamedTuple):
    """Arguments of the kernel that blends a strip of R rows and W columns, with C channels."""

    first_tile: int
    width: int  # of the image, in pixels
    top_row: int
    end_row: int
    tiles_x: int
    # A pixel blends nothing more once its transmittance is below this; 0: all splats.
    front_transmittance: float
    offsets: Tensor  # start of each tile's run in ``ids``, (tiles + 1,) int32
    ids: Tensor  # splats by tile, then depth, then index, (M,) int32
    splats: Tensor | TypedTensor  # (N, 9 + C)
    background: Tensor  # (C,)
    image: Tensor  # result: blended channels, (R, W, C)
    transmittance: Tensor  # result, (R, W)
    last: Tensor  # result: place in ``ids`` of the last splat blended, (R, W) int32


class BackwardInputs(NamedTuple):
    """Arguments of the kernel that fills one gradient row per intersection of a strip."""

    first_tile: int
    width: int
    top_row: int
    end_row: int
    tiles_x: int
    offsets: Tensor
    ids: Tensor
    splats: Tensor | TypedTensor
    background: Tensor
    transmittance: Tensor
    last: Tensor
    d_image: Tensor  # (R, W, C)
    d_transmittance: Tensor  # (R, W)
    gradient_sums: Tensor | TypedTensor  # result: a row per intersection, (M, 6 + C)


class SumInputs(NamedTuple):
    """Arguments of the kernel that adds the gradient rows of each splat."""

    first_tile: int
    end_tile: int
    offsets: Tensor  # as of :class:`ForwardInputs`
    first_intersections: Tensor  # start of each splat's run in ``places``, (N,) int32
    counts: Tensor  # length of the run, (N,) int32
    places: Tensor  # places of a splat in the tile lists, ascending within its run, (M,) int32
    gradient_sums: Tensor  # (M, 6 + C)
    d_means2d: Tensor  # result, (N, 2)
    d_splats: Tensor  # result, (N, 9 + C)


class BlendKernels(Protocol):
    """Kernels of a device for splats of some number of channels."""

    def launch_forward(self, n_tiles: int, inputs: ForwardInputs) -> None:
        """Blend the pixels of some tiles."""
        ...

    def launch_backward(self, n_tiles: int, inputs: BackwardInputs) -> None:
        """Fill the gradient rows of all intersections in some tiles."""
        ...

    def launch_sums(self, n_splats: int, inputs: SumInputs) -> None:
        """Add the rows of each splat's intersections to its gradients."""
        ...
