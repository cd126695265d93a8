# SPDX-License-Identifier: Apache-2.0
"""Depth Anything 3 (Lin et al. 2025, arXiv 2511.10647): its model of metric depth."""

from __future__ import annotations

import importlib

import numpy as np
import torch

from gaussian_splatting.data.maps.estimators.estimator import Estimate, Estimator, Photograph

# The other large models of this program, and its giant ones, forbid commercial use.
WEIGHTS = "depth-anything/DA3METRIC-LARGE"
FOCAL_LENGTH = 300.0  # of the camera that depths are given for, in pixels
SKY = 0.3  # share of sky from which a pixel has no depth


def load(device: torch.device) -> Estimate:
    """Load the weights, which are downloaded at the first time."""
    module = importlib.import_module("depth_anything_3.api")
    model = module.DepthAnything3.from_pretrained(WEIGHTS).to(device).eval()

    def estimate(photograph: Photograph) -> np.ndarray:
        prediction = model.inference([photograph.pixels])
        depth = np.asarray(prediction.depth[0], dtype=np.float32)
        # The program computes at a size of its own, for which the focal length changes.
        focal = photograph.focal * depth.shape[1] / photograph.pixels.shape[1]
        metres = depth * np.float32(focal / FOCAL_LENGTH)
        if prediction.sky is None:
            return metres
        return np.where(np.asarray(prediction.sky[0]) >= SKY, np.float32(0), metres)

    return estimate


DEPTH_ANYTHING = Estimator(
    "Depth Anything 3",
    WEIGHTS,
    "Apache-2.0",
    "it as github.com/ByteDance-Seed/Depth-Anything-3 says",
    packages=("depth_anything_3",),
    load=load,
)
