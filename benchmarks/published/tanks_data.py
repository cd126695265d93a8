# SPDX-License-Identifier: Apache-2.0
"""Tanks and Temples as people download it: the training scenes, whose true points are published.

A scene's folder, ``Barn``, holds its photographs in ``images`` (or as ``*.jpg`` itself) and, where
somebody has found the cameras already, a COLMAP model in ``sparse/0``. What is true, in the same
folder or in one of the same name elsewhere:

- ``Barn.ply``: points of a laser scanner, metres;
- ``Barn_COLMAP_SfM.log``: where the photographs were taken, in a world of its own;
- ``Barn_trans.txt``: the 4 x 4 matrix from that world to the scanner's;
- ``Barn.json``: the volume that counts, a polygon along one axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from benchmarks.published.dtu_data import read_points
from benchmarks.published.similarity import Similarity, robust_similarity
from gaussian_splatting.posing.photographs import picture_files
from sugar_utils.errors import UserError
from sugar_utils.files import read_json
from sugar_utils.schemas import Coordinate, conform

THRESHOLDS = {
    "Barn": 0.01,
    "Caterpillar": 0.005,
    "Courthouse": 0.025,
    "Ignatius": 0.003,
    "Meetingroom": 0.01,
    "Truck": 0.005,
}
"""The six scenes that surface papers report, and the distance at which each is scored. Metres"""

_AXES = {"X": (1, 2, 0), "Y": (0, 2, 1), "Z": (0, 1, 2)}
"""Of each axis that a polygon is drawn along: columns of the polygon's plane, and its own."""

_Corner = tuple[Coordinate, Coordinate, Coordinate]


class _Volume(msgspec.Struct):
    """What is read of ``Scene.json``."""

    orthogonal_axis: Annotated[str, msgspec.Meta(pattern="^[XYZ]$")]
    axis_min: Coordinate
    axis_max: Coordinate
    bounding_polygon: Annotated[list[_Corner], msgspec.Meta(min_length=3)]


@dataclass(frozen=True)
class CropVolume:
    """A polygon drawn out along an axis; metres of the scanner's world.

    Attributes:
        axis: X, Y or Z.
        low: Least coordinate along it.
        high: Largest one.
        polygon: Corners; the coordinate along the axis means nothing. (C, 3)
    """

    axis: str
    low: float
    high: float
    polygon: np.ndarray

    def contains(self, points: np.ndarray) -> np.ndarray:
        """Points inside. (N, 3) -> (N,) bool"""
        u, v, w = _AXES[self.axis]
        inside = (points[:, w] >= self.low) & (points[:, w] <= self.high)
        rows = np.flatnonzero(inside)
        x, y = points[rows, u], points[rows, v]
        crossed = np.zeros(len(rows), dtype=bool)
        corners = self.polygon[:, (u, v)]
        for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
            # A ray along u crosses the edge on its way out.
            across = (y0 > y) != (y1 > y)
            slope = (x1 - x0) / (y1 - y0) if y1 != y0 else 0.0
            crossed ^= across & (x < x0 + (y - y0) * slope)
        inside[rows] = crossed
        return inside


@dataclass(frozen=True)
class TanksScene:
    """One scene as downloaded.

    Attributes:
        name: ``Barn``, ...
        root: Folder with the photographs.
        truth: Folder with what is true.
    """

    name: str
    root: Path
    truth: Path

    @property
    def threshold(self) -> float:
        """Distance at which it is scored. Metres"""
        return THRESHOLDS[self.name]

    @property
    def photographs(self) -> list[Path]:
        """In the order of the log; those that ``convert.py`` worked on where it has been here."""
        folders = (self.root / "input", self.root / "images", self.root)
        found = (picture_files(folder, recursive=False) for folder in folders if folder.is_dir())
        return sorted(next(filter(None, found), []))

    def file(self, suffix: str) -> Path:
        """A file of the truth."""
        return self.truth / f"{self.name}{suffix}"


def find_scenes(data: Path, truth: Path | None, wanted: Sequence[str]) -> list[TanksScene]:
    """The wanted scenes that are there.

    Args:
        data: Folder of the scenes' folders, or one above it.
        truth: Folder of folders with what is true; None where that lies with the photographs.
        wanted: Names.

    Raises:
        UserError: There is none, or one has no truth.
    """
    found = []
    for name in wanted:
        roots = [p for p in (data / name, *sorted(data.glob(f"*/{name}"))) if p.is_dir()]
        places = [] if truth is None else [truth / name, truth, *sorted(truth.glob(f"*/{name}"))]
        places += roots
        for root in roots:
            known = next((p for p in places if (p / f"{name}.json").is_file()), None)
            scene = TanksScene(name, root, known or root)
            if not scene.photographs:
                continue
            for suffix in (".ply", ".json", "_COLMAP_SfM.log", "_trans.txt"):
                if not scene.file(suffix).is_file():
                    raise UserError(
                        f"{scene.file(suffix)}: no such file; download the evaluation files of "
                        f"{name}, and give their folder with --truth"
                    )
            found.append(scene)
            break
    if not found:
        raise UserError(
            f"{data}: holds none of the scenes {', '.join(wanted)}; expected folders such as Barn "
            "with images/"
        )
    return found


def read_volume(scene: TanksScene) -> CropVolume:
    """The volume that counts.

    Raises:
        UserError: The file is damaged.
    """
    path = scene.file(".json")
    stored = conform(read_json(path), _Volume, path, "download it again")
    return CropVolume(
        stored.orthogonal_axis, stored.axis_min, stored.axis_max, np.array(stored.bounding_polygon)
    )


def read_true_points(scene: TanksScene) -> np.ndarray:
    """Points of the scanner. (P, 3) metres"""
    return read_points(scene.file(".ply"))


def read_trajectory(path: Path) -> np.ndarray:
    """Camera centres of a log: a line of numbers, then four lines of a matrix, for each. (N, 3)

    Raises:
        UserError: It is damaged.
    """
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        matrices = [np.array(lines[i + 1 : i + 5], dtype=float) for i in range(0, len(lines), 5)]
        return np.stack([matrix.reshape(4, 4)[:3, 3] for matrix in matrices])
    except (ValueError, IndexError) as error:
        raise UserError(f"{path}: damaged ({error}); download it again") from error


def to_scanner(scene: TanksScene, centers: dict[str, np.ndarray]) -> Similarity:
    """From the world in which a scene was trained to the scanner's, by where the cameras are.

    Args:
        scene: The scene.
        centers: Camera centres by the names of photographs. (3,) each

    Raises:
        UserError: The log is not of these photographs.
    """
    path = scene.file("_COLMAP_SfM.log")
    names = [photograph.name for photograph in scene.photographs]
    taken = read_trajectory(path)
    if len(taken) != len(names):
        raise UserError(
            f"{path}: has {len(taken)} cameras but {scene.root} has {len(names)} photographs; "
            "download the photographs (image set), not the video"
        )
    try:
        matrix = np.loadtxt(scene.file("_trans.txt")).reshape(4, 4)
    except ValueError as error:
        raise UserError(f"{scene.file('_trans.txt')}: is no 4 x 4 matrix ({error})") from error
    rows = [i for i, name in enumerate(names) if name in centers]
    if len(rows) < 3:
        raise UserError(f"{scene.root}: only {len(rows)} of its photographs have a camera")
    moved = np.stack([centers[names[i]] for i in rows])
    found, _ = robust_similarity(moved, taken[rows])
    return Similarity.of_matrix(matrix).after(found)
