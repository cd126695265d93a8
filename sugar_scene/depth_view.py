# SPDX-License-Identifier: Apache-2.0
"""Depth and colour of a view, as meshes are fused of them and compared with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.data.masks import VisualHull


@dataclass(frozen=True)
class DepthView:
    """Depth and colour of one view."""

    camera: Camera
    depth: Tensor  # 0 where unknown. (H, W) world units
    color: Tensor  # (H, W, 3)
    weight: Tensor  # of the view in means over views. (H, W)

    def world_points(self, depth: Tensor) -> Tensor:
        """Return the points of all pixels at other depths. (H, W) -> (H W, 3) world units"""
        camera = self.camera
        rays = pixel_rays(camera, dtype=depth.dtype, device=depth.device)
        points = (rays * depth[..., None]).reshape(-1, 3)
        rotation = depth.new_tensor(camera.rotation)
        return points @ rotation + depth.new_tensor(camera.center)


Renderer = Callable[[Camera], DepthView]


@dataclass(frozen=True)
class FusedViews:
    """The views whose depth is fused, and the masks of an object in them."""

    cameras: Sequence[Camera]
    renderer: Callable[[], Renderer]  # makes the renderer of their depth, on first use
    hull: VisualHull | None  # of the masks; None without
    device: torch.device
