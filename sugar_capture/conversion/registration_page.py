# SPDX-License-Identifier: Apache-2.0
"""``convert.html``: the page about a registration, with a map of the cameras."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from gaussian_splatting.core.subsets import about
from gaussian_splatting.data.cameras import up_direction, upright_rotation
from gaussian_splatting.data.observations import positions_and_colors
from sugar_capture.registration.registration_report import BLURRED, Evidence, RegistrationReport
from sugar_utils.html import Page, Picture, duration_text
from sugar_utils.memory import format_bytes

if TYPE_CHECKING:
    import pycolmap

MAP_SIZE = 1000  # pixels
_MAP_MARGIN = 60
_MAX_POINTS = 60_000
_LABELS = 40  # most numbers of cameras on the map
_VIEW_LENGTH = 22  # pixels of a camera's direction of view
_LABEL_DISTANCE = 14  # pixels
_PAPER = (250, 250, 248)
_INK = (30, 30, 30)
_PATH = (226, 200, 190)
_CAMERA = (214, 69, 52)
_FIRST_CAMERA = (36, 110, 185)
_THUMBNAIL = 320
_MAX_LEFT_OUT_PICTURES = 12
_MEANING = {
    "fine": "Go on and train.",
    "usable": "Go on and train, or do what is advised below for a better result.",
    "poor": "The result will have holes or be wrong; better do what is advised below.",
}


@dataclass(frozen=True)
class CaptureMaps:
    """The two maps of a capture."""

    from_above: np.ndarray  # as of :func:`camera_map`
    directions: Picture


@dataclass(frozen=True)
class RunFacts:
    """The steps and settings of a call of convert, for the end of the page."""

    steps: Sequence[tuple[str, float, int]]  # title, seconds, peak bytes
    settings: Mapping[str, object]


def convert_page(
    title: str,
    evidence: Evidence,
    registration: RegistrationReport,
    findings: Sequence[tuple[str, str, str]],
    maps: CaptureMaps,
    files: Mapping[str, Path],
    run: RunFacts,
) -> Page:
    """Make the page about a registration.

    Args:
        findings: What is likely to go wrong: what, where, and what to do.
        files: Image files by name.
    """
    n = len(evidence.names)
    page = Page(title, f"{n} photographs")
    _add_summary(page, evidence, registration)
    if findings:
        page.heading("What is likely to go wrong")
        page.table(("what", "where", "what to do"), findings, text_columns=3)
    page.heading("Where the photographs were taken")
    caption = (
        "From above: the cameras, where they look, and their numbers in the order of the "
        "photographs. Blue is the first one."
    )
    page.wide_picture(Picture(maps.from_above, caption, "Map of the cameras"))
    page.wide_picture(maps.directions)
    for number, names in enumerate(registration.other_models, start=2):
        text = f"Part {number}, which shares too little with the rest: {', '.join(names)}"
        page.paragraph(text, note=True)
    _add_further_features(page, evidence)
    if registration.left_out:
        _add_left_out(page, registration, files)
    page.heading("All photographs")
    page.pairs(_describe_images(evidence), folded=f"{n} photographs")
    page.heading("What it took")
    rows = []
    for step_title, seconds, peak_bytes in run.steps:
        rows.append((step_title, duration_text(seconds), format_bytes(peak_bytes)))
    page.table(("step", "time", "peak memory"), rows)
    page.pairs(run.settings.items(), folded="settings")
    return page


def _add_summary(page: Page, evidence: Evidence, registration: RegistrationReport) -> None:
    n = len(evidence.names)
    page.facts(
        [
            ("registered photographs", f"{registration.n_registered} of {n}"),
            ("quality", registration.word),
            ("reprojection error", f"{evidence.error:.2f} px"),
            ("points", evidence.n_points),
            ("photographs per point", f"{evidence.track_length:.1f}"),
        ]
    )
    page.paragraph(_MEANING[registration.word], note=registration.word == "poor")
    for advice in registration.advice:
        sentence = advice[0].upper() + advice[1:] + "."
        page.paragraph(sentence, note=True)


def _add_further_features(page: Page, evidence: Evidence) -> None:
    """Say which images only further kinds of features registered, and which were not tried."""
    if evidence.registered_by:
        page.heading("Photographs that further features registered")
        rows = []
        for label, names in evidence.registered_by.items():
            rows.append((label, f"{len(names)}: {', '.join(names)}"))
        page.table(("features", "photographs"), rows, text_columns=2)
    for sentence in evidence.omitted_steps:
        page.paragraph(f"{sentence[0].upper()}{sentence[1:]}.", note=True)


def _add_left_out(page: Page, registration: RegistrationReport, files: Mapping[str, Path]) -> None:
    page.heading("Photographs that are not registered")
    page.table(("photograph", "why"), registration.left_out, text_columns=2)
    pictures = []
    for name, reason in registration.left_out[:_MAX_LEFT_OUT_PICTURES]:
        pictures.append(Picture(files[name], f"{name}: {reason}"))
    page.pictures(pictures, width=_THUMBNAIL)


def _describe_images(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield number and name, and measurements of each image."""
    shared = evidence.shared or {}
    n_partners = Counter(itertools.chain(*evidence.matches))
    for index, name in enumerate(evidence.names):
        sharpness = evidence.sharpness[index]
        blurred = " (blurred)" if sharpness < BLURRED else ""
        registration = "not registered"
        if name in shared:
            registration = f"shares {shared[name]:,} points with its nearest"
        yield (
            f"{index + 1}  {name}",
            f"sharpness {sharpness:.2f}{blurred}, {evidence.n_features[index]:,} features, matches "
            f"{n_partners[index]} others, {registration}",
        )


def camera_map(model: pycolmap.Reconstruction, names: Sequence[str]) -> np.ndarray:
    """Draw cameras and points of a reconstruction from above. (MAP_SIZE, MAP_SIZE, 3) uint8

    Args:
        model: ``pycolmap.Reconstruction``.
        names: Of all images in their order, registered or not; cameras are numbered by it.
    """
    images = {model.images[number].name: model.images[number] for number in model.reg_image_ids()}
    numbers = [number for number, name in enumerate(names, start=1) if name in images]
    ordered = [images[names[number - 1]] for number in numbers]
    poses = np.stack([image.cam_from_world().matrix() for image in ordered])
    centers = np.stack([image.projection_center() for image in ordered])
    point_ids = about(sorted(model.point3D_ids()), _MAX_POINTS)
    sampled = [model.points3D[number] for number in point_ids]
    points, colors = positions_and_colors(sampled)
    up = up_direction(poses[:, :, :3], points)
    # Rows are the directions to the right and towards the viewer; the map shows these two.
    level_axes = upright_rotation(up, centers[0] - centers.mean(axis=0))[[0, 2]]
    level_centers = centers @ level_axes.T
    level_points = points @ level_axes.T
    frame = _MapFrame.around(level_centers, level_points)
    paper = np.full((MAP_SIZE, MAP_SIZE, 3), _PAPER, np.uint8)
    x, y = frame.pixels(level_points).astype(int).T
    inside = (x >= 0) & (x < MAP_SIZE) & (y >= 0) & (y < MAP_SIZE)
    # Low points first, so that higher ones cover them.
    order = np.argsort(points[inside] @ up, kind="stable")
    paper[y[inside][order], x[inside][order]] = colors[inside][order]
    picture = Image.fromarray(paper)
    directions = poses[:, 2, :3] @ level_axes.T
    _draw_cameras(ImageDraw.Draw(picture), frame.pixels(level_centers), directions, numbers)
    return np.asarray(picture)


@dataclass(frozen=True)
class _MapFrame:
    """The part of the level plane that the map shows."""

    middle: np.ndarray  # (2,) world units
    scale: float  # pixels of a world unit

    @classmethod
    def around(cls, centers: np.ndarray, points: np.ndarray) -> _MapFrame:
        """Fit a frame to cameras and to 90 % of the points. (N, 2), (P, 2)"""
        corners = centers
        if len(points):
            corners = np.concatenate([centers, np.percentile(points, (5, 95), axis=0)])
        low = corners.min(axis=0)
        high = corners.max(axis=0)
        extent = max(float((high - low).max()), 1e-9)
        return cls((low + high) / 2, (MAP_SIZE - 2 * _MAP_MARGIN) / extent)

    def pixels(self, places: np.ndarray) -> np.ndarray:
        """Pixels of places on the plane. (N, 2) -> (N, 2)"""
        return (places - self.middle) * self.scale + MAP_SIZE / 2


def _draw_cameras(
    draw: ImageDraw.ImageDraw,
    pixels: np.ndarray,
    directions: np.ndarray,
    numbers: Sequence[int],
) -> None:
    """Draw the path of the cameras, where each looks, and some of their numbers."""
    draw.line([tuple(pixel) for pixel in pixels], fill=_PATH, width=1)
    label_step = -(-len(pixels) // _LABELS)
    for index in reversed(range(len(pixels))):
        is_first = index == 0
        color = _FIRST_CAMERA if is_first else _CAMERA
        radius = 7 if is_first else 4
        center = pixels[index]
        ahead = center + _VIEW_LENGTH * directions[index]
        draw.line([tuple(center), tuple(ahead)], fill=color, width=3)
        draw.ellipse([*(center - radius), *(center + radius)], fill=color, outline=_INK)
        if index % label_step == 0:
            # Behind the camera, where its line of sight is not.
            behind = center - _LABEL_DISTANCE * directions[index]
            draw.text(tuple(behind), str(numbers[index]), fill=_INK, anchor="mm")
