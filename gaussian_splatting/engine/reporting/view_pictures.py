# SPDX-License-Identifier: Apache-2.0
"""Pictures of rendered views: colour, depth, normals, opacity, and sheets of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.engine.reporting.evaluation import to_uint8
from gaussian_splatting.rasterization import RenderOutput
from sugar_utils.files import atomic_path

NEAREST_SHARE = 0.02  # of the pixels with a depth, that are nearer than the first colour
FARTHEST_SHARE = 0.98  # of these pixels, that are nearer than the last colour
NEAR_SHARE = 0.25
FAR_BEHIND = 3.0
"""The last colour is at most so many times the depth that this share of the pixels is nearer than:
a sky far behind a scene leaves the scene its colours."""
VISIBLE_ALPHA = 0.5  # pixels that Gaussians cover less have no depth
DEPTH_COLORS = (
    (253, 231, 37),
    (173, 220, 48),
    (94, 201, 98),
    (40, 174, 128),
    (33, 145, 140),
    (44, 114, 142),
    (59, 82, 139),
    (71, 45, 123),
    (68, 1, 84),
)
"""Colours of depths from near to far: matplotlib's viridis (CC0) from its end, at equal steps."""
THUMBNAIL = 240  # longest side in pixels
_SAMPLED_PIXELS = 1_000_000


class DepthRange(NamedTuple):
    """Depths of the first and the last colour of a depth picture, world units."""

    near: float
    far: float


LIVE_PICTURES: dict[str, Callable[[RenderOutput], Tensor]] = {
    "image": lambda output: to_uint8(output.image),
    "depth": lambda output: depth_picture(surface_depth(output.depth, output.alpha)),
    "normal": lambda output: normal_picture(output.normal),
    "alpha": lambda output: grey_picture(output.alpha),
}
"""Pictures that can be made of a render. (H, W, 3) uint8"""


def view_pictures(output: RenderOutput, photograph: Tensor) -> dict[str, Tensor]:
    """Photograph, render, depth and normals of a view. (H, W, 3) uint8 each, on the CPU"""
    kinds = {"render": "image", "depth": "depth", "normal": "normal"}
    pictures = {"photograph": photograph.cpu()}
    for name, kind in kinds.items():
        pictures[name] = LIVE_PICTURES[kind](output).cpu()
    return pictures


def grey_picture(values: Tensor) -> Tensor:
    """Values in [0, 1] from black to white. (H, W) -> (H, W, 3) uint8"""
    return to_uint8(values[..., None].expand(-1, -1, 3))


def surface_depth(depth: Tensor, alpha: Tensor) -> Tensor:
    """Depth of the surface that Gaussians show; infinite where they cover less than half a pixel.

    Args:
        depth: Blended depth, not divided by alpha. (H, W) world units
        alpha: Blended opacity. (H, W)
    """
    return torch.where(alpha >= VISIBLE_ALPHA, depth / alpha.clamp_min(VISIBLE_ALPHA), torch.inf)


def depth_picture(depth: Tensor, colored: DepthRange | None = None) -> Tensor:
    """Depth in colours from yellow (near) to violet (far), white where there is none.

    Args:
        depth: (H, W) world units; pixels that are not positive and finite have no depth.
        colored: Depths of the first and the last colour; None: the range of this picture.

    Returns:
        (H, W, 3) uint8
    """
    near, far = colored or depth_range(depth)
    colors = depth.new_tensor(DEPTH_COLORS)
    last = len(DEPTH_COLORS) - 1
    span = max(far - near, torch.finfo(torch.float32).tiny)
    has_depth = _has_depth(depth)
    steps = torch.where(has_depth, (depth - near) / span, 0.0).clamp(0.0, 1.0) * last
    lower = steps.floor().clamp_max(last - 1)
    rows = lower.long()
    mixed = torch.lerp(colors[rows], colors[rows + 1], (steps - lower)[..., None])
    return torch.where(has_depth[..., None], mixed, 255.0).round().to(torch.uint8)


def normal_picture(normal: Tensor) -> Tensor:
    """Normals in camera axes as colours: x right red, y up green, towards the camera blue."""
    return to_uint8((normal * normal.new_tensor([1.0, -1.0, -1.0]) + 1) / 2)


def depth_range(depth: Tensor) -> DepthRange:
    """Return the range to colour: percentiles 2 to 98 of the depths, but not far behind the near.

    Args:
        depth: Depths of any shape in world units; what is not positive and finite does not count.
    """
    values = depth.flatten()
    values = values[:: max(1, values.numel() // _SAMPLED_PIXELS)]
    values = values[_has_depth(values)]
    if values.numel() == 0:
        return DepthRange(0.0, 1.0)
    nearest, near, farthest = (
        float(values.kthvalue(max(1, round(share * values.numel()))).values)
        for share in (NEAREST_SHARE, NEAR_SHARE, FARTHEST_SHARE)
    )
    return DepthRange(nearest, min(farthest, FAR_BEHIND * near))


def _has_depth(depth: Tensor) -> Tensor:
    return (depth > 0) & depth.isfinite()


def thumbnail(picture: Tensor) -> Tensor:
    """A picture with no side above ``THUMBNAIL``. (H, W, 3) uint8 -> (h, w, 3) uint8"""
    small = Image.fromarray(picture.numpy())
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return torch.from_numpy(np.array(small))


def write_contact_sheet(path: Path, views: Sequence[dict[str, Tensor]]) -> None:
    """Write the pictures of views as one PNG, a view a row. (H, W, 3) uint8 each"""
    rows = [torch.cat(list(pictures.values()), dim=1) for pictures in views]
    width = max(row.shape[1] for row in rows)
    padded = [torch.nn.functional.pad(row, (0, 0, 0, width - row.shape[1])) for row in rows]
    with atomic_path(path) as temporary:
        Image.fromarray(torch.cat(padded).numpy()).save(temporary)
