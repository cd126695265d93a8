# SPDX-License-Identifier: Apache-2.0
"""Rasterizers of other packages, and the choice of a rasterizer.

The built-in one is used unless another is asked for and passes its self-test.
"""

from __future__ import annotations

import abc
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Generic

import torch
from torch import Tensor

from gaussian_splatting.rasterization import projection_kernels as kernels
from gaussian_splatting.rasterization.projection import Projection
from gaussian_splatting.rasterization.rasterizers import (
    WARP,
    BlendedRows,
    Rasterizer,
    Rows,
    SplatGradients,
    TileLists,
    Tiles,
    build_tile_lists,
)
from gaussian_splatting.rasterization.self_test import self_test
from sugar_utils.errors import UserError, explained
from sugar_utils.libraries import install_advice

RASTERIZERS = ("auto", "warp", "gsplat", "inria")
MIN_VERSION = (1, 5)  # of gsplat
PASS_CHANNELS = 3  # that diff_gaussian_rasterization blends in one pass
_W_GUARD = 1e-7  # diff_gaussian_rasterization divides by w plus this
_BEHIND = -1.0  # depth given to culled splats: nearer than that package's own near plane


@dataclass(frozen=True)
class GraphRows(BlendedRows):
    """Blended rows with the autograd graph of their pixels."""

    leaf: Tensor  # copy of the splats that collects their gradient, (N, 9 + C)
    outputs: tuple[Tensor, Tensor]  # pixels and transmittance with their graph


class GraphRasterizer(Rasterizer[Tiles, GraphRows], Generic[Tiles]):
    """Base of rasterizers that render rows as a differentiable function of splats."""

    def require_whole_splats(self, projection: Projection) -> None:
        """Check that splats end where alpha is 1/255.

        Raises:
            UserError: They end before; the packages would end them at borders of tiles.
        """
        if projection.has_cutoff:
            raise UserError(
                f"--rasterizer {self.name} cannot render this model, whose Gaussians end at some "
                "deviations (--cutoff_deviations); leave --rasterizer out"
            )

    @abc.abstractmethod
    def render(
        self, splats: Tensor, tiles: Tiles, background: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """Return pixels, (R, W, C), and transmittance, (R, W), of one splat or more."""

    def blend_rows(self, splats: Tensor, tiles: Tiles, background: Tensor, rows: Rows) -> GraphRows:
        """See :meth:`Rasterizer.blend_rows`."""
        leaf = splats.detach().requires_grad_()
        with torch.enable_grad():
            if splats.shape[0]:
                # Rows of tiles are rendered whole.
                top = rows.start // kernels.TILE * kernels.TILE
                pixels, transmittance = self.render(leaf, tiles, background, Rows(top, rows.stop))
                pixels = pixels[rows.start - top :]
                transmittance = transmittance[rows.start - top :]
            else:
                # The packages leave an image of nothing black instead of showing the background.
                shape = (rows.stop - rows.start, tiles.width)
                nothing = leaf.sum()
                pixels = background.expand(*shape, -1) + nothing
                transmittance = torch.ones(shape, device=splats.device) + nothing
        return GraphRows(
            pixels=pixels.detach(),
            transmittance=transmittance.detach(),
            last=torch.empty(0, dtype=torch.int32, device=splats.device),
            rows=rows,
            background=background,
            leaf=leaf,
            outputs=(pixels, transmittance),
        )

    def backpropagate_rows(
        self,
        splats: Tensor,
        tiles: Tiles,
        blended: GraphRows,
        d_pixels: Tensor,
        d_transmittance: Tensor,
        gradients: SplatGradients,
    ) -> None:
        """See :meth:`Rasterizer.backpropagate_rows`."""
        d_outputs = [d_pixels, d_transmittance]
        (d_splats,) = torch.autograd.grad(blended.outputs, [blended.leaf], d_outputs)
        gradients.means2d.add_(d_splats[:, :2])
        # Columns before the conic have a sum of their own, those up to the channels no gradient.
        gradients.splats[:, 2:6].add_(d_splats[:, 2:6])
        gradients.splats[:, kernels.SPLAT_HEADER :].add_(d_splats[:, kernels.SPLAT_HEADER :])


@dataclass(frozen=True)
class RowedLists(TileLists):
    """Tile lists that the host can slice by rows of tiles."""

    starts: tuple[int, ...]  # place in the lists where each row of tiles begins, and the end


class GsplatRasterizer(GraphRasterizer[RowedLists]):
    """Pixels by gsplat's ``rasterize_to_pixels``."""

    name = "gsplat"

    def __init__(self, package: ModuleType) -> None:
        self._package = package

    def build_tile_lists(self, projection: Projection) -> RowedLists:
        """See :meth:`Rasterizer.build_tile_lists`."""
        self.require_whole_splats(projection)
        lists = build_tile_lists(projection)
        # One read for all strips: the package must be told where a strip's list ends.
        starts = lists.offsets[:: lists.across].tolist()
        return RowedLists(**vars(lists), starts=tuple(starts))

    def render(
        self, splats: Tensor, tiles: RowedLists, background: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """See :class:`GraphRasterizer`; a strip is an image of its own, its splats moved up."""
        n_rows = rows.stop - rows.start
        top = rows.start // kernels.TILE
        down = -(-n_rows // kernels.TILE)
        first = tiles.starts[top]
        last = tiles.starts[top + down]
        offsets = tiles.offsets[top * tiles.across : (top + down) * tiles.across] - first
        # Scalars, because a small tensor would wait for its copy to the device.
        x = splats[:, 0] + 0.5
        y = splats[:, 1] + (0.5 - rows.start)
        means2d = torch.stack([x, y], dim=-1)
        opacities = splats[:, 5]
        # Straight through: the cap changes the value, not the gradient.
        opacities = opacities + (opacities.clamp_max(kernels.ALPHA_MAX) - opacities).detach()
        pixels, alpha = self._package.rasterize_to_pixels(
            means2d[None],
            splats[None, :, 2:5],
            splats[None, :, kernels.SPLAT_HEADER :],
            opacities[None],
            tiles.width,
            n_rows,
            kernels.TILE,
            offsets.view(1, down, tiles.across),
            tiles.ids[first:last].contiguous(),
            backgrounds=background[None],
        )
        return pixels[0], 1.0 - alpha[0, ..., 0]


def load_gsplat() -> GsplatRasterizer:
    """Import gsplat.

    Raises:
        UserError: It is not installed, or too old.
    """
    package = _imported("gsplat", install_advice("gsplat"))
    version = str(getattr(package, "__version__", "0"))
    numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    if tuple(numbers) < MIN_VERSION or not hasattr(package, "rasterize_to_pixels"):
        least = ".".join(map(str, MIN_VERSION))
        raise UserError(f"gsplat {version} is not {least} or newer; install it again")
    return GsplatRasterizer(package)


def _imported(name: str, advice: str) -> ModuleType:
    with explained(f"{name} cannot be imported", advice, ImportError):
        return importlib.import_module(name)


@dataclass(frozen=True)
class SplatList:
    """Splats to be blended, not sorted: the package sorts them itself, strip by strip."""

    radii: Tensor  # three standard deviations, rounded up; 0 for culled splats, (N,) int32 pixels
    depths: Tensor  # view-axis depth, by which splats are sorted, (N,) world units
    width: int  # image width in pixels
    height: int  # image height in pixels


class InriaRasterizer(GraphRasterizer[SplatList]):
    """Pixels by diff_gaussian_rasterization: splats as flat Gaussians before a trivial camera."""

    name = "inria"

    def __init__(self, package: ModuleType) -> None:
        """Take the package or a fork of it.

        Raises:
            UserError: The fork has unknown settings.
        """
        self._settings = package.GaussianRasterizationSettings
        self._rasterizer = package.GaussianRasterizer
        unknown = set(self._settings._fields) - set(_camera_settings(1, 1, torch.device("cpu")))
        if unknown:
            raise UserError(
                "diff_gaussian_rasterization is a fork with settings that are not known here "
                f"({', '.join(sorted(unknown))}); install the original or use --rasterizer warp"
            )

    def build_tile_lists(self, projection: Projection) -> SplatList:
        """See :meth:`Rasterizer.build_tile_lists`."""
        self.require_whole_splats(projection)
        camera = projection.camera
        return SplatList(projection.radii, projection.depths, camera.width, camera.height)

    def render(
        self, splats: Tensor, tiles: SplatList, background: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """See :class:`GraphRasterizer`; a strip is an image of its own, its splats moved up."""
        n_channels = background.shape[0]
        centres, covariances = flat_gaussians(splats, tiles, rows)
        # One more channel of ones blends to alpha; the package takes three at a time.
        ones = torch.ones_like(splats[:, :1])
        values = torch.cat([splats[:, kernels.SPLAT_HEADER :], ones], dim=1)
        behind = torch.cat([background, background.new_zeros(1)])
        missing = -values.shape[1] % PASS_CHANNELS
        values = torch.nn.functional.pad(values, (0, missing))
        behind = torch.nn.functional.pad(behind, (0, missing))
        camera = _camera_settings(tiles.width, rows.stop - rows.start, splats.device)
        images = []
        for first in range(0, values.shape[1], PASS_CHANNELS):
            channels = slice(first, first + PASS_CHANNELS)
            settings = {**camera, "bg": behind[channels].contiguous()}
            # Versions of the package have some of these settings.
            expected = {name: settings[name] for name in self._settings._fields}
            rasterize_pass = self._rasterizer(raster_settings=self._settings(**expected))
            # Forks return (colour, radii) and further images after them.
            image, *_ = rasterize_pass(
                means3D=centres,
                means2D=torch.zeros_like(centres),
                cov3D_precomp=covariances,
                opacities=splats[:, 5:6].contiguous(),
                colors_precomp=values[:, channels].contiguous(),
            )
            images.append(image)
        rendered = torch.cat(images).permute(1, 2, 0)
        return rendered[..., :n_channels].contiguous(), 1.0 - rendered[..., n_channels]


def flat_gaussians(splats: Tensor, splat_list: SplatList, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return 3D Gaussians that the trivial camera projects to given splats, (N, 9 + C).

    Centres (N, 3), and covariances (N, 6) as xx, xy, xz, yy, yz, zz; culled splats lie behind it.
    """
    width = splat_list.width
    n_rows = rows.stop - rows.start
    # In float64: the determinant of a long and thin splat's conic cancels.
    rows64 = splats[:, :5].double()
    visible = splat_list.radii > 0
    depth = torch.where(visible, splat_list.depths, _BEHIND).detach().double()
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
            (yy / determinant - kernels.LOW_PASS) * unit,
            -xy / determinant * unit,
            zero,
            (xx / determinant - kernels.LOW_PASS) * unit,
            zero,
            zero,
        ],
        dim=-1,
    )
    return centres.float(), covariances.float()


def _camera_settings(width: int, height: int, device: torch.device) -> dict[str, object]:
    """Settings of a camera at the origin that looks along z, its focal length half the width."""
    tan_y = height / width
    rows = ((1.0, 0, 0, 0), (0, 1.0 / tan_y, 0, 0), (0, 0, 1.0, 0), (0, 0, 1.0, 0))
    projection = torch.tensor(rows, device=device)
    return {
        "image_height": height,
        "image_width": width,
        "tanfovx": 1.0,
        "tanfovy": tan_y,
        "viewmatrix": torch.eye(4, device=device),
        "projmatrix": projection.T.contiguous(),
        "campos": torch.zeros(3, device=device),
        "bg": None,
        "scale_modifier": 1.0,
        "sh_degree": 0,
        "prefiltered": False,
        "debug": False,
        "antialiasing": False,
    }


def load_inria() -> InriaRasterizer:
    """Import diff_gaussian_rasterization.

    Raises:
        UserError: It is not installed, or a fork with unknown settings.
    """
    advice = "build it from its authors' sources or use --rasterizer warp"
    return InriaRasterizer(_imported("diff_gaussian_rasterization", advice))


def choose_rasterizer(name: str, device: torch.device) -> tuple[Rasterizer, str]:
    """Return the rasterizer of a run, and one line that names it with the reason.

    ``auto`` is the built-in one: it alone gives the same bits on every run.

    Raises:
        UserError: The rasterizer is not available on this device, or fails its self-test.
    """
    if name == "auto":
        return WARP, "rasterizer: warp, built in; it gives the same bits on every run"
    if name == "warp":
        return WARP, "rasterizer: warp, by --rasterizer"
    if device.type != "cuda":
        raise UserError(
            f"--rasterizer {name} renders on CUDA devices only, and this run computes on the "
            f"{device.type.upper()}; leave the flag out"
        )
    try:
        rasterizer = load_gsplat() if name == "gsplat" else load_inria()
    except UserError as error:
        raise UserError(f"--rasterizer {name}: {error}") from error
    fault = self_test(rasterizer, device)
    if fault is not None:
        raise UserError(
            f"--rasterizer {name}: its self-test failed, {fault}; install a build for this torch "
            "and GPU, or leave the flag out"
        )
    return rasterizer, f"rasterizer: {name}, by --rasterizer; its self-test passed"
