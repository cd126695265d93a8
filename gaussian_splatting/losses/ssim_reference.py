# SPDX-License-Identifier: Apache-2.0
"""Structural similarity in plain torch.

Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", IEEE TIP
2004, with the choices of 3DGS: an 11 x 11 Gaussian window of sigma 1.5, each channel by itself,
zeros outside the image, C1 = 0.01^2, C2 = 0.03^2, and the mean over all pixels and channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d

WINDOW_SIZE = 11
WINDOW_SIGMA = 1.5
C1 = 1e-4
C2 = 9e-4


def gaussian_window(dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return the window along one axis, summing to 1; the 2D window is its outer product. (11,)"""
    middle = WINDOW_SIZE // 2
    weights = []
    for i in range(WINDOW_SIZE):
        square = (i - middle) ** 2
        weights.append(math.exp(-square / (2 * WINDOW_SIGMA**2)))
    total = sum(weights)
    return torch.tensor([weight / total for weight in weights], dtype=dtype, device=device)


def ssim_map_reference(image: Tensor, target: Tensor) -> Tensor:
    """Return the similarity in [-1, 1] around every pixel; differentiable. (H, W, C)"""
    x = image.permute(2, 0, 1)
    y = target.to(image.dtype).permute(2, 0, 1)
    # Window averages along both axes, with zeros outside.
    window = gaussian_window(x.dtype, x.device)
    middle = WINDOW_SIZE // 2
    batch = torch.cat([x, y, x * x, y * y, x * y])[:, None]
    rows = conv2d(batch, window.view(1, 1, 1, -1), padding=(0, middle))
    moments = conv2d(rows, window.view(1, 1, -1, 1), padding=(middle, 0))[:, 0]
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = moments.chunk(5)
    variances = (mean_xx - mean_x**2) + (mean_yy - mean_y**2)
    covariance = mean_xy - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    structure = (2 * covariance + C2) / (variances + C2)
    return (luminance * structure).permute(1, 2, 0)
