# SPDX-License-Identifier: Apache-2.0
"""Pictures for the page by the Warp renderer: of one result, or of two that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from gaussian_splatting.core.subsets import about
from gaussian_splatting.data.cameras import Camera, centers_of, view_directions
from gaussian_splatting.data.images import decode_view
from gaussian_splatting.engine.reporting.view_pictures import DepthRange
from sugar_viewer.shown_models import SHOWS, ShownModel, depths_of_views, shown

PHOTOGRAPH = "photograph"
ERROR = "error"
PICTURES = (*SHOWS, PHOTOGRAPH, ERROR)
LAYOUTS = ("one", "side by side", "slider")
LARGEST_ERROR = 0.25  # mean difference of the colours, of 1, that is drawn white
PROBE_SIDE = 160  # pixels of the views that decide the colours of depths
_N_PROBES = 4
_PAPER = 24  # grey around an image
_LINE = 255  # grey of the line between two pictures


@dataclass(frozen=True)
class PictureChoice:
    """The choice of one picture: a result, and an image or map of it."""

    model: str  # title of the result
    picture: str = SHOWS[0]  # one of PICTURES


@dataclass(frozen=True)
class Arrangement:
    """One or two pictures and how they lie on the page."""

    left: PictureChoice
    right: PictureChoice
    layout: str = LAYOUTS[0]
    split: float = 0.5  # share of the width at which a slider stands

    @property
    def pictures(self) -> tuple[PictureChoice, ...]:
        """The pictures that the layout shows."""
        return (self.left,) if self.layout == "one" else (self.left, self.right)


class RenderedPicture(NamedTuple):
    """A picture for a browser."""

    pixels: np.ndarray  # (H, W, 3) uint8
    photograph: str  # name of the camera whose image it is compared with; empty without


class RenderedPictures:
    """Renders arrangements of pictures; keeps the last images and the range of depths."""

    def __init__(
        self, models: dict[str, ShownModel], cameras: Sequence[Camera], white: bool
    ) -> None:
        self.models = models
        self._white = white
        self._cameras = {camera.name: camera for camera in cameras}
        self._depths: dict[str, DepthRange] = {}  # by the title of the result
        self._photograph = lru_cache(maxsize=8)(self._decode)

    def available(self, title: str) -> tuple[str, ...]:
        """Return the entries of ``PICTURES`` that a result has."""
        missing = set() if self._cameras else {PHOTOGRAPH, ERROR}
        if self.models[title].mesh is None:
            missing.add("clay")
        return tuple(name for name in PICTURES if name not in missing)

    def make(self, arrangement: Arrangement, view: Camera) -> RenderedPicture:
        """Render the picture for a browser that looks from ``view``.

        If an image takes part, the picture is that of the nearest camera.
        """
        size = view.size
        photograph = ""
        choices = arrangement.pictures
        if any(choice.picture in (PHOTOGRAPH, ERROR) for choice in choices):
            view = nearest_camera(list(self._cameras.values()), view)
            photograph = view.name
        width, height = size
        if arrangement.layout == "side by side":
            left_width = width // 2
            left_view = cut_to(view, left_width, height, size)
            right_view = cut_to(view, width - left_width, height, size)
            parts = [
                self._picture(arrangement.left, left_view),
                self._picture(arrangement.right, right_view),
            ]
            return RenderedPicture(np.concatenate(parts, axis=1), photograph)
        full_view = cut_to(view, width, height, size)
        pixels = self._picture(arrangement.left, full_view)
        if len(choices) > 1:
            right = self._picture(arrangement.right, full_view)
            pixels = slid(pixels, right, arrangement.split)
        return RenderedPicture(pixels, photograph)

    def _picture(self, choice: PictureChoice, camera: Camera) -> np.ndarray:
        """Render one picture. (H, W, 3) uint8"""
        model = self.models[choice.model]
        if choice.picture == PHOTOGRAPH:
            dark = np.full((camera.height, camera.width, 3), _PAPER, np.uint8)
            return self._with_photograph(camera, dark)
        if choice.picture == ERROR:
            image = shown(model, "image", camera)
            # Outside of the photograph there is nothing to differ from.
            return error_picture(image, self._with_photograph(camera, image))
        depths = None
        if choice.picture == "depth":
            depths = self._depths_of(choice.model, camera)
        picture = shown(model, choice.picture, camera, depths)
        if picture.shape[:2] == camera.shape:
            return picture
        # Renderers round sides to whole blocks.
        image = Image.fromarray(picture).resize(camera.size)
        return np.asarray(image)

    def _depths_of(self, title: str, camera: Camera) -> DepthRange:
        """Return one range of depths for all views, or they would flicker."""
        if title not in self._depths:
            probes = about(list(self._cameras.values()), _N_PROBES) or [camera]
            small_probes = [probe.reduced(PROBE_SIDE) for probe in probes]
            self._depths[title] = depths_of_views(self.models[title], small_probes)
        return self._depths[title]

    def _with_photograph(self, camera: Camera, paper: np.ndarray) -> np.ndarray:
        """Return a picture with the image of its camera pasted on it. (H, W, 3) uint8"""
        source = self._cameras[camera.name]
        scale = camera.fx / source.fx
        width = max(1, round(source.width * scale))
        height = max(1, round(source.height * scale))
        column = round(camera.cx - source.cx * scale)
        row = round(camera.cy - source.cy * scale)
        image = Image.fromarray(paper)
        photograph = self._photograph(camera.name, width, height)
        image.paste(Image.fromarray(photograph), (column, row))
        return np.asarray(image)

    def _decode(self, name: str, width: int, height: int) -> np.ndarray:
        camera = self._cameras[name].resized(width, height)
        return decode_view(camera, self._white)[..., :3]


def nearest_camera(cameras: Sequence[Camera], view: Camera) -> Camera:
    """Return the camera that is nearest to a view, by distance in extents and by angle."""
    centers = centers_of(cameras)
    directions = view_directions(cameras)
    distances = np.linalg.norm(centers - view.center, axis=1)
    extents = np.linalg.norm(centers - centers.mean(axis=0), axis=1)
    extent = max(extents.max(), 1e-9)
    turns = 1 - directions @ view.rotation[2]
    return cameras[int(np.argmin(distances / extent + turns))]


def cut_to(camera: Camera, width: int, height: int, full_size: tuple[int, int]) -> Camera:
    """Return the middle part of a view that is fitted into a picture.

    Args:
        width: Of the part, in pixels.
        height: Of the part, in pixels.
        full_size: Width and height of the picture into which the view is fitted.
    """
    full_width, full_height = full_size
    scale = min(full_width / camera.width, full_height / camera.height)
    sx = (width - camera.width * scale) / 2
    sy = (height - camera.height * scale) / 2
    return replace(
        camera,
        width=width,
        height=height,
        fx=camera.fx * scale,
        fy=camera.fy * scale,
        cx=camera.cx * scale + sx,
        cy=camera.cy * scale + sy,
    )


def slid(left: np.ndarray, right: np.ndarray, split: float) -> np.ndarray:
    """Join two pictures, the first up to a share of the width, with a line between them."""
    column = round(split * left.shape[1])
    joined = np.concatenate([left[:, :column], right[:, column:]], axis=1)
    joined[:, max(0, column - 1) : column + 1] = _LINE
    return joined


def error_picture(image: np.ndarray, photograph: np.ndarray) -> np.ndarray:
    """Draw the difference of two pictures: black is equal, then red, yellow and white.

    (H, W, 3), (H, W, 3) -> (H, W, 3) uint8
    """
    difference = np.abs(image.astype(np.float32) - photograph).mean(axis=2) / 255
    ramp = 3 * difference[..., None] / LARGEST_ERROR - np.arange(3, dtype=np.float32)
    return (255 * ramp.clip(0, 1)).round().astype(np.uint8)
