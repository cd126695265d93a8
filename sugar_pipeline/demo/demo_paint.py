# SPDX-License-Identifier: Apache-2.0
"""Paint of the demo scene: colours of points of the rope and of the disc, in linear RGB."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from gaussian_splatting.core.random import generator
from sugar_pipeline.demo.demo_surface import DISC_RADIUS, STRANDS, TWISTS

Noise = Callable[[Tensor], Tensor]  # points, (N, 3), to values, (N, 1)

_OCTAVES = ((1.0, 1.0), (2.3, 0.6), (5.3, 0.4), (12.1, 0.3))  # scale and weight of fractal noise
_NOISE_CELLS = 32  # per axis of the grid of random values, which repeats
_REPEATS = 72  # of the pattern of a strand along the rope
_TILE_SIZE = 0.17  # world units
_RIM_RADIUS = 0.93 * DISC_RADIUS


def rgb(red: float, green: float, blue: float) -> Tensor:
    """A linear colour on the CPU. (3,)"""
    return torch.tensor([red, green, blue], device="cpu")


_CREAM = rgb(0.86, 0.76, 0.58)
_RED = rgb(0.72, 0.17, 0.07)
_TEAL = rgb(0.03, 0.30, 0.34)
_OCHRE = rgb(0.85, 0.47, 0.09)
_SAND = rgb(0.50, 0.46, 0.40)
_BROWN = rgb(0.47, 0.37, 0.28)
_GROUT = rgb(0.17, 0.155, 0.14)


def make_noise(seed: int) -> Noise:
    """Make a smooth random function of points, with values of about -1 to 1.

    It interpolates between random values of a periodic grid with cells of size 1.
    """
    source = generator(seed, "demo", "noise")
    n = _NOISE_CELLS
    values = 2 * torch.rand(1, 1, n, n, n, generator=source, device="cpu") - 1
    values = pad(values, (0, 1, 0, 1, 0, 1), mode="circular")

    def noise(points: Tensor) -> Tensor:
        cell = points.floor()
        share = points - cell
        smooth_share = share * share * (3 - 2 * share)
        # grid_sample takes positions from -1 to 1.
        positions = (cell + smooth_share) % n / (n // 2) - 1
        samples = grid_sample(values, positions.view(1, 1, 1, -1, 3), align_corners=True)
        return samples.view(-1, 1)

    return noise


def smooth_step(edge: float, width: float, x: Tensor) -> Tensor:
    """Rise smoothly from 0 at ``edge - width`` to 1 at ``edge + width``."""
    t = ((x - edge + width) / (2 * width)).clamp(0, 1)
    return t * t * (3 - 2 * t)


def _fractal(noise: Noise, points: Tensor) -> Tensor:
    total = torch.zeros(len(points), 1, device="cpu")
    for scale, weight in _OCTAVES:
        total = total + 0.7 * weight * noise(scale * points)
    return total


def knot_paint(noise: Noise, points: Tensor, chart: Tensor) -> Tensor:
    """Paint the rope: four strands, each with a pattern of its own, under solid noise.

    Args:
        noise: Of :func:`make_noise`.
        points: World positions, (N, 3).
        chart: Positions along the rope and around it, both of period 1, (N, 2).

    Returns:
        Linear RGB, (N, 3).
    """
    along = chart[:, :1]
    around = chart[:, 1:]
    across = STRANDS * around + TWISTS * along + 0.5
    # position within a strand, and within one repeat of its pattern, from -0.5 to 0.5
    x = across % 1 - 0.5
    y = _REPEATS * along % 1 - 0.5
    edge = x.abs()
    dots = torch.lerp(_RED, _CREAM, smooth_step(0.34, 0.03, torch.hypot(2.6 * x, y)))
    line_share = 0.8 * (1 - smooth_step(0.05, 0.02, (edge - 0.2).abs()))
    lines = torch.lerp(_TEAL, _CREAM, line_share)
    bands = torch.lerp(_CREAM, _OCHRE, smooth_step(0.5, 0.04, 2 * y.abs()))
    diamonds = torch.lerp(_RED, _TEAL, smooth_step(0.52, 0.04, 1.2 * edge + y.abs()))
    patterns = torch.stack([dots, lines, bands, diamonds], dim=1)

    strand = across.floor().long() % STRANDS
    color = patterns.take_along_dim(strand[..., None], dim=1)[:, 0]
    groove = 1 - 0.75 * smooth_step(0.44, 0.03, edge)
    color = color * groove * (1 + 0.28 * _fractal(noise, 7 * points))
    stains = 0.75 * smooth_step(0.78, 0.06, noise(46 * points))
    return color * (1 - stains)


def disc_paint(noise: Noise, points: Tensor, chart: Tensor) -> Tensor:
    """Paint the disc: tiles of random shade inside a painted rim.

    Args:
        noise: Of :func:`make_noise`.
        points: World positions, (N, 3).
        chart: Not used; the signature is that of :func:`knot_paint`.

    Returns:
        Linear RGB, (N, 3).
    """
    color = _tiles(noise, points)
    radius = points[:, :2].norm(dim=1, keepdim=True)
    rim = _rim(points, radius)
    color = torch.lerp(color, rim, smooth_step(_RIM_RADIUS, 0.004, radius))
    color = color * (1 + 0.22 * _fractal(noise, 5 * points))
    stains = 0.5 * smooth_step(0.76, 0.06, noise(55 * points))
    return color * (1 - stains)


def _tiles(noise: Noise, points: Tensor) -> Tensor:
    # The tiles are turned by 20 degrees against the world's axes.
    x = (0.94 * points[:, :1] + 0.342 * points[:, 1:2]) / _TILE_SIZE
    y = (0.94 * points[:, 1:2] - 0.342 * points[:, :1]) / _TILE_SIZE
    tile = 0.5 + torch.cat([x.floor(), y.floor(), torch.zeros_like(x)], dim=1)
    # Shades of a tile are smooth noise at a place of its own.
    tone = (0.5 + noise(7.3 * tile + 3)).clamp(0, 1)
    tint = (0.5 + noise(7.3 * tile + 11)).clamp(0, 1)
    teal = (0.5 + noise(7.3 * tile + 19)).clamp(0, 1)
    color = torch.lerp(_SAND, _BROWN, tint)
    teal_tile = torch.lerp(_SAND, _TEAL, 0.6)
    color = torch.where(teal < 0.2, teal_tile, color)
    color = color * (0.62 + 0.55 * tone)
    to_border_x = (x % 1 - 0.5).abs()
    to_border_y = (y % 1 - 0.5).abs()
    gap = torch.maximum(to_border_x, to_border_y)
    return torch.lerp(color, _GROUT, smooth_step(0.475, 0.012, gap))


def _rim(points: Tensor, radius: Tensor) -> Tensor:
    """Paint of the rim: stripes, with a dark line towards the tiles."""
    stripe = torch.atan2(points[:, 1:2], points[:, :1]) * 24 / math.pi
    to_middle = (2 * (stripe % 1) - 1).abs()
    stripes = torch.lerp(_CREAM, _RED, smooth_step(0.5, 0.03, to_middle))
    to_line = (radius - _RIM_RADIUS).abs()
    line = 1 - smooth_step(0.01, 0.004, to_line)
    return 0.8 * torch.lerp(stripes, _GROUT, line)
