# SPDX-License-Identifier: Apache-2.0
"""Which view a step is trained on, and its photograph at the size of the iteration."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.core.random import generator
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from sugar_utils.device import upload

_LEAST_WEIGHT = 1e-3  # of a masked pixel, in steps of the mask's byte
KEPT_BYTES = 32 * 2**20
"""Photographs that stay on a GPU: sixty of 480 x 360 pixels, whose steps take the host longer than
the GPU. Little enough to be in no memory plan."""


class ViewSampler:
    """Order of the training views: each epoch is a permutation drawn from the seed."""

    def __init__(self, n_cameras: int, seed: int, label: str) -> None:
        self._n = n_cameras
        self._seed = seed
        self._label = label
        self._epoch = -1
        self._permutation: list[int] = []

    def epoch(self, step: int) -> int:
        """Return the number of complete passes before a step (steps count from 0)."""
        return step // self._n

    def index(self, step: int) -> int:
        """Row of the camera that is shown in a step (steps count from 0)."""
        epoch = self.epoch(step)
        if epoch != self._epoch:
            rng = generator(self._seed, self._label, "camera order", epoch)
            self._permutation = torch.randperm(self._n, generator=rng, device="cpu").tolist()
            self._epoch = epoch
        return self._permutation[step % self._n]


class SizedViews:
    """Photographs of the training views at the size of the iteration; small copies are cached."""

    def __init__(self, images: ImageStore) -> None:
        self._images = images
        self._scale = 1.0

    def get(self, camera: Camera, scale: float) -> tuple[Camera, Tensor]:
        """A view at a share of its size: camera, and photograph on the CPU, which is shared."""
        if scale != self._scale and self._scale != 1.0:
            self._images.drop_scaled(self._scale)
        self._scale = scale
        if scale == 1.0:
            return camera, self._images.get(camera)
        small = camera.scaled(scale)

        def shrink(photograph: Tensor) -> Tensor:
            return averaged(photograph, *small.size)

        return small, self._images.scaled(camera, scale, shrink)

    def prefetch(self, camera: Camera) -> None:
        """Have the photograph decoded in the background unless there is a small copy of it."""
        if self._scale == 1.0 or not self._images.has_scaled(camera, self._scale):
            self._images.prefetch(camera)


class _SentView(NamedTuple):
    """A view with a pending copy of its image to the device."""

    camera: Camera  # as it was asked for
    scale: float
    sized_camera: Camera
    photograph: Tensor  # on the device
    arrived: torch.cuda.Event


class UploadedViews:
    """Photographs of the training views on the device, at the size of the iteration.

    One may be sent ahead: a GPU copies it on a stream of its own, beside the kernels of the step
    before. The first ones stay there, as long as the size of images does not change.
    """

    def __init__(self, images: ImageStore, device: torch.device) -> None:
        images.serve(device)
        self._views = SizedViews(images)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sent: _SentView | None = None
        self._kept: dict[Camera, tuple[Camera, Tensor]] = {}  # of one scale
        self._kept_scale = 1.0
        self._kept_bytes = 0

    def get(self, camera: Camera, scale: float) -> tuple[Camera, Tensor]:
        """Return a view at a share of its size: camera, and photograph on the device."""
        sent = self._sent
        self._sent = None
        if scale != self._kept_scale:
            self._kept.clear()
            self._kept_scale = scale
            self._kept_bytes = 0
        if camera in self._kept:
            return self._kept[camera]
        view = self._sent_or_uploaded(sent, camera, scale)
        n_bytes = view[1].nbytes
        if self._stream is not None and self._kept_bytes + n_bytes <= KEPT_BYTES:
            self._kept[camera] = view
            self._kept_bytes += n_bytes
        return view

    def _sent_or_uploaded(
        self, sent: _SentView | None, camera: Camera, scale: float
    ) -> tuple[Camera, Tensor]:
        """Wait for a photograph that was sent ahead; send it now where another one was."""
        if sent is not None and sent.camera is camera and sent.scale == scale:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(sent.arrived)
            sent.photograph.record_stream(stream)
            return sent.sized_camera, sent.photograph
        sized_camera, photograph = self._views.get(camera, scale)
        return sized_camera, upload(photograph, self._device)

    def prefetch(self, camera: Camera) -> None:
        """Have the photograph decoded in the background."""
        if camera not in self._kept:
            self._views.prefetch(camera)

    def send_ahead(self, camera: Camera, scale: float) -> None:
        """Begin to send the photograph that is asked for next; only a GPU copies beside work."""
        if self._stream is None or (scale == self._kept_scale and camera in self._kept):
            return
        sized_camera, photograph = self._views.get(camera, scale)
        with torch.cuda.stream(self._stream):
            on_device = upload(photograph, self._device)
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        self._sent = _SentView(camera, scale, sized_camera, on_device, arrived)


def smaller(camera: Camera, photograph: Tensor, longest_side: int) -> tuple[Camera, Tensor]:
    """Reduce a view and its photograph, (H, W, 3) or (H, W, 4) uint8, to a number of pixels."""
    small = camera.reduced(longest_side)
    return small, averaged(photograph.cpu(), *small.size)


def averaged(photograph: Tensor, width: int, height: int) -> Tensor:
    """A reduced image: means of the covered pixels, colours weighted by the mask."""
    planes = photograph.permute(2, 0, 1).float()
    if len(planes) == 3:
        return _rounded(_means(planes, width, height))
    # What is masked out says nothing about colours, except where there is nothing else.
    weights = planes[3:].clamp_min(_LEAST_WEIGHT)
    colors = _means(planes[:3] * weights, width, height) / _means(weights, width, height)
    return _rounded(np.concatenate([colors, _means(planes[3:], width, height)]))


def _means(planes: Tensor, width: int, height: int) -> np.ndarray:
    """Area means at a smaller size. (P, H, W) float -> (P, height, width)"""
    # In floats, because of bytes Pillow would round rows and then columns, half of them upwards.
    box = Image.Resampling.BOX
    small_planes = []
    for plane in planes:
        small = Image.fromarray(plane.numpy()).resize((width, height), box)
        small_planes.append(np.asarray(small))
    return np.stack(small_planes)


def _rounded(planes: np.ndarray) -> Tensor:
    """(C, h, w) float -> (h, w, C) uint8"""
    values = np.rint(planes).astype(np.uint8)
    return torch.from_numpy(values.transpose(1, 2, 0).copy())
