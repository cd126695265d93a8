# SPDX-License-Identifier: Apache-2.0
"""Rendering backends: what blends splats into pixels; other libraries can take its place.

Projection is always ours, so radii, near plane, normals and units of gradients never depend on
the choice. A rasterizer sorts splats into tiles, blends rows of the image and sends gradients back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gaussian_splatting.rasterization.blending import (
    BlendedRows,
    Rows,
    SplatGradients,
    backpropagate_rows,
    blend_rows,
)
from gaussian_splatting.rasterization.projection import Projection
from gaussian_splatting.rasterization.tile_lists import build_tile_lists


class Rasterizer(Protocol):
    """Blends projected splats.

    Attributes:
        name: As the flag ``--rasterizer`` spells it.
    """

    name: str

    def build_tile_lists(self, projection: Projection) -> Any:
        """What blending needs to know of a view, found once; it has a ``height`` in pixels."""
        ...

    def blend_rows(self, splats: Tensor, tiles: Any, background: Tensor, rows: Rows) -> BlendedRows:
        """Blend some rows of the image, without a gradient to the arguments.

        Args:
            splats: As projected, C channels each. (N, 9 + C)
            tiles: What :meth:`build_tile_lists` returned for the view.
            background: Value behind everything. (C,) float32
            rows: What to blend; not empty, inside the image.
        """
        ...

    def backpropagate_rows(
        self,
        splats: Tensor,
        tiles: Any,
        background: Tensor,
        blended: BlendedRows,
        d_pixels: Tensor,
        d_transmittance: Tensor,
        gradients: SplatGradients,
    ) -> None:
        """Add what some rows say to the gradients of splats.

        Args:
            splats: As given to :meth:`blend_rows`, like the following two.
            tiles: Of the view.
            background: Value behind everything. (C,)
            blended: What it returned; ``pixels`` are not read and may be overwritten.
            d_pixels: (R, W, C)
            d_transmittance: (R, W)
            gradients: Sums to add to.
        """
        ...


class WarpRasterizer:
    """The built-in one: any device, exact tile lists, the same bits on every run.

    Args:
        blocks: Whether the kernels of GPUs blend, which a CPU can run slowly; None: on a GPU.
    """

    name = "warp"

    def __init__(self, blocks: bool | None = None) -> None:
        self._blocks = blocks

    def build_tile_lists(self, projection: Projection) -> Any:
        """See :func:`blending.build_tile_lists`."""
        return build_tile_lists(projection)

    def blend_rows(self, splats: Tensor, tiles: Any, background: Tensor, rows: Rows) -> BlendedRows:
        """See :func:`blending.blend_rows`."""
        return blend_rows(splats, tiles, background, rows, blocks=self._blocks)

    def backpropagate_rows(
        self,
        splats: Tensor,
        tiles: Any,
        background: Tensor,
        blended: BlendedRows,
        d_pixels: Tensor,
        d_transmittance: Tensor,
        gradients: SplatGradients,
    ) -> None:
        """See :func:`blending.backpropagate_rows`."""
        backpropagate_rows(
            splats, tiles, background, blended, d_pixels, d_transmittance, gradients,
            blocks=self._blocks,
        )  # fmt: skip


WARP = WarpRasterizer()


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
    """Blend a whole image.

    Args:
        projection: Splats with C channels.
        background: Value behind everything, without a gradient. (C,)
        rasterizer: Rendering backend.

    Returns:
        ``(pixels (H, W, C), transmittance (H, W))``; gradients flow to ``projection.means2d``
        and ``projection.splats``.
    """
    return _Blend.apply(
        projection.means2d,
        projection.splats,
        background.detach().float().contiguous(),
        rasterizer.build_tile_lists(projection),
        rasterizer,
    )
