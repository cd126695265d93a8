# SPDX-License-Identifier: Apache-2.0
"""Blending by ``diff_gaussian_rasterization``, the rasterizer of the 3DGS authors or a fork of it.

The package projects 3D Gaussians itself and renders three channels. It is given a trivial camera
and, for each splat, a Gaussian whose projection is that splat: at our depth ``z``, at the point
that projects to our centre, flat and parallel to the image, with the covariance
``(covariance of the splat - 0.3) (z / f)^2``; the package multiplies by ``(f / z)^2`` and adds the
0.3. Further channels are further passes, and a channel of ones gives the transmittance.

What remains different: a splat's inverse covariance takes the way over the covariance in float32,
which loses digits where a splat is a thousand times as long as it is wide. Sums run in no fixed
order, so two runs differ in their last bits.
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
from gaussian_splatting.rasterization.view import LOW_PASS
from sugar_utils.errors import UserError

PASS_CHANNELS = 3
_W_GUARD = 1e-7
"""The package divides by w plus this."""

_BEHIND = -1.0
"""Depth of splats that were culled: before the package's own near plane, whatever it is."""


@dataclass(frozen=True)
class SplatList:
    """What is to be blended, not sorted: the package sorts for itself, strip by strip.

    Attributes:
        radii: Three standard deviations, rounded up; 0 for culled splats. (N,) int32 pixels
        depths: View-axis depth, by which splats are sorted. (N,) world units
        width: Image width in pixels.
        height: Image height in pixels.
    """

    radii: Tensor
    depths: Tensor
    width: int
    height: int


class InriaRasterizer(GraphRasterizer):
    """Splats as flat Gaussians before a trivial camera.

    Args:
        package: The module ``diff_gaussian_rasterization``.

    Raises:
        UserError: It is a fork with settings that are not known here.
    """

    name = "inria"

    def __init__(self, package: Any) -> None:
        self._settings = package.GaussianRasterizationSettings
        self._rasterizer = package.GaussianRasterizer
        unknown = set(self._settings._fields) - set(_camera(1, 1, torch.device("cpu")))
        if unknown:
            raise UserError(
                "diff_gaussian_rasterization is a fork with settings that are not known here "
                f"({', '.join(sorted(unknown))}); install the original or use --rasterizer warp"
            )

    def build_tile_lists(self, projection: Projection) -> SplatList:
        """Radii and depths of the view."""
        camera = projection.camera
        return SplatList(projection.radii, projection.depths, camera.width, camera.height)

    def render(
        self, splats: Tensor, tiles: SplatList, background: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """See :class:`GraphRasterizer`; a strip is an image of its own, its splats moved up."""
        width, n_rows = tiles.width, rows.stop - rows.start
        centres, covariances = flat_gaussians(splats, tiles, rows)
        ones = torch.ones_like(splats[:, :1])
        values = torch.cat([splats[:, SPLAT_HEADER:], ones], dim=1)
        behind = torch.cat([background, background.new_zeros(1)])
        missing = -values.shape[1] % PASS_CHANNELS
        values = torch.nn.functional.pad(values, (0, missing))
        behind = torch.nn.functional.pad(behind, (0, missing))
        camera = _camera(width, n_rows, splats.device)
        images = []
        for first in range(0, values.shape[1], PASS_CHANNELS):
            channels = slice(first, first + PASS_CHANNELS)
            settings = {**camera, "bg": behind[channels].contiguous()}
            rasterizer = self._rasterizer(
                raster_settings=self._settings(**{n: settings[n] for n in self._settings._fields})
            )
            # Forks return (colour, radii) and further images after them.
            images.append(
                rasterizer(
                    means3D=centres,
                    means2D=torch.zeros_like(centres),
                    opacities=splats[:, 5:6].contiguous(),
                    colors_precomp=values[:, channels].contiguous(),
                    cov3D_precomp=covariances,
                )[0]
            )
        n_channels = background.shape[0]
        rendered = torch.cat(images).permute(1, 2, 0)
        return rendered[..., :n_channels].contiguous(), 1.0 - rendered[..., n_channels]


def flat_gaussians(splats: Tensor, listed: SplatList, rows: Rows) -> tuple[Tensor, Tensor]:
    """3D Gaussians that the trivial camera projects to given splats.

    Args:
        splats: As projected. (N, 9 + C)
        listed: Their radii and depths, and the size of the image.
        rows: The rows that the camera shows.

    Returns:
        Centres (N, 3), and covariances (N, 6) as xx, xy, xz, yy, yz, zz; culled splats lie behind
        the camera.
    """
    width, n_rows = listed.width, rows.stop - rows.start
    # In float64: the determinant of a long and thin splat's conic cancels.
    rows64, visible = splats[:, :5].double(), listed.radii > 0
    depth = torch.where(visible, listed.depths, _BEHIND).detach().double()
    x = (2 * rows64[:, 0] + 1) / width - 1
    y = ((2 * (rows64[:, 1] - rows.start) + 1) / n_rows - 1) * (n_rows / width)
    centres = torch.stack([x * (depth + _W_GUARD), y * (depth + _W_GUARD), depth], dim=-1)
    # Culled splats have no conic; any valid one keeps NaN out of the gradient.
    round_splat = rows64.new_tensor([1.0, 0.0, 1.0])
    xx, xy, yy = torch.where(visible[:, None], rows64[:, 2:5], round_splat).unbind(-1)
    determinant = xx * yy - xy * xy
    unit = (2 * depth / width) ** 2
    zero = torch.zeros_like(depth)
    covariances = torch.stack(
        [
            (yy / determinant - LOW_PASS) * unit, -xy / determinant * unit, zero,
            (xx / determinant - LOW_PASS) * unit, zero, zero,
        ],
        dim=-1,
    )  # fmt: skip
    return centres.float(), covariances.float()


def _camera(width: int, height: int, device: torch.device) -> dict[str, Any]:
    """Settings of a camera at the origin that looks along z, its focal length half the width.

    Matrices are transposed, as the package wants them.
    """
    tan_y = height / width
    projection = torch.tensor(
        [
            [1.0, 0.0, 0.0, 0.0],
            [0.0, 1.0 / tan_y, 0.0, 0.0],
            [0.0, 0.0, 1.0, 0.0],
            [0.0, 0.0, 1.0, 0.0],
        ],
        device=device,
    )
    return {
        "image_height": height,
        "image_width": width,
        "tanfovx": 1.0,
        "tanfovy": tan_y,
        "bg": None,
        "scale_modifier": 1.0,
        "viewmatrix": torch.eye(4, device=device),
        "projmatrix": projection.T.contiguous(),
        "sh_degree": 0,
        "campos": torch.zeros(3, device=device),
        "prefiltered": False,
        "debug": False,
        "antialiasing": False,
    }


def load_inria() -> InriaRasterizer:
    """The adapter on the installed package.

    Raises:
        UserError: It is missing or not understood.
    """
    try:
        package = importlib.import_module("diff_gaussian_rasterization")
    except ImportError as error:
        raise UserError(
            f"diff_gaussian_rasterization cannot be imported ({' '.join(str(error).split())}); "
            "build it from its authors' sources or use --rasterizer warp"
        ) from error
    return InriaRasterizer(package)
