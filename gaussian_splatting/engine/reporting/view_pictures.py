# SPDX-License-Identifier: Apache-2.0
"""Pictures of rendered views: colour, depth, normals, opacity, and sheets of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.engine.reporting.evaluation import to_uint8
from gaussian_splatting.rasterization import RenderOutput
from sugar_utils.files import atomic_path

FARTHEST_SHARE = 0.98  # of all pixels, that are nearer than what is drawn white
NEAR_SHARE = 0.25
FAR_BEHIND = 3.0
"""White in any case is so many times the depth that this share of the pixels is nearer than."""
THUMBNAIL = 240  # longest side in pixels
_SAMPLED_PIXELS = 1_000_000


LIVE_PICTURES: dict[str, Callable[[RenderOutput], Tensor]] = {
    "image": lambda output: to_uint8(output.image),
    "depth": lambda output: depth_picture(output.depth, farthest(output.depth)),
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


def depth_picture(depth: Tensor, far: Tensor | float) -> Tensor:
    """Depth as grey: white is far, or where there is nothing. (H, W) -> (H, W, 3) uint8"""
    return grey_picture(depth / far)


def normal_picture(normal: Tensor) -> Tensor:
    """Normals in camera axes as colours: x right red, y up green, towards the camera blue."""
    return to_uint8((normal * normal.new_tensor([1.0, -1.0, -1.0]) + 1) / 2)


def farthest(depth: Tensor) -> Tensor:
    """Depth that is drawn white: nearly the largest, but not far behind what is near."""
    values = depth.flatten()
    values = values[:: max(1, values.numel() // _SAMPLED_PIXELS)]
    values = values[(values > 0) & values.isfinite()]
    if values.numel() == 0:
        return depth.new_ones(())
    near_rank = max(1, round(NEAR_SHARE * values.numel()))
    far_rank = max(1, round(FARTHEST_SHARE * values.numel()))
    near_depth = values.kthvalue(near_rank).values
    far_depth = values.kthvalue(far_rank).values
    return torch.minimum(far_depth, FAR_BEHIND * near_depth)


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
