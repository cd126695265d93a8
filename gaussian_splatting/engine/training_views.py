# SPDX-License-Identifier: Apache-2.0
"""Training views, and strips of their images.

Masks are the fourth byte of a photograph. In mode ``object`` photograph and render lie on one
background, whose colour is drawn anew for every view, so that what is outside can only become
transparent. In mode ``ignore`` the fourth byte stays, and loss terms leave out pixels that do not
count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.color_bytes import color_bytes
from gaussian_splatting.core.random import draw_labels, generator
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import COUNTS, composited
from gaussian_splatting.losses.color_loss import ColorGradient, ColorLoss, weighted_color_loss
from gaussian_splatting.losses.exposure import beyond_saturation, exposed
from gaussian_splatting.losses.photometric import color_gradient, color_terms
from gaussian_splatting.losses.texture import texture_weights
from gaussian_splatting.rasterization import Rows
from sugar_utils.device import upload

if TYPE_CHECKING:
    from gaussian_splatting.engine.loss_terms import LossTerm


@dataclass(frozen=True)
class AddedLoss:
    """What a component adds to the loss of a view, beside the table of the stage."""

    name: str  # of the component
    terms: Sequence[LossTerm]  # of images only
    # Values to blend for the terms, (N, f); a term finds them as ``ImageStrip.feature(name)``.
    features: Callable[[Gaussians, Camera], Tensor] | None = None


@dataclass(frozen=True)
class TrainingView:
    """All that is known of one view of a step, before and while it is rendered."""

    camera: Camera
    # Photograph that the render is compared with: (H, W, 3), or (H, W, 4) uint8 with weights of the
    # pixels, of which 255 is 1. None for a pass that compares nothing with it.
    photograph: Tensor | None
    iteration: int = 0
    index: int = 0  # of the view in its step
    background: Tensor | None = None  # colour behind the render; None is black, (3,)
    exposure: Tensor | None = None  # leaf of the photograph's exposure; None without one, (2, 3)
    exposed_pixels: Tensor | None = None  # whose gradient reaches the exposure; None: all, (H, W)
    added: tuple[AddedLoss, ...] = ()  # by the components
    # Whether a component reads the gradients of the model after the view, before its step.
    gradients_are_read: bool = False
    # Columns of the blended free features by name of the component that asked for them.
    feature_columns: Mapping[str, slice] = field(default_factory=dict)
    surface: Any = None  # what a stage knows of the surface in this view, for its own terms

    def with_loss(self, added: AddedLoss) -> TrainingView:
        """The view with a further loss."""
        return replace(self, added=(*self.added, added))

    @property
    def target(self) -> Tensor:
        """The photograph.

        Raises:
            ValueError: The view has none.
        """
        if self.photograph is None:
            raise ValueError(f"{self.camera.name}: this pass has no photograph to compare with")
        return self.photograph

    @functools.cached_property
    def counted_pixels(self) -> Tensor | None:
        """Pixels of the whole image that count. (H, W) bool; None for all"""
        return None if self.photograph is None else is_counted(self.photograph)

    @functools.cached_property
    def texture_weights(self) -> Tensor:
        """Weights of depth and normal maps, low where the image has texture. (H, W)"""
        return texture_weights(self.target)

    @functools.cached_property
    def n_counted(self) -> int | Tensor:
        """Number of pixels that count, at least 1."""
        counted = self.counted_pixels
        if counted is None:
            return self.camera.n_pixels
        return counted.sum().clamp_min(1)


@dataclass(frozen=True)
class ImageStrip:
    """A horizontal strip of a view, as loss terms get it: the view and the rendered maps.

    Maps are leaves that collect gradients. Their R rows include neighbours of the rows that count.
    A map that is not rendered is a ``KeyError``: a term names what it reads.
    """

    view: TrainingView
    rows: Rows  # of the image, that the maps show
    counted_rows: slice  # rows of the maps that count; the others are their neighbours
    maps: Mapping[str, Tensor]  # by name of the properties below

    @property
    def color(self) -> Tensor:
        """Rendered colour. (R, W, 3)"""
        return self.maps["color"]

    @property
    def depth(self) -> Tensor:
        """Blended depth along the view axis. (R, W) world units"""
        return self.maps["depth"]

    @property
    def normal_xy(self) -> Tensor:
        """Camera-space x and y of the normals; see ``complete_normals``. (R, W, 2)"""
        return self.maps["normal_xy"]

    @property
    def plane(self) -> Tensor:
        """Blended normals and distances of the Gaussians' planes. (R, W, 4)"""
        return self.maps["plane"]

    @property
    def height(self) -> int:
        """Rows of the whole image."""
        return self.view.camera.height

    @property
    def share(self) -> float:
        """Share of the image's rows that count here."""
        return (self.counted_rows.stop - self.counted_rows.start) / self.height

    def exposed_color(self) -> Tensor:
        """The strip as a photograph of this exposure shows it. (R, W, 3)"""
        pixels = self.view.exposed_pixels
        inside = None if pixels is None else self.rows_of(pixels)
        return exposed(self.color, self.view.exposure, inside)

    def feature(self, name: str) -> Tensor:
        """Blended features of a component in the rows that count. (C, W, f)"""
        return self.maps["features"][self.counted_rows][..., self.view.feature_columns[name]]

    def rows_of(self, values: Tensor) -> Tensor:
        """The shown rows of values of the whole image. (H, W, ...) -> (R, W, ...)"""
        return values[self.rows.start : self.rows.stop]

    def counted_pixels(self) -> Tensor | None:
        """Pixels of the shown rows that count; None for all. (R, W) bool"""
        counted = self.view.counted_pixels
        return None if counted is None else self.rows_of(counted)

    def target_color(self) -> Tensor:
        """The shown rows of the photograph as floats in [0, 1]. (R, W, 3)"""
        target = self.rows_of(self.view.target[..., :3])
        return target / 255.0 if target.dtype == torch.uint8 else target


def composited_view(view: TrainingView, plain_background: Tensor, seed: int) -> TrainingView:
    """Choose the background of a view, and put its photograph on it where a mask asks for that.

    Args:
        view: With the photograph as the image store gives it: (H, W, 3), or (H, W, 4) uint8 with a
            mask; and with the exposure that the render will get, background and all.
        plain_background: Colour behind the render of a view without a mask. (3,)
    """
    photograph = view.target
    counted = is_counted(photograph)
    if counted is None:
        return replace(view, background=plain_background)
    if not view.camera.shows_object:
        weighted = without_uncovered(photograph[..., :3], counted)
        return replace(view, photograph=weighted, background=plain_background)
    rng = generator(seed, "mask background", *draw_labels(view.iteration, view.index))
    # Whole bytes, so that the photograph's background is the render's to the bit.
    color = torch.randint(0, 256, (3,), generator=rng, dtype=torch.uint8, device="cpu")
    color = upload(color, photograph.device)
    background = color.to(plain_background.dtype) / 255.0
    if view.exposure is None:
        return replace(view, photograph=composited(photograph, color), background=background)
    as_photographed = exposed(background[None, None], view.exposure.detach())[0, 0]
    color = color_bytes(as_photographed.clamp(0, 1))
    return replace(
        view,
        photograph=composited(photograph, color),
        background=background,
        # Only exposures need to know which pixels are the object's.
        exposed_pixels=counted,
    )


def is_counted(photograph: Tensor) -> Tensor | None:
    """Pixels that count. (H, W, 4) uint8 -> (H, W) bool; None where all do, (H, W, 3)"""
    return photograph[..., 3] >= COUNTS if photograph.shape[-1] == 4 else None


def without_uncovered(photograph: Tensor, covered: Tensor) -> Tensor:
    """Give weight 0 to the pixels of a photograph that are not covered.

    Args:
        photograph: (H, W, 3) or (H, W, 4) uint8
        covered: (H, W) bool

    Returns:
        (H, W, 4) uint8
    """
    weights = torch.where(covered, 255, 0).to(torch.uint8)[..., None]
    if photograph.shape[-1] == 4:
        weights = torch.minimum(photograph[..., 3:], weights)
    return torch.cat([photograph[..., :3], weights], dim=-1)


def halved_mask(photograph: Tensor, half: Camera) -> Tensor | None:
    """Halve the size of a mask; a pixel counts where all that it covers do.

    (H, W, 4) -> (H / 2, W / 2, 4) uint8, of which the colours mean nothing; None without a mask
    """
    if photograph.shape[-1] == 3:
        return None
    even = photograph[: 2 * half.height, : 2 * half.width]
    quarters = []
    for y in range(min(2, even.shape[0])):
        for x in range(min(2, even.shape[1])):
            quarters.append(even[y::2, x::2])
    return torch.stack(quarters).amin(dim=0)


def color_gradient_of(strip: ImageStrip, dssim_weight: float) -> ColorGradient | None:
    """Compare a strip with its photograph, and differentiate without autograd.

    None where pixels have weights or the photograph an exposure, which only :func:`color_loss`
    knows.
    """
    if strip.view.target.shape[-1] != 3 or strip.view.exposure is not None:
        return None
    return color_gradient(
        strip.color,
        strip.target_color(),
        dssim_weight,
        rows=strip.counted_rows,
        total_rows=strip.height,
    )


def color_loss(strip: ImageStrip, dssim_weight: float) -> ColorLoss:
    """Compare a strip with its photograph: L1 and SSIM by weighted pixels.

    The less a pixel counts, the more both images take the render's own value, without a gradient:
    at weight 0 it differs nowhere, neither by itself nor in the windows of its neighbours.
    """
    image = strip.exposed_color()
    target = strip.target_color()
    if strip.view.exposure is not None:
        target = beyond_saturation(target, image)
    rows = {"rows": strip.counted_rows, "total_rows": strip.height}
    photograph = strip.view.target
    if photograph.shape[-1] == 3:
        return color_terms(image, target, dssim_weight, **rows)
    all_weights = photograph[..., 3:].to(image.dtype) / 255
    weights = strip.rows_of(all_weights)
    fill = (1 - weights) * image.detach()
    image = weights * image + fill
    target = weights * target + fill
    _, l1, ssim = color_terms(image, target, dssim_weight, **rows)
    # Both were divided by all pixels.
    scale = all_weights.numel() / all_weights.sum().clamp_min(1)
    l1 = scale * l1
    ssim = strip.share - scale * (strip.share - ssim)
    total = weighted_color_loss(l1, ssim, dssim_weight, strip.share)
    return ColorLoss(total, l1, ssim)
