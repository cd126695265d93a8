# SPDX-License-Identifier: Apache-2.0
"""Training views at the size that an iteration asks for.

Smaller photographs are made of the decoded ones, every pixel the mean of what it covers, and kept
for the current size only.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore


class SizedViews:
    """Photographs and cameras of one size after another.

    Args:
        images: Decoded photographs at full size.
    """

    def __init__(self, images: ImageStore) -> None:
        self._images = images
        self._scale = 1.0
        self._small: dict[str, Tensor] = {}

    def get(self, camera: Camera, scale: float) -> tuple[Camera, Tensor]:
        """A view at a share of its size.

        Args:
            camera: The view at full size.
            scale: Width and height as shares of the full ones, above 0 and at most 1.

        Returns:
            The camera at that size and its photograph, on the CPU; it is shared, do not write to
            it. (h, w, 3) or (h, w, 4) uint8

        Raises:
            UserError: The camera has no image or the image cannot be decoded.
        """
        if scale != self._scale:
            self._scale, self._small = scale, {}
        if scale == 1.0:
            return camera, self._images.get(camera)
        small = at_scale(camera, scale)
        if camera.name not in self._small:
            whole = self._images.get(camera)
            self._small[camera.name] = averaged(whole, small.width, small.height)
        return small, self._small[camera.name]

    def prefetch(self, camera: Camera) -> None:
        """Have the photograph decoded in the background unless there is a small copy of it."""
        if camera.name not in self._small:
            self._images.prefetch(camera)


def at_scale(camera: Camera, scale: float) -> Camera:
    """The view at a share of its size, in whole pixels."""
    return camera.resized(max(1, round(scale * camera.width)), max(1, round(scale * camera.height)))


def averaged(photograph: Tensor, width: int, height: int) -> Tensor:
    """A smaller photograph, every byte the mean of what it covers.

    Args:
        photograph: Colours, and a mask that is averaged like them. (H, W, 3) or (H, W, 4) uint8
        width: In pixels.
        height: In pixels.
    """
    box = Image.Resampling.BOX
    # In floats, because of bytes Pillow would round rows and then columns, half of them upwards.
    planes = [
        np.asarray(Image.fromarray(plane.numpy()).resize((width, height), box))
        for plane in photograph.permute(2, 0, 1).float()
    ]
    return torch.from_numpy(np.rint(np.stack(planes, axis=-1)).astype(np.uint8))
