# SPDX-License-Identifier: Apache-2.0
"""Initial Gaussians of a vanilla run that photographs add."""

from __future__ import annotations

from pathlib import Path

from gaussian_splatting.components.densification import Region
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.vanilla.dense_start import with_dense_points
from gaussian_splatting.vanilla.initial_gaussians import holds_gaussians
from gaussian_splatting.vanilla.sky_colors import with_sky_colors
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_utils.console import Console


def completed_from_images(
    cloud: GaussianCloud,
    scene: Scene,
    images: ImageStore,
    config: VanillaConfig,
    region: Region,
    console: Console,
) -> GaussianCloud:
    """Add what photographs say: colours of a sky, dense points."""
    if region.sky is not None and region.hull is None:
        cloud = with_sky_colors(cloud, region.sky, scene.train_cameras, images.shown)
    if config.starts_dense or scene.depths.maps:
        limit = config.densification.max_gaussians
        cloud = with_dense_points(cloud, scene, images.shown, region.hull, limit, console.info)
    return cloud


def starts_from_points(init_ply: Path | None) -> bool:
    """Whether a run starts from points, to which photographs can add, and not from Gaussians."""
    return init_ply is None or not holds_gaussians(init_ply)
