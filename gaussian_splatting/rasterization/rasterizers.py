# SPDX-License-Identifier: Apache-2.0
"""Rendering backends: what blends splats into pixels, the built-in one and its seam.

Projection is always ours. A rasterizer sorts splats into tiles once per view, blends rows of the
image, which need not end where tiles do, and sends gradients back. A pixel has the same bits
whatever rows are blended with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gaussian_splatting.rasterization.blend_cpu import tile_kernels
from gaussian_splatting.rasterization.blend_cuda import block_kernels
from gaussian_splatting.rasterization.projection import Projection
from gaussian_splatting.rasterization.projection_kernels import TILE
from gaussian_splatting.rasterization.tile_lists import TileLists, build_tile_lists


class Rows(NamedTuple):
    start: int
    stop: int

    def widened(self, halo: int, height: int) -> Rows:
        """With up to ``halo`` more rows on each side, inside an image of ``height`` rows."""
        return Rows(max(0, self.start - halo), min(height, self.stop + halo))


@dataclass(frozen=True)
class BlendedRows:
    """Pixels of some rows, and what their gradient needs."""

    pixels: Tensor  # blended channels, (R, W, C)
    transmittance: Tensor  # light left at the end of each ray, (R, W)
    last: Tensor  # place in the tile lists of the last splat that each pixel blended, (R, W) int32
    rows: Rows


@dataclass(frozen=True)
class SplatGradients:
    """Sums of gradients of splats, to which every strip of an image adds its part."""

    means2d: Tensor  # (N, 2) per pixel
    splats: Tensor  # columns as in ``projection_kernels``, (N, 9 + C)

    @classmethod
    def zeros(cls, projection: Projection) -> SplatGradients:
        return cls(torch.zeros_like(projection.means2d), torch.zeros_like(projection.splats))


def blend_rows(
    splats: Tensor, tiles: TileLists, background: Tensor, rows: Rows, *, blocks: bool | None = None
) -> BlendedRows:
    """Blend splats front to back over a background, without a gradient.

    Args:
        splats: As projected, C channels each. (N, 9 + C)
        background: Value behind everything. (C,) float32
        blocks: Run the kernels of GPUs, which a CPU can do as well, slowly; None: on a GPU.
    """
    device, shape = splats.device, (rows.stop - rows.start, tiles.width)
    n_channels = background.shape[0]
    pixels = torch.empty(*shape, n_channels, device=device)
    transmittance = torch.empty(shape, device=device)
    last = torch.empty(shape, dtype=torch.int32, device=device)
    first, count = _tiles_of(rows, tiles)
    inputs = [
        first, tiles.width, *rows, tiles.across, tiles.offsets, tiles.ids, splats.detach(),
        background, pixels, transmittance, last,
    ]  # fmt: skip
    _kernels(device, blocks, n_channels).launch_forward(count, inputs)
    return BlendedRows(pixels, transmittance, last, rows)


def backpropagate_rows(
    splats: Tensor,
    tiles: TileLists,
    background: Tensor,
    blended: BlendedRows,
    d_pixels: Tensor,
    d_transmittance: Tensor,
    gradients: SplatGradients,
    *,
    blocks: bool | None = None,
) -> None:
    """Add what some rows say to the gradients of splats, in an order that is always the same.

    Args:
        background: Value behind everything. (C,)
        d_pixels: (R, W, C)
        d_transmittance: (R, W)
    """
    device, n_channels = splats.device, background.shape[0]
    kernels = _kernels(device, blocks, n_channels)
    first, count = _tiles_of(blended.rows, tiles)
    gradient_sums = torch.empty(_n_pairs(tiles, first, count), 6 + n_channels, device=device)
    inputs = [
        first, tiles.width, *blended.rows, tiles.across, tiles.offsets, tiles.ids, splats.detach(),
        background, blended.transmittance, blended.last, d_pixels.contiguous(),
        d_transmittance.contiguous(), gradient_sums,
    ]  # fmt: skip
    kernels.launch_backward(count, inputs)
    inputs = [
        first, first + count, tiles.offsets, tiles.first_pairs, tiles.counts, tiles.places,
        gradient_sums, gradients.means2d, gradients.splats,
    ]  # fmt: skip
    kernels.launch_sums(splats.shape[0], inputs)


def _kernels(device: torch.device, blocks: bool | None, n_channels: int) -> Any:
    on_blocks = device.type != "cpu" if blocks is None else blocks
    return (block_kernels if on_blocks else tile_kernels)(n_channels)


def _tiles_of(rows: Rows, tiles: TileLists) -> tuple[int, int]:
    top, bottom = rows.start // TILE, -(-rows.stop // TILE)
    return top * tiles.across, (bottom - top) * tiles.across


def _n_pairs(tiles: TileLists, first: int, count: int) -> int:
    """Pairs in some tiles. Of the whole image it is known; else the host waits for two numbers."""
    if count == tiles.offsets.shape[0] - 1:
        return tiles.ids.shape[0]
    return int(tiles.offsets[first + count] - tiles.offsets[first])


class Rasterizer:
    """The built-in one, which others derive from: any device, the same bits on every run.

    Its three steps find what blending needs to know of a view, which has a ``height`` in pixels;
    blend some rows of the image without a gradient; and add what some rows say to gradients, where
    the pixels that were blended may be overwritten.
    """

    name = "warp"  # as the flag ``--rasterizer`` spells it
    build_tile_lists = staticmethod(build_tile_lists)
    blend_rows = staticmethod(blend_rows)
    backpropagate_rows = staticmethod(backpropagate_rows)


WARP = Rasterizer()


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, means2d, splats, background, tiles, rasterizer):
        blended = rasterizer.blend_rows(splats, tiles, background, Rows(0, tiles.height))
        ctx.rasterizer, ctx.tiles, ctx.n_splats = rasterizer, tiles, means2d.shape[0]
        # Results are kept by autograd: a reference from here would be a circle.
        ctx.kept = replace(blended, pixels=None, transmittance=None, last=None)
        ctx.save_for_backward(splats, background, blended.transmittance, blended.last)
        return blended.pixels, blended.transmittance

    @staticmethod
    def backward(ctx, d_pixels, d_transmittance):
        splats, background, transmittance, last = ctx.saved_tensors
        gradients = SplatGradients(splats.new_zeros(ctx.n_splats, 2), torch.zeros_like(splats))
        blended = replace(ctx.kept, pixels=d_pixels, transmittance=transmittance, last=last)
        ctx.rasterizer.backpropagate_rows(
            splats, ctx.tiles, background, blended, d_pixels, d_transmittance, gradients
        )
        return gradients.means2d, gradients.splats, None, None, None


def blend(
    projection: Projection, background: Tensor, rasterizer: Rasterizer = WARP
) -> tuple[Tensor, Tensor]:
    """Blend a whole image: pixels (H, W, C) and transmittance (H, W), differentiable."""
    return _Blend.apply(
        projection.means2d,
        projection.splats,
        background.detach().float().contiguous(),
        rasterizer.build_tile_lists(projection),
        rasterizer,
    )
