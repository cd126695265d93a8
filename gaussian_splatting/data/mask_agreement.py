# SPDX-License-Identifier: Apache-2.0
"""Masks that contradict each other, and how precise masks are.

For each view the visual hull of the other views is compared with its mask. A low intersection over
union (IoU) means a wrong pose or mask; how far masks reach beyond the hull is their precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera, pixels_of
from gaussian_splatting.data.images import COUNTS, dilated, eroded
from gaussian_splatting.data.masks import overview
from gaussian_splatting.data.observations import far_below

SIDE = 256  # longest side in pixels of the masks that are compared
N_VOXELS = 56  # voxels along the longest side of the object
OUTSIDE_SHARE = 0.15  # share of the views that may show a voxel outside of their masks
EXACT = 0.1  # voxels that exact masks reach beyond the hull
ERROR_FACTOR = 2.5
"""Error of outlines over the distance that masks reach beyond the hull: most errors stay within."""

# Most below the median: IoU, standard deviations.
IOU_GAP = 0.12
IOU_SPREAD = 6.0
MAX_CONTRADICTING_SHARE = 0.34  # if more views disagree, there is no majority to compare with
MIN_MASKED_VIEWS = 6  # fewer masks are not compared
_MIN_VOTERS = 3  # views that must show a voxel
_INSIDE_SHARE = 0.7  # of the views that show a point, if it is of the object
_MIN_OBJECT_POINTS = 30
_MARGIN = 0.15  # around the points of the object, of its size
_ROUNDS = 2


@dataclass(frozen=True)
class MaskAgreement:
    """The result of comparing masks."""

    iou: dict[str, float]  # of each mask with the hull of the other views
    inconsistent: dict[str, str]  # reasons by view
    outline_error: float  # mean, as a share of the longest side; 0 below the resolution


class _MaskFit(NamedTuple):
    """A mask compared with the hull of the other views."""

    iou: float
    beyond: float  # how many pixels the mask reaches beyond the hull


class _Grid(NamedTuple):
    """Voxels around the object."""

    centers: Tensor  # (V, 3) float32 world units
    pitch: float  # distance of neighbouring centres


def mask_agreement(cameras: Sequence[Camera], points: np.ndarray) -> MaskAgreement | None:
    """Compare masks, at the size of their images, with the visual hull of the others.

    Args:
        points: Of the reconstruction; they locate the object. (P, 3) world units

    Returns:
        None with too few masks, or too few points inside of them.
    """
    views = [_View(camera) for camera in cameras if camera.shows_object]
    if len(views) < MIN_MASKED_VIEWS or len(points) < _MIN_OBJECT_POINTS:
        return None
    grid = _grid_around_object(views, torch.from_numpy(points))
    if grid is None:
        return None
    inconsistent: dict[str, str] = {}
    for _ in range(_ROUNDS):
        # The second round is without the views that disagreed in the first.
        fits = _compare_with_hull(views, grid, inconsistent)
        iou = {name: fit.iou for name, fit in fits.items()}
        previous = inconsistent
        inconsistent = _outliers(iou)
        if inconsistent.keys() == previous.keys():
            break
        if len(inconsistent) > MAX_CONTRADICTING_SHARE * len(views):
            return MaskAgreement(iou, {}, 0.0)
    error = _outline_error(views, grid, fits, inconsistent)
    return MaskAgreement(iou, inconsistent, error)


def _compare_with_hull(
    views: Sequence[_View], grid: _Grid, inconsistent: dict[str, str]
) -> dict[str, _MaskFit]:
    """Compare each mask with the hull of the other views, without inconsistent ones."""
    hull = _Hull(grid.centers, [v for v in views if v.camera.name not in inconsistent])
    fits = {}
    for view in views:
        name = view.camera.name
        silhouette = hull.silhouette(view, grid.pitch, is_member=name not in inconsistent)
        fits[name] = _compare(view.mask, silhouette)
    return fits


def _outline_error(
    views: Sequence[_View],
    grid: _Grid,
    fits: dict[str, _MaskFit],
    inconsistent: dict[str, str],
) -> float:
    """Return the mean error of outlines, as a share of the longest side; 0 for exact masks."""
    voxel_sizes = [view.pixels_per_unit(grid.centers) * grid.pitch for view in views]
    voxel = float(np.median(voxel_sizes))
    distances = [fit.beyond for name, fit in fits.items() if name not in inconsistent]
    beyond = float(np.median(distances))
    if not beyond > EXACT * voxel:
        return 0.0
    return round(ERROR_FACTOR * beyond / SIDE, 4)


class _View:
    """A camera at the size of its small mask, and the mask, (H, W) bool."""

    def __init__(self, camera: Camera) -> None:
        self.camera = camera.reduced(SIDE)
        values = torch.from_numpy(overview(camera).copy())[None, None].float()
        size = self.camera.shape
        shares = functional.interpolate(values, size, mode="area")[0, 0]
        self.mask = shares >= COUNTS

    def pixels(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the flat index of the pixel of each point, and whether it is in the image.

        (N, 3) world units -> (N,) int64, (N,) bool
        """
        camera = self.camera
        pixels = pixels_of(camera.coordinates(points), camera)
        return pixels.rows * camera.width + pixels.columns, pixels.inside

    def pixels_per_unit(self, points: Tensor) -> float:
        """Pixels of a world unit at the mean of the points; 0 behind the camera."""
        camera = self.camera
        center = points.double().mean(dim=0).numpy()
        depth = float(center @ camera.rotation[2] + camera.translation[2])
        return max(camera.fx, camera.fy) / depth if depth > 0 else 0.0


class _Hull:
    """Votes of some views about voxels."""

    def __init__(self, voxels: Tensor, views: Sequence[_View]) -> None:
        self._voxels = voxels
        # Views that show a voxel, and those that show it inside of their mask. (V,) int16
        self.n_shown = torch.zeros(len(voxels), dtype=torch.int16, device="cpu")
        self.n_inside = torch.zeros_like(self.n_shown)
        for view in views:
            index, is_shown = view.pixels(voxels)
            self.n_shown += is_shown
            self.n_inside += is_shown & view.mask.flatten()[index]

    def silhouette(self, view: _View, pitch: float, is_member: bool) -> Tensor:
        """Draw the hull of the other views as a view shows it. (H, W) bool

        Args:
            is_member: Whether the view is one of the hull's, whose votes are taken out.
        """
        index, is_shown = view.pixels(self._voxels)
        n_shown = self.n_shown
        n_inside = self.n_inside
        if is_member:
            is_inside = is_shown & view.mask.flatten()[index]
            n_shown = n_shown - is_shown.to(n_shown.dtype)
            n_inside = n_inside - is_inside.to(n_inside.dtype)
        is_in_hull = n_inside >= (1 - OUTSIDE_SHARE) * n_shown
        is_solid = is_shown & (n_shown >= _MIN_VOTERS) & is_in_hull
        camera = view.camera
        image = torch.zeros(camera.n_pixels, dtype=torch.bool, device="cpu")
        image[index[is_solid]] = True
        image = image.view(camera.height, camera.width)
        if not bool(is_solid.any()):
            return image
        # Voxels are further apart than pixels: close the gaps between their centres.
        gap = math.ceil(view.pixels_per_unit(self._voxels[is_solid]) * pitch)
        return eroded(dilated(image, (gap + 1) // 2), gap // 2)


def _grid_around_object(views: Sequence[_View], points: Tensor) -> _Grid | None:
    """Return voxels around the points that most masks contain; None with too few points."""
    votes = _Hull(points, views)
    is_inside = votes.n_inside >= _INSIDE_SHARE * votes.n_shown
    object_points = points[(votes.n_shown >= _MIN_VOTERS) & is_inside]
    if len(object_points) < _MIN_OBJECT_POINTS:
        return None
    low, high = np.quantile(object_points.numpy(), (0.01, 0.99), axis=0)
    size = float((high - low).max())
    pitch = size * (1 + 2 * _MARGIN) / N_VOXELS
    if not pitch > 0:
        return None
    low = low - _MARGIN * size
    high = high + _MARGIN * size
    axes = []
    for start, end in zip(low, high, strict=True):
        first = float(start) + pitch / 2
        axes.append(torch.arange(first, float(end), pitch, dtype=torch.float32, device="cpu"))
    centers = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    return _Grid(centers.reshape(-1, 3), pitch)


def _compare(mask: Tensor, silhouette: Tensor) -> _MaskFit:
    """Compare a mask with the hull of the other views. (H, W), (H, W) bool"""
    n_union = int((mask | silhouette).sum())
    n_common = int((mask & silhouette).sum())
    n_outline = int((mask & ~eroded(mask, 1)).sum())
    n_beyond = int((mask & ~silhouette).sum())
    return _MaskFit(n_common / max(n_union, 1), n_beyond / max(n_outline, 1))


def _outliers(iou: dict[str, float]) -> dict[str, str]:
    middle, low = far_below(iou, IOU_GAP, IOU_SPREAD)
    what = "its mask contradicts the others, IoU"
    return {name: f"{what} {value:.2f} instead of {middle:.2f}" for name, value in low.items()}
