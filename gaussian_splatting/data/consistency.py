# SPDX-License-Identifier: Apache-2.0
"""Which views of a capture contradict the others, and the masks of the views that stay.

Views with a wrong pose, image or mask are left out of training; held-out ones are measured apart.
For each view the visual hull of the other views is compared with its mask. A low intersection over
union (IoU) means a wrong pose or mask; how far masks reach beyond the hull is their precision.

An image of another place does not correlate with the mean colours of the points that it observes;
an overexposed one differs by stops; a blurred one is far less sharp than the others.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data import images as pictures
from gaussian_splatting.data import masks as masking
from gaussian_splatting.data import observations as tracks
from gaussian_splatting.data.cameras import Camera, camera_extent, pixels_of
from gaussian_splatting.data.names import nearest_name
from gaussian_splatting.data.observations import Observations, ViewOptions, deviation, median
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.files import file_digest, in_parallel

LONGEST_SIDE = 640  # pixels, at which images are compared
MIN_CORRELATION = 0.75
CORRELATION_GAP = 0.15
CORRELATION_SPREAD = 8.0
"""An image is inconsistent below the first, if it also lies so far below the median image, and so
many standard deviations."""

MIN_MEDIAN_CORRELATION = 0.6  # if the median image is below, the colours of the points tell nothing
# of the exposure: stops, standard deviations
MAX_STOPS = 1.25
STOPS_SPREAD = 5.0
N_EXPOSURE_NEIGHBORS = 3  # neighbouring views with whose mean exposure a view is compared
MIN_SHARPNESS = 0.5  # least sharpness, as a share of that of the median image
MIN_MEDIAN_SHARPNESS = 0.25  # if the median image is below, there is too little detail to tell
MOST_FAILING = 0.25  # if a check fails for more of the images, it is the check that does not apply
_BLUR_WIDTH = 9
_MIN_SEEN_POINTS = 20
_DARK = 16
_BRIGHT = 160
_GAMMA = 2.2

SIDE = 256  # longest side in pixels of the masks that are compared
N_VOXELS = 56  # voxels along the longest side of the object
OUTSIDE_SHARE = 0.15  # share of the views that may show a voxel outside of their masks
EXACT = 0.1
ERROR_FACTOR = 2.5
"""How far masks reach beyond the hull, in voxels, although they are exact; and how many times that
distance their outlines are off, because most errors stay within the hull."""
# most below the median: IoU, standard deviations
IOU_GAP = 0.12
IOU_SPREAD = 6.0
MAX_SHARE = 0.34  # if more views disagree, there is no majority to compare with
MIN_VIEWS = 6  # fewer masks are not compared
_INSIDE_SHARE = 0.7
_MIN_POINTS = 30
_MARGIN = 0.15
_ROUNDS = 2
_KEPT = 16  # results of checks


@dataclass(frozen=True)
class ImageStatistics:
    """What is measured of one image; nan where it cannot be."""

    correlation: float  # of the brightness with that of the observed points
    stops: float  # exposure relative to the points
    sharpness: float


def sharpness(grey: np.ndarray) -> float:
    """How much of the detail between neighbouring pixels a further blur takes away. (H, W) uint8

    A picture that is blurred already loses little by it, whatever it shows (Crété-Roffet et al.
    2007, "The blur effect"). 0 for a picture without any detail, towards 1 for a sharp one.
    """
    # Here and not above: it takes a tenth of the time in which a command starts.
    from scipy.ndimage import uniform_filter1d

    values = grey.astype(np.float32)
    shares = []
    for axis in (0, 1):
        if values.shape[axis] < 4:
            return 0.0
        # One step of 8 bits is how a smooth slope is stored, and no detail.
        detail = np.maximum(0, np.abs(np.diff(values, axis=axis)) - 1)
        blurred = uniform_filter1d(values, _BLUR_WIDTH, axis=axis, mode="nearest")
        left = np.abs(np.diff(blurred, axis=axis))
        total = float(detail.sum())
        shares.append(float(np.maximum(0, detail - left).sum()) / total if total else 0.0)
    return min(shares)


def wrong_shapes(cameras: Sequence[Camera]) -> dict[str, str]:
    """Cameras whose image file has another aspect ratio, by name, with the reason."""
    found = {}
    for camera in cameras:
        if camera.image_path is not None:
            width, height = pictures.image_size(camera.image_path)
            own = camera.width, camera.height
            if abs(width * own[1] - height * own[0]) > max(width + height, sum(own)):
                size = f"the image is {width} x {height} pixels"
                found[camera.name] = f"{size}, its camera {own[0]} x {own[1]}"
    return _trusted(found, len(cameras))


class ImageFindings(NamedTuple):
    """Results of comparing images with the points they observe."""

    # Reasons by name of the images that do not show what their cameras see.
    inconsistent: dict[str, str]
    # Standard deviations in stops; nan where they cannot be measured.
    exposure_spread: float  # of all exposures
    exposure_noise: float  # of what neighbouring views do not share


def inconsistent_images(
    cameras: Sequence[Camera], observations: Observations | None
) -> ImageFindings:
    """Compare images with the points they observe, and with each other.

    Args:
        cameras: At the size of their images. Those without an image are passed over.
        observations: Coloured points; None leaves only the sharpness and copies to be checked.
    """
    cameras = [camera for camera in cameras if camera.image_path is not None]
    measured = in_parallel(lambda camera: _measure(camera, observations), cameras)
    by_name = {c.name: m for c, m in zip(cameras, measured, strict=True)}
    checks = [_copies(cameras, by_name), _blurred(by_name)]
    if median(m.correlation for m in measured) >= MIN_MEDIAN_CORRELATION:
        checks = [_uncorrelated(by_name), _other_exposure(by_name), *checks]
    found: dict[str, str] = {}
    for check in checks:
        found = {**_trusted(check, len(cameras)), **found}
    relative = _relative_stops(by_name)
    return ImageFindings(found, deviation(relative.values()), _exposure_noise(cameras, relative))


def _exposure_noise(cameras: Sequence[Camera], stops: Mapping[str, float]) -> float:
    """Standard deviation in stops of what the exposures of neighbouring views do not share.

    An automatic exposure that follows the direction of view is a part of what a model with
    view-dependent colours learns by itself; one that jumps from view to view is not.
    """
    measured = [camera for camera in cameras if np.isfinite(stops[camera.name])]
    if len(measured) <= N_EXPOSURE_NEIGHBORS:
        return math.nan
    centers = np.stack([camera.center for camera in measured])
    axes = np.stack([camera.rotation[2] for camera in measured])
    apart = np.linalg.norm(centers[:, None] - centers, axis=2) / (camera_extent(measured) or 1.0)
    apart += np.arccos(np.clip(axes @ axes.T, -1.0, 1.0))
    np.fill_diagonal(apart, np.inf)
    values = np.array([stops[camera.name] for camera in measured])
    neighbors = apart.argsort(axis=1, kind="stable")[:, :N_EXPOSURE_NEIGHBORS]
    differences = values - values[neighbors].mean(axis=1)
    # Mean absolute deviation to standard deviation of a normal distribution, of a view and a mean.
    factor = math.sqrt(math.pi / 2.0) / math.sqrt(1.0 + 1.0 / N_EXPOSURE_NEIGHBORS)
    return float(np.abs(differences).mean() * factor)


def _trusted(found: dict[str, str], n: int) -> dict[str, str]:
    return found if len(found) <= MOST_FAILING * n else {}


def reduced_grey(camera: Camera, longest_side: int) -> tuple[Camera, np.ndarray]:
    """A camera and its photograph in grey, not larger than asked for. (H, W) uint8"""
    small = camera.reduced(longest_side)
    with pictures.open_image(camera.image_path) as image:
        # JPEG files are decoded at a fraction of their size, which takes a fraction of the time.
        image.draft("RGB", (small.width, small.height))
        colors = pictures.colors_of(image).convert("RGB")
        if colors.size != (small.width, small.height):
            colors = colors.resize((small.width, small.height), Image.Resampling.BOX)
        return small, np.asarray(colors.convert("L"))


def _measure(camera: Camera, observations: Observations | None) -> ImageStatistics:
    small, grey = reduced_grey(camera, LONGEST_SIDE)
    correlation = stops = np.nan
    seen = None if observations is None else observations.seen(small)
    if seen is not None and seen.rgb is not None and len(seen.rgb) >= _MIN_SEEN_POINTS:
        columns, rows = seen.pixels.astype(int).T
        known = seen.rgb @ (0.299, 0.587, 0.114)
        correlation, stops = _compare_colors(grey[rows, columns].astype(float), known)
    return ImageStatistics(correlation, stops, sharpness(grey))


def _compare_colors(image: np.ndarray, points: np.ndarray) -> tuple[float, float]:
    """Correlation and exposure offset in stops of an image with the points it observes."""
    if points.std() < 1.0:
        return np.nan, np.nan
    correlation = float(np.corrcoef(image, points)[0, 1]) if image.std() > 0 else 0.0
    # Bright points clip in an overexposed image, and noise decides about dark ones.
    middle = (points > _DARK) & (points < _BRIGHT)
    if middle.sum() < _MIN_SEEN_POINTS:
        return correlation, np.nan
    ratio = np.log2(np.maximum(image[middle], 1.0)) - np.log2(points[middle])
    return correlation, _GAMMA * float(np.median(ratio))


def _uncorrelated(measured: dict[str, ImageStatistics]) -> dict[str, str]:
    values = {name: m.correlation for name, m in measured.items()}
    _, low = tracks.far_below(values, CORRELATION_GAP, CORRELATION_SPREAD)
    what = "its colours do not match the points it observes, correlation"
    return {name: f"{what} {value:.2f}" for name, value in low.items() if value < MIN_CORRELATION}


def _other_exposure(measured: dict[str, ImageStatistics]) -> dict[str, str]:
    apart = _relative_stops(measured)
    limit = max(MAX_STOPS, STOPS_SPREAD * deviation(apart.values()))
    return {
        name: f"exposed {stops:+.1f} stops beside the others"
        for name, stops in apart.items()
        if abs(stops) > limit
    }


def _relative_stops(measured: dict[str, ImageStatistics]) -> dict[str, float]:
    middle = median(m.stops for m in measured.values())
    return {name: m.stops - middle for name, m in measured.items()}


def _blurred(measured: dict[str, ImageStatistics]) -> dict[str, str]:
    values = {name: m.sharpness for name, m in measured.items()}
    middle = median(values.values())
    limit = MIN_SHARPNESS * middle if middle >= MIN_MEDIAN_SHARPNESS else 0.0
    return {name: f"blurred, sharpness {x:.2f}" for name, x in values.items() if x < limit}


def _copies(cameras: Sequence[Camera], measured: dict[str, ImageStatistics]) -> dict[str, str]:
    """Images with the same bytes as another; the one that fits its points best is kept."""
    by_size: dict[int, list[Camera]] = {}
    for camera in cameras:
        by_size.setdefault(camera.image_path.stat().st_size, []).append(camera)
    same: dict[str, list[str]] = {}
    for alike in by_size.values():
        for camera in alike if len(alike) > 1 else ():
            same.setdefault(file_digest(camera.image_path), []).append(camera.name)
    found = {}
    for names in same.values():
        kept = max(names, key=lambda name: np.nan_to_num(measured[name].correlation))
        found |= {name: f"the same file as {kept}" for name in names if name != kept}
    return found


@dataclass(frozen=True)
class MaskAgreement:
    iou: dict[str, float]  # of each mask with the hull of the other views
    inconsistent: dict[str, str]  # reasons by view
    outline_error: float  # mean, as a share of the longest side; 0 below the resolution


def mask_agreement(cameras: Sequence[Camera], points: np.ndarray) -> MaskAgreement | None:
    """Compare masks, at the size of their images, with the visual hull of the others.

    Points of the reconstruction, (P, 3) in world units, tell where the object is. None if there are
    too few masks, or too few points inside of them.
    """
    views = [_View(camera) for camera in cameras if camera.shows_object]
    if len(views) < MIN_VIEWS or len(points) < _MIN_POINTS:
        return None
    grid = _grid_around_object(views, torch.from_numpy(points))
    if grid is None:
        return None
    voxels, pitch = grid
    inconsistent: dict[str, str] = {}
    for _ in range(_ROUNDS):
        # The second round is without the views that disagreed in the first.
        hull = _Hull(voxels, [v for v in views if v.camera.name not in inconsistent])
        outlines = {}
        for view in views:
            shown = hull.silhouette(view, pitch, view.camera.name not in inconsistent)
            outlines[view.camera.name] = _compare(view.mask, shown)
        iou = {name: found for name, (found, _) in outlines.items()}
        before = inconsistent
        inconsistent = _outliers(iou)
        if inconsistent.keys() == before.keys():
            break
        if len(inconsistent) > MAX_SHARE * len(views):
            return MaskAgreement(iou, {}, 0.0)
    voxel = float(np.median([view.pixels_per_unit(voxels) * pitch for view in views]))
    beyond = float(np.median([d for name, (_, d) in outlines.items() if name not in inconsistent]))
    error = round(ERROR_FACTOR * beyond / SIDE, 4) if beyond > EXACT * voxel else 0.0
    return MaskAgreement(iou, inconsistent, error)


class _View:
    """A camera at the size of its small mask, and the mask. (H, W) bool"""

    def __init__(self, camera: Camera) -> None:
        self.camera = camera.reduced(SIDE)
        values = torch.from_numpy(masking.overview(camera).copy())[None, None].float()
        size = self.camera.height, self.camera.width
        self.mask = functional.interpolate(values, size, mode="area")[0, 0] >= pictures.COUNTS

    def pixels(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Flat index of the pixel of each point, and whether the view shows it. (N,), (N,)"""
        c = self.camera
        # Sums of three products, not a matrix product, whose order depends on the machine.
        x, y, z = points.unbind(-1)
        moved = [
            x * float(row[0]) + y * float(row[1]) + z * float(row[2]) + float(offset)
            for row, offset in zip(c.rotation, c.translation, strict=True)
        ]
        found = pixels_of(torch.stack(moved, dim=-1), c)
        return found.rows * c.width + found.columns, found.inside

    def pixels_per_unit(self, points: Tensor) -> float:
        """Pixels of a world unit at the mean of the points; 0 behind the camera."""
        c = self.camera
        center = points.double().mean(dim=0).numpy()
        depth = float(center @ c.rotation[2] + c.translation[2])
        return max(c.fx, c.fy) / depth if depth > 0 else 0.0


class _Hull:
    """Votes of some views about voxels."""

    def __init__(self, voxels: Tensor, views: Sequence[_View]) -> None:
        self._voxels = voxels
        self.inside = torch.zeros(len(voxels), dtype=torch.int16, device="cpu")
        self.shown = torch.zeros_like(self.inside)
        for view in views:
            index, shown = view.pixels(voxels)
            self.shown += shown
            self.inside += shown & view.mask.flatten()[index]

    def silhouette(self, view: _View, pitch: float, voted: bool) -> Tensor:
        """The hull of the other views as a view shows it; ``voted``: it is one of the hull's."""
        index, shown = view.pixels(self._voxels)
        n = self.shown
        inside = self.inside
        if voted:
            n = n - shown.to(n.dtype)
            inside = inside - (shown & view.mask.flatten()[index]).to(n.dtype)
        solid = shown & (n > 2) & (inside >= (1 - OUTSIDE_SHARE) * n)
        c = view.camera
        image = torch.zeros(c.height * c.width, dtype=torch.bool, device="cpu")
        image[index[solid]] = True
        image = image.view(c.height, c.width)
        if not bool(solid.any()):
            return image
        # Voxels are further apart than pixels: close the gaps between their centres.
        gap = math.ceil(view.pixels_per_unit(self._voxels[solid]) * pitch)
        return pictures.eroded(pictures.dilated(image, (gap + 1) // 2), gap // 2)


def _grid_around_object(views: Sequence[_View], points: Tensor) -> tuple[Tensor, float] | None:
    """Centres of voxels around the points that most masks contain, and their distance."""
    votes = _Hull(points, views)
    good = points[(votes.shown > 2) & (votes.inside >= _INSIDE_SHARE * votes.shown)]
    if len(good) < _MIN_POINTS:
        return None
    low, high = np.quantile(good.numpy(), (0.01, 0.99), axis=0)
    size = float((high - low).max())
    pitch = size * (1 + 2 * _MARGIN) / N_VOXELS
    if not pitch > 0:
        return None
    low = low - _MARGIN * size
    high = high + _MARGIN * size
    axes = [
        torch.arange(float(a) + pitch / 2, float(b), pitch, dtype=torch.float32, device="cpu")
        for a, b in zip(low, high, strict=True)
    ]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3), pitch


def _compare(mask: Tensor, silhouette: Tensor) -> tuple[float, float]:
    """IoU of a mask and the hull of the others, and how many pixels it reaches beyond that."""
    union = int((mask | silhouette).sum())
    both = int((mask & silhouette).sum())
    outline = int((mask & ~pictures.eroded(mask, 1)).sum())
    return both / max(union, 1), int((mask & ~silhouette).sum()) / max(outline, 1)


def _outliers(iou: dict[str, float]) -> dict[str, str]:
    middle, low = tracks.far_below(iou, IOU_GAP, IOU_SPREAD)
    what = "its mask contradicts the others, IoU"
    return {name: f"{what} {value:.2f} instead of {middle:.2f}" for name, value in low.items()}


@dataclass(frozen=True)
class CheckedViews:
    cameras: list[Camera]  # at the size of their images, with masks, in the given order
    # Reasons by name; those whose image does not fit are not in cameras.
    dropped: dict[str, str] = field(default_factory=dict)
    # Of the images' exposures, see :class:`ImageFindings`; nan where they are unknown.
    exposure_spread: float = math.nan
    exposure_noise: float = math.nan


def checked_views(
    cameras: Sequence[Camera],
    root: Path,
    *,
    points: np.ndarray,
    observations: Observations | None,
    masks: masking.MaskOptions,
    options: ViewOptions,
    notify: Notify,
    known: dict[str, str] | None = None,
    estimated: Path | None = None,
) -> CheckedViews:
    """Find the masks of the views of a capture, and check the views against each other.

    Args:
        cameras: At their calibrated size.
        points: (P, 3) world units
        known: Views that an earlier stage left out; None looks for some.
        estimated: Folder of masks that an earlier stage estimated, which replace the given ones.
    """
    check_view_names(options.keep_views, [camera.name for camera in cameras])
    if options.keeps_all:
        fitted = [pictures.fit_to_file(camera) for camera in cameras]
        return CheckedViews(masking.with_masks(fitted, root, masks, notify))
    unusable = wrong_shapes(cameras)
    fitted = [pictures.fit_to_file(camera) for camera in cameras if camera.name not in unusable]
    masked = masking.with_masks(fitted, root, masks, notify)
    given = any(camera.mask is not None for camera in masked)
    if estimated is not None and (given or masks.masks in masking.FOUND):
        masked = masking.with_object_masks(masked, estimated)
        notify(f"masks that the checkpoint's training estimated: {estimated}")
    spread = math.nan
    noise = math.nan
    if known is not None:
        found = {**known, **unusable}
        masked, _ = _with_agreement(masked, found, points)
    else:
        found = {**tracks.hardly_known(observations, options), **unusable}
        inputs = _Inputs.of(masked, found, observations)
        inconsistent, spread, noise = _kept_result(inconsistent_images, inputs)
        found = {**inconsistent, **found}
        masked, contradictions = _with_agreement(masked, found, points, notify)
        found = {**contradictions, **found}
    dropped = {c.name: found[c.name] for c in cameras if c.name in found}
    dropped = {n: why for n, why in dropped.items() if n in unusable or n not in options.keep_views}
    if known is None and dropped:
        named = [f"{name} ({why})" for name, why in dropped.items()]
        notify(
            f"left out {len(named)} of {len(cameras)} views that contradict the rest: "
            f"{shortened(named, 5)}; --keep_views NAME, or all, keeps them"
        )
    return CheckedViews(masked, dropped, spread, noise)


def check_view_names(views: Sequence[str], names: Sequence[str]) -> None:
    """Check that there are views of all names that ``--keep_views`` gives.

    Args:
        names: Of the views of the capture.
    """
    unknown = [view for view in views if view not in {*names, tracks.ALL_VIEWS}]
    if unknown:
        nearest = nearest_name(unknown[0], names) or min(names)
        raise UserError(
            f"--keep_views {unknown[0]}: no view has this name; names are those of the "
            f"reconstruction, for example {nearest}; one with a comma stands in quotes"
        )


@dataclass(frozen=True)
class _Inputs:
    """What a check reads; equal if nothing of it changed, so that later stages reuse its result."""

    key: str
    cameras: tuple[Camera, ...] = field(compare=False)
    data: Any = field(compare=False)

    @classmethod
    def of(cls, cameras: Sequence[Camera], dropped: Collection[str], data: Any) -> _Inputs:
        """Inputs without the views that are dropped already."""
        kept = tuple(camera for camera in cameras if camera.name not in dropped)
        points = data.points if isinstance(data, Observations) else data
        digest = hashlib.sha256(b"" if points is None else points.tobytes())
        for c in kept:
            lens = c.width, c.height, c.fx, c.fy, c.cx, c.cy
            digest.update(f"{c.name} {lens} {c.mask}".encode(errors="replace"))
            digest.update(c.rotation.tobytes() + c.translation.tobytes())
            for path in (c.image_path, None if c.mask is None else c.mask.path):
                if path is not None:
                    status = path.stat()
                    text = f"{path} {status.st_size} {status.st_mtime_ns}"
                    digest.update(text.encode(errors="replace"))
        return cls(digest.hexdigest(), kept, data)


@functools.lru_cache(maxsize=_KEPT)
def _kept_result(check: Callable[[Sequence[Camera], Any], Any], inputs: _Inputs) -> Any:
    return check(inputs.cameras, inputs.data)


def _with_agreement(
    cameras: Sequence[Camera],
    dropped: Collection[str],
    points: np.ndarray,
    notify: Notify = lambda line: None,
) -> tuple[list[Camera], dict[str, str]]:
    """The cameras with what the comparison of their masks tells, and views that contradict."""
    black = {c.name: "nothing of its mask counts" for c in cameras if masking.counts_nowhere(c)}
    if not any(c.shows_object for c in cameras):
        return list(cameras), black
    found = _kept_result(mask_agreement, _Inputs.of(cameras, {*dropped, *black}, points))
    if found is None:
        return list(cameras), black
    if found.outline_error:
        notify(f"the outlines of the masks are off by {found.outline_error:.1%} of the image size")
    # Masks that agree nowhere have a median of 0.
    middle = max(float(np.median(list(found.iou.values()))), 1e-6)
    weighted = []
    for camera in cameras:
        mask = camera.mask
        if mask is not None:
            weight = round(min(1.0, found.iou.get(camera.name, middle) / middle), 2)
            mask = replace(mask, outline_error=found.outline_error, weight=weight)
        weighted.append(replace(camera, mask=mask))
    return weighted, {**black, **found.inconsistent}
