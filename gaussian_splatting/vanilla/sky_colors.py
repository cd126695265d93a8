# SPDX-License-Identifier: Apache-2.0
"""Colours of a sky sphere, sampled from the images in the directions of its Gaussians."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from gaussian_splatting.components.sky_sphere import SkySphere
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.spherical_harmonics import rgb_to_sh
from gaussian_splatting.data.cameras import Camera, LoadImage, middle_of, pixels_of
from gaussian_splatting.vanilla.dense_start import evenly_chosen
from gaussian_splatting.vanilla.plane_sweep import small_copy


def with_sky_colors(
    cloud: GaussianCloud,
    sky: SkySphere,
    cameras: Sequence[Camera],
    load_image: LoadImage,
) -> GaussianCloud:
    """Give the Gaussians of the sky the colours of their directions; others stay as they are."""
    rows = (sky.distance(cloud.means) > 0).nonzero()[:, 0]
    colors = directional_colors(cloud.means[rows].cpu().double(), cameras, load_image)
    if colors is None:
        return cloud
    sh_dc = cloud.sh_dc.clone()
    sh_dc[rows, 0] = rgb_to_sh(colors.float() / 255).to(sh_dc)
    return replace(cloud, sh_dc=sh_dc)


def directional_colors(
    points: Tensor, cameras: Sequence[Camera], load_image: LoadImage
) -> Tensor | None:
    """Median colour that photographs show where points are; the nearest one's where none does.

    Args:
        points: Far away. (M, 3) float64 world units, on the CPU
        load_image: (H, W, 3), or (H, W, 4) uint8 with a mask

    Returns:
        (M, 3) uint8 on the CPU; None if no photograph shows any of them.
    """
    by_view = [_colors_in(camera, load_image(camera), points) for camera in evenly_chosen(cameras)]
    if not by_view or len(points) == 0:
        return None
    colors = torch.stack(by_view).nanmedian(dim=0).values
    has_color = ~colors.isnan().any(dim=1)
    if not has_color.any():
        return None
    middle = torch.from_numpy(np.asarray(middle_of(cameras), dtype=np.float64))
    directions = normalize(points - middle, dim=1)
    nearest = (directions @ directions[has_color].T).argmax(dim=1)
    return colors[has_color][nearest].round().to(torch.uint8)


def _colors_in(camera: Camera, photograph: Tensor, points: Tensor) -> Tensor:
    """Colours of a photograph where points project, NaN where it does not show them. (M, 3)"""
    view, colors, counted = small_copy(camera, photograph, "cpu")
    rows, columns, inside = pixels_of(camera.to_view(points), view.camera)
    is_shown = inside & counted[rows, columns]
    return torch.where(is_shown[:, None], colors[rows, columns].double(), torch.nan)
