# SPDX-License-Identifier: Apache-2.0
"""Checks that an image shows what the reconstruction says its camera sees.

An image of another place does not correlate with the mean colours of the points that it observes;
an overexposed one differs by stops; a blurred one is far less sharp than the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import colors_of, image_size, open_image
from gaussian_splatting.data.observations import Observations, far_below
from sugar_utils.files import file_digest

LONGEST_SIDE = 640  # pixels, at which images are compared
MIN_CORRELATION, CORRELATION_GAP, CORRELATION_SPREAD = 0.75, 0.15, 8.0
"""An image is inconsistent below the first, if it also lies so far below the median image, and so
many standard deviations."""

MIN_MEDIAN_CORRELATION = 0.6  # if the median image is below, the colours of the points tell nothing
MAX_STOPS, STOPS_SPREAD = 1.25, 5.0  # of the exposure: stops, standard deviations
MIN_SHARPNESS = 0.5  # least sharpness, as a share of that of the median image
MIN_MEDIAN_SHARPNESS = 0.25  # if the median image is below, there is too little detail to tell
MAX_SHARE = 0.25  # if a check fails for more of the images, it is the check that does not apply
_BLUR_WIDTH = 9
_MIN_POINTS = 20
_DARK, _BRIGHT = 16, 160
_GAMMA = 2.2


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
            own, (width, height) = (camera.width, camera.height), image_size(camera.image_path)
            if abs(width * own[1] - height * own[0]) > max(width + height, sum(own)):
                size = f"the image is {width} x {height} pixels"
                found[camera.name] = f"{size}, its camera {own[0]} x {own[1]}"
    return _trusted(found, len(cameras))


def inconsistent_images(
    cameras: Sequence[Camera], observations: Observations | None
) -> tuple[dict[str, str], float]:
    """Images that do not show what their cameras see, by name, with the reason; and the standard
    deviation of the exposures of all in stops, nan where it cannot be measured.

    Args:
        cameras: At the size of their images. Those without an image are passed over.
        observations: Coloured points; None leaves only the sharpness and copies to be checked.
    """
    cameras = [camera for camera in cameras if camera.image_path is not None]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        measured = list(pool.map(lambda camera: _measure(camera, observations), cameras))
    by_name = {c.name: m for c, m in zip(cameras, measured, strict=True)}
    checks = [_copies(cameras, by_name), _blurred(by_name)]
    if _median(m.correlation for m in measured) >= MIN_MEDIAN_CORRELATION:
        checks = [_uncorrelated(by_name), _other_exposure(by_name), *checks]
    found: dict[str, str] = {}
    for check in checks:
        found = {**_trusted(check, len(cameras)), **found}
    return found, _spread(_relative_stops(by_name).values())


def _trusted(found: dict[str, str], n: int) -> dict[str, str]:
    return found if len(found) <= MAX_SHARE * n else {}


def _measure(camera: Camera, observations: Observations | None) -> ImageStatistics:
    small = camera.reduced(LONGEST_SIDE)
    with open_image(camera.image_path) as image:
        # JPEG files are decoded at a fraction of their size, which takes a fraction of the time.
        image.draft("RGB", (small.width, small.height))
        colors = colors_of(image).convert("RGB")
        if colors.size != (small.width, small.height):
            colors = colors.resize((small.width, small.height), Image.Resampling.BOX)
        grey = np.asarray(colors.convert("L"))
    correlation = stops = np.nan
    seen = None if observations is None else observations.seen(small)
    if seen is not None and seen.rgb is not None and len(seen.rgb) >= _MIN_POINTS:
        columns, rows = seen.pixels.astype(int).T
        known = seen.rgb @ (0.299, 0.587, 0.114)
        correlation, stops = _compare(grey[rows, columns].astype(float), known)
    return ImageStatistics(correlation, stops, sharpness(grey))


def _compare(image: np.ndarray, points: np.ndarray) -> tuple[float, float]:
    """Correlation and exposure offset in stops of an image with the points it observes."""
    if points.std() < 1.0:
        return np.nan, np.nan
    correlation = float(np.corrcoef(image, points)[0, 1]) if image.std() > 0 else 0.0
    # Bright points clip in an overexposed image, and noise decides about dark ones.
    middle = (points > _DARK) & (points < _BRIGHT)
    if middle.sum() < _MIN_POINTS:
        return correlation, np.nan
    ratio = np.log2(np.maximum(image[middle], 1.0)) - np.log2(points[middle])
    return correlation, _GAMMA * float(np.median(ratio))


def _uncorrelated(measured: dict[str, ImageStatistics]) -> dict[str, str]:
    values = {name: m.correlation for name, m in measured.items()}
    _, low = far_below(values, CORRELATION_GAP, CORRELATION_SPREAD)
    what = "its colours do not match the points it observes, correlation"
    return {name: f"{what} {value:.2f}" for name, value in low.items() if value < MIN_CORRELATION}


def _other_exposure(measured: dict[str, ImageStatistics]) -> dict[str, str]:
    apart = _relative_stops(measured)
    limit = max(MAX_STOPS, STOPS_SPREAD * _spread(apart.values()))
    return {
        name: f"exposed {stops:+.1f} stops beside the others"
        for name, stops in apart.items()
        if abs(stops) > limit
    }


def _relative_stops(measured: dict[str, ImageStatistics]) -> dict[str, float]:
    middle = _median(m.stops for m in measured.values())
    return {name: m.stops - middle for name, m in measured.items()}


def _spread(apart: Iterable[float]) -> float:
    """Standard deviation of differences from the median, by their median."""
    return 1.4826 * _median(map(abs, apart))


def _blurred(measured: dict[str, ImageStatistics]) -> dict[str, str]:
    values = {name: m.sharpness for name, m in measured.items()}
    middle = _median(values.values())
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


def _median(values: object) -> float:
    found = [value for value in values if np.isfinite(value)]
    return float(np.median(found)) if found else np.nan
