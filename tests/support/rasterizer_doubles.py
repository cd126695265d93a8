# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for gsplat and diff_gaussian_rasterization: their interfaces in dense float64 torch.

They follow what the packages document: argument names, shapes, layouts and conventions (pixel
centres, matrices, culling, caps of alpha). Nothing in them knows of the adapters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE = 16
ALPHA_MIN, TRANSMITTANCE_MIN = 1.0 / 255.0, 1e-4


class _StraightCap(torch.autograd.Function):
    """min(x, 0.99) whose gradient is that of x."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp_max(0.99)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def blend_tiles(means, conics, colors, opacities, width, height, lists, center, cap, background):
    """Blend each tile's list front to back.

    Args:
        lists: Rows of splats for each tile, row by row of tiles.
        center: Where in a pixel its centre lies.
        cap: Caps alpha.

    Returns:
        Pixels (H, W, C) and transmittance (H, W), float64.
    """
    across = -(-width // TILE)
    means, conics, colors, opacities, background = (
        t.double() for t in (means, conics, colors, opacities, background)
    )
    pixels = torch.zeros(height, width, colors.shape[1], dtype=torch.float64)
    left = torch.ones(height, width, dtype=torch.float64)
    for tile, rows in enumerate(lists):
        top, start = tile // across * TILE, tile % across * TILE
        bottom, end = min(top + TILE, height), min(start + TILE, width)
        y = torch.arange(top, bottom, dtype=torch.float64)[:, None, None] + center
        x = torch.arange(start, end, dtype=torch.float64)[None, :, None] + center
        dx, dy = means[rows, 0] - x, means[rows, 1] - y
        a, b, c = conics[rows].unbind(-1)
        sigma = 0.5 * (a * dx * dx + c * dy * dy) + b * dx * dy
        alpha = cap(opacities[rows] * torch.exp(-sigma))
        alpha = torch.where((sigma >= 0) & (alpha >= ALPHA_MIN), alpha, 0.0)
        through = torch.cumprod(1 - alpha.detach(), dim=-1)
        alpha = alpha * torch.cumprod((through >= TRANSMITTANCE_MIN).double(), dim=-1)
        through = torch.cumprod(1 - alpha, dim=-1)
        ones = torch.ones_like(through[..., :1])
        before = torch.cat([ones, through], dim=-1)
        last = before[..., -1]
        tile_pixels = (alpha * before[..., :-1]) @ colors[rows] + last[..., None] * background
        pixels[top:bottom, start:end] = tile_pixels
        left[top:bottom, start:end] = last
    return pixels, left


class FakeGsplat:
    """The function of gsplat 1.5 that the adapter calls, for one image."""

    __version__ = "1.5.3"
    cap = 0.999
    center = 0.5

    def rasterize_to_pixels(
        self,
        means2d,
        conics,
        colors,
        opacities,
        image_width,
        image_height,
        tile_size,
        isect_offsets,
        flatten_ids,
        backgrounds=None,
        masks=None,
        packed=False,
        absgrad=False,
    ):
        n, channels = means2d.shape[-2], colors.shape[-1]
        assert conics.shape == (1, n, 3)
        assert colors.shape == (1, n, channels)
        assert opacities.shape == (1, n)
        assert backgrounds.shape == (1, channels)
        assert isect_offsets.dtype == flatten_ids.dtype == torch.int32
        assert isect_offsets.shape == (1, -(-image_height // 16), -(-image_width // 16))
        assert tile_size == TILE
        edges = [*isect_offsets.flatten().tolist(), flatten_ids.shape[0]]
        lists = [flatten_ids[a:b].long() for a, b in zip(edges, edges[1:], strict=False)]
        pixels, left = blend_tiles(
            means2d[0],
            conics[0],
            colors[0],
            opacities[0],
            image_width,
            image_height,
            lists,
            self.center,
            lambda alpha: alpha.clamp_max(self.cap),
            backgrounds[0],
        )
        return pixels.float()[None], (1 - left).float()[None, ..., None]


LATER_FIELDS = ("debug", "antialiasing")


class Settings(NamedTuple):
    """The settings of a recent diff_gaussian_rasterization."""

    image_height: int
    image_width: int
    tanfovx: float
    tanfovy: float
    bg: Tensor
    scale_modifier: float
    viewmatrix: Tensor
    projmatrix: Tensor
    sh_degree: int
    campos: Tensor
    prefiltered: bool
    debug: bool
    antialiasing: bool


OlderSettings = NamedTuple(
    "OlderSettings", [(name, Any) for name in Settings._fields if name not in LATER_FIELDS]
)
"""Without the fields that came later."""


def render_inria(settings, low_pass, means3d, means2d, opacities, colors, covariances):
    """Project 3D Gaussians with the settings' matrices and blend three channels.

    Matrices act on row vectors: ``p @ viewmatrix``.
    """
    n, width, height = means3d.shape[0], settings.image_width, settings.image_height
    assert means2d.shape == (n, 3)
    assert opacities.shape == (n, 1)
    assert colors.shape == (n, 3)
    assert covariances.shape == (n, 6)
    assert settings.bg.shape == (3,)
    points = torch.cat([means3d.double(), torch.ones(n, 1, dtype=torch.float64)], dim=1)
    view, projection = settings.viewmatrix.double(), settings.projmatrix.double()
    x, y, z, _ = (points @ view).unbind(-1)
    hom = points @ projection
    ndc = hom[:, :2] / (hom[:, 3:] + 1e-7)
    size = torch.tensor([width, height], dtype=torch.float64)
    pixel = ((ndc + 1) * size - 1) / 2
    focal_x, focal_y = width / (2 * settings.tanfovx), height / (2 * settings.tanfovy)
    tx = (x / z).clamp(-1.3 * settings.tanfovx, 1.3 * settings.tanfovx) * z
    ty = (y / z).clamp(-1.3 * settings.tanfovy, 1.3 * settings.tanfovy) * z
    zero = torch.zeros_like(z)
    jacobian = torch.stack(
        [focal_x / z, zero, -focal_x * tx / z**2, zero, focal_y / z, -focal_y * ty / z**2], dim=-1
    ).view(n, 2, 3)
    full = covariances.double()[:, [0, 1, 2, 1, 3, 4, 2, 4, 5]].view(n, 3, 3)
    step = jacobian @ view[:3, :3].T
    cov = step @ full @ step.transpose(1, 2)
    a, b, c = cov[:, 0, 0] + low_pass, cov[:, 0, 1], cov[:, 1, 1] + low_pass
    det = a * c - b * b
    conics = torch.stack([c / det, -b / det, a / det], dim=-1)
    middle = 0.5 * (a + c)
    radii = torch.ceil(3 * (middle + (middle**2 - det).clamp_min(0.1).sqrt()).sqrt())
    radii = torch.where((z > 0.2) & (det > 0), radii.detach(), 0.0)
    across, down = -(-width // TILE), -(-height // TILE)
    low = ((pixel.detach() - radii[:, None]) / TILE).trunc()
    high = ((pixel.detach() + radii[:, None] + TILE - 1) / TILE).trunc()
    order = z.detach().float().argsort(stable=True)
    order = order[radii[order] > 0]
    lists = []
    for tile_y in range(down):
        for tile_x in range(across):
            place = torch.tensor([tile_x, tile_y])
            inside = ((low[order] <= place) & (place < high[order])).all(dim=1)
            lists.append(order[inside])
    pixels, _ = blend_tiles(
        pixel,
        conics,
        colors,
        opacities[:, 0],
        width,
        height,
        lists,
        0.0,
        _StraightCap.apply,
        settings.bg,
    )
    return pixels.permute(2, 0, 1).float(), radii.int()


class FakeInria:
    """The two names of diff_gaussian_rasterization that the adapter uses."""

    def __init__(self, settings=Settings, extra_outputs=0, low_pass=0.3):
        self.GaussianRasterizationSettings = settings
        self.passes = 0
        package = self

        class GaussianRasterizer(torch.nn.Module):
            def __init__(self, raster_settings):
                super().__init__()
                self.raster_settings = raster_settings

            def forward(
                self,
                means3D,
                means2D,
                opacities,
                shs=None,
                colors_precomp=None,
                scales=None,
                rotations=None,
                cov3D_precomp=None,
            ):
                package.passes += 1
                image, radii = render_inria(
                    self.raster_settings,
                    low_pass,
                    means3D,
                    means2D,
                    opacities,
                    colors_precomp,
                    cov3D_precomp,
                )
                return image, radii, *[None] * extra_outputs

        self.GaussianRasterizer = GaussianRasterizer
