# SPDX-License-Identifier: Apache-2.0
"""Views that a step trains on: their order, their size, and what renders are compared with.

Masks are a fourth byte. In mode ``object`` photograph and render lie on one background, whose
colour is drawn anew for every view, so that what is outside can only become transparent. In mode
``ignore`` the fourth byte stays, and terms of pixels leave out those that do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import COUNTS, ImageStore, composited
from gaussian_splatting.engine.strips import StripMaps
from gaussian_splatting.losses.photometric import color_terms
from gaussian_splatting.losses.ssim_reference import weighted_color_loss
from gaussian_splatting.optim.learned_exposure import exposed
from sugar_utils.random import draw_labels, generator

_LEAST_WEIGHT = 1e-3  # of a masked pixel, in steps of the mask's byte


@dataclass(frozen=True)
class Target:
    """What a view of a step is compared with."""

    # (H, W, 3), or (H, W, 4) uint8 with weights of the pixels, of which 255 is 1. At half its size
    # only what the mask says, None without one.
    photograph: Tensor | None
    background: Tensor | None = None  # colour behind the render, (3,)
    exposure: Tensor | None = None  # leaf of the photograph's exposure; None without one, (2, 3)
    inside: Tensor | None = None  # pixels that say what the exposure is; None for all, (H, W) bool

    @property
    def counted(self) -> Tensor | None:
        """Pixels of the whole image that count. (H, W) bool; None for all"""
        return None if self.photograph is None else is_counted(self.photograph)

    def exposed(self, maps: StripMaps) -> Tensor:
        """A strip as a photograph of this exposure shows it. (R, W, 3)"""
        here = None if self.inside is None else self.inside[maps.shown.start : maps.shown.stop]
        return exposed(maps.image, self.exposure, here)


def target_of(
    photograph: Tensor,
    plain: Tensor,
    camera: Camera,
    exposure: Tensor | None = None,
    *,
    seed: int,
    iteration: int,
    view_index: int = 0,
) -> Target:
    """What a view of a step is compared with, on its background and with its exposure.

    Args:
        photograph: As the image store gives it. (H, W, 3), or (H, W, 4) uint8 with a mask
        plain: Colour behind the render of a view without a mask. (3,)
        exposure: Exposure that the render will get, background and all; None for none. (2, 3)
    """
    if photograph.shape[-1] == 3:
        return Target(photograph, plain, exposure)
    if not camera.shows_object:
        whole = without_uncovered(photograph[..., :3], is_counted(photograph))
        return Target(whole, plain, exposure)
    rng = generator(seed, "mask background", *draw_labels(iteration, view_index))
    # Whole bytes, so that the photograph's background is the render's to the bit.
    color = torch.randint(0, 256, (3,), generator=rng, dtype=torch.uint8, device="cpu")
    color = color.to(photograph.device)
    behind = color.to(plain.dtype) / 255.0
    if exposure is None:
        return Target(composited(photograph, color), behind)
    shown = exposed(behind[None, None], exposure.detach())[0, 0]
    color = (shown.clamp(0, 1) * 255).round().to(torch.uint8)
    # Only exposures need to know which pixels are the object's.
    return Target(composited(photograph, color), behind, exposure, is_counted(photograph))


def is_counted(photograph: Tensor) -> Tensor | None:
    """Pixels that count. (H, W, 4) uint8 -> (H, W) bool; None where all do, (H, W, 3)"""
    return photograph[..., 3] >= COUNTS if photograph.shape[-1] == 4 else None


def without_uncovered(photograph: Tensor, covered: Tensor) -> Tensor:
    """A photograph, (H, W, 3) or (H, W, 4) uint8, of which only covered pixels, (H, W) bool, count.

    (H, W, 4) uint8
    """
    counts = torch.where(covered, 255, 0).to(torch.uint8)[..., None]
    if photograph.shape[-1] == 4:
        return torch.cat([photograph[..., :3], torch.minimum(photograph[..., 3:], counts)], dim=-1)
    return torch.cat([photograph, counts], dim=-1)


def halved_mask(photograph: Tensor, half: Camera) -> Tensor | None:
    """What a mask says at half the size; a pixel counts where all it covers do.

    (H, W, 4) -> (H / 2, W / 2, 4) uint8, of which the colours mean nothing; None without a mask
    """
    if photograph.shape[-1] == 3:
        return None
    whole = photograph[: 2 * half.height, : 2 * half.width]
    firsts = [(y, x) for y in range(min(2, whole.shape[0])) for x in range(min(2, whole.shape[1]))]
    return torch.stack([whole[y::2, x::2] for y, x in firsts]).amin(dim=0)


def color_terms_of(
    image: Tensor, maps: StripMaps, photograph: Tensor, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The colour loss of a strip, with its mean absolute error and mean SSIM, by weighted pixels.

    The less a pixel counts, the more both images take the render's own value, without a gradient:
    at weight 0 it differs nowhere, neither by itself nor in the windows of its neighbours.

    Args:
        image: What the strip looks like. (R, W, 3)
        photograph: The whole photograph. (H, W, 3), or (H, W, 4) uint8 with weights of the pixels

    Returns:
        ``(loss, l1, ssim)`` scalars; those of all strips add up to those of the image.
    """
    target = maps.part_of(photograph[..., :3])
    rows = {"rows": maps.counted, "total_rows": maps.height}
    if photograph.shape[-1] == 3:
        return color_terms(image, target, weight, **rows)
    counts = photograph[..., 3:].to(image.dtype) / 255
    here = counts[maps.shown.start : maps.shown.stop]
    own = (1 - here) * image.detach()
    image = here * image + own
    target = here * target + own
    _, l1, ssim = color_terms(image, target, weight, **rows)
    # Both were divided by all pixels.
    scale = counts.numel() / counts.sum().clamp_min(1)
    l1 = scale * l1
    ssim = maps.share - scale * (maps.share - ssim)
    return weighted_color_loss(l1, ssim, weight, maps.share), l1, ssim


class ViewSampler:
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
        epoch = self.epoch(step)
        if epoch != self._epoch:
            rng = generator(self._seed, self._label, "camera order", epoch)
            self._permutation = torch.randperm(self._n, generator=rng, device="cpu").tolist()
            self._epoch = epoch
        return self._permutation[step % self._n]


class SizedViews:
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
    """A smaller photograph, every byte the mean of what it covers, colours weighted by the mask."""
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
