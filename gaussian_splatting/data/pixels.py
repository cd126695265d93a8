# SPDX-License-Identifier: Apache-2.0
"""From pixels to rays, and from points to pixels.

The middle of the first pixel is at (0.5, 0.5).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera

_SMALLEST = torch.finfo(torch.float32).tiny


class Pixels(NamedTuple):
    """Where points are in an image; points outside of it have the nearest pixel of its border.

    Attributes:
        rows: (...,) int64
        columns: (...,) int64
        inside: Points before the camera and in the image. (...,) bool
    """

    rows: Tensor
    columns: Tensor
    inside: Tensor


def pixel_rays(
    camera: Camera,
    rows: tuple[int, int] | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Points at depth 1 of the middles of pixels, in camera axes.

    Args:
        camera: The view.
        rows: First row and the row after the last one; None for the whole image.
        dtype: Of the points.
        device: Of the points.

    Returns:
        (R, W, 3)
    """
    first, last = rows or (0, camera.height)
    x = (torch.arange(camera.width, dtype=dtype, device=device) + 0.5 - camera.cx) / camera.fx
    y = (torch.arange(first, last, dtype=dtype, device=device) + 0.5 - camera.cy) / camera.fy
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
    return torch.cat([grid, torch.ones_like(grid[..., :1])], dim=-1)


def pixels_of(points: Tensor, camera: Camera) -> Pixels:
    """The pixels that points are in. (..., 3) in camera axes"""
    x, y, z = points.unbind(dim=-1)
    depth = z.clamp_min(_SMALLEST)
    columns = (x / depth * camera.fx + camera.cx).floor()
    rows = (y / depth * camera.fy + camera.cy).floor()
    inside = (z > 0) & (columns >= 0) & (columns < camera.width)
    inside &= (rows >= 0) & (rows < camera.height)
    return Pixels(
        rows.clamp(0, camera.height - 1).long(), columns.clamp(0, camera.width - 1).long(), inside
    )
