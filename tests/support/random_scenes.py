# SPDX-License-Identifier: Apache-2.0
"""Small random scenes that reach every branch of the rasterizer."""

import numpy as np
import torch

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera


def look_at(
    center,
    target=(0.0, 0.0, 0.0),
    *,
    width=70,
    height=50,
    focal=60.0,
    principal=(0.0, 0.0),
    name="view",
) -> Camera:
    """Camera at ``center`` looking at ``target``; ``principal`` offsets the principal point."""
    center, target = np.asarray(center, float), np.asarray(target, float)
    z = (target - center) / np.linalg.norm(target - center)
    x = np.cross(z, [0.0, 0.0, 1.0])
    x /= np.linalg.norm(x)
    rotation = np.stack([x, np.cross(z, x), z])
    return Camera(
        name=name,
        width=width,
        height=height,
        fx=focal,
        fy=focal * 1.05,
        cx=width / 2 + principal[0],
        cy=height / 2 + principal[1],
        rotation=rotation,
        translation=-rotation @ center,
    )


def random_gaussians(n: int, seed: int, dtype=torch.float64) -> Gaussians:
    """Clustered Gaussians: thin and fat, faint and opaque, in front of and behind the camera."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    means = normal(n, 3)
    means[: n // 10] *= 4.0
    scales = torch.exp(normal(n, 3) * 0.7 - 2.2)
    opacities = torch.rand(n, generator=g, dtype=torch.float64)
    opacities[: n // 6] = 0.9995
    opacities[n // 6 : n // 5] = 0.002
    # Values that float32 holds exactly, so that both precisions see the same scene.
    tensors = (
        means,
        torch.nn.functional.normalize(normal(n, 4), dim=-1),
        scales,
        opacities,
        normal(n, 1, 3) * 0.8,
        normal(n, 15, 3) * 0.2,
    )
    return Gaussians(*(t.float().to(dtype) for t in tensors))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draw standard normal numbers, which follow from the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
