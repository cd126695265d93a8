# SPDX-License-Identifier: Apache-2.0
"""Made-up scenes for measuring a step: a wall to refine, two views to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.optim.learned_exposure import Exposures
from sugar_scene.multiview.reprojection import NeighborViews
from sugar_trainers.multiview_config import MultiviewConfig
from sugar_trainers.multiview_stage import MultiviewStage

BASELINE = 0.05
"""Distance of the two views in camera extents."""


def make_wall(n_faces: int) -> tuple[Tensor, Tensor, Tensor]:
    """A wavy wall of about ``n_faces`` triangles that fills the view, grey."""
    side = max(2, round((n_faces / 2) ** 0.5))
    x, y = np.meshgrid(np.linspace(-3.6, 3.6, side + 1), np.linspace(-2.4, 2.4, side + 1))
    points = np.stack([x, y, 6 + 0.3 * np.sin(2 * x)], axis=-1).reshape(-1, 3)
    corner = (np.arange(side)[:, None] * (side + 1) + np.arange(side)).reshape(-1, 1)
    faces = np.concatenate([corner + (0, 1, side + 1), corner + (1, side + 2, side + 1)])
    return (
        torch.from_numpy(points.astype(np.float32)),
        torch.from_numpy(faces),
        torch.full((len(points), 3), 0.5),
    )


@dataclass(frozen=True)
class MadeUpPhotographs:
    """Stands in for the store of decoded photographs."""

    get: Callable[[Camera], Tensor]
    prefetch: Callable[[Camera], None] = lambda camera: None
    serve: Callable[[torch.device], None] = lambda device: None


def make_multiview_stage(
    cloud: GaussianCloud,
    camera: Camera,
    config: MultiviewConfig,
    extent: float,
    photograph: Callable[[Camera], Tensor],
    exposures: Exposures | None = None,
) -> MultiviewStage:
    """The stage.

    Args:
        cloud: Its Gaussians.
        camera: The view that is trained on.
        config: Settings.
        extent: Camera extent in world units.
        photograph: Makes the photograph of a camera. (H, W, 3) uint8
        exposures: Those of the photographs.
    """
    moved = camera.translation + np.array([BASELINE * extent, 0.0, 0.0])
    cameras = [camera, replace(camera, name="beside", translation=moved)]
    return MultiviewStage(
        cloud,
        config,
        extent,
        cameras,
        NeighborViews(cameras, extent),
        MadeUpPhotographs(photograph),
        lambda message: None,
        exposures=exposures,
    )
