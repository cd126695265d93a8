# SPDX-License-Identifier: Apache-2.0
"""Blending by the package gsplat, version 1.5 or newer: several channels in one pass.

Normalised here: gsplat's pixel centres lie at halves and ours at integers, and its cap of alpha
is 0.999 and stops the gradient. Opacities are therefore capped at our 0.99 before, straight
through. What remains different: a splat with an opacity above 0.99 is fainter by up to one percent
away from its centre too, and a ray ends when its transmittance is at most 1e-4, not below it.
Sums run in no fixed order, so two runs differ in their last bits.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from gaussian_splatting.rasterization.backends.graph import GraphRasterizer, SplatList
from gaussian_splatting.rasterization.blending import Rows
from gaussian_splatting.rasterization.projection_kernels import SPLAT_HEADER
from gaussian_splatting.rasterization.view import ALPHA_MAX, TILE
from sugar_utils.errors import UserError

MIN_VERSION = (1, 5)
_NEEDED = ("isect_tiles", "isect_offset_encode", "rasterize_to_pixels")


class GsplatRasterizer(GraphRasterizer):
    """Tiles and pixels by gsplat's documented functions.

    Args:
        package: The module ``gsplat``.
    """

    name = "gsplat"

    def __init__(self, package: Any) -> None:
        self._package = package

    def render(
        self, splats: Tensor, listed: SplatList, background: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """See :class:`GraphRasterizer`; a strip is an image of its own, its splats moved up."""
        gsplat, n_rows = self._package, rows.stop - rows.start
        across, down = -(-listed.width // TILE), -(-n_rows // TILE)
        means2d = splats[:, :2] + splats.new_tensor([0.5, 0.5 - rows.start])
        opacities = splats[:, 5]
        # Straight through: the cap changes the value, not the gradient.
        opacities = opacities + (opacities.clamp_max(ALPHA_MAX) - opacities).detach()
        radii = listed.radii[:, None].expand(-1, 2).contiguous()
        _, pairs, flat = gsplat.isect_tiles(
            means2d.detach()[None], radii[None], listed.depths[None], TILE, across, down
        )
        offsets = gsplat.isect_offset_encode(pairs, 1, across, down)
        pixels, alpha = gsplat.rasterize_to_pixels(
            means2d[None], splats[None, :, 2:5], splats[None, :, SPLAT_HEADER:], opacities[None],
            listed.width, n_rows, TILE, offsets, flat, backgrounds=background[None],
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
    if tuple(numbers) < MIN_VERSION or any(not hasattr(package, name) for name in _NEEDED):
        least = ".".join(map(str, MIN_VERSION))
        raise UserError(f"gsplat {version} is not {least} or newer; install it again")
    return GsplatRasterizer(package)
