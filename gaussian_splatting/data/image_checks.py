# SPDX-License-Identifier: Apache-2.0
"""Checks of images against their cameras: wrong scenes, exposures, blur and copies.

An image of another place does not correlate with the mean colours of the points that it observes;
an overexposed one differs by stops; a blurred one is far less sharp than the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from gaussian_splatting.core.subsets import values_by_key
from gaussian_splatting.data.cameras import Camera, camera_extent, centers_of, view_directions
from gaussian_splatting.data.images import colors_of, has_alpha, image_size, open_image
from gaussian_splatting.data.observations import Observations, deviation, far_below, median
from sugar_utils.files import file_digest, in_parallel

LONGEST_SIDE = 640  # pixels, at which images are compared
MIN_CORRELATION = 0.75
CORRELATION_GAP = 0.15
CORRELATION_SPREAD = 8.0
"""An image is inconsistent below the first, if it also lies so far below the median image, and so
many standard deviations."""

MIN_MEDIAN_CORRELATION = 0.6  # if the median image is below, colours of points are unreliable
# Of the exposure: stops, standard deviations.
MAX_STOPS = 1.25
STOPS_SPREAD = 5.0
N_EXPOSURE_NEIGHBORS = 3  # neighbouring views with whose mean exposure a view is compared
MIN_SHARPNESS = 0.5  # least sharpness, as a share of that of the median image
MIN_MEDIAN_SHARPNESS = 0.25  # if the median image is below, there is too little detail
MOST_FAILING = 0.25  # if a check fails for more of the images, it is the check that does not apply
_BLUR_WIDTH = 9  # pixels
_MIN_SIDE = 4  # pixels of an image that has a sharpness
_MIN_OBSERVED_POINTS = 20  # of an image whose colours are compared
_MIN_CONTRAST = 1.0  # standard deviation of the points' brightness, of 255
_DARK = 16
_BRIGHT = 160
_GAMMA = 2.2
_LUMA = (0.299, 0.587, 0.114)
_PLAIN_MODES = ("L", "RGB")  # of images that need no conversion to 8 bits


@dataclass(frozen=True)
class ImageStatistics:
    """Measurements of one image; nan where they cannot be made."""

    correlation: float  # of the brightness with that of the observed points
    stops: float  # exposure relative to the points
    sharpness: float


class ImageFindings(NamedTuple):
    """Results of comparing images with the points they observe."""

    # Reasons by name of the images that do not show what their cameras see.
    inconsistent: dict[str, str]
    # Standard deviations in stops; nan where they cannot be measured.
    exposure_spread: float  # of all exposures
    exposure_noise: float  # of what neighbouring views do not share


def sharpness(grey: np.ndarray) -> float:
    """Measure how much detail between neighbouring pixels a further blur removes. (H, W) uint8

    An image that is blurred already loses little by it, whatever it shows (Crété-Roffet et al.
    2007, "The blur effect"). 0 for an image without any detail, towards 1 for a sharp one.
    """
    if min(grey.shape) < _MIN_SIDE:
        return 0.0
    values = grey.astype(np.float32)
    return min(_sharpness_along(values, axis) for axis in (0, 1))


def _sharpness_along(values: np.ndarray, axis: int) -> float:
    # Here and not above: it takes a tenth of the time in which a command starts.
    from scipy.ndimage import uniform_filter1d

    # One step of 8 bits is how a smooth slope is stored, and no detail.
    detail = np.maximum(0, np.abs(np.diff(values, axis=axis)) - 1)
    total = float(detail.sum())
    if total == 0:
        return 0.0
    blurred = uniform_filter1d(values, _BLUR_WIDTH, axis=axis, mode="nearest")
    blurred_detail = np.abs(np.diff(blurred, axis=axis))
    return float(np.maximum(0, detail - blurred_detail).sum()) / total


def wrong_shapes(cameras: Sequence[Camera]) -> dict[str, str]:
    """Return the cameras whose image file has another aspect ratio, by name, with the reason."""
    reasons = {}
    for camera in cameras:
        if camera.image_path is None:
            continue
        width, height = image_size(camera.image_path)
        misfit = abs(width * camera.height - height * camera.width)
        if misfit > max(width + height, camera.width + camera.height):
            reasons[camera.name] = (
                f"the image is {width} x {height} pixels, its camera {camera.width} x "
                f"{camera.height}"
            )
    return _trusted(reasons, len(cameras))


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
    by_name = {camera.name: one for camera, one in zip(cameras, measured, strict=True)}
    checks = [_copies(cameras, by_name), _blurred(by_name)]
    if median(one.correlation for one in measured) >= MIN_MEDIAN_CORRELATION:
        checks = [_uncorrelated(by_name), _other_exposure(by_name), *checks]
    reasons: dict[str, str] = {}
    for check in checks:
        # The first reason for an image counts.
        reasons = {**_trusted(check, len(cameras)), **reasons}
    relative_stops = _relative_stops(by_name)
    return ImageFindings(
        inconsistent=reasons,
        exposure_spread=deviation(relative_stops.values()),
        exposure_noise=_exposure_noise(cameras, relative_stops),
    )


def _exposure_noise(cameras: Sequence[Camera], stops: Mapping[str, float]) -> float:
    """Return the standard deviation of exposure differences between neighbouring views, in stops.

    An automatic exposure that follows the direction of view is a part of what a model with
    view-dependent colours learns by itself; one that jumps from view to view is not.
    """
    measured = [camera for camera in cameras if np.isfinite(stops[camera.name])]
    if len(measured) <= N_EXPOSURE_NEIGHBORS:
        return math.nan
    centers = centers_of(measured)
    axes = view_directions(measured)
    extent = camera_extent(measured) or 1.0
    distances = np.linalg.norm(centers[:, None] - centers, axis=2) / extent
    distances += np.arccos(np.clip(axes @ axes.T, -1.0, 1.0))
    np.fill_diagonal(distances, np.inf)
    values = np.array([stops[camera.name] for camera in measured])
    neighbors = distances.argsort(axis=1, kind="stable")[:, :N_EXPOSURE_NEIGHBORS]
    differences = values - values[neighbors].mean(axis=1)
    # Mean absolute deviation to standard deviation of a normal distribution, of a view and a mean.
    factor = math.sqrt(math.pi / 2.0) / math.sqrt(1.0 + 1.0 / N_EXPOSURE_NEIGHBORS)
    return float(np.abs(differences).mean() * factor)


def _trusted(reasons: dict[str, str], n: int) -> dict[str, str]:
    """Return the results of a check; none if it fails for so many images that it does not apply."""
    return reasons if len(reasons) <= MOST_FAILING * n else {}


def reduced_grey(camera: Camera, longest_side: int) -> tuple[Camera, np.ndarray]:
    """Return a camera and its image in grey, not larger than asked for. (H, W) uint8"""
    small = camera.reduced(longest_side)
    size = small.size
    with open_image(camera.image_file) as image:
        # JPEG files are decoded at a fraction of their size, and without their colours.
        image.draft("L", size)
        image.load()
        # Of a large PNG file each further copy takes a tenth of the time of decoding it.
        pixels = image
        if image.mode not in _PLAIN_MODES or has_alpha(image):
            pixels = colors_of(image).convert("RGB")
        if pixels.size != size:
            pixels = pixels.resize(size, Image.Resampling.BOX)
        return small, np.asarray(pixels.convert("L"))


def _measure(camera: Camera, observations: Observations | None) -> ImageStatistics:
    small, grey = reduced_grey(camera, LONGEST_SIDE)
    correlation = np.nan
    stops = np.nan
    points = None if observations is None else observations.seen(small)
    colors = None if points is None else points.rgb
    if points is not None and colors is not None and len(colors) >= _MIN_OBSERVED_POINTS:
        columns, rows = points.pixels.astype(int).T
        image_values = grey[rows, columns].astype(float)
        correlation, stops = _compare_colors(image_values, colors @ _LUMA)
    return ImageStatistics(correlation, stops, sharpness(grey))


def _compare_colors(image: np.ndarray, points: np.ndarray) -> tuple[float, float]:
    """Return correlation and exposure offset in stops of an image with the points it observes.

    Args:
        image: Brightness of the image at the points. (n,)
        points: Brightness of the points. (n,)
    """
    if points.std() < _MIN_CONTRAST:
        return np.nan, np.nan
    correlation = float(np.corrcoef(image, points)[0, 1]) if image.std() > 0 else 0.0
    # Bright points clip in an overexposed image, and noise decides about dark ones.
    is_medium = (points > _DARK) & (points < _BRIGHT)
    if is_medium.sum() < _MIN_OBSERVED_POINTS:
        return correlation, np.nan
    log_ratio = np.log2(np.maximum(image[is_medium], 1.0)) - np.log2(points[is_medium])
    return correlation, _GAMMA * float(np.median(log_ratio))


def _uncorrelated(measured: dict[str, ImageStatistics]) -> dict[str, str]:
    correlations = {name: one.correlation for name, one in measured.items()}
    _, low = far_below(correlations, CORRELATION_GAP, CORRELATION_SPREAD)
    what = "its colours do not match the points it observes, correlation"
    return {name: f"{what} {value:.2f}" for name, value in low.items() if value < MIN_CORRELATION}


def _other_exposure(measured: dict[str, ImageStatistics]) -> dict[str, str]:
    relative_stops = _relative_stops(measured)
    limit = max(MAX_STOPS, STOPS_SPREAD * deviation(relative_stops.values()))
    return {
        name: f"exposed {stops:+.1f} stops beside the others"
        for name, stops in relative_stops.items()
        if abs(stops) > limit
    }


def _relative_stops(measured: dict[str, ImageStatistics]) -> dict[str, float]:
    """Return the exposure of each image relative to the median one."""
    middle = median(one.stops for one in measured.values())
    return {name: one.stops - middle for name, one in measured.items()}


def _blurred(measured: dict[str, ImageStatistics]) -> dict[str, str]:
    middle = median(one.sharpness for one in measured.values())
    if not middle >= MIN_MEDIAN_SHARPNESS:
        return {}
    limit = MIN_SHARPNESS * middle
    return {
        name: f"blurred, sharpness {one.sharpness:.2f}"
        for name, one in measured.items()
        if one.sharpness < limit
    }


def _copies(cameras: Sequence[Camera], measured: dict[str, ImageStatistics]) -> dict[str, str]:
    """Return images with the same bytes as another; the one that fits its points best stays."""
    by_size = values_by_key((camera.image_file.stat().st_size, camera) for camera in cameras)
    candidates = [camera for group in by_size.values() if len(group) > 1 for camera in group]
    by_digest = values_by_key((file_digest(one.image_file), one.name) for one in candidates)
    reasons = {}
    for names in by_digest.values():
        best = max(names, key=lambda name: np.nan_to_num(measured[name].correlation))
        for name in names:
            if name != best:
                reasons[name] = f"the same file as {best}"
    return reasons
