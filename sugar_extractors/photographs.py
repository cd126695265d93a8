# SPDX-License-Identifier: Apache-2.0
"""Photographs as colours and weights of pixels, for textures and for the comparison of views."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore, eroded
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.losses.exposure import exposed, mean_exposure, unexposed
from sugar_utils.device import upload

Photograph = Callable[[Camera], Tensor]
"""Returns the colours of a view, and how much each pixel counts. (H, W, 4) in [0, 1]"""


def photo_source(
    images: ImageStore, device: torch.device, exposures: Mapping[str, Tensor]
) -> Photograph:
    """Return a source of images and pixel weights; exposures are replaced by the mean one.

    A texture then has the colours of the mean image, as the Gaussians have.
    """
    mean = mean_exposure(torch.stack(list(exposures.values()))) if exposures else None

    def read(camera: Camera) -> Tensor:
        image = upload(images.get(camera), device)
        valid_mask = is_counted(image)
        colors = image[..., :3].float() / 255
        if mean is not None and camera.name in exposures:
            colors = unexposed(colors, exposures[camera.name].to(device))
            colors = exposed(colors, mean.to(device)).clamp(0, 1)
        if valid_mask is None:
            return functional.pad(colors, (0, 1), value=1.0)
        # A pixel on the outline also shows the background.
        weights = eroded(valid_mask, 1)[..., None].float()
        return torch.cat([colors, weights], dim=2)

    return read
