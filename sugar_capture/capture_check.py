# SPDX-License-Identifier: Apache-2.0
"""What is likely to go wrong with a capture, measured before the training, and what to do.

Limits lie between what was measured of captures in order and of copies with one fault each; both
are noted below. Tracks are needed to judge exposures, reflections and the number of photographs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from gaussian_splatting.data.cameras import Camera, looked_at, up_direction, upright_rotation
from gaussian_splatting.data.consistency import reduced_grey, sharpness
from gaussian_splatting.data.masks import overview
from gaussian_splatting.data.observations import Observations, median
from gaussian_splatting.data.scene import Scene
from sugar_capture.registration_report import BLURRED
from sugar_utils.errors import shortened
from sugar_utils.files import in_parallel
from sugar_utils.html import Picture

MAX_SPREAD = 0.35  # of exposures, standard deviation in stops; 0.0 to 0.26, with gains 1.5
STEP = 15  # degrees of azimuth and elevation, side of a cell of the map of directions
REACH = 20  # degrees from a photograph up to which a direction counts as seen
MIN_GAP = 45
FRONTAL_GAP = 180
"""Degrees of azimuth without a photograph that are a hole in the round; with more than the second
an object is photographed from the front on purpose, as a relief is."""

LOW = 30  # degrees; the top is hardly seen if no photograph is from higher
DETAIL = 4.0  # deviation of a cell's pixels from their neighbours, of 255; below, it is bare
MAX_BARE = 0.4
"""Share of the subject's cells that are bare, of the median photograph: 0 to 0.3, smoothed 1."""

MAX_LOST = 0.25
"""The same for cells with detail but without a point: 0 to 0.07, of a sphere that mirrors lamps
with weight 0.3 it is 0.29, with 0.8 0.71."""

MIN_KNOWN = 0.6
"""Share of the points of the median photograph that three or more observe: 0.96 to 1, with a
quarter of the photographs 0.5."""

# of the photographs as they are looked at: pixels, cells along it
_SIDE = 800
_CELLS = 10
SLIDING = 4.0  # times the median error from which a track slides, and its point does not count
_POINTS_PER_CELL = 2  # mean, below which cells without a point say nothing
_WIDTH = 9  # pixels, of the neighbourhood that detail differs from

# of a cell of the picture, around the cells
_PIXELS = 26
_MARGIN = 40
_PAPER = "#fafaf8"
_SEEN = "#9cc9a3"
_UNSEEN = "#e6b8b0"
_CAMERA = "#24435f"
_INK = "#1e1e1e"


class CaptureFinding(NamedTuple):
    what: str
    where: str
    advice: str


@dataclass(frozen=True)
class Directions:
    """Where an object is seen from, or where photographs from its inside look."""

    around: bool  # whether the photographs look at one place
    names: list[str]
    azimuths: np.ndarray  # of each photograph, (N,) degrees in [0, 360), the first at 0
    elevations: np.ndarray  # (N,) degrees
    seen: np.ndarray  # cells from the top down, (180 / STEP, 360 / STEP) bool

    def gap(self) -> tuple[int, int]:
        """Start and width of the widest range of azimuth in which nothing level is seen. degrees"""
        n_rows, n = self.seen.shape
        covered = self.seen[n_rows // 4 : -(n_rows // 4)].any(axis=0)
        best = (0, 0 if covered.any() else 360)
        for start in np.flatnonzero(covered & ~np.roll(covered, -1)) + 1:
            width = int(np.argmax(np.roll(covered, -start)))
            best = max(best, (int(start) * STEP, width * STEP), key=lambda found: found[1])
        return best


def directions_of(cameras: Sequence[Camera], points: np.ndarray) -> Directions:
    """Directions that cameras see; the points, (P, 3), tell with them what is up."""
    centers = np.stack([camera.center for camera in cameras])
    axes = np.stack([camera.rotation[2] for camera in cameras])
    target = looked_at(cameras)
    around = bool((((target - centers) * axes).sum(axis=1) > 0).mean() > 0.8)
    directions = centers - target if around else axes
    directions = directions / np.maximum(np.linalg.norm(directions, axis=1), 1e-12)[:, None]
    up = up_direction(np.stack([camera.rotation for camera in cameras]), points)
    level = upright_rotation(up, directions[0])
    x, y, z = level @ directions.T
    upwards, sideways = (
        np.radians(np.arange(STEP / 2, end, STEP) - middle) for end, middle in ((180, 90), (360, 0))
    )
    upwards, sideways = np.meshgrid(upwards[::-1], sideways, indexing="ij")
    flat = np.cos(upwards)
    cells = np.stack([flat * np.sin(sideways), np.sin(upwards), flat * np.cos(sideways)], -1)
    cells = cells @ level
    if around:
        seen = (cells @ directions.T).max(axis=-1) >= np.cos(np.radians(REACH))
    else:
        seen = np.any([_shows(camera, cells) for camera in cameras], axis=0)
    return Directions(
        around,
        [camera.name for camera in cameras],
        np.degrees(np.arctan2(x, z)) % 360,
        np.degrees(np.arcsin(np.clip(y, -1, 1))),
        seen,
    )


def _shows(camera: Camera, directions: np.ndarray) -> np.ndarray:
    """Whether something in a direction, however far, is in the image. (..., 3) to (...) bool"""
    x, y, z = np.moveaxis(directions @ camera.rotation.T, -1, 0)
    depth = np.where(z > 0, z, np.inf)
    column = x / depth * camera.fx + camera.cx
    row = y / depth * camera.fy + camera.cy
    inside = (column >= 0) & (column < camera.width) & (row >= 0) & (row < camera.height)
    return (z > 0) & inside


def check_capture(scene: Scene) -> tuple[list[CaptureFinding], Directions]:
    """What is likely to go wrong, worst faults of the photographs first; and the directions."""
    cameras = sorted((*scene.train_cameras, *scene.test_cameras), key=lambda c: c.name)
    directions = directions_of(cameras, scene.points)
    looked = [c for c in cameras if c.image_path is not None]
    looks = in_parallel(lambda camera: _look_at(camera, scene.observations), looked)
    found = [
        *_blurred({c.name: look.sharpness for c, look in zip(looked, looks, strict=True)}),
        # Blur takes texture and points away as well.
        *_surface([look for look in looks if look.sharpness >= BLURRED] or looks),
        *_exposures(scene.exposure_spread),
        *_unseen(directions),
        *_too_few(cameras, scene.observations),
    ]
    return found, directions


class _Look(NamedTuple):
    sharpness: float
    bare: float  # share of the subject's cells without detail
    lost: float  # share of those with detail that have no point; nan where it cannot be told


def _look_at(camera: Camera, observations: Observations | None) -> _Look:
    from scipy.ndimage import uniform_filter

    small, grey = reduced_grey(camera, _SIDE)
    values = grey.astype(np.float32)
    size = tuple(max(1, round(_CELLS * n / max(grey.shape))) for n in grey.shape)
    cell_of = [np.arange(n) * cells // n for n, cells in zip(grey.shape, size, strict=True)]
    squares = (values - uniform_filter(values, _WIDTH)) ** 2
    sums = np.zeros(size)
    counts = np.zeros(size)
    np.add.at(sums, np.ix_(*cell_of), squares)
    np.add.at(counts, np.ix_(*cell_of), 1)
    detailed = np.sqrt(sums / counts) >= DETAIL
    subject = _subject(camera, size)
    bare = float((~detailed)[subject].mean())
    lost = np.nan
    seen = observations and observations.seen(small)
    if seen and len(seen.pixels) >= _POINTS_PER_CELL * detailed.size and detailed[subject].any():
        fits = seen.errors <= SLIDING * np.median(observations.errors)
        columns, rows = seen.pixels[fits].astype(int).T
        empty = np.ones(size, bool)
        empty[cell_of[0][rows], cell_of[1][columns]] = False
        lost = float(empty[detailed & subject].mean())
    return _Look(sharpness(grey), bare, lost)


def _subject(camera: Camera, size: tuple[int, int]) -> np.ndarray:
    """Cells of the object by its mask, else the middle half of the rows and columns. (h, w) bool"""
    if camera.shows_object:
        mask = Image.fromarray(overview(camera)).resize(size[::-1], Image.Resampling.BOX)
        found = np.asarray(mask) >= 128
        if found.any():
            return found
    inside = np.zeros(size, bool)
    inside[tuple(slice(n // 4, n - n // 4) for n in size)] = True
    return inside


def _blurred(sharp: dict[str, float]) -> list[CaptureFinding]:
    names = [name for name, value in sharp.items() if value < BLURRED]
    advice = "replace them: hold the camera still or use more light; a shorter exposure helps"
    where = f"{len(names)} of {len(sharp)} photographs: {shortened(names)}"
    return [CaptureFinding("blurred", where, advice)] if names else []


def _surface(looks: Sequence[_Look]) -> list[CaptureFinding]:
    """Texture that is missing, or does not stay in place.

    What a shiny surface mirrors slides over it when the camera moves. Its features match and then
    fit no point well, so that a surface with detail and without points is left.
    """
    bare = median(look.bare for look in looks)
    if bare > MAX_BARE:
        where = f"{bare:.0%} of the subject, in the median photograph, shows no detail"
        advice = "depth is a guess there: matt chalk spray or small stickers help, or side light"
        return [CaptureFinding("little texture", where, advice)]
    lost = median(look.lost for look in looks)
    if lost > MAX_LOST:
        where = f"{lost:.0%} of the subject, in the median photograph, has detail but no points"
        advice = (
            "what is seen there slides or moves: diffuse light, a polarising filter or matt spray "
            "against reflections; keep what moves out"
        )
        return [CaptureFinding("reflections or movement", where, advice)]
    return []


def _exposures(spread: float) -> list[CaptureFinding]:
    advice = "lock the exposure; for these photographs --exposure_compensation evens it out"
    where = f"photographs differ by {spread:.1f} stops (standard deviation)"
    return [CaptureFinding("exposure", where, advice)] if spread > MAX_SPREAD else []


def _unseen(directions: Directions) -> list[CaptureFinding]:
    start, width = directions.gap()
    if width > FRONTAL_GAP:
        return []
    found = []
    if width >= MIN_GAP:
        before = np.argmin((start - directions.azimuths) % 360)
        after = np.argmin((directions.azimuths - start - width) % 360)
        ends = f"between {directions.names[before]} and {directions.names[after]}"
        advice = "what faces there becomes a hole or a guess; take photographs from there"
        if not directions.around:
            advice = "nothing is known of what is there; take photographs that look there"
        found.append(CaptureFinding("unseen side", f"{width} degrees {ends}", advice))
    highest = float(directions.elevations.max())
    if directions.around and highest < LOW:
        where = f"no photograph is from higher than {highest:.0f} degrees"
        advice = "the top is hardly seen; add a round from higher up"
        found.append(CaptureFinding("unseen top", where, advice))
    return found


def _too_few(cameras: Sequence[Camera], observations: Observations | None) -> list[CaptureFinding]:
    of = {} if observations is None else observations.rows
    rows = [of[camera.name] for camera in cameras if len(of.get(camera.name, ()))]
    if not rows:
        return []
    counts = np.bincount(np.concatenate(rows))
    known = float(np.median([(counts[own] >= 3).mean() for own in rows]))
    where = f"{known:.0%} of a photograph's points are in three or more; {len(rows)} photographs"
    advice = "take two to three times as many of the same, each from a little further on"
    return [CaptureFinding("too few photographs", where, advice)] if known < MIN_KNOWN else []


def direction_map(directions: Directions) -> Picture:
    """The map of directions: azimuth from left to right, straight up at the top."""
    n_rows, n_columns = directions.seen.shape
    width = n_columns * _PIXELS
    height = n_rows * _PIXELS
    paper = Image.new("RGB", (width + 2 * _MARGIN, height + 2 * _MARGIN), _PAPER)
    draw = ImageDraw.Draw(paper)
    for (row, column), seen in np.ndenumerate(directions.seen):
        x = _MARGIN + column * _PIXELS
        y = _MARGIN + row * _PIXELS
        corners = x, y, x + _PIXELS - 2, y + _PIXELS - 2
        draw.rectangle(corners, fill=_SEEN if seen else _UNSEEN)
    xs = _MARGIN + directions.azimuths / 360 * width
    ys = _MARGIN + (90 - directions.elevations) / 180 * height
    for x, y in zip(xs, ys, strict=True):
        draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=_CAMERA)
    labels = [(d, _MARGIN + d / 360 * width, _MARGIN + height + 14) for d in range(0, 361, 90)]
    labels += [(d, _MARGIN / 2, _MARGIN + (90 - d) / 180 * height) for d in (-90, 0, 90)]
    for degrees, *at in labels:
        draw.text(at, f"{degrees}°", fill=_INK, anchor="mm")
    what = "from which it is seen" if directions.around else "that the photographs look in"
    caption = (
        f"Directions {what}, as degrees around from the first photograph and up: green cells are "
        "seen, red ones are not, dots are photographs."
    )
    return Picture(np.asarray(paper), caption, "Map of directions")
