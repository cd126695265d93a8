# SPDX-License-Identifier: Apache-2.0
"""Blending by the package gsplat, version 1.5 or newer: several channels in one pass.

It is given our lists of splats by tile, so that footprints and the order of equal depths are ours.
Normalised besides: gsplat's pixel centres lie at halves and ours at integers, and its cap of alpha
is 0.999 and stops the gradient. Opacities are therefore capped at our 0.99 before, straight
through. What remains different: a splat with an opacity above 0.99 is fainter by up to one percent
away from its centre too, and a ray ends when its transmittance is at most 1e-4, not below it.
Sums run in no fixed order, so two runs differ in their last bits.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.rasterization.backends.graph_rasterizer import GraphRasterizer
from gaussian_splatting.rasterization.blending import Rows
from gaussian_splatting.rasterization.projection import Projection
from gaussian_splatting.rasterization.projection_kernels import SPLAT_HEADER
from gaussian_splatting.rasterization.tile_lists import TileLists, build_tile_lists
from gaussian_splatting.rasterization.view import ALPHA_MAX, TILE
from sugar_utils.errors import UserError

MIN_VERSION = (1, 5)


@dataclass(frozen=True)
class RowedLists:
    """Splats by tile, and the place in the lists where each row of tiles begins, and the end."""

    lists: TileLists
    starts: tuple[int, ...]

    @property
    def width(self) -> int:
        """Image width in pixels."""
        return self.lists.width

    @property
    def height(self) -> int:
        """Image height in pixels."""
        return self.lists.height


class GsplatRasterizer(GraphRasterizer):
    """Pixels by gsplat's ``rasterize_to_pixels``.

    Args:
        package: The module ``gsplat``.
    """

    name = "gsplat"

    def __init__(self, package: Any) -> None:
        self._package = package

    def build_tile_lists(self, projection: Projection) -> RowedLists:
        """Our lists, and where the rows of tiles begin in them."""
        lists = build_tile_lists(projection)
        # One read for all strips: a strip's list ends where the package is told that it does.
        return RowedLists(lists, tuple(lists.offsets[:: lists.across].tolist()))

    def render(
        self, splats: Tensor, tiles: RowedLists, background: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """See :class:`GraphRasterizer`; a strip is an image of its own, its splats moved up."""
        lists, n_rows = tiles.lists, rows.stop - rows.start
        top, down = rows.start // TILE, -(-n_rows // TILE)
        first, last = tiles.starts[top], tiles.starts[top + down]
        offsets = lists.offsets[top * lists.across : (top + down) * lists.across] - first
        # Scalars, because a small tensor would wait for its copy to the device.
        means2d = torch.stack([splats[:, 0] + 0.5, splats[:, 1] + (0.5 - rows.start)], dim=-1)
        opacities = splats[:, 5]
        # Straight through: the cap changes the value, not the gradient.
        opacities = opacities + (opacities.clamp_max(ALPHA_MAX) - opacities).detach()
        pixels, alpha = self._package.rasterize_to_pixels(
            means2d[None], splats[None, :, 2:5], splats[None, :, SPLAT_HEADER:], opacities[None],
            lists.width, n_rows, TILE, offsets.view(1, down, lists.across),
            lists.ids[first:last].contiguous(), backgrounds=background[None],
        )  # fmt: skip
        return pixels[0], 1.0 - alpha[0, ..., 0]


def load_gsplat() -> GsplatRasterizer:
    """The adapter on the installed package.

    Raises:
        UserError: It is missing, too old, or lacks what is needed.
    """
    try:
        package = importlib.import_module("gsplat")
    except ImportError as error:
        raise UserError(
            f"gsplat cannot be imported ({' '.join(str(error).split())}); install it with "
            '"pip install gsplat"'
        ) from error
    version = str(getattr(package, "__version__", "0"))
    numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    if tuple(numbers) < MIN_VERSION or not hasattr(package, "rasterize_to_pixels"):
        least = ".".join(map(str, MIN_VERSION))
        raise UserError(f"gsplat {version} is not {least} or newer; install it again")
    return GsplatRasterizer(package)
