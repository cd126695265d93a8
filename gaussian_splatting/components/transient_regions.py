# SPDX-License-Identifier: Apache-2.0
"""Transient regions: parts of an image that contradict all other images.

Where the residual of one view stands far out of what is usual at the same place, see
:mod:`.view_residuals`, something stood in front there, or a shadow fell, while that photograph was
taken.

Robust statistics of residuals with box smoothing follow RobustNeRF (Sabour et al. 2023); that the
places of a scene have distributions of their own, over views instead of over the pixels of one
image, needs a model of Gaussians and no learned features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gaussian_splatting.components.view_residuals import (
    MIN_WEIGHT,
    SOLID,
    ComparedView,
    ResidualsOverViews,
)
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import WARP, Rasterizer, rasterize
from gaussian_splatting.rasterization.render import weight_sums
from sugar_utils.device import float32_tensor, upload

SIDE = 160  # longest side in pixels at which photographs and renders are compared
WEAK = 0.07  # residual to which a region reaches
WEAK_RATIO = 1.2  # the same as a multiple of what is usual at the place
FLOOR = 0.02  # added to usual residuals: below, differences are those of bytes and noise
MIN_AREA = 0.006  # of the image, that is strong in a region
KEPT = 0.6  # of the least area and share of a new region, for one that was found before
FEW_VIEWS = 0.05  # of all, with regions; if fewer have some, nothing moves, and the model errs
# Of all views: with regions beyond doubt, or with regions of the lower limits. There is more that
# is transient than what is beyond doubt.
MANY_VIEWS = 0.1
MANY_EXPECTED = 0.2
N_NEIGHBORS = 6  # views from nearly the same place that are asked about a region
MIN_COVERED = 0.3  # of a region's pixels, that a neighbour must show of the same surface
MIN_NEIGHBORS = 2  # that must show it
MAX_SHARE = 0.6  # of a photograph; if more would go, the view as a whole is at fault
THINNEST = 2  # half of the least width of a region in pixels; edges that are off are thinner
CLOSING = 2  # half of the width in pixels of gaps that are closed
MARGIN = 1  # pixels around a region that are masked, too


@dataclass(frozen=True)
class Sensitivity:
    """Limits from which on a region is taken for transient."""

    strong: float  # residual, mean of the channels, 0 to 1, that a share of its pixels has
    ratio: float  # the same as a multiple of what is usual at the place
    share: float  # of its pixels that are strong in both ways
    max_common: float  # share of its residual that neighbouring views may have there


DOUBTING = Sensitivity(strong=0.16, ratio=2.0, share=0.5, max_common=0.4)
EXPECTING = Sensitivity(strong=0.11, ratio=1.7, share=0.35, max_common=0.55)

Masks = Mapping[str, np.ndarray]
"""Transient pixels by name of view, (h, w) bool, of at most SIDE pixels; views without are left
out."""


def candidate_regions(
    views: Sequence[ComparedView], usual: Masks, earlier: Masks, sensitivity: Sensitivity
) -> Masks:
    """Find the pixels of all views whose residual is unusual for their surface.

    Args:
        usual: Usual residuals by name of view; nan where a place has none. (h, w)
        earlier: Regions that were found before; they stay while the residual is not small.
    """
    candidates = {}
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
            candidates[name] = region
    return candidates


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


def find_transients(
    gaussians: Gaussians,
    cameras: Sequence[Camera],
    compare: Callable[[Gaussians, Camera], ComparedView],
    earlier: Masks,
    rasterizer: Rasterizer = WARP,
) -> Masks:
    """Find transient pixels in the images of all cameras.

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
    usual_by_view = residuals.usual(view.camera for view in views)
    usual = {view.camera.name: image for view, image in zip(views, usual_by_view, strict=True)}

    def found_with(sensitivity: Sensitivity) -> Masks:
        candidates = candidate_regions(views, usual, earlier, sensitivity)
        return _confirmed(gaussians, views, candidates, sensitivity.max_common, rasterizer)

    beyond_doubt = found_with(DOUBTING)
    expected = found_with(EXPECTING)
    n_views = len(views)
    if len(beyond_doubt) >= MANY_VIEWS * n_views or len(expected) >= MANY_EXPECTED * n_views:
        return expected
    if not earlier and len(beyond_doubt) < FEW_VIEWS * n_views:
        return {}
    return beyond_doubt


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
    neighborhood = _Neighborhood(views)
    for view in views:
        name = view.camera.name
        if name not in candidates:
            continue
        labels, n_regions = _labelled(candidates[name])
        regions = np.arange(1, n_regions + 1)[:, None, None] == labels
        neighbors = neighborhood.of(view)
        common = _common_residuals(gaussians, view, regions, neighbors, rasterizer)
        means = np.array([view.residual[region].mean() for region in regions])
        is_transient = common < max_common * means
        if is_transient.any():
            confirmed[name] = regions[is_transient].any(axis=0)
    return confirmed


@torch.no_grad()
def _common_residuals(
    gaussians: Gaussians,
    view: ComparedView,
    regions: np.ndarray,
    neighbors: Sequence[ComparedView],
    rasterizer: Rasterizer,
) -> np.ndarray:
    """Median over neighbouring views of the residual where they show the surface of regions.

    Args:
        regions: Of the view. (R, h, w) bool

    Returns:
        (R,); infinity where too few neighbours show the surface.
    """
    inside = float32_tensor(regions).permute(1, 2, 0)
    pixels = torch.cat([inside, torch.ones_like(inside[..., :1])], dim=-1)
    device = gaussians.means.device
    with torch.enable_grad():
        sums = weight_sums(gaussians, view.camera, upload(pixels, device), rasterizer)
    shares = sums[:, :-1] / sums[:, -1:].clamp_min(MIN_WEIGHT)
    residuals: list[list[float]] = [[] for _ in regions]
    for other in neighbors:
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


class _Neighborhood:
    """Finds the views that look most alike: from a near place, in nearly the same direction."""

    def __init__(self, views: Sequence[ComparedView]) -> None:
        self._views = views
        self._centers = np.stack([view.camera.center for view in views])
        self._forward = np.stack([view.camera.rotation[2] for view in views])

    def of(self, view: ComparedView) -> list[ComparedView]:
        """Return the nearest neighbours of a view, the nearest first."""
        distance = np.linalg.norm(self._centers - view.camera.center, axis=1)
        turn = np.linalg.norm(self._forward - view.camera.rotation[2], axis=1)
        apart = distance / max(float(np.median(distance)), 1e-12) + turn
        order = np.argsort(apart, kind="stable")[: N_NEIGHBORS + 1]
        nearest = [self._views[row] for row in order if self._views[row] is not view]
        return nearest[:N_NEIGHBORS]
