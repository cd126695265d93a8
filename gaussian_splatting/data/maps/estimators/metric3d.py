# SPDX-License-Identifier: Apache-2.0
"""Metric3D v2 (Hu et al. 2024, arXiv 2404.15506): depth in metres from one photograph.

Its program is no package: torch's hub fetches it together with the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from gaussian_splatting.data.maps.estimators.estimator import Estimate, Estimator, Photograph

SOURCE = "yvanyin/metric3d"
WEIGHTS = "metric3d_vit_large"
HEIGHT = 616  # of the images that the network was trained with
WIDTH = 1064
FOCAL_LENGTH = 1000.0  # of the camera that depths are given for, in pixels
MEAN = (123.675, 116.28, 103.53)  # of colours in training, and the padding
DEVIATION = (58.395, 57.12, 57.375)


class _Padded(NamedTuple):
    """A photograph as the network gets it."""

    image: np.ndarray  # (3, HEIGHT, WIDTH) float32
    rows: slice  # of the photograph in it
    columns: slice
    scale: float  # size of the photograph in it, as a share of its own


def load(device: torch.device) -> Estimate:
    """Load the weights, which are downloaded at the first time."""
    hub: Any = torch.hub
    network = hub.load(SOURCE, WEIGHTS, pretrain=True, trust_repo=True)
    model = network.to(device).eval()

    @torch.no_grad()
    def estimate(photograph: Photograph) -> np.ndarray:
        padded = padded_photograph(photograph.pixels)
        image = torch.from_numpy(padded.image)[None].to(device)
        depth, _, _ = model.inference({"input": image})
        metres = depth.float() * (photograph.focal * padded.scale / FOCAL_LENGTH)
        return metres.reshape(HEIGHT, WIDTH)[padded.rows, padded.columns].cpu().numpy()

    return estimate


def padded_photograph(pixels: np.ndarray) -> _Padded:
    """Resize a photograph to fit, pad it evenly, and normalise its colours. (h, w, 3) uint8"""
    height, width = pixels.shape[:2]
    scale = min(HEIGHT / height, WIDTH / width)
    size = (int(width * scale), int(height * scale))
    resized = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))
    top = (HEIGHT - size[1]) // 2
    margin = (WIDTH - size[0]) // 2
    rows = slice(top, top + size[1])
    columns = slice(margin, margin + size[0])
    # Padding of mean colour is zero.
    image = np.zeros((3, HEIGHT, WIDTH), dtype=np.float32)
    normalised = (resized.astype(np.float32) - MEAN) / DEVIATION
    image[:, rows, columns] = normalised.transpose(2, 0, 1)
    return _Padded(image, rows, columns, scale)


METRIC3D = Estimator(
    "Metric3D v2",
    f"{SOURCE}, {WEIGHTS}",
    "BSD-2-Clause",
    "the packages of its requirements_v2.txt, as github.com/YvanYin/Metric3D says",
    # What the hub's program imports.
    packages=("mmengine", "timm"),
    load=load,
)
