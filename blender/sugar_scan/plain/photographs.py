# SPDX-License-Identifier: Apache-2.0
"""Photographs of a scan and their cameras, from ``photographs.json`` of the folder of results."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ScanError

FILE = "photographs.json"
SENSOR_WIDTH = 36.0
"""Millimetres; Blender describes focal lengths by it."""


@dataclass(frozen=True)
class Photograph:
    """A photograph and the pinhole camera that took it, in the coordinates of the results."""

    name: str
    image: Path | None  # None where the program did not know it
    width: int  # pixels
    height: int  # pixels
    fx: float  # focal lengths and principal point in pixels
    fy: float
    cx: float
    cy: float
    position: np.ndarray  # centre of the camera, (3,)
    rotation: np.ndarray  # from its axes to those of the file, (3, 3)

    @property
    def focal_length(self) -> float:
        """Focal length in millimetres on a sensor of :data:`SENSOR_WIDTH`."""
        return self.fx * SENSOR_WIDTH / self.width

    @property
    def shift(self) -> tuple[float, float]:
        """Middle of the picture as seen from the principal point, in widths; y is up."""
        right = (self.width / 2 - self.cx) / self.width
        up = (self.cy - self.height / 2) / self.width * self.fx / self.fy
        return right, up

    @property
    def pixel_aspect(self) -> tuple[float, float]:
        """Width and height of a pixel, of which the smaller is 1, as Blender wants it."""
        stretch = self.fx / self.fy
        return max(1.0, 1 / stretch), max(1.0, stretch)


def read_photographs(folder: Path) -> list[Photograph]:
    """Read the photographs of a folder of results; none where it has no list of them.

    Raises:
        ScanError: The list is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [_photograph(entry, folder) for entry in entries]
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ScanError(f"{path}: damaged ({error}); run the program again") from error


def _photograph(entry: dict[str, Any], folder: Path) -> Photograph:
    width = int(entry["width"])
    height = int(entry["height"])
    image = entry.get("image")
    return Photograph(
        name=str(entry["img_name"]),
        # An absolute path stays what it is.
        image=None if image is None else (folder / image).resolve(),
        width=width,
        height=height,
        fx=float(entry["fx"]),
        fy=float(entry["fy"]),
        cx=float(entry.get("cx", width / 2)),
        cy=float(entry.get("cy", height / 2)),
        position=np.array(entry["position"], dtype=np.float64).reshape(3),
        rotation=np.array(entry["rotation"], dtype=np.float64).reshape(3, 3),
    )
