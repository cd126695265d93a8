# SPDX-License-Identifier: Apache-2.0
"""Rendering backends: what blends splats into pixels, the built-in one and its seam.

Projection is always ours. A rasterizer sorts splats into tiles once per view, blends rows of the
image, which need not end where tiles do, and sends gradients back. A pixel has the same bits
whatever rows are blended with it.

Sorting is by tile, then depth, then index, the same on every device. Each splat owns a run of
pairs, one for each tile it reaches. Splats are sorted by depth and their runs laid out in that
order; a stable sort of the pairs by tile does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.rasterization.blend_cpu import sort_pairs, sort_splats, tile_kernels
from gaussian_splatting.rasterization.blend_cuda import block_kernels
from gaussian_splatting.rasterization.projection import MIN_ITEMS, Projection
from gaussian_splatting.rasterization.projection_kernels import TILE, n_tiles
from gaussian_splatting.rasterization.tile_coverage import list_tiles, place_pairs
from sugar_utils.errors import UserError
from sugar_utils.warp_launch import as_array, launch, on_stream_of

_MAX_PAIRS = 2**31 - 1


@dataclass(frozen=True)
class TileLists:
    """Which splats each tile blends, front to back."""

    offsets: Tensor  # start of each tile's run in ``ids``, (tiles + 1,) int32
    # Splats by tile, then depth, then index; M may be more than there are pairs, (M,) int32.
    ids: Tensor
    first_pairs: Tensor  # where each splat's run begins in ``places``, (N,) int32
    counts: Tensor  # how long it is, (N,) int32
    places: Tensor  # places of a splat in ``ids``, ascending within its run, (M,) int32
    across: int
    width: int  # image width in pixels
    height: int  # image height in pixels


def build_tile_lists(projection: Projection, *, blocks: bool | None = None) -> TileLists:
    """Sort the (tile, splat) pairs of a projection; ``blocks`` as of ``blend_rows``."""
    # Native code learns the number for nothing.
    blocks = projection.splats.device.type != "cpu" if blocks is None else blocks
    camera = projection.camera
    counts = projection.tile_counts
    across, down = n_tiles(camera)
    order, first_pairs, n_pairs = (_runs_by_sort if blocks else _runs_natively)(projection)
    if n_pairs > _MAX_PAIRS:
        raise UserError(
            f"{camera.name} ({camera.width} x {camera.height}) needs {n_pairs} (tile, Gaussian) "
            "pairs, more than 2^31; render a smaller image, or prune Gaussians that cover it all."
        )
    # The radix sort wants room for as much again behind its keys.
    pair_tiles = _ints((2 if blocks else 1) * n_pairs, counts.device)
    if blocks and projection.guess is not None:
        # What is left over is sorted behind all tiles.
        pair_tiles.fill_(across * down)
    owners = _ints(n_pairs if blocks else 0, counts.device)
    rects = as_array(projection.tile_rects, wp.vec4i)
    inputs = [across, n_pairs, projection.splats.detach(), rects, first_pairs, pair_tiles, owners]
    launch(list_tiles, counts.shape[0], inputs, min_items=MIN_ITEMS)
    if blocks:
        offsets, ids, places = _sort_by_radix(pair_tiles, owners, across * down)
    else:
        offsets, ids, places = _sort_natively(order, counts, pair_tiles, across * down)
    return TileLists(offsets, ids, first_pairs, counts, places, across, camera.width, camera.height)


def _ints(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.int32, device=device)


def _runs_natively(projection: Projection) -> tuple[Tensor, Tensor, int]:
    """Splats with pairs by depth, where each splat's run begins, and the number of pairs."""
    counts = projection.tile_counts
    device = projection.tile_counts.device
    n = counts.shape[0]
    total = torch.zeros(1, dtype=torch.int64, device=device)
    order, spare, first_pairs = (_ints(n, device) for _ in range(3))
    launch(sort_splats, 1, [n, projection.depths, counts, order, spare, first_pairs, total])
    return order, first_pairs, int(total)


def _runs_by_sort(projection: Projection) -> tuple[Tensor, Tensor, int]:
    """The same on any device."""
    counts = projection.tile_counts
    order = projection.depths.sort(stable=True).indices
    sizes = counts[order]
    ends = sizes.cumsum(0)
    starts = ends - sizes
    n_pairs = projection.n_pairs
    guess = projection.guess
    if n_pairs is None and counts.shape[0] == 0:
        n_pairs = 0
    elif n_pairs is None and guess is not None:
        n_pairs = guess.capacity
        guess.excess = ends[-1] - guess.capacity
        starts.clamp_(max=guess.capacity)
    elif n_pairs is None:
        # The one number that must reach the host: it is the size of all that comes next.
        n_pairs = int(ends[-1])
    first_pairs = torch.empty_like(counts)
    first_pairs[order] = starts.int()
    return order, first_pairs, n_pairs


def _sort_natively(
    order: Tensor, counts: Tensor, pair_tiles: Tensor, n_all: int
) -> tuple[Tensor, Tensor, Tensor]:
    n_pairs = pair_tiles.shape[0]
    device = pair_tiles.device
    offsets = _ints(n_all + 1, device)
    ids = _ints(n_pairs, device)
    places = _ints(n_pairs, device)
    cursor = _ints(n_all + 1, device)
    launch(sort_pairs, 1, [n_pairs, n_all, counts, order, pair_tiles, offsets, cursor, ids, places])
    return offsets, ids, places


def _sort_by_radix(pair_tiles: Tensor, owners: Tensor, n_all: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, ids and places, on any device; pairs of a tile stay in the order of their runs."""
    device = pair_tiles.device
    n_pairs = owners.shape[0]
    pairs = _ints(2 * n_pairs, device)
    torch.arange(n_pairs, dtype=torch.int32, device=device, out=pairs[:n_pairs])
    sorted_together = wp.from_torch(pair_tiles), wp.from_torch(pairs)
    with on_stream_of(device):
        wp.utils.radix_sort_pairs(*sorted_together, n_pairs, end_bit=n_all.bit_length())
    edges = torch.arange(n_all + 1, dtype=torch.int32, device=device)
    offsets = torch.searchsorted(pair_tiles[:n_pairs], edges, out_int32=True)
    ids = _ints(n_pairs, device)
    places = _ints(n_pairs, device)
    inputs = [pairs, owners, places, ids]
    launch(place_pairs, n_pairs, inputs, min_items=MIN_ITEMS)
    return offsets, ids, places


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
    device = splats.device
    shape = (rows.stop - rows.start, tiles.width)
    n_channels = background.shape[0]
    pixels = torch.empty(*shape, n_channels, device=device)
    transmittance = torch.empty(shape, device=device)
    last = torch.empty(shape, dtype=torch.int32, device=device)
    first, count = _tiles_of(rows, tiles)
    inputs = [
        first,
        tiles.width,
        *rows,
        tiles.across,
        tiles.offsets,
        tiles.ids,
        splats.detach(),
        background,
        pixels,
        transmittance,
        last,
    ]
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

    background: (C,); d_pixels: (R, W, C); d_transmittance: (R, W)
    """
    device = splats.device
    n_channels = background.shape[0]
    kernels = _kernels(device, blocks, n_channels)
    first, count = _tiles_of(blended.rows, tiles)
    gradient_sums = torch.empty(_n_pairs(tiles, first, count), 6 + n_channels, device=device)
    inputs = [
        first,
        tiles.width,
        *blended.rows,
        tiles.across,
        tiles.offsets,
        tiles.ids,
        splats.detach(),
        background,
        blended.transmittance,
        blended.last,
        d_pixels.contiguous(),
        d_transmittance.contiguous(),
        gradient_sums,
    ]
    kernels.launch_backward(count, inputs)
    inputs = [
        first,
        first + count,
        tiles.offsets,
        tiles.first_pairs,
        tiles.counts,
        tiles.places,
        gradient_sums,
        gradients.means2d,
        gradients.splats,
    ]
    kernels.launch_sums(splats.shape[0], inputs)


def _kernels(device: torch.device, blocks: bool | None, n_channels: int) -> Any:
    on_blocks = device.type != "cpu" if blocks is None else blocks
    return (block_kernels if on_blocks else tile_kernels)(n_channels)


def _tiles_of(rows: Rows, tiles: TileLists) -> tuple[int, int]:
    top = rows.start // TILE
    bottom = -(-rows.stop // TILE)
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
        ctx.rasterizer = rasterizer
        ctx.tiles = tiles
        ctx.n_splats = means2d.shape[0]
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
    tiles = rasterizer.build_tile_lists(projection)
    behind = background.detach().float().contiguous()
    return _Blend.apply(projection.means2d, projection.splats, behind, tiles, rasterizer)
