# SPDX-License-Identifier: Apache-2.0
"""Scores of a model on held-out views: rendering, and image quality as reported.

Images are (H, W, 3), float in [0, 1] or uint8; floats are clamped to [0, 1] first. Sums run in
float64, row by row, so that the figures do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.losses.exposure import fit_gain_and_offset
from gaussian_splatting.losses.photometric import DSSIM_WEIGHT, color_terms
from gaussian_splatting.losses.ssim_reference import ssim_map_reference
from sugar_utils.device import upload
from sugar_utils.errors import UserError


@dataclass(frozen=True)
class ViewScore:
    """Image quality of one view."""

    name: str
    l1: float
    psnr: float
    ssim: float
    # PSNR in dB after a gain and an offset per channel, by least squares; None where it was not
    # asked for
    fitted_psnr: float | None = None
    # PSNR of the pixels that its mask counts; None without a mask
    counted_psnr: float | None = None
    counted_ssim: float | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of all views; figures are means over the views."""

    per_view: tuple[ViewScore, ...]

    @property
    def l1(self) -> float:
        """Mean absolute difference."""
        return self._mean("l1")

    @property
    def psnr(self) -> float:
        """In dB, as the field reports it."""
        return self._mean("psnr")

    @property
    def ssim(self) -> float:
        """Mean structural similarity."""
        return self._mean("ssim")

    @property
    def counted(self) -> dict[str, float]:
        """``psnr`` and ``ssim`` of what masks count, over the views with a mask; may be empty"""
        psnrs = [view.counted_psnr for view in self.per_view if view.counted_psnr is not None]
        ssims = [view.counted_ssim for view in self.per_view if view.counted_ssim is not None]
        if not psnrs:
            return {}
        return {"psnr": sum(psnrs) / len(psnrs), "ssim": sum(ssims) / len(ssims)}

    @property
    def fitted_psnr(self) -> float | None:
        """After a gain and an offset for each view; None if not asked for."""
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
        render: Returns the float render of a camera. (H, W, 3)
        load_image: Returns the photograph of a camera. (H, W, 3) or (H, W, 4) uint8
        quantise: Round the render to 8 bits first, as saving it would. Off, a PSNR of 30 dB is
            0.006 dB and one of 40 dB is 0.06 dB above that of the saved image.
    """
    scores = []
    for camera in cameras:
        image = render(camera).detach()
        photograph = upload(load_image(camera), image.device)
        target = photograph[..., :3]
        if image.shape != target.shape:
            render_size = " x ".join(map(str, image.shape))
            photograph_size = " x ".join(map(str, target.shape))
            raise UserError(
                f"camera {camera.name}: the render is {render_size} but the photograph "
                f"{photograph_size}; check that images and cameras belong together"
            )
        rounded = to_uint8 if quantise else to_unit
        fitted_psnr = None
        if fitted:
            fitted_psnr = psnr(rounded(fitted_to(to_unit(image), target)), target)
        image = rounded(image)
        scores.append(
            ViewScore(
                name=camera.name,
                l1=l1(image, target),
                psnr=psnr(image, target),
                ssim=ssim(image, target),
                **_counted_scores(image, photograph, camera),
                fitted_psnr=fitted_psnr,
            )
        )
    if not scores:
        raise ValueError("evaluation needs at least one camera")
    return EvaluationResult(tuple(scores))


def _counted_scores(image: Tensor, photograph: Tensor, camera: Camera) -> dict[str, float]:
    counted = is_counted(photograph)
    if counted is None or not bool(counted.any()):
        return {}
    target = photograph[..., :3]
    weights = counted.double()
    if camera.mask is not None and camera.mask.mode == "ignore":
        # Equal where nothing is known, so that windows do not look at it.
        target = torch.where(counted[..., None], target, to_uint8(image))
        image = torch.where(counted[..., None], to_unit(image), target / 255)
    return {
        "counted_psnr": psnr(image, target, weights),
        "counted_ssim": ssim(image, target, weights),
    }


def fitted_to(image: Tensor, target: Tensor) -> Tensor:
    """A float image after the gain and offset per channel that fit another one best."""
    gain, offset = fit_gain_and_offset(image, to_unit(target))
    return (image.double() * gain + offset).to(image.dtype)


@torch.no_grad()
def l1(image: Tensor, target: Tensor) -> float:
    """Mean absolute difference over all pixels and channels."""
    image, target = _unit_pair(image, target)
    return _mean((image - target).abs())


@torch.no_grad()
def psnr(image: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Peak signal-to-noise ratio in dB, of the mean squared error; infinity for equal images.

    Args:
        weights: How much each pixel counts; None for all alike. (H, W), some above 0
    """
    image, target = _unit_pair(image, target)
    error = _mean((image - target) ** 2, weights)
    return math.inf if error == 0 else -10 * math.log10(error)


@torch.no_grad()
def ssim(image: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Mean structural similarity; see ``ssim_reference``. Arguments as of :func:`psnr`."""
    image, target = _unit_pair(image, target)
    if weights is None and image.device.type == "cpu" and image.dtype == torch.float32:
        # The same to six digits in a fiftieth of the time.
        return float(color_terms(image, target, DSSIM_WEIGHT).ssim)
    if image.device.type != "cpu":
        # A GPU's convolutions may round float32 to the 10 bits of TF32, which moves SSIM by 0.07.
        image = image.double()
        target = target.double()
    return _mean(ssim_map_reference(image, target), weights)


def to_unit(image: Tensor) -> Tensor:
    """Float image in [0, 1] from uint8 or float. Same shape"""
    if image.dtype == torch.uint8:
        return image.float() / 255
    if not image.dtype.is_floating_point:
        raise ValueError(f"an image is uint8 or float, not {image.dtype}")
    return image.clamp(0, 1)


def to_uint8(image: Tensor) -> Tensor:
    """The image as an 8-bit file would keep it, rounded to nearest."""
    return (to_unit(image) * 255).round().to(torch.uint8)


def _unit_pair(image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if image.shape != target.shape or image.dim() != 3 or image.shape[2] != 3:
        raise ValueError(
            f"metrics compare (H, W, 3) images of one shape, got {tuple(image.shape)} and "
            f"{tuple(target.shape)}"
        )
    if image.numel() == 0:
        raise ValueError("metrics need at least one pixel")
    return to_unit(image), to_unit(target)


def _mean(values: Tensor, weights: Tensor | None = None) -> float:
    """Mean with a fixed order of summation: within rows first, then over rows."""
    if weights is not None:
        total = 3 * float(weights.sum(dim=1, dtype=torch.float64).sum())
        values = values * weights[..., None]
    rows = values.flatten(1).sum(dim=1, dtype=torch.float64)
    return float(rows.sum()) / (values.numel() if weights is None else total)
