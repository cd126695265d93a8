# SPDX-License-Identifier: Apache-2.0
"""Alpha blending of projected splats into pixels, as a differentiable torch operation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.rasterization.projection import MIN_STRIP, Projection
from gaussian_splatting.rasterization.tile_kernels import bin_splats, tile_kernels
from gaussian_splatting.rasterization.view import n_tiles
from sugar_utils.errors import UserError
from sugar_utils.warp_launch import as_array, launch


@dataclass(frozen=True)
class TileLists:
    """Which splats each tile blends, front to back.

    Attributes:
        offsets: Start of each tile's run in ``ids``. (tiles + 1,) int32
        ids: Splats by tile, then depth, then index. (M,) int32
        slot_of: Place of each pair in splat-major order. (M,) int32
        first_slot: Start of each splat's run in that order. (N + 1,) int32
    """

    offsets: Tensor
    ids: Tensor
    slot_of: Tensor
    first_slot: Tensor


def build_tile_lists(projection: Projection) -> TileLists:
    """Sort the (tile, splat) pairs of a projection."""
    counts, device = projection.tile_counts, projection.tile_counts.device
    if device.type != "cpu":
        raise UserError(f"tensors are on {device}, but this version renders on the CPU only")
    n = counts.shape[0]
    across, down = n_tiles(projection.camera)
    first_slot = torch.zeros(n + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=first_slot[1:])
    n_pairs = int(first_slot[-1])

    def ints(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    offsets, ids, slot_of = ints(across * down + 1), ints(n_pairs), ints(n_pairs)
    launch(
        bin_splats,
        1,
        [
            n, across * down, across, projection.depths,
            as_array(projection.tile_rects, wp.vec4i), first_slot, offsets, ids, slot_of,
            ints(n), ints(n), ints(across * down + 1),
        ],
        device=device,
    )  # fmt: skip
    return TileLists(offsets, ids, slot_of, first_slot)


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, means2d, splats, background, tiles, width, height, tiles_x, kernels):
        device, n_channels = splats.device, background.shape[0]
        image = torch.empty(height, width, n_channels, device=device)
        transmittance = torch.empty(height, width, device=device)
        last = torch.empty(height, width, dtype=torch.int32, device=device)
        launch(
            kernels.forward,
            tiles.offsets.shape[0] - 1,
            [
                width, height, tiles_x, tiles.offsets, tiles.ids, splats, background,
                image, transmittance, last,
            ],
            device=device,
        )  # fmt: skip
        ctx.tiles, ctx.size, ctx.kernels = tiles, (width, height, tiles_x), kernels
        ctx.save_for_backward(splats, background, transmittance, last)
        return image, transmittance

    @staticmethod
    def backward(ctx, d_image, d_transmittance):
        splats, background, transmittance, last = ctx.saved_tensors
        tiles, device = ctx.tiles, splats.device
        n, n_channels = splats.shape[0], background.shape[0]
        slots = torch.empty(tiles.ids.shape[0], 6 + n_channels, device=device)
        launch(
            ctx.kernels.backward,
            tiles.offsets.shape[0] - 1,
            [
                *ctx.size, tiles.offsets, tiles.ids, tiles.slot_of, splats, background,
                transmittance, last, d_image.contiguous(), d_transmittance.contiguous(), slots,
            ],
            device=device,
        )  # fmt: skip
        d_means2d = torch.empty(n, 2, device=device)
        d_splats = torch.empty_like(splats)
        launch(
            ctx.kernels.sum_slots,
            n,
            [tiles.first_slot, slots, d_means2d, d_splats],
            device=device,
            min_items=MIN_STRIP,
        )
        return d_means2d, d_splats, None, None, None, None, None, None


def blend(projection: Projection, background: Tensor) -> tuple[Tensor, Tensor]:
    """Blend splats front to back over a background.

    Args:
        projection: Splats with C channels.
        background: Value behind everything, without a gradient. (C,)

    Returns:
        ``(pixels (H, W, C), transmittance (H, W))``; gradients flow to ``projection.means2d``
        and ``projection.splats``.
    """
    camera = projection.camera
    return _Blend.apply(
        projection.means2d,
        projection.splats,
        background.detach().float().contiguous(),
        build_tile_lists(projection),
        camera.width,
        camera.height,
        n_tiles(camera)[0],
        tile_kernels(projection.layout.total),
    )
