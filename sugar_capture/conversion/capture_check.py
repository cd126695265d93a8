# SPDX-License-Identifier: Apache-2.0
"""Faults of a capture that are measured before the training, and advice.

Each limit lies between measurements of faultless captures and of copies with one fault; both are
noted below. Tracks are needed to judge exposures, reflections and the number of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from gaussian_splatting.data.cameras import (
    Camera,
    centers_of,
    looked_at,
    up_direction,
    upright_rotation,
    view_directions,
)
from gaussian_splatting.data.image_checks import reduced_grey, sharpness
from gaussian_splatting.data.masks import overview
from gaussian_splatting.data.observations import Observations, median
from gaussian_splatting.scenes.scene import Scene
from sugar_capture.registration.registration_report import BLURRED
from sugar_utils.errors import shortened
from sugar_utils.files import in_parallel
from sugar_utils.html import Picture

MAX_SPREAD = 0.35  # of exposures, standard deviation in stops; 0.0 to 0.26, with gains 1.5
STEP = 15  # degrees of azimuth and elevation, side of a cell of the map of directions
REACH = 20  # degrees from an image up to which a direction counts as covered
AROUND_SHARE = 0.8  # of the images that look towards one point, if they look at an object
MIN_GAP = 45
FRONTAL_GAP = 180
"""Degrees of azimuth without an image that are a hole in the round; with more than the second an
object is photographed from the front on purpose, as a relief is."""

LOW = 30  # degrees; the top is hardly visible if no image is from higher
DETAIL = 4.0  # deviation of a cell's pixels from their neighbours, of 255; below, it is bare
MAX_BARE = 0.4
"""Share of the subject's cells that are bare, of the median image: 0 to 0.3, smoothed 1."""

MAX_LOST = 0.25
"""The same for cells with detail but without a point: 0 to 0.07, of a sphere that mirrors lamps
with weight 0.3 it is 0.29, with 0.8 0.71."""

MIN_TRACKED_SHARE = 0.6
"""Share of the points of the median image that three or more observe: 0.96 to 1, with a quarter of
the images 0.5."""

MIN_TRACK = 3  # images that observe a point that counts as tracked
_SIDE = 800  # pixels of the longest side, at which images are measured
_CELLS = 10  # along the longest side
SLIDING = 4.0  # times the median error from which a track slides, and its point does not count
_POINTS_PER_CELL = 2  # mean, below which cells without a point say nothing
_WIDTH = 9  # pixels, of the neighbourhood that detail differs from

# Of the map of directions.
_CELL_PIXELS = 26
_MARGIN = 40
_DOT_RADIUS = 4
_PAPER = "#fafaf8"
_COVERED = "#9cc9a3"
_UNCOVERED = "#e6b8b0"
_CAMERA = "#24435f"
_INK = "#1e1e1e"


class CaptureFinding(NamedTuple):
    """A fault that is likely to spoil the result."""

    what: str
    where: str
    advice: str


@dataclass(frozen=True)
class Directions:
    """Viewing directions of a capture, towards an object or outwards."""

    around: bool  # whether the images look at one place
    names: list[str]  # of the images
    azimuths: np.ndarray  # of each image, (N,) degrees in [0, 360), the first at 0
    elevations: np.ndarray  # of each image, (N,) degrees
    seen: np.ndarray  # covered cells, from the top down, (180 / STEP, 360 / STEP) bool

    def gap(self) -> tuple[int, int]:
        """Return start and width of the widest range of azimuth that is not covered. degrees

        Cells near straight up and straight down do not count.
        """
        n_rows = len(self.seen)
        level_rows = self.seen[n_rows // 4 : -(n_rows // 4)]
        is_covered = level_rows.any(axis=0)
        if not is_covered.any():
            return 0, 360
        widest = (0, 0)
        for start in np.flatnonzero(is_covered & ~np.roll(is_covered, -1)) + 1:
            n_cells = int(np.argmax(np.roll(is_covered, -start)))
            if n_cells * STEP > widest[1]:
                widest = (int(start) * STEP, n_cells * STEP)
        return widest


def directions_of(cameras: Sequence[Camera], points: np.ndarray) -> Directions:
    """Return the directions that cameras cover.

    Args:
        points: Of the reconstruction; with the cameras they determine the vertical. (P, 3)
    """
    centers = centers_of(cameras)
    axes = view_directions(cameras)
    target = looked_at(cameras)
    depths = ((target - centers) * axes).sum(axis=1)
    around = bool((depths > 0).mean() > AROUND_SHARE)
    directions = centers - target if around else axes
    lengths = np.linalg.norm(directions, axis=1)
    directions = directions / np.maximum(lengths, 1e-12)[:, None]
    up = up_direction(np.stack([camera.rotation for camera in cameras]), points)
    level_axes = upright_rotation(up, directions[0])
    x, y, z = level_axes @ directions.T
    cells = _cell_directions() @ level_axes
    if around:
        covered = (cells @ directions.T).max(axis=-1) >= np.cos(np.radians(REACH))
    else:
        covered = np.any([_shows(camera, cells) for camera in cameras], axis=0)
    return Directions(
        around=around,
        names=[camera.name for camera in cameras],
        azimuths=np.degrees(np.arctan2(x, z)) % 360,
        elevations=np.degrees(np.arcsin(np.clip(y, -1, 1))),
        seen=covered,
    )


def _cell_directions() -> np.ndarray:
    """Middles of the cells of the map, with y up. (180 / STEP, 360 / STEP, 3) of length 1"""
    elevations = np.radians(np.arange(STEP / 2, 180, STEP) - 90)
    azimuths = np.radians(np.arange(STEP / 2, 360, STEP))
    elevations, azimuths = np.meshgrid(elevations[::-1], azimuths, indexing="ij")
    level = np.cos(elevations)
    return np.stack([level * np.sin(azimuths), np.sin(elevations), level * np.cos(azimuths)], -1)


def _shows(camera: Camera, directions: np.ndarray) -> np.ndarray:
    """Whether something in a direction, however far, is in the image. (..., 3) -> (...) bool"""
    x, y, z = np.moveaxis(directions @ camera.rotation.T, -1, 0)
    depth = np.where(z > 0, z, np.inf)
    column = x / depth * camera.fx + camera.cx
    row = y / depth * camera.fy + camera.cy
    inside = (column >= 0) & (column < camera.width) & (row >= 0) & (row < camera.height)
    return (z > 0) & inside


def check_capture(scene: Scene) -> tuple[list[CaptureFinding], Directions]:
    """Return the faults of a capture, image faults first, and the directions it covers."""
    cameras = sorted(scene.cameras, key=lambda c: c.name)
    directions = directions_of(cameras, scene.points)
    measured = [camera for camera in cameras if camera.image_path is not None]
    statistics = in_parallel(lambda camera: _measure(camera, scene.observations), measured)
    by_name = {camera.name: one for camera, one in zip(measured, statistics, strict=True)}
    # Blur takes texture and points away as well.
    sharp = [one for one in statistics if one.sharpness >= BLURRED]
    findings = [
        *_blurred(by_name),
        *_surface(sharp or statistics),
        *_exposures(scene.exposure_spread),
        *_unseen(directions),
        *_too_few(cameras, scene.observations),
    ]
    return findings, directions


class _ImageStatistics(NamedTuple):
    """Measurements of one image."""

    sharpness: float
    bare: float  # share of the subject's cells without detail
    lost: float  # share of those with detail that have no point; nan where it cannot be told


class _CellGrid:
    """The cells into which an image is divided.

    Args:
        shape: Of the image, in pixels.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        height, width = shape
        longest_side = max(shape)
        self.n_rows = max(1, round(_CELLS * height / longest_side))
        self.n_columns = max(1, round(_CELLS * width / longest_side))
        self.rows = np.arange(height) * self.n_rows // height  # row of cells of each row of pixels
        self.columns = np.arange(width) * self.n_columns // width

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of cells."""
        return self.n_rows, self.n_columns

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of the pixels of each cell. (H, W) -> (n_rows, n_columns)"""
        sums = np.zeros(self.shape)
        counts = np.zeros(self.shape)
        cells = np.ix_(self.rows, self.columns)
        np.add.at(sums, cells, values)
        np.add.at(counts, cells, 1)
        return sums / counts


def _measure(camera: Camera, observations: Observations | None) -> _ImageStatistics:
    from scipy.ndimage import uniform_filter

    small, grey = reduced_grey(camera, _SIDE)
    values = grey.astype(np.float32)
    grid = _CellGrid(grey.shape)
    squares = (values - uniform_filter(values, _WIDTH)) ** 2
    is_detailed = np.sqrt(grid.means(squares)) >= DETAIL
    subject = _subject(camera, grid)
    bare_share = float((~is_detailed)[subject].mean())
    lost_share = np.nan
    if observations is not None and is_detailed[subject].any():
        has_point = _cells_with_points(small, observations, grid)
        if has_point is not None:
            lost_share = float((~has_point)[is_detailed & subject].mean())
    return _ImageStatistics(sharpness(grey), bare_share, lost_share)


def _cells_with_points(
    camera: Camera, observations: Observations, grid: _CellGrid
) -> np.ndarray | None:
    """Cells with a point that fits well, (h, w) bool; None with too few points to tell."""
    points = observations.seen(camera)
    n_cells = grid.n_rows * grid.n_columns
    if points is None or len(points.pixels) < _POINTS_PER_CELL * n_cells:
        return None
    is_still = points.errors <= SLIDING * np.median(observations.errors)
    columns, rows = points.pixels[is_still].astype(int).T
    has_point = np.zeros(grid.shape, bool)
    has_point[grid.rows[rows], grid.columns[columns]] = True
    return has_point


def _subject(camera: Camera, grid: _CellGrid) -> np.ndarray:
    """Cells of the object by its mask, else the middle half of rows and columns. (h, w) bool"""
    if camera.shows_object:
        size = (grid.n_columns, grid.n_rows)
        mask = Image.fromarray(overview(camera)).resize(size, Image.Resampling.BOX)
        is_object = np.asarray(mask) >= 128
        if is_object.any():
            return is_object
    n_rows, n_columns = grid.shape
    is_middle = np.zeros(grid.shape, bool)
    is_middle[
        n_rows // 4 : n_rows - n_rows // 4,
        n_columns // 4 : n_columns - n_columns // 4,
    ] = True
    return is_middle


def _blurred(statistics: Mapping[str, _ImageStatistics]) -> list[CaptureFinding]:
    names = [name for name, one in statistics.items() if one.sharpness < BLURRED]
    if not names:
        return []
    where = f"{len(names)} of {len(statistics)} photographs: {shortened(names)}"
    advice = "replace them: hold the camera still or use more light; a shorter exposure helps"
    return [CaptureFinding("blurred", where, advice)]


def _surface(statistics: Sequence[_ImageStatistics]) -> list[CaptureFinding]:
    """Find texture that is missing, or does not stay in place.

    A reflection slides over a shiny surface when the camera moves. Its features match and then fit
    no point well, so that a surface with detail and without points is left.
    """
    bare_share = median(one.bare for one in statistics)
    if bare_share > MAX_BARE:
        where = f"{bare_share:.0%} of the subject, in the median photograph, shows no detail"
        advice = "depth is a guess there: matt chalk spray or small stickers help, or side light"
        return [CaptureFinding("little texture", where, advice)]
    lost_share = median(one.lost for one in statistics)
    if lost_share > MAX_LOST:
        where = (
            f"{lost_share:.0%} of the subject, in the median photograph, has detail but no points"
        )
        advice = (
            "what is seen there slides or moves: diffuse light, a polarising filter or matt spray "
            "against reflections; keep what moves out"
        )
        return [CaptureFinding("reflections or movement", where, advice)]
    return []


def _exposures(spread: float) -> list[CaptureFinding]:
    if not spread > MAX_SPREAD:
        return []
    where = f"photographs differ by {spread:.1f} stops (standard deviation)"
    advice = "lock the exposure; for these photographs --exposure_compensation evens it out"
    return [CaptureFinding("exposure", where, advice)]


def _unseen(directions: Directions) -> list[CaptureFinding]:
    """Find sides that no image shows; none for objects that are photographed from the front."""
    start, width = directions.gap()
    if width > FRONTAL_GAP:
        return []
    findings = []
    if width >= MIN_GAP:
        before = np.argmin((start - directions.azimuths) % 360)
        after = np.argmin((directions.azimuths - start - width) % 360)
        ends = f"between {directions.names[before]} and {directions.names[after]}"
        advice = "nothing is known of what is there; take photographs that look there"
        if directions.around:
            advice = "what faces there becomes a hole or a guess; take photographs from there"
        findings.append(CaptureFinding("unseen side", f"{width} degrees {ends}", advice))
    highest = float(directions.elevations.max())
    if directions.around and highest < LOW:
        where = f"no photograph is from higher than {highest:.0f} degrees"
        advice = "the top is hardly seen; add a round from higher up"
        findings.append(CaptureFinding("unseen top", where, advice))
    return findings


def _too_few(cameras: Sequence[Camera], observations: Observations | None) -> list[CaptureFinding]:
    """Find out whether most points of an image are observed by hardly any other one."""
    if observations is None:
        return []
    rows_of_images = []
    for camera in cameras:
        rows = observations.rows.get(camera.name, ())
        if len(rows):
            rows_of_images.append(rows)
    if not rows_of_images:
        return []
    track_lengths = np.bincount(np.concatenate(rows_of_images))
    shares = [(track_lengths[rows] >= MIN_TRACK).mean() for rows in rows_of_images]
    share = float(np.median(shares))
    if not share < MIN_TRACKED_SHARE:
        return []
    n_images = len(rows_of_images)
    where = f"{share:.0%} of a photograph's points are in three or more; {n_images} photographs"
    advice = "take two to three times as many of the same, each from a little further on"
    return [CaptureFinding("too few photographs", where, advice)]


def direction_map(directions: Directions) -> Picture:
    """Draw the directions: azimuth from left to right, straight up at the top."""
    n_rows, n_columns = directions.seen.shape
    width = n_columns * _CELL_PIXELS
    height = n_rows * _CELL_PIXELS
    paper = Image.new("RGB", (width + 2 * _MARGIN, height + 2 * _MARGIN), _PAPER)
    draw = ImageDraw.Draw(paper)
    for (row, column), is_covered in np.ndenumerate(directions.seen):
        x = _MARGIN + column * _CELL_PIXELS
        y = _MARGIN + row * _CELL_PIXELS
        corners = (x, y, x + _CELL_PIXELS - 2, y + _CELL_PIXELS - 2)
        draw.rectangle(corners, fill=_COVERED if is_covered else _UNCOVERED)
    xs = _MARGIN + directions.azimuths / 360 * width
    ys = _MARGIN + (90 - directions.elevations) / 180 * height
    r = _DOT_RADIUS
    for x, y in zip(xs, ys, strict=True):
        draw.ellipse((x - r, y - r, x + r, y + r), fill=_CAMERA)
    for degrees in range(0, 361, 90):
        place = (_MARGIN + degrees / 360 * width, _MARGIN + height + 14)
        draw.text(place, f"{degrees}°", fill=_INK, anchor="mm")
    for degrees in (-90, 0, 90):
        place = (_MARGIN / 2, _MARGIN + (90 - degrees) / 180 * height)
        draw.text(place, f"{degrees}°", fill=_INK, anchor="mm")
    what = "from which it is seen" if directions.around else "that the photographs look in"
    caption = (
        f"Directions {what}, as degrees around from the first photograph and up: green cells are "
        "seen, red ones are not, dots are photographs."
    )
    return Picture(np.asarray(paper), caption, "Map of directions")
