# SPDX-License-Identifier: Apache-2.0
"""Training views: the order in which they come, and the size that an iteration asks for.

Smaller photographs are made of the decoded ones, every pixel the mean of what it covers, and kept
for the current size only, under the budget of the decoded ones.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from sugar_utils.random import generator


class CameraOrder:
    """Which view belongs to which step, computed from the seed alone.

    Args:
        n_cameras: Number of training views, at least 1.
    """

    def __init__(self, n_cameras: int, seed: int, label: str) -> None:
        self._n = n_cameras
        self._seed = seed
        self._label = label
        self._epoch = -1
        self._permutation: list[int] = []

    def epoch(self, step: int) -> int:
        """How many complete passes lie behind a step (steps count from 0)."""
        return step // self._n

    def index(self, step: int) -> int:
        """Index of the view of a step."""
        epoch = self.epoch(step)
        if epoch != self._epoch:
            rng = generator(self._seed, self._label, "camera order", epoch)
            self._permutation = torch.randperm(self._n, generator=rng, device="cpu").tolist()
            self._epoch = epoch
        return self._permutation[step % self._n]


_LEAST_WEIGHT = 1e-3
"""Of a masked pixel, in steps of the mask's byte."""


class SizedViews:
    """Photographs and cameras of one size after another."""

    def __init__(self, images: ImageStore) -> None:
        self._images = images
        self._scale = 1.0

    def get(self, camera: Camera, scale: float) -> tuple[Camera, Tensor]:
        """A view at a share of its size.

        Args:
            scale: Width and height as shares of the full ones, above 0 and at most 1.

        Returns:
            The camera at that size and its photograph, on the CPU; it is shared, do not write to
            it. (h, w, 3) or (h, w, 4) uint8
        """
        if scale != self._scale and self._scale != 1.0:
            self._images.drop_scaled(self._scale)
        self._scale = scale
        if scale == 1.0:
            return camera, self._images.get(camera)
        small = at_scale(camera, scale)
        size = small.width, small.height
        return small, self._images.scaled(camera, scale, lambda whole: averaged(whole, *size))

    def prefetch(self, camera: Camera) -> None:
        """Have the photograph decoded in the background unless there is a small copy of it."""
        if self._scale == 1.0 or not self._images.has_scaled(camera, self._scale):
            self._images.prefetch(camera)


def at_scale(camera: Camera, scale: float) -> Camera:
    """The view at a share of its size, in whole pixels."""
    return camera.resized(max(1, round(scale * camera.width)), max(1, round(scale * camera.height)))


def averaged(photograph: Tensor, width: int, height: int) -> Tensor:
    """A smaller photograph, every byte the mean of what it covers, colours weighted by the mask.

    Args:
        photograph: Colours, and perhaps a mask. (H, W, 3) or (H, W, 4) uint8
        width: In pixels.
        height: In pixels.
    """
    planes = photograph.permute(2, 0, 1).float()
    if len(planes) == 3:
        return _rounded(_means(planes, width, height))
    # What is masked out says nothing about colours, except where there is nothing else.
    weights = planes[3:].clamp_min(_LEAST_WEIGHT)
    colors = _means(planes[:3] * weights, width, height) / _means(weights, width, height)
    return _rounded(np.concatenate([colors, _means(planes[3:], width, height)]))


def _means(planes: Tensor, width: int, height: int) -> np.ndarray:
    """Means of what the pixels of a smaller size cover. (P, H, W) float -> (P, height, width)"""
    # In floats, because of bytes Pillow would round rows and then columns, half of them upwards.
    box = Image.Resampling.BOX
    small = [Image.fromarray(p.numpy()).resize((width, height), box) for p in planes]
    return np.stack([np.asarray(plane) for plane in small])


def _rounded(planes: np.ndarray) -> Tensor:
    """(C, h, w) float -> (h, w, C) uint8"""
    return torch.from_numpy(np.rint(planes).astype(np.uint8).transpose(1, 2, 0).copy())
