# SPDX-License-Identifier: Apache-2.0
"""What rasterizers of other packages share: autograd keeps what their backward pass needs.

Packages cut an image into tiles from its first row on, and a splat is blended in all pixels of the
tiles that its square of three deviations touches. Strips therefore begin with a row of tiles of
the whole image, and rows that were not asked for are cut off: else the tails of splats would
depend on the strip.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.rasterization.blending import BlendedRows, Rows, SplatGradients
from gaussian_splatting.rasterization.projection import Projection
from gaussian_splatting.rasterization.projection_kernels import SPLAT_HEADER
from gaussian_splatting.rasterization.view import TILE


@dataclass(frozen=True)
class GraphRows(BlendedRows):
    """Blended rows with the graph that made them.

    Attributes:
        leaf: Copy of the splats that collects their gradient. (N, 9 + C)
        outputs: Pixels and transmittance with their graph.
    """

    leaf: Tensor
    outputs: tuple[Tensor, Tensor]


class GraphRasterizer(ABC):
    """A rasterizer that renders rows as a differentiable function of splats.

    Attributes:
        name: As the flag ``--rasterizer`` spells it.
    """

    name: str

    @abstractmethod
    def build_tile_lists(self, projection: Projection) -> Any:
        """What :meth:`render` needs to know of a view; it has ``width`` and ``height``."""

    @abstractmethod
    def render(
        self, splats: Tensor, tiles: Any, background: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """Pixels (R, W, C) and transmittance (R, W), differentiable by the splats.

        Args:
            splats: At least one, as projected. (N, 9 + C) float32
            tiles: What :meth:`build_tile_lists` returned.
            background: Value behind everything. (C,)
            rows: What to render, from the first row of a tile on.
        """

    def blend_rows(self, splats: Tensor, tiles: Any, background: Tensor, rows: Rows) -> GraphRows:
        """See :class:`Rasterizer`."""
        leaf = splats.detach().requires_grad_()
        with torch.enable_grad():
            if splats.shape[0]:
                top = rows.start // TILE * TILE
                images = self.render(leaf, tiles, background, Rows(top, rows.stop))
                pixels, transmittance = (image[rows.start - top :] for image in images)
            else:
                # The packages leave an image of nothing black instead of showing the background.
                shape = (rows.stop - rows.start, tiles.width)
                nothing = leaf.sum()
                pixels = background.expand(*shape, -1) + nothing
                transmittance = torch.ones(shape, device=splats.device) + nothing
        last = torch.empty(0, dtype=torch.int32, device=splats.device)
        return GraphRows(
            pixels.detach(), transmittance.detach(), last, rows, leaf, (pixels, transmittance)
        )

    def backpropagate_rows(
        self,
        splats: Tensor,
        tiles: Any,
        background: Tensor,
        blended: GraphRows,
        d_pixels: Tensor,
        d_transmittance: Tensor,
        gradients: SplatGradients,
    ) -> None:
        """See :class:`Rasterizer`."""
        (d_splats,) = torch.autograd.grad(
            blended.outputs, [blended.leaf], [d_pixels, d_transmittance]
        )
        gradients.means2d.add_(d_splats[:, :2])
        # Columns before the conic have a sum of their own, those up to the channels no gradient.
        gradients.splats[:, 2:6].add_(d_splats[:, 2:6])
        gradients.splats[:, SPLAT_HEADER:].add_(d_splats[:, SPLAT_HEADER:])
