# SPDX-License-Identifier: Apache-2.0
"""Choosing a rasterizer: the built-in one unless another is asked for and passes its self-test."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import projection_kernels as kernels
from gaussian_splatting.rasterization import rasterizers
from gaussian_splatting.rasterization.projection import Projection, project
from gaussian_splatting.rasterization.rasterizers import BlendedRows, Rasterizer, Rows, TileLists
from gaussian_splatting.rasterization.render import rasterize
from sugar_utils.errors import UserError, explained
from sugar_utils.random import generator

MIN_VERSION = (1, 5)
PASS_CHANNELS = 3
_W_GUARD = 1e-7  # the package divides by w plus this
_BEHIND = -1.0
"""Depth of splats that were culled: before the package's own near plane, whatever it is."""
RASTERIZERS = ("auto", "warp", "gsplat", "inria")
N_GAUSSIANS = 60
WIDTH = 21
HEIGHT = 35
STRIPS = (Rows(0, HEIGHT), Rows(17, 30))
"""The whole image, and a strip that begins and ends inside of a tile."""
MAX_ERROR = 8e-3
GRADIENT_ERROR = 2e-2
"""Largest difference of a pixel, and norm of the gradients' difference relative to their own.

A splat that one of the two just counts and the other just does not makes 1/255 of its value."""
BLOCK = 7
MAX_BLOCK_ERROR = 1e-3
BLOCK_MEANS = (
    0.3798,
    0.3097,
    0.2277,
    1.5725,
    0.6061,
    0.1946,
    0.1240,
    0.1924,
    0.9389,
    0.3272,
    0.0041,
    0.0025,
    0.0043,
    0.0201,
    0.0067,
    0.1899,
    0.1413,
    0.1148,
    0.8116,
    0.2883,
    0.0558,
    0.0479,
    0.0491,
    0.2369,
    0.0945,
    0.1035,
    0.0947,
    0.1160,
    0.7571,
    0.2207,
    0.0951,
    0.0620,
    0.0762,
    0.5529,
    0.1776,
    0.1817,
    0.1329,
    0.1876,
    0.8739,
    0.3346,
    0.3020,
    0.2187,
    0.2570,
    1.8468,
    0.5841,
    0.0970,
    0.0974,
    0.0941,
    0.5540,
    0.2197,
    0.1981,
    0.1778,
    0.2114,
    1.1385,
    0.3940,
    0.2012,
    0.1330,
    0.1759,
    1.1342,
    0.3597,
    0.0346,
    0.0308,
    0.0284,
    0.1763,
    0.0721,
    0.1361,
    0.0990,
    0.1146,
    0.6822,
    0.2552,
    0.0248,
    0.0162,
    0.0247,
    0.1159,
    0.0472,
)
"""Colour, depth and alpha of the test scene, block means of the float64 twin."""


@dataclass(frozen=True)
class GraphRows(BlendedRows):
    """Blended rows with the graph that made them."""

    leaf: Tensor  # copy of the splats that collects their gradient, (N, 9 + C)
    outputs: tuple[Tensor, Tensor]


class GraphRasterizer(Rasterizer):
    """Renders rows as a differentiable function of splats.

    ``render(splats, tiles, background, rows)`` gives pixels (R, W, C) and transmittance (R, W) of
    one splat or more.
    """

    def blend_rows(self, splats: Tensor, tiles: Any, background: Tensor, rows: Rows) -> GraphRows:
        leaf = splats.detach().requires_grad_()
        with torch.enable_grad():
            if splats.shape[0]:
                top = rows.start // kernels.TILE * kernels.TILE
                images = self.render(leaf, tiles, background, Rows(top, rows.stop))
                pixels, transmittance = (image[rows.start - top :] for image in images)
            else:
                # The packages leave an image of nothing black instead of showing the background.
                shape = (rows.stop - rows.start, tiles.width)
                nothing = leaf.sum()
                pixels = background.expand(*shape, -1) + nothing
                transmittance = torch.ones(shape, device=splats.device) + nothing
        last = torch.empty(0, dtype=torch.int32, device=splats.device)
        outputs = pixels, transmittance
        return GraphRows(*(t.detach() for t in outputs), last, rows, leaf, outputs)

    def backpropagate_rows(
        self, splats, tiles, background, blended, d_pixels, d_transmittance, gradients
    ) -> None:
        outputs = [d_pixels, d_transmittance]
        (d_splats,) = torch.autograd.grad(blended.outputs, [blended.leaf], outputs)
        gradients.means2d.add_(d_splats[:, :2])
        # Columns before the conic have a sum of their own, those up to the channels no gradient.
        gradients.splats[:, 2:6].add_(d_splats[:, 2:6])
        gradients.splats[:, kernels.SPLAT_HEADER :].add_(d_splats[:, kernels.SPLAT_HEADER :])


@dataclass(frozen=True)
class RowedLists(TileLists):
    starts: tuple[int, ...]  # place in the lists where each row of tiles begins, and the end


class GsplatRasterizer(GraphRasterizer):
    """Pixels by gsplat's ``rasterize_to_pixels``."""

    name = "gsplat"

    def __init__(self, package: Any) -> None:
        self._package = package

    def build_tile_lists(self, projection: Projection) -> RowedLists:
        lists = rasterizers.build_tile_lists(projection)
        # One read for all strips: a strip's list ends where the package is told that it does.
        return RowedLists(**vars(lists), starts=tuple(lists.offsets[:: lists.across].tolist()))

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
        means2d = torch.stack([splats[:, 0] + 0.5, splats[:, 1] + (0.5 - rows.start)], dim=-1)
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
    package = _imported("gsplat", 'install it with "pip install gsplat"')
    version = str(getattr(package, "__version__", "0"))
    numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    if tuple(numbers) < MIN_VERSION or not hasattr(package, "rasterize_to_pixels"):
        least = ".".join(map(str, MIN_VERSION))
        raise UserError(f"gsplat {version} is not {least} or newer; install it again")
    return GsplatRasterizer(package)


def _imported(name: str, advice: str) -> Any:
    with explained(f"{name} cannot be imported", advice, ImportError):
        return importlib.import_module(name)


@dataclass(frozen=True)
class SplatList:
    """What is to be blended, not sorted: the package sorts for itself, strip by strip."""

    radii: Tensor  # three standard deviations, rounded up; 0 for culled splats, (N,) int32 pixels
    depths: Tensor  # view-axis depth, by which splats are sorted, (N,) world units
    width: int  # image width in pixels
    height: int  # image height in pixels


class InriaRasterizer(GraphRasterizer):
    """Splats as flat Gaussians before a trivial camera."""

    name = "inria"

    def __init__(self, package: Any) -> None:
        self._settings = package.GaussianRasterizationSettings
        self._rasterizer = package.GaussianRasterizer
        unknown = set(self._settings._fields) - set(_camera_settings(1, 1, torch.device("cpu")))
        if unknown:
            raise UserError(
                "diff_gaussian_rasterization is a fork with settings that are not known here "
                f"({', '.join(sorted(unknown))}); install the original or use --rasterizer warp"
            )

    def build_tile_lists(self, projection: Projection) -> SplatList:
        camera = projection.camera
        return SplatList(projection.radii, projection.depths, camera.width, camera.height)

    def render(
        self, splats: Tensor, tiles: SplatList, background: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """See :class:`GraphRasterizer`; a strip is an image of its own, its splats moved up."""
        width = tiles.width
        n_rows = rows.stop - rows.start
        centres, covariances = flat_gaussians(splats, tiles, rows)
        ones = torch.ones_like(splats[:, :1])
        values = torch.cat([splats[:, kernels.SPLAT_HEADER :], ones], dim=1)
        behind = torch.cat([background, background.new_zeros(1)])
        missing = -values.shape[1] % PASS_CHANNELS
        values = torch.nn.functional.pad(values, (0, missing))
        behind = torch.nn.functional.pad(behind, (0, missing))
        camera = _camera_settings(width, n_rows, splats.device)
        images = []
        for first in range(0, values.shape[1], PASS_CHANNELS):
            channels = slice(first, first + PASS_CHANNELS)
            settings = {**camera, "bg": behind[channels].contiguous()}
            settings = self._settings(**{name: settings[name] for name in self._settings._fields})
            # Forks return (colour, radii) and further images after them.
            image, *_ = self._rasterizer(raster_settings=settings)(
                means3D=centres,
                means2D=torch.zeros_like(centres),
                cov3D_precomp=covariances,
                opacities=splats[:, 5:6].contiguous(),
                colors_precomp=values[:, channels].contiguous(),
            )
            images.append(image)
        n_channels = background.shape[0]
        rendered = torch.cat(images).permute(1, 2, 0)
        return rendered[..., :n_channels].contiguous(), 1.0 - rendered[..., n_channels]


def flat_gaussians(splats: Tensor, listed: SplatList, rows: Rows) -> tuple[Tensor, Tensor]:
    """3D Gaussians that the trivial camera projects to given splats, (N, 9 + C).

    Centres (N, 3), and covariances (N, 6) as xx, xy, xz, yy, yz, zz; culled splats lie behind it.
    """
    width = listed.width
    n_rows = rows.stop - rows.start
    # In float64: the determinant of a long and thin splat's conic cancels.
    rows64 = splats[:, :5].double()
    visible = listed.radii > 0
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


def _camera_settings(width: int, height: int, device: torch.device) -> dict[str, Any]:
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
    advice = "build it from its authors' sources or use --rasterizer warp"
    return InriaRasterizer(_imported("diff_gaussian_rasterization", advice))


_LOADERS = {"gsplat": load_gsplat, "inria": load_inria}


def choose_rasterizer(name: str, device: torch.device) -> tuple[Rasterizer, str]:
    """The rasterizer of a run, and one line that names it with the reason.

    ``auto`` is the built-in one: it alone gives the same bits on every run.
    """
    if name == "auto":
        return rasterizers.WARP, "rasterizer: warp, built in; it gives the same bits on every run"
    if name == "warp":
        return rasterizers.WARP, "rasterizer: warp, by --rasterizer"
    if device.type != "cuda":
        raise UserError(
            f"--rasterizer {name} renders on CUDA devices only, and this run computes on the "
            f"{device.type.upper()}; leave the flag out"
        )
    try:
        rasterizer = _LOADERS[name]()
    except UserError as error:
        raise UserError(f"--rasterizer {name}: {error}") from error
    fault = self_test(rasterizer, device)
    if fault is not None:
        raise UserError(
            f"--rasterizer {name}: its self-test failed, {fault}; install a build for this torch "
            "and GPU, or leave the flag out"
        )
    return rasterizer, f"rasterizer: {name}, by --rasterizer; its self-test passed"


@torch.no_grad()
def self_test(rasterizer: Rasterizer, device: torch.device) -> str | None:
    """Compare with the built-in rasterizer. What is wrong, None if nothing is."""
    expected = _render(rasterizers.WARP, device)
    try:
        found = _render(rasterizer, device)
    # Another package's failure, whatever it is, is a reason not to use it.
    except Exception as error:
        return f"it raised {type(error).__name__} ({' '.join(str(error).split())[:300]})"
    for name, values in expected.items():
        if not bool(found[name].isfinite().all()):
            return f"its {name} are not finite"
        difference = (found[name] - values).double()
        error = float(difference.abs().max())
        allowed = MAX_ERROR
        if name.startswith("gradients"):
            error = float(difference.norm() / values.double().norm())
            allowed = GRADIENT_ERROR
        if error > allowed:
            return f"its {name} differ by {error:.1e} from the built-in rasterizer's"
    return None


@torch.no_grad()
def reference_test(device: torch.device) -> str | None:
    """Compare the built-in rasterizer with recorded float64 values. What is wrong, if anything."""
    found = rasterize(_test_scene(device), _test_camera(), depth=True)
    pixels = torch.cat([found.image, found.depth[..., None], found.alpha[..., None]], dim=-1)
    blocks = pixels.cpu().double().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    means = blocks.mean(dim=(1, 3)).reshape(-1, pixels.shape[2])
    expected = torch.tensor(BLOCK_MEANS, dtype=torch.float64, device="cpu").view_as(means)
    errors = (means - expected).abs().amax(dim=0).tolist()
    for name, error in zip(("image", "image", "image", "depth", "alpha"), errors, strict=True):
        if not error <= MAX_BLOCK_ERROR:
            return f"its {name} differs by {error:.1e} from the float64 reference"
    return None


def _render(rasterizer: Rasterizer, device: torch.device) -> dict[str, Tensor]:
    projection = project(_test_scene(device), _test_camera(), depth=True, normal=True)
    tiles = rasterizer.build_tile_lists(projection)
    background = torch.linspace(0.1, 0.6, projection.layout.total, device=device)
    results = {}
    for rows in STRIPS:
        blended = rasterizer.blend_rows(projection.splats, tiles, background, rows)
        draws = generator(0, "rasterizer self-test", rows.start, rows.stop)
        shape = blended.pixels.shape
        d_pixels = torch.randn(shape, generator=draws, device="cpu").to(device)
        d_left = torch.randn(shape[:2], generator=draws, device="cpu").to(device)
        pixels = blended.pixels.clone()
        left = blended.transmittance.clone()
        gradients = rasterizers.SplatGradients.zeros(projection)
        rasterizer.backpropagate_rows(
            projection.splats, tiles, background, blended, d_pixels, d_left, gradients
        )
        by_splat = gradients.splats
        found = {
            "pixels": pixels,
            "transmittances": left,
            "gradients of centres": gradients.means2d,
            "gradients of shapes": by_splat[:, 2:5],
            "gradients of opacities": by_splat[:, 5],
            "gradients of channels": by_splat[:, 9:],
        }
        results |= {f"{name} of rows {rows.start} to {rows.stop}": v for name, v in found.items()}
    return results


def _test_camera() -> Camera:
    lens = {"fx": 30.0, "fy": 31.0, "cx": WIDTH / 2 + 1.5, "cy": HEIGHT / 2 - 2.0}
    return Camera("self-test", WIDTH, HEIGHT, **lens, rotation=np.eye(3), translation=np.zeros(3))


def _test_scene(device: torch.device) -> Gaussians:
    """Gaussians before, beside and behind the camera, none as opaque as the caps of alpha."""
    draws = generator(0, "rasterizer self-test")
    n = N_GAUSSIANS

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, device="cpu")

    means = normal(n, 3) * torch.tensor([1.2, 1.0, 0.8], device="cpu")
    means[:, 2] += 3.0
    means[: n // 20, 2] *= -1.0
    quats = torch.nn.functional.normalize(normal(n, 4), dim=-1)
    scales = torch.exp(0.5 * normal(n, 3) - 2.2)
    opacities = torch.rand(n, generator=draws, device="cpu") * 0.9 + 0.03
    tensors = means, quats, scales, opacities, 0.5 * normal(n, 1, 3), 0.1 * normal(n, 15, 3)
    return Gaussians(*(tensor.to(device) for tensor in tensors))
