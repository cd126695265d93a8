# SPDX-License-Identifier: Apache-2.0
"""Regions of photographs that show what no other photograph shows at the same place.

A photograph, in the exposure that fits it best to the render, leaves a residual. What is hard to
render leaves one in all views: of each Gaussian there is a distribution of the residuals of the
views that see it. Where the residual of one view stands far out of it, something stood in front
there, or a shadow fell, while that photograph was taken.

Robust statistics of residuals with box smoothing follow RobustNeRF (Sabour et al. 2023); that the
places of a scene have distributions of their own, over views instead of over the pixels of one
image, needs a model of Gaussians and no learned features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.rasterization import WARP, Rasterizer, plain_background, rasterize
from gaussian_splatting.rasterization.render import weight_sums
from sugar_utils.device import upload

SIDE = 160  # longest side in pixels at which photographs and renders are compared
SMOOTHING = 5  # side of the box in pixels over which residuals are averaged
SOLID = 0.5  # opacity from which a pixel shows a surface, and not a sky that may flicker
WEAK = 0.07  # residual to which a region reaches
WEAK_RATIO = 1.2  # the same as a multiple of what is usual at the place
USUAL_SHARE = 0.75  # of the views that see a place have its usual residual or less
FLOOR = 0.02  # added to usual residuals: below, differences are those of bytes and noise
MIN_VIEWS = 4  # that must see a place before it has a usual residual
MIN_AREA = 0.006  # of the image, that is strong in a region
KEPT = 0.6  # of the least area and share of a new region, for one that was found before
FEW_VIEWS = 0.05  # of all, with regions; if fewer have some, nothing moves, and the model errs
MANY_VIEWS = 0.1  # of all, with regions: a capture of which more is transient than is beyond doubt
N_NEIGHBORS = 6  # views from nearly the same place that are asked about a region
MIN_COVERED = 0.3  # of a region's pixels, that a neighbour must show of the same surface
MIN_NEIGHBORS = 2  # that must show it
MAX_SHARE = 0.6  # of a photograph; if more would go, the view as a whole is at fault
THINNEST = 2  # half of the least width of a region in pixels; edges that are off are thinner
CLOSING = 2  # half of the width in pixels of gaps that are closed
MARGIN = 1  # pixels around a region that are masked, too
N_BLOCKS = 3  # along each side of an image, that exposures are guessed from
TRIMMED_SHARES = (0.5, 0.6, 0.7, 0.7)  # of the pixels that stay, in each round of a fit
_BINS = 32  # of a distribution, of equal ratios
_LEAST = 0.005  # residual; all that is smaller is in the first bin
_MIN_WEIGHT = 5e-3  # pixels of a Gaussian that a view must show to count
_MIN_VARIANCE = 1e-6


@dataclass(frozen=True)
class Sensitivity:
    """What a region needs to be taken for transient."""

    strong: float  # residual, mean of the channels, 0 to 1, that a share of its pixels has
    ratio: float  # the same as a multiple of what is usual at the place
    share: float  # of its pixels that are strong in both ways
    max_common: float  # share of its residual that neighbouring views may have there


DOUBTING = Sensitivity(strong=0.16, ratio=2.0, share=0.5, max_common=0.4)
EXPECTING = Sensitivity(strong=0.11, ratio=1.7, share=0.35, max_common=0.55)

Masks = Mapping[str, np.ndarray]
"""Transient pixels by name of view, (h, w) bool, of at most SIDE pixels; views without are left
out."""


@dataclass(frozen=True)
class ComparedView:
    """A small copy of a photograph, compared with the render of its camera."""

    camera: Camera  # small
    residual: np.ndarray  # smoothed, mean of the channels, 0 to 1, (h, w) float32
    is_usable: np.ndarray  # pixels that count, and show a surface, (h, w) bool


def candidate_regions(
    views: Sequence[ComparedView], usual: Masks, earlier: Masks, sensitivity: Sensitivity
) -> Masks:
    """Find the pixels of all views that differ from what is usual at their places.

    Args:
        usual: Usual residuals by name of view; nan where a place has none. (h, w)
        earlier: Regions that were found before; they stay while the residual is not small.
    """
    found = {}
    for view in views:
        name = view.camera.name
        ratio = view.residual / (usual[name] + FLOOR)
        ratio = np.where(view.is_usable & np.isfinite(ratio), ratio, 0.0)
        is_weak = (view.residual > WEAK) & (ratio > WEAK_RATIO)
        is_strong = (view.residual > sensitivity.strong) & (ratio > sensitivity.ratio)
        before: np.ndarray = earlier.get(name, np.zeros(is_weak.shape, bool))
        is_hidden = before & ~view.is_usable
        region = _grown(is_strong | is_hidden, is_weak | is_hidden, before, sensitivity.share)
        if region.any() and region.mean() <= MAX_SHARE:
            found[name] = region
    return found


def _grown(
    is_strong: np.ndarray, is_weak: np.ndarray, before: np.ndarray, strong_share: float
) -> np.ndarray:
    """Regions of weak pixels that hold enough strong ones, closed and with a margin. (h, w) bool

    Args:
        before: Where regions were found before, for which fewer are enough.
    """
    # Here and not above: it takes a tenth of the time in which a command starts.
    from scipy import ndimage

    thick = ndimage.binary_opening(is_weak, iterations=THINNEST)
    labels, n_regions = _labelled(thick)
    if n_regions == 0:
        return np.zeros(is_weak.shape, bool)
    n_pixels = np.bincount(labels.ravel(), minlength=n_regions + 1)
    n_strong = np.bincount(labels[is_strong], minlength=n_regions + 1)
    n_before = np.bincount(labels[before], minlength=n_regions + 1)
    enough = np.maximum(MIN_AREA * is_weak.size, strong_share * n_pixels)
    is_kept = n_strong >= np.where(n_before > n_pixels / 2, KEPT, 1.0) * enough
    is_kept[0] = False
    region = is_kept[labels]
    region |= np.asarray(ndimage.binary_dilation(region, iterations=THINNEST)) & is_weak
    # A closing reaches the border of the image only where there is something beyond it.
    padded = np.pad(region, CLOSING + 1, mode="edge")
    closed = np.asarray(ndimage.binary_closing(padded, iterations=CLOSING))
    inner = slice(CLOSING + 1, -CLOSING - 1)
    region |= closed[inner, inner]
    return np.asarray(ndimage.binary_dilation(region, iterations=MARGIN))


def _labelled(mask: np.ndarray) -> tuple[np.ndarray, int]:
    """Numbers of the connected regions of a mask, from 1, (h, w), and how many there are."""
    from scipy import ndimage

    labels = np.zeros(mask.shape, np.int32)
    n_regions = ndimage.label(mask, output=labels)
    return labels, int(n_regions)  # pyright: ignore[reportArgumentType]  a number with an output


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
    x = photograph[is_kept]
    y = render[is_kept]
    mean_x = x.mean(axis=0)
    mean_y = y.mean(axis=0)
    variance = ((x - mean_x) ** 2).mean(axis=0)
    covariance = ((x - mean_x) * (y - mean_y)).mean(axis=0)
    is_flat = variance < _MIN_VARIANCE
    gain = np.where(is_flat, 1.0, covariance / np.maximum(variance, _MIN_VARIANCE))
    return mean_y + gain * (photograph - mean_x)


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
        usable = torch.from_numpy(view.is_usable.astype(np.float32))
        pixels = torch.stack([torch.from_numpy(view.residual) * usable, usable], dim=-1)
        on_device = upload(pixels, self._counts.device)
        sums = weight_sums(self._gaussians, view.camera, on_device, self._rasterizer)
        rows = torch.nonzero(sums[:, 1] >= _MIN_WEIGHT)[:, 0]
        mean = sums[rows, 0] / sums[rows, 1]
        octave = torch.log(mean.clamp_min(_LEAST) / _LEAST) / -np.log(_LEAST)
        bins = (octave * (_BINS - 1)).round().long().clamp(0, _BINS - 1)
        # Every Gaussian has one entry, so the order of the additions does not matter.
        self._counts[rows, bins] += 1

    @torch.no_grad()
    def usual(self, camera: Camera) -> np.ndarray:
        """The usual residual of what a view shows; nan where too few views do. (h, w)"""
        blended = rasterize(
            self._gaussians, camera, rgb=False, features=self._features, rasterizer=self._rasterizer
        )
        alpha = blended.alpha.clamp_min(_MIN_WEIGHT)
        usual, is_known = (blended.features / alpha[..., None]).cpu().numpy().transpose(2, 0, 1)
        return np.where(is_known > SOLID, usual / np.maximum(is_known, SOLID), np.nan)

    @property
    def _features(self) -> Tensor:
        """Usual residual, or 0, and 1 where enough views see a Gaussian. (N, 2)"""
        cumulated = self._counts.cumsum(dim=1, dtype=torch.int32)
        n_views = cumulated[:, -1:]
        is_known = (n_views >= MIN_VIEWS).float()
        below = cumulated < USUAL_SHARE * n_views
        bins = below.sum(dim=1, keepdim=True).float()
        usual = _LEAST ** (1 - bins / (_BINS - 1))
        return torch.cat([usual * is_known, is_known], dim=1)


def find_transients(
    gaussians: Gaussians,
    cameras: Sequence[Camera],
    compare: Callable[[Gaussians, Camera], ComparedView],
    earlier: Masks,
    rasterizer: Rasterizer = WARP,
) -> Masks:
    """Find what is transient in the photographs of all cameras.

    Args:
        compare: Compares the photograph of a camera with its render, as :func:`compared` does.
        earlier: Regions that were found before.
    """
    residuals = ResidualsOverViews(gaussians, rasterizer)
    views = []
    for camera in cameras:
        view = compare(gaussians, camera)
        residuals.add(view)
        views.append(view)
    usual = {view.camera.name: residuals.usual(view.camera) for view in views}
    found: Masks = {}
    for sensitivity in (DOUBTING, EXPECTING):
        candidates = candidate_regions(views, usual, earlier, sensitivity)
        found = _confirmed(gaussians, views, candidates, sensitivity.max_common, rasterizer)
        if not earlier and len(found) < FEW_VIEWS * len(views):
            return {}
        if len(found) < MANY_VIEWS * len(views):
            break
    return found


def _confirmed(
    gaussians: Gaussians,
    views: Sequence[ComparedView],
    candidates: Masks,
    max_common: float,
    rasterizer: Rasterizer,
) -> Masks:
    """The regions whose surface the neighbouring views fit well.

    Gloss, and geometry that is wrong from one side, are the same in views from nearly one place.
    """
    confirmed = {}
    for view in views:
        name = view.camera.name
        if name not in candidates:
            continue
        labels, n_regions = _labelled(candidates[name])
        regions = np.arange(1, n_regions + 1)[:, None, None] == labels
        common = _common_residuals(gaussians, view, regions, views, rasterizer)
        own = np.array([view.residual[region].mean() for region in regions])
        is_transient = common < max_common * own
        if is_transient.any():
            confirmed[name] = regions[is_transient].any(axis=0)
    return confirmed


@torch.no_grad()
def _common_residuals(
    gaussians: Gaussians,
    view: ComparedView,
    regions: np.ndarray,
    views: Sequence[ComparedView],
    rasterizer: Rasterizer,
) -> np.ndarray:
    """Median over neighbouring views of the residual where they show the surface of regions.

    Args:
        regions: Of the view. (R, h, w) bool

    Returns:
        (R,); infinity where too few neighbours show the surface.
    """
    inside = torch.from_numpy(regions.astype(np.float32)).permute(1, 2, 0)
    pixels = torch.cat([inside, torch.ones_like(inside[..., :1])], dim=-1)
    device = gaussians.means.device
    with torch.enable_grad():
        sums = weight_sums(gaussians, view.camera, upload(pixels, device), rasterizer)
    shares = sums[:, :-1] / sums[:, -1:].clamp_min(_MIN_WEIGHT)
    residuals: list[list[float]] = [[] for _ in regions]
    for other in _neighbors(view, views):
        blended = rasterize(
            gaussians, other.camera, rgb=False, features=shares, rasterizer=rasterizer
        ).features
        for row, is_there in enumerate(blended.permute(2, 0, 1).cpu().numpy() > SOLID):
            is_there &= other.is_usable
            if is_there.sum() >= MIN_COVERED * regions[row].sum():
                residuals[row].append(float(other.residual[is_there].mean()))
    medians = []
    for of_region in residuals:
        is_known = len(of_region) >= MIN_NEIGHBORS
        medians.append(float(np.median(of_region)) if is_known else np.inf)
    return np.array(medians)


def _neighbors(view: ComparedView, views: Sequence[ComparedView]) -> list[ComparedView]:
    """The views that look most alike: from a near place, in nearly the same direction."""
    centers = np.stack([other.camera.center for other in views])
    forward = np.stack([other.camera.rotation[2] for other in views])
    distance = np.linalg.norm(centers - view.camera.center, axis=1)
    turn = np.linalg.norm(forward - view.camera.rotation[2], axis=1)
    apart = distance / max(float(np.median(distance)), 1e-12) + turn
    order = np.argsort(apart, kind="stable")
    nearest = [views[row] for row in order if views[row] is not view]
    return nearest[:N_NEIGHBORS]
