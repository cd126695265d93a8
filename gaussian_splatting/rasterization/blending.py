# SPDX-License-Identifier: Apache-2.0
"""Alpha blending of projected splats into pixels: of the whole image, or of some of its rows.

The splats are sorted into tiles once per view. Pixels, what their gradient needs and the gradient
rows of (tile, splat) pairs are as large as the rows that are blended, which need not end where
tiles do. A pixel has the same bits whatever rows are blended with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.rasterization.projection import MIN_STRIP, Projection
from gaussian_splatting.rasterization.tile_kernels import bin_splats, tile_kernels
from gaussian_splatting.rasterization.view import TILE, n_tiles
from sugar_utils.errors import UserError
from sugar_utils.warp_launch import as_array, launch


class Rows(NamedTuple):
    """Rows of an image: the first and the one past the last."""

    start: int
    stop: int

    def widened(self, halo: int, height: int) -> Rows:
        """With up to ``halo`` more rows on each side, inside an image of ``height`` rows."""
        return Rows(max(0, self.start - halo), min(height, self.stop + halo))


@dataclass(frozen=True)
class TileLists:
    """Which splats each tile blends, front to back.

    Attributes:
        offsets: Start of each tile's run in ``ids``. (tiles + 1,) int32
        ids: Splats by tile, then depth, then index. (M,) int32
        rects: First and past-the-last tile of each splat in x, then in y. (N, 4) int32
        across: Tiles in a row of tiles.
        width: Image width in pixels.
        height: Image height in pixels.
    """

    offsets: Tensor
    ids: Tensor
    rects: Tensor
    across: int
    width: int
    height: int


@dataclass(frozen=True)
class BlendedRows:
    """Pixels of some rows, and what their gradient needs.

    Attributes:
        pixels: Blended channels. (R, W, C)
        transmittance: Light left at the end of each ray. (R, W)
        last: Place in the tile lists of the last splat that each pixel blended. (R, W) int32
        rows: Which rows these are.
    """

    pixels: Tensor
    transmittance: Tensor
    last: Tensor
    rows: Rows


@dataclass(frozen=True)
class SplatGradients:
    """Sums of gradients of splats, to which every strip of an image adds its part.

    Attributes:
        means2d: (N, 2) per pixel
        splats: Columns as in ``projection_kernels``. (N, 9 + C)
    """

    means2d: Tensor
    splats: Tensor

    @classmethod
    def zeros(cls, projection: Projection) -> SplatGradients:
        """Nothing yet."""
        return cls(torch.zeros_like(projection.means2d), torch.zeros_like(projection.splats))


def build_tile_lists(projection: Projection) -> TileLists:
    """Sort the (tile, splat) pairs of a projection."""
    counts, device = projection.tile_counts, projection.tile_counts.device
    if device.type != "cpu":
        raise UserError(f"tensors are on {device}, but this version renders on the CPU only")
    n, camera = counts.shape[0], projection.camera
    across, down = n_tiles(camera)

    def ints(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    offsets, ids = ints(across * down + 1), ints(int(counts.sum()))
    launch(
        bin_splats,
        1,
        [
            n, across * down, across, projection.depths,
            as_array(projection.tile_rects, wp.vec4i), counts, offsets, ids,
            ints(n), ints(n), ints(across * down + 1),
        ],
        device=device,
    )  # fmt: skip
    return TileLists(offsets, ids, projection.tile_rects, across, camera.width, camera.height)


def blend_rows(splats: Tensor, tiles: TileLists, background: Tensor, rows: Rows) -> BlendedRows:
    """Blend splats front to back over a background, without a gradient.

    Args:
        splats: As projected, C channels each. (N, 9 + C)
        tiles: Lists of the whole image.
        background: Value behind everything. (C,) float32
        rows: What to blend; not empty, inside the image.
    """
    device, shape = splats.device, (rows.stop - rows.start, tiles.width)
    n_channels = background.shape[0]
    pixels = torch.empty(*shape, n_channels, device=device)
    transmittance = torch.empty(shape, device=device)
    last = torch.empty(shape, dtype=torch.int32, device=device)
    first, count = _tiles_of(rows, tiles)
    launch(
        tile_kernels(n_channels).forward,
        count,
        [
            first, tiles.width, *rows, tiles.across, tiles.offsets, tiles.ids, splats.detach(),
            background, pixels, transmittance, last,
        ],
        device=device,
    )  # fmt: skip
    return BlendedRows(pixels, transmittance, last, rows)


def backpropagate_rows(
    splats: Tensor,
    tiles: TileLists,
    background: Tensor,
    blended: BlendedRows,
    d_pixels: Tensor,
    d_transmittance: Tensor,
    gradients: SplatGradients,
) -> None:
    """Add what some rows say to the gradients of splats, in an order that is always the same.

    Args:
        splats: As given to :func:`blend_rows`, like the following two.
        tiles: Lists of the whole image.
        background: Value behind everything. (C,)
        blended: What it returned; ``pixels`` are not read.
        d_pixels: (R, W, C)
        d_transmittance: (R, W)
        gradients: Sums to add to.
    """
    device, n_channels = splats.device, background.shape[0]
    kernels = tile_kernels(n_channels)
    first, count = _tiles_of(blended.rows, tiles)
    first_slot = _first_slots(tiles, blended.rows)
    slots = torch.empty(int(first_slot[-1]), 6 + n_channels, device=device)
    launch(
        kernels.backward,
        count,
        [
            first, tiles.width, *blended.rows, tiles.across, tiles.offsets, tiles.ids,
            as_array(tiles.rects, wp.vec4i), first_slot, splats.detach(), background,
            blended.transmittance, blended.last, d_pixels.contiguous(),
            d_transmittance.contiguous(), slots,
        ],
        device=device,
    )  # fmt: skip
    launch(
        kernels.sum_slots,
        splats.shape[0],
        [first_slot, slots, gradients.means2d, gradients.splats],
        device=device,
        min_items=MIN_STRIP,
    )


def _tiles_of(rows: Rows, tiles: TileLists) -> tuple[int, int]:
    """First tile that rows touch, and the number of tiles."""
    top, bottom = rows.start // TILE, -(-rows.stop // TILE)
    return top * tiles.across, (bottom - top) * tiles.across


def _first_slots(tiles: TileLists, rows: Rows) -> Tensor:
    """Where each splat's gradient rows begin, one for each tile it shares with ``rows``. (N + 1,)

    Within a splat they follow the rows of tiles.
    """
    left, right, top, bottom = tiles.rects.unbind(-1)
    down = bottom.clamp_max(-(-rows.stop // TILE)) - top.clamp_min(rows.start // TILE)
    first_slot = torch.zeros(tiles.rects.shape[0] + 1, dtype=torch.int32, device=left.device)
    torch.cumsum((right - left) * down.clamp_min(0), 0, dtype=torch.int32, out=first_slot[1:])
    return first_slot
