# SPDX-License-Identifier: Apache-2.0
"""Two views of one surface: from pixel to pixel and back, and how far that misses.

A pixel's point is projected into a neighbouring view, which has a depth of its own there; that
point is projected back. Where both views see the same surface point the pixel is met again. Where
one sees something else, by occlusion or by wrong depth, it is missed by some pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from sugar_scene.multiview.plane_depth import MIN_DEPTH

MAX_CYCLE = 1.0
"""Points that miss their pixel by more are not the same ones, or not known well enough. Pixels"""

_MIN_SQUARE = 1e-12


@dataclass(frozen=True)
class ViewPair:
    """A reference view and its neighbour.

    Attributes:
        reference: The view whose pixels are looked at.
        neighbor: The view that they are compared with.
        rotation: From camera axes of the reference to those of the neighbour. (3, 3) float64
        translation: X' = rotation X + translation. (3,) float64, world units
    """

    reference: Camera
    neighbor: Camera
    rotation: np.ndarray
    translation: np.ndarray

    @classmethod
    def of(cls, reference: Camera, neighbor: Camera) -> ViewPair:
        """Of two cameras."""
        rotation = neighbor.rotation @ reference.rotation.T
        translation = neighbor.translation - rotation @ reference.translation
        return cls(reference, neighbor, rotation, translation)


def bilinear_depth(depth: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Read a depth map between the middles of its pixels.

    Args:
        depth: 0 where unknown. (H, W) world units
        at: Positions, measured from the corner of the image. (n, 2) pixels

    Returns:
        Depth, and where all of the four pixels around have one. (n,) each; the gradient reaches
        the positions.
    """
    height, width = depth.shape
    x, y = (at - 0.5).unbind(-1)
    x0, y0 = x.detach().floor(), y.detach().floor()
    inside = (x0 >= 0) & (y0 >= 0) & (x0 < width - 1) & (y0 < height - 1)
    # Positions that are not finite are inside of nothing.
    column = torch.where(inside, x0, 0).long()
    row = torch.where(inside, y0, 0).long()
    right, down = x - x0, y - y0
    first = row * width + column
    flat = depth.reshape(-1)
    step = int(width > 1)
    below = width if height > 1 else 0
    corners = [flat[first], flat[first + step], flat[first + below], flat[first + below + step]]
    known = inside & (torch.stack(corners) > 0).all(dim=0)
    top = corners[0] + (corners[1] - corners[0]) * right
    bottom = corners[2] + (corners[3] - corners[2]) * right
    return torch.where(known, top + (bottom - top) * down, 1.0), known


def cycle_error(
    rays: Tensor, depth: Tensor, neighbor_depth: Tensor, pair: ViewPair
) -> tuple[Tensor, Tensor]:
    """How far pixels are missed on the way to the neighbour and back.

    Args:
        rays: Points of the pixels' rays at depth 1. (n, 3)
        depth: Depth of the reference at the pixels. (n,) world units
        neighbor_depth: Depth map of the neighbour, 0 where unknown. (H', W') world units
        pair: The two views.

    Returns:
        Distances in pixels of the reference, and where there is one: the point lies in the
        neighbour's image, which has a depth there. (n,) each; the gradient reaches ``depth``.
    """
    reference, neighbor = pair.reference, pair.neighbor
    rotation = depth.new_tensor(pair.rotation)
    translation = depth.new_tensor(pair.translation)
    there = (rays * depth[:, None]) @ rotation.T + translation
    in_front = there[:, 2] > MIN_DEPTH
    tangents = there[:, :2] / torch.where(in_front, there[:, 2], 1.0)[:, None]
    focal = depth.new_tensor([neighbor.fx, neighbor.fy])
    middle = depth.new_tensor([neighbor.cx, neighbor.cy])
    seen, known = bilinear_depth(neighbor_depth, tangents * focal + middle)
    met = torch.cat([tangents, torch.ones_like(tangents[:, :1])], dim=1) * seen[:, None]
    back = (met - translation) @ rotation
    known = known & in_front & (back[:, 2] > MIN_DEPTH)
    again = back[:, :2] / torch.where(known, back[:, 2], 1.0)[:, None]
    missed = (again - rays[:, :2]) * depth.new_tensor([reference.fx, reference.fy])
    missed = torch.where(known[:, None], missed, 0.0)
    squares = missed.square().sum(dim=-1)
    # A square root has no gradient at zero.
    return squares.clamp_min(_MIN_SQUARE).sqrt(), known


def cycle_weights(error: Tensor, known: Tensor) -> Tensor:
    """exp(-error), and 0 where the neighbour sees something else; without a gradient. (n,)"""
    error = error.detach()
    return torch.where(known & (error < MAX_CYCLE), (-error).exp(), 0.0)
