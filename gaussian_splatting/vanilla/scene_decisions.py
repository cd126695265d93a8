# SPDX-License-Identifier: Apache-2.0
"""Decisions by the scene of a vanilla run: settings that were left to it, and the region."""

from __future__ import annotations

from dataclasses import replace

import torch

from gaussian_splatting.components.densification import Region
from gaussian_splatting.components.exposures import MIN_NOISE
from gaussian_splatting.components.sky_sphere import sky_of
from gaussian_splatting.data.masks import hull_of
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_utils.errors import Notify, UserError
from sugar_utils.flags import AUTO


def resolved_for(scene: Scene, config: VanillaConfig, notify: Notify) -> VanillaConfig:
    """Return the settings with nothing left to the scene.

    Raises:
        UserError: Poses are to be learned of photographs that were taken from one position.
    """
    config = config.resolved(any(camera.shows_object for camera in scene.train_cameras))
    noise = scene.exposure_noise
    exposures_differ = noise >= MIN_NOISE
    if config.exposure.exposure_compensation == AUTO and exposures_differ:
        notify(f"exposures differ by {noise:.2f} stops: --exposure_compensation True")
    if config.refine_poses and scene.extent <= 0:
        raise UserError(
            "--refine_poses needs photographs from different positions; all cameras stand in one"
        )
    return replace(config, exposure=config.exposure.resolved(exposures_differ))


def region_of(scene: Scene, config: VanillaConfig, device: torch.device) -> Region:
    """Return where Gaussians may be."""
    cameras = scene.train_cameras
    sky = sky_of(cameras, scene.extent, config.robustness)
    return Region(scene.extent, sky, hull_of(cameras, device))
