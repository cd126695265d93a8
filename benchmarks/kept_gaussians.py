# SPDX-License-Identifier: Apache-2.0
"""A capture, and the Gaussians of its vanilla model that the coarse stage keeps."""

from __future__ import annotations

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.scene import Scene
from sugar_trainers.capture import load_capture
from sugar_trainers.coarse_run import CoarseOptions, start_cloud


def kept_gaussians(options: CoarseOptions) -> tuple[GaussianCloud, Scene]:
    """Those that are opaque enough when the geometric terms begin, before any step."""
    config = options.config
    checkpoint, scene = load_capture(options, config.white_background, config.random_seed, print)
    cloud = start_cloud(checkpoint, print)
    return cloud.select(cloud.activate().opacities >= config.prune_opacity), scene
