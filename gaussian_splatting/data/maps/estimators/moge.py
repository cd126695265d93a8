# SPDX-License-Identifier: Apache-2.0
"""MoGe-2 (Wang et al. 2025, arXiv 2507.02546): points in metres from one photograph."""

from __future__ import annotations

import importlib
import math

import numpy as np
import torch

from gaussian_splatting.data.maps.estimators.estimator import Estimate, Estimator, Photograph

WEIGHTS = "Ruicheng/moge-2-vitl"


def load(device: torch.device) -> Estimate:
    """Load the weights, which are downloaded at the first time."""
    module = importlib.import_module("moge.model.v2")
    model = module.MoGeModel.from_pretrained(WEIGHTS).to(device).eval()

    def estimate(photograph: Photograph) -> np.ndarray:
        width = photograph.pixels.shape[1]
        field_of_view = 2 * math.degrees(math.atan(0.5 * width / photograph.focal))
        image = torch.from_numpy(photograph.pixels).to(device).permute(2, 0, 1).float() / 255
        # Half precision is for GPUs.
        result = model.infer(image, fov_x=field_of_view, use_fp16=device.type == "cuda")
        depth = result["depth"].float()
        # The sky is infinitely far.
        return torch.where(depth.isfinite(), depth, 0.0).cpu().numpy()

    return estimate


MOGE = Estimator(
    "MoGe-2", WEIGHTS, "MIT", "it as github.com/microsoft/MoGe says", packages=("moge",), load=load
)
