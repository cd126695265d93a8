# SPDX-License-Identifier: Apache-2.0
"""Pictures of a rendered view for people: photograph, render, depth and normals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.engine.reporting.image_metrics import to_uint8
from gaussian_splatting.rasterization import RenderOutput
from sugar_utils.files import atomic_path

FARTHEST_SHARE = 0.98
"""Of all pixels, that are nearer than what is drawn white."""

NEAR_SHARE, FAR_BEHIND = 0.25, 3.0
"""White in any case is so many times the depth that this share of the pixels is nearer than."""

THUMBNAIL = 240
"""Longest side in pixels."""

WORST_FILE = "worst.png"
_SAMPLED_PIXELS = 1_000_000


def view_pictures(output: RenderOutput, photograph: Tensor) -> dict[str, Tensor]:
    """What a view looks like, as RGB pictures of one size.

    Args:
        output: A render with colour, depth and normals.
        photograph: (H, W, 3) uint8

    Returns:
        ``photograph``, ``render``, ``depth`` (white is far) and ``normal`` (x right is red, y up
        green, towards the camera blue). (H, W, 3) uint8 each, on the CPU
    """
    pictures = {
        "photograph": photograph,
        "render": to_uint8(output.image),
        "depth": depth_picture(output.depth, farthest(output.depth)),
        "normal": normal_picture(output.normal),
    }
    return {name: picture.cpu() for name, picture in pictures.items()}


def grey_picture(values: Tensor) -> Tensor:
    """Values in [0, 1] from black to white. (H, W) -> (H, W, 3) uint8"""
    return to_uint8(values[..., None].expand(-1, -1, 3))


def depth_picture(depth: Tensor, far: Tensor | float) -> Tensor:
    """Depth as grey: white is far, or where there is nothing. (H, W) -> (H, W, 3) uint8"""
    return grey_picture(depth / far)


def normal_picture(normal: Tensor) -> Tensor:
    """Normals as colours: x right is red, y up green, towards the camera blue.

    (H, W, 3) in camera axes -> (H, W, 3) uint8
    """
    return to_uint8((normal * normal.new_tensor([1.0, -1.0, -1.0]) + 1) / 2)


def farthest(depth: Tensor) -> Tensor:
    """Depth that is drawn white: nearly the largest, so that a stray Gaussian does not count.

    But not far behind what is near, as a shell in the distance would leave all else black. Pixels
    without a depth do not count.
    """
    values = depth.flatten()
    values = values[:: max(1, values.numel() // _SAMPLED_PIXELS)]
    values = values[(values > 0) & values.isfinite()]
    if values.numel() == 0:
        return depth.new_ones(())
    near, far = (values.kthvalue(max(1, round(share * values.numel()))).values
                 for share in (NEAR_SHARE, FARTHEST_SHARE))  # fmt: skip
    return torch.minimum(far, FAR_BEHIND * near)


def thumbnail(picture: Tensor) -> Tensor:
    """A picture with no side above ``THUMBNAIL``. (H, W, 3) uint8 -> (h, w, 3) uint8"""
    small = Image.fromarray(picture.numpy())
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return torch.from_numpy(np.array(small))


def write_contact_sheet(path: Path, views: Sequence[dict[str, Tensor]]) -> None:
    """Write the pictures of several views, one row each, as one PNG.

    Args:
        path: File to write, atomically.
        views: Pictures as :func:`view_pictures` returns them; views may differ in size.
    """
    rows = [torch.cat(list(pictures.values()), dim=1) for pictures in views]
    width = max(row.shape[1] for row in rows)
    padded = [torch.nn.functional.pad(row, (0, 0, 0, width - row.shape[1])) for row in rows]
    with atomic_path(path) as temporary:
        Image.fromarray(torch.cat(padded).numpy()).save(temporary)
