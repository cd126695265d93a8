# SPDX-License-Identifier: Apache-2.0
"""Colours of mesh-bound Gaussians from the photographs, where the refinement starts.

Colours of vertices are as coarse as the mesh, and an optimiser needs hundreds of steps to sharpen
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.optim.learned_exposure import unexposed
from gaussian_splatting.rasterization.spherical_harmonics import rgb_to_sh
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.triangle_rasterizer import pixels_of_points
from sugar_utils.device import upload

Photograph = tuple[Camera, Tensor, Tensor | None]
"""A camera; its image, (H, W, 3) or (H, W, 4) uint8; its exposure, (2, 3), if it has one."""


@torch.no_grad()
def with_photograph_colors(cloud: BoundCloud, photographs: Iterable[Photograph]) -> BoundCloud:
    """Gaussians with the mean colour of the views that show their centres; others as they are."""
    points = cloud.activate().means
    sums, counts = torch.zeros_like(points), points.new_zeros(len(points), 1)
    for camera, image, exposure in photographs:
        shown, row, column = pixels_of_points(points, cloud.vertices, cloud.faces, camera)
        image = upload(image, points.device)
        counted = is_counted(image)
        if counted is not None:
            shown &= counted[row, column]
        colors = image[row, column, :3] / 255.0
        if exposure is not None:
            colors = unexposed(colors, exposure.to(colors.device))
        sums += torch.where(shown[:, None], colors, 0.0)
        counts += shown[:, None]
    seen = (counts > 0)[:, None]
    colors = rgb_to_sh(sums / counts.clamp_min(1))[:, None]
    return replace(cloud, sh_dc=torch.where(seen, colors, cloud.sh_dc))
