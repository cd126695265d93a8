# SPDX-License-Identifier: Apache-2.0
"""Scores of a model on held-out views: rendering, and image quality as reported.

Images are (H, W, 3), float in [0, 1] or uint8; floats are clamped to [0, 1] first. Sums run in
float64, row by row, so that the figures do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gaussian_splatting.core.color_bytes import color_bytes
from gaussian_splatting.data.cameras import Camera, LoadImage
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.losses.exposure import fit_gain_and_offset
from gaussian_splatting.losses.photometric import DSSIM_WEIGHT, color_terms
from gaussian_splatting.losses.ssim_reference import ssim_map_reference
from sugar_utils.device import upload
from sugar_utils.errors import UserError
from sugar_utils.files import without_none

MAX_PSNR = 100.0  # dB, of equal images in a score, so that means over views are numbers
_MIN_VARIANCE = 1e-10  # of colours; below, an image has one colour


@dataclass(frozen=True)
class ImageComparison:
    """A render beside its photograph, and how well they agree on the pixels that count.

    Pixels count that the mask of the photograph counts, and that the render covers. PSNRs are in
    dB, at most ``MAX_PSNR``; they need a pixel that counts.
    """

    image: Tensor  # the render, (H, W, 3) float
    target: Tensor  # colours of the photograph, (H, W, 3) uint8
    counted: Tensor | None = None  # pixels that the mask counts, (H, W) bool; None for all
    covered: Tensor | None = None  # pixels where the render shows something; None for all
    # Whether the photograph shows something else where its mask does not count, as a person in
    # front; otherwise it shows the background there.
    is_hidden: bool = False
    quantise: bool = False  # round the render to 8 bits, as saving it would

    @classmethod
    def of(
        cls,
        camera: Camera,
        image: Tensor,
        photograph: Tensor,
        covered: Tensor | None = None,
        quantise: bool = False,
    ) -> ImageComparison:
        """Compare the render of a camera with its photograph.

        Args:
            camera: Has the mask of the photograph.
            image: The render. (H, W, 3) float
            photograph: (H, W, 3) or, with a mask, (H, W, 4) uint8
            covered: Pixels where the render shows something. (H, W) bool; None for all
            quantise: Round the render to 8 bits first. Off, a PSNR of 30 dB is 0.006 dB and one of
                40 dB is 0.06 dB above that of the saved image.

        Raises:
            UserError: Both have different sizes.
        """
        image = image.detach()
        photograph = upload(photograph, image.device)
        target = photograph[..., :3]
        if image.shape != target.shape:
            render_size = " x ".join(map(str, image.shape))
            photograph_size = " x ".join(map(str, target.shape))
            raise UserError(
                f"camera {camera.name}: the render is {render_size} but the photograph "
                f"{photograph_size}; check that images and cameras belong together"
            )
        is_hidden = camera.mask is not None and camera.mask.mode == "ignore"
        return cls(image, target, is_counted(photograph), covered, is_hidden, quantise)

    def whole(self) -> ImageComparison:
        """The same images, of which all pixels count."""
        return replace(self, counted=None, covered=None)

    @property
    def pixels(self) -> Tensor | None:
        """Pixels that count, (H, W) bool; None for all."""
        if self.counted is None or self.covered is None:
            return self.covered if self.counted is None else self.counted
        return self.counted & self.covered

    @property
    def n_pixels(self) -> int:
        """Number of pixels that count."""
        pixels = self.pixels
        return self.image[..., 0].numel() if pixels is None else int(pixels.sum())

    def psnr(self) -> float:
        """Peak signal-to-noise ratio."""
        return self._psnr_of(self.image)

    def fitted_psnr(self) -> float:
        """PSNR after the gain and offset per channel that fit the pixels best."""
        return self._psnr_of(fitted_to(to_unit(self.image), self.target, self._weights))

    def constant_psnr(self) -> float:
        """PSNR of the best image of one colour, instead of the render."""
        return constant_psnr(self.target, self.pixels)

    def ssim(self) -> float:
        """Mean structural similarity, of windows around the pixels."""
        image = self._rounded(self.image)
        target = self.target
        # Windows reach beyond the pixels. Where one of the images shows nothing, it is made equal
        # to the other.
        if self.covered is not None:
            image = torch.where(self.covered[..., None], to_unit(image), to_unit(target))
        if self.is_hidden and self.counted is not None:
            image = to_unit(image)
            target = torch.where(self.counted[..., None], to_unit(target), image)
        return ssim(image, target, self._weights)

    def l1(self) -> float:
        """Mean absolute difference of all pixels."""
        return l1(self._rounded(self.image), self.target)

    def _psnr_of(self, image: Tensor) -> float:
        return min(psnr(self._rounded(image), self.target, self._weights), MAX_PSNR)

    def _rounded(self, image: Tensor) -> Tensor:
        return to_uint8(image) if self.quantise else to_unit(image)

    @property
    def _weights(self) -> Tensor | None:
        """How much each pixel counts. (H, W) float64; None for all alike"""
        pixels = self.pixels
        return None if pixels is None else pixels.double()


@dataclass(frozen=True)
class ViewScore:
    """Image quality of one view: of all its pixels, and of those that count."""

    name: str
    l1: float
    psnr: float
    ssim: float
    # PSNR in dB after a gain and an offset per channel, by least squares; None where it was not
    # asked for
    fitted_psnr: float | None = None
    # The same of the pixels that the mask counts and that the render covers; None where all do, or
    # none
    counted_psnr: float | None = None
    counted_ssim: float | None = None
    counted_fitted_psnr: float | None = None

    @classmethod
    def of(cls, name: str, comparison: ImageComparison, fitted: bool) -> ViewScore:
        """Score a view; ``fitted``: also after a gain and an offset."""
        whole = comparison.whole()
        score = cls(
            name,
            l1=whole.l1(),
            psnr=whole.psnr(),
            ssim=whole.ssim(),
            fitted_psnr=whole.fitted_psnr() if fitted else None,
        )
        if comparison.pixels is None or not comparison.n_pixels:
            return score
        return replace(
            score,
            counted_psnr=comparison.psnr(),
            counted_ssim=comparison.ssim(),
            counted_fitted_psnr=comparison.fitted_psnr() if fitted else None,
        )


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
    def fitted_psnr(self) -> float | None:
        """After a gain and an offset for each view; None if not asked for."""
        return self.mean("fitted_psnr")

    @property
    def counted(self) -> dict[str, float]:
        """``psnr`` and ``ssim`` of what masks count, over the views with a mask; may be empty"""
        means = {"psnr": self.mean("counted_psnr"), "ssim": self.mean("counted_ssim")}
        return without_none(means)

    def mean(self, name: str) -> float | None:
        """Mean of a field of :class:`ViewScore`, over the views that have it; None without any."""
        values = [getattr(view, name) for view in self.per_view]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    def _mean(self, name: str) -> float:
        """Mean of a field that all views have."""
        return sum(getattr(view, name) for view in self.per_view) / len(self.per_view)


@torch.no_grad()
def score_views(
    render: Callable[[Camera], Tensor],
    cameras: Iterable[Camera],
    load_image: LoadImage,
    *,
    quantise: bool = False,
    fitted: bool = False,
) -> EvaluationResult:
    """Render views and compare them with their photographs, one at a time.

    Args:
        render: Returns the float render of a camera. (H, W, 3)
        load_image: Returns the photograph of a camera. (H, W, 3) or (H, W, 4) uint8
        quantise: Round renders to 8 bits first, as of :class:`ImageComparison`.
        fitted: Also score them after a gain and an offset.
    """
    scores = []
    for camera in cameras:
        image = render(camera)
        photograph = load_image(camera)
        comparison = ImageComparison.of(camera, image, photograph, quantise=quantise)
        scores.append(ViewScore.of(camera.name, comparison, fitted))
    if not scores:
        raise ValueError("evaluation needs at least one camera")
    return EvaluationResult(tuple(scores))


def fitted_to(image: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """A float image after the gain and offset per channel that fit another one best.

    Args:
        weights: How much each pixel counts; None for all alike. (H, W)
    """
    gain, offset = fit_gain_and_offset(image, to_unit(target), weights)
    return (image.double() * gain + offset).to(image.dtype)


def constant_psnr(photograph: Tensor, pixels: Tensor | None = None) -> float:
    """PSNR of the best image of one colour for (H, W, 3) uint8, in dB; at most ``MAX_PSNR``.

    Args:
        pixels: Those that count, (H, W) bool; None for all.
    """
    colors = photograph.reshape(-1, 3) if pixels is None else photograph[pixels]
    variance = float(colors.double().div(255).var(dim=0, correction=0).mean())
    return MAX_PSNR if variance < _MIN_VARIANCE else -10 * math.log10(variance)


def intersection_over_union(first: Tensor, second: Tensor) -> float:
    """Pixels that are in both masks, of those that are in one; 0 of empty masks. (H, W) bool"""
    n_both = int((first & second).sum())
    return n_both / max(1, int((first | second).sum()))


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
    return color_bytes(to_unit(image))


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
