# SPDX-License-Identifier: Apache-2.0
"""Scores of a model on held-out views."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.masking import is_counted
from gaussian_splatting.engine.reporting import image_metrics
from gaussian_splatting.losses.exposure import fit_gain_and_offset
from sugar_utils.device import upload
from sugar_utils.errors import UserError


@dataclass(frozen=True)
class ViewScore:
    """Scores of one view.

    Attributes:
        name: Name of the camera's image.
        l1: Mean absolute difference, colours in [0, 1].
        psnr: Peak signal-to-noise ratio in dB.
        ssim: Structural similarity.
        counted_psnr: PSNR of the pixels that its mask counts; None without a mask.
        counted_ssim: SSIM of these.
        fitted_psnr: PSNR in dB after a gain and an offset per channel, by least squares; None
            where it was not asked for.
    """

    name: str
    l1: float
    psnr: float
    ssim: float
    fitted_psnr: float | None = None
    counted_psnr: float | None = None
    counted_ssim: float | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of all views.

    Attributes:
        per_view: In the order of the cameras.
    """

    per_view: tuple[ViewScore, ...]

    @property
    def l1(self) -> float:
        """Mean over the views."""
        return self._mean("l1")

    @property
    def psnr(self) -> float:
        """Mean over the views of their PSNR in dB, as the field reports it."""
        return self._mean("psnr")

    @property
    def ssim(self) -> float:
        """Mean over the views."""
        return self._mean("ssim")

    @property
    def counted(self) -> dict[str, float]:
        """``psnr`` and ``ssim`` of what masks count, means over the views with one; may be empty"""
        found = [view for view in self.per_view if view.counted_psnr is not None]
        return {
            name: sum(getattr(view, f"counted_{name}") for view in found) / len(found)
            for name in (("psnr", "ssim") if found else ())
        }

    @property
    def fitted_psnr(self) -> float | None:
        """Mean over the views, after a gain and an offset for each; None if not asked for."""
        return None if self.per_view[0].fitted_psnr is None else self._mean("fitted_psnr")

    def _mean(self, name: str) -> float:
        return sum(getattr(view, name) for view in self.per_view) / len(self.per_view)


@torch.no_grad()
def evaluate(
    render: Callable[[Camera], Tensor],
    cameras: Iterable[Camera],
    load_image: Callable[[Camera], Tensor],
    *,
    quantise: bool = False,
    fitted: bool = False,
) -> EvaluationResult:
    """Render views and compare them with their photographs, one at a time.

    Args:
        render: Returns the float render of a camera; it is clamped to [0, 1] here. (H, W, 3)
        cameras: Views to score; at least one.
        load_image: Returns the photograph of a camera, on any device. (H, W, 3) uint8, or
            (H, W, 4) with a mask, as of :meth:`ImageStore.shown`
        quantise: Round the render to 8 bits first, as saving it would. Off, a PSNR of 30 dB is
            0.006 dB and one of 40 dB is 0.06 dB above that of the saved image.
        fitted: Also measure after a gain and an offset per view and channel, which take out that
            the exposure of a held-out photograph is not known.

    Returns:
        Scores per view and their means.

    Raises:
        UserError: A render and its photograph differ in size.
        ValueError: There are no cameras.
    """
    scores = []
    for camera in cameras:
        image = render(camera).detach()
        photograph = upload(load_image(camera), image.device)
        target = photograph[..., :3]
        if image.shape != target.shape:
            raise UserError(
                f"camera {camera.name}: the render is {_size(image)} but the photograph "
                f"{_size(target)}; check that images and cameras belong together"
            )
        rounded = image_metrics.to_uint8 if quantise else image_metrics.to_unit
        as_photographed = rounded(_fitted(image, target)) if fitted else None
        image = rounded(image)
        scores.append(
            ViewScore(
                name=camera.name,
                l1=image_metrics.l1(image, target),
                psnr=image_metrics.psnr(image, target),
                ssim=image_metrics.ssim(image, target),
                **_counted_scores(image, photograph, camera),
                fitted_psnr=image_metrics.psnr(as_photographed, target) if fitted else None,
            )
        )
    if not scores:
        raise ValueError("evaluation needs at least one camera")
    return EvaluationResult(tuple(scores))


def _counted_scores(image: Tensor, photograph: Tensor, camera: Camera) -> dict[str, float]:
    """Scores of the pixels that a mask counts; empty where it counts none, or there is none."""
    counted = is_counted(photograph)
    if counted is None or not bool(counted.any()):
        return {}
    target, weights = photograph[..., :3], counted.double()
    if camera.mask is not None and camera.mask.mode == "ignore":
        # Equal where nothing is known, so that windows do not look at it.
        target = torch.where(counted[..., None], target, image_metrics.to_uint8(image))
        image = torch.where(counted[..., None], image_metrics.to_unit(image), target / 255)
    return {
        "counted_psnr": image_metrics.psnr(image, target, weights),
        "counted_ssim": image_metrics.ssim(image, target, weights),
    }


def _fitted(image: Tensor, target: Tensor) -> Tensor:
    """The image with the gain and offset of its photograph."""
    image = image_metrics.to_unit(image)
    gain, offset = fit_gain_and_offset(image, image_metrics.to_unit(target))
    return (image.double() * gain + offset).to(image.dtype)


def _size(image: Tensor) -> str:
    return " x ".join(str(side) for side in image.shape)
