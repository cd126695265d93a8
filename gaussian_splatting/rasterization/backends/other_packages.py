# SPDX-License-Identifier: Apache-2.0
"""Blending by the packages gsplat (1.5 or newer) and ``diff_gaussian_rasterization``.

Packages cut an image into tiles from its first row on, and a splat is blended in all pixels of the
tiles that its square of three deviations touches. Strips therefore begin with a row of tiles of
the whole image, and rows that were not asked for are cut off: else the tails of splats would
depend on the strip.

It is given our lists of splats by tile, so that footprints and the order of equal depths are ours.
Normalised besides: gsplat's pixel centres lie at halves and ours at integers, and its cap of alpha
is 0.999 and stops the gradient. Opacities are therefore capped at our 0.99 before, straight
through. What remains different: a splat with an opacity above 0.99 is fainter by up to one percent
away from its centre too, and a ray ends when its transmittance is at most 1e-4, not below it.
Sums run in no fixed order, so two runs differ in their last bits.

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
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.rasterization.projection import Projection
from gaussian_splatting.rasterization.projection_kernels import SPLAT_HEADER
from gaussian_splatting.rasterization.rasterizers import BlendedRows, Rows, SplatGradients
from gaussian_splatting.rasterization.tile_lists import TileLists, build_tile_lists
from gaussian_splatting.rasterization.view import ALPHA_MAX, LOW_PASS, TILE
from sugar_utils.errors import UserError


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
            background: Value behind everything. (C,)
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
    """The adapter on the installed package."""
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
    """Settings of a camera at the origin that looks along z, its focal length half the width."""
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
    """The adapter on the installed package."""
    try:
        package = importlib.import_module("diff_gaussian_rasterization")
    except ImportError as error:
        raise UserError(
            f"diff_gaussian_rasterization cannot be imported ({' '.join(str(error).split())}); "
            "build it from its authors' sources or use --rasterizer warp"
        ) from error
    return InriaRasterizer(package)
