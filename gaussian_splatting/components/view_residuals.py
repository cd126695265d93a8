# SPDX-License-Identifier: Apache-2.0
"""Residuals between images and renders, and the usual residual of each Gaussian over its views.

A photograph, in the exposure that fits it best to the render, leaves a residual. What is hard to
render leaves one in all views: of each Gaussian there is a distribution of the residuals of the
views that see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.losses.exposure import fit_gain_and_offset
from gaussian_splatting.rasterization import WARP, Rasterizer, plain_background, rasterize
from gaussian_splatting.rasterization.render import weight_sums
from sugar_utils.device import float32_tensor, upload

SMOOTHING = 5  # side of the box in pixels over which residuals are averaged
SOLID = 0.5  # opacity from which a pixel shows a surface, and not a sky that may flicker
USUAL_SHARE = 0.75  # of the views that see a place have its usual residual or less
MIN_VIEWS = 4  # that must see a place before it has a usual residual
MIN_WEIGHT = 5e-3  # pixels of a Gaussian that a view must show to count
N_BLOCKS = 3  # along each side of an image, that exposures are guessed from
TRIMMED_SHARES = (0.5, 0.6, 0.7, 0.7)  # of the pixels that stay, in each round of a fit
_BINS = 32  # of a distribution, of equal ratios
_LEAST = 0.005  # residual; all that is smaller is in the first bin


@dataclass(frozen=True)
class ComparedView:
    """A small copy of a photograph, compared with the render of its camera."""

    camera: Camera  # small
    residual: np.ndarray  # smoothed, mean of the channels, 0 to 1, (h, w) float32
    is_usable: np.ndarray  # pixels that count, and show a surface, (h, w) bool


@torch.no_grad()
def compared(
    gaussians: Gaussians,
    camera: Camera,
    photograph: Tensor,
    *,
    white: bool,
    sh_degree: int,
    rasterizer: Rasterizer = WARP,
) -> ComparedView:
    """Compare a small photograph, (h, w, 3) or (h, w, 4) uint8, with the render of its camera."""
    background = plain_background(white, gaussians.means.device)
    output = rasterize(gaussians, camera, background, sh_degree=sh_degree, rasterizer=rasterizer)
    render = output.image.clamp(0, 1).cpu().numpy().astype(np.float64)
    is_usable = (output.alpha > SOLID).cpu().numpy()
    counted = is_counted(photograph)
    if counted is not None:
        is_usable &= counted.cpu().numpy()
    pixels = photograph[..., :3].cpu().numpy() / 255.0
    difference = _as_exposed(pixels, render, is_usable) - render
    return ComparedView(camera, _smoothed(difference), is_usable)


def _as_exposed(photograph: np.ndarray, render: np.ndarray, is_usable: np.ndarray) -> np.ndarray:
    """A photograph with the gain and offset per channel that bring most of it to a render.

    All are (h, w, 3) float64. A shadow over a third of a photograph spoils a fit to all of it. So
    the first guess is the one, of the whole and of blocks, that fits half of the pixels best; then
    each round of least squares leaves out the pixels that fit worst.
    """
    if not is_usable.any():
        return photograph
    guesses = [_fitted(photograph, render, part) for part in _parts(is_usable)]
    errors = [np.abs(guess - render).mean(axis=-1) for guess in guesses]
    medians = [np.median(error[is_usable]) for error in errors]
    fitted = guesses[int(np.argmin(medians))]
    for share in TRIMMED_SHARES:
        error = np.abs(fitted - render).mean(axis=-1)
        is_kept = is_usable & (error <= np.quantile(error[is_usable], share))
        fitted = _fitted(photograph, render, is_kept)
    return fitted


def _parts(is_usable: np.ndarray) -> list[np.ndarray]:
    """Usable pixels of an image, and those of each of its blocks. (h, w) bool"""
    parts = [is_usable]
    for rows in np.array_split(np.arange(is_usable.shape[0]), N_BLOCKS):
        for columns in np.array_split(np.arange(is_usable.shape[1]), N_BLOCKS):
            part = np.zeros_like(is_usable)
            part[np.ix_(rows, columns)] = is_usable[np.ix_(rows, columns)]
            if part.any():
                parts.append(part)
    return parts


def _fitted(photograph: np.ndarray, render: np.ndarray, is_kept: np.ndarray) -> np.ndarray:
    """A photograph with the gain and offset that fit its kept pixels best to a render."""
    pixels = torch.from_numpy(photograph[is_kept])[:, None]
    target = torch.from_numpy(render[is_kept])[:, None]
    gain, offset = fit_gain_and_offset(pixels, target)
    return photograph * gain.numpy() + offset.numpy()


def _smoothed(difference: np.ndarray) -> np.ndarray:
    """Mean absolute value over the channels of box means. (h, w, 3) -> (h, w) float32

    Means have signs: detail that the render lacks cancels in them.
    """
    planes = torch.from_numpy(difference).permute(2, 0, 1)[None]
    half = SMOOTHING // 2
    means = functional.avg_pool2d(planes, SMOOTHING, 1, half, count_include_pad=False)
    return means[0].abs().mean(dim=0).numpy().astype(np.float32)


class ResidualsOverViews:
    """Distribution over views of the residual at each of N Gaussians, as counts in bins. (N, 32)"""

    def __init__(self, gaussians: Gaussians, rasterizer: Rasterizer = WARP) -> None:
        self._gaussians = gaussians
        self._rasterizer = rasterizer
        device = gaussians.means.device
        self._counts = torch.zeros(len(gaussians), _BINS, dtype=torch.int16, device=device)

    def add(self, view: ComparedView) -> None:
        """Count a view at all Gaussians that it shows, with its mean residual there."""
        usable = float32_tensor(view.is_usable)
        pixels = torch.stack([torch.from_numpy(view.residual) * usable, usable], dim=-1)
        on_device = upload(pixels, self._counts.device)
        sums = weight_sums(self._gaussians, view.camera, on_device, self._rasterizer)
        rows = torch.nonzero(sums[:, 1] >= MIN_WEIGHT)[:, 0]
        mean = sums[rows, 0] / sums[rows, 1]
        octave = torch.log(mean.clamp_min(_LEAST) / _LEAST) / -np.log(_LEAST)
        bins = (octave * (_BINS - 1)).round().long().clamp(0, _BINS - 1)
        # Every Gaussian has one entry, so the order of the additions does not matter.
        self._counts[rows, bins] += 1

    @torch.no_grad()
    def usual(self, cameras: Iterable[Camera]) -> Iterator[np.ndarray]:
        """Yield the usual residual of each view's pixels; nan where few views show them. (h, w)"""
        features = self._features()
        for camera in cameras:
            blended = rasterize(
                self._gaussians,
                camera,
                rgb=False,
                features=features,
                rasterizer=self._rasterizer,
            )
            alpha = blended.alpha.clamp_min(MIN_WEIGHT)
            usual, is_known = (blended.features / alpha[..., None]).cpu().numpy().transpose(2, 0, 1)
            yield np.where(is_known > SOLID, usual / np.maximum(is_known, SOLID), np.nan)

    def _features(self) -> Tensor:
        """Usual residual, or 0, and 1 where enough views see a Gaussian. (N, 2)"""
        cumulated = self._counts.cumsum(dim=1, dtype=torch.int32)
        n_views = cumulated[:, -1:]
        is_known = (n_views >= MIN_VIEWS).float()
        below = cumulated < USUAL_SHARE * n_views
        bins = below.sum(dim=1, keepdim=True).float()
        usual = _LEAST ** (1 - bins / (_BINS - 1))
        return torch.cat([usual * is_known, is_known], dim=1)
