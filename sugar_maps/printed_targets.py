# SPDX-License-Identifier: Apache-2.0
"""Printed targets in photographs: AprilTag and ArUco markers, found by OpenCV, which is optional.

OpenCV detects their numbers, and their corners to about a pixel. Its refinements of the corners are
off by a percent of the side where targets are small, or take seconds for a photograph. So edges
are measured here: where the mean brightness along a line across says that black becomes white.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from scipy.ndimage import map_coordinates

from gaussian_splatting.data.images import colors_of, open_image
from sugar_utils.errors import UserError
from sugar_utils.libraries import install_advice, load_package

TARGET_KINDS = {
    "apriltag36h11": "DICT_APRILTAG_36h11",
    "apriltag25h9": "DICT_APRILTAG_25h9",
    "aruco4x4": "DICT_4X4_250",
    "aruco5x5": "DICT_5X5_250",
    "aruco6x6": "DICT_6X6_250",
}
"""OpenCV's names of the sets of targets that can be found and printed."""

DEFAULT_KIND = "apriltag36h11"
_PACKAGE = "opencv-python-headless"
_MIDDLE = 0.5  # pixels from the corner of the image to where OpenCV counts from
_PROFILES = 24  # lines across an edge
_EDGE_PART = 0.12, 0.88  # of an edge; nearer to corners the next edge blurs in
_REACH = 0.7  # of a cell, to either side of an edge; behind it are the cells of the number
_LEAST_REACH = 1.5  # pixels
_MOST_REACH = 8.0
_STEP = 0.25  # pixels
_ROUNDS = 3
_LEAST_CONTRAST = 10.0  # grey levels between black and white
_LEAST_CELL = 2.0  # pixels across, where it is narrowest; below it edges blur into each other
_TOGETHER = 0.5  # of a target's side, within which two detections are one target


class Detection(NamedTuple):
    """A target in a photograph."""

    number: int
    corners: np.ndarray  # clockwise, pixels from the corner of the image, (4, 2) float64

    @property
    def middle(self) -> np.ndarray:
        """The mean of the corners. (2,)"""
        return self.corners.mean(axis=0)

    @property
    def side(self) -> float:
        """The mean length of the four sides, pixels."""
        edges = np.roll(self.corners, -1, axis=0) - self.corners
        return float(np.linalg.norm(edges, axis=1).mean())

    @property
    def width(self) -> float:
        """The mean width across the longest side, pixels."""
        x, y = self.corners.T
        area = 0.5 * abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1)))
        edges = np.roll(self.corners, -1, axis=0) - self.corners
        return area / max(float(np.linalg.norm(edges, axis=1).max()), 1e-9)


def load_opencv(what: str) -> ModuleType:
    """Import OpenCV.

    Args:
        what: The feature that needs it, for the error.

    Raises:
        UserError: It is missing, or too old to find targets.
    """
    (opencv,) = load_package(what, _PACKAGE, "cv2")
    if not hasattr(getattr(opencv, "aruco", None), "ArucoDetector"):
        raise UserError(
            f"{what}: this OpenCV ({opencv.__version__}) is older than 4.7 and has no "
            f"ArucoDetector; {install_advice(_PACKAGE)}"
        )
    return opencv


def dictionary_of(opencv: ModuleType, kind: str) -> Any:
    """Return OpenCV's dictionary of a kind of ``TARGET_KINDS``."""
    return opencv.aruco.getPredefinedDictionary(getattr(opencv.aruco, TARGET_KINDS[kind]))


def detections_in(path: Path, kind: str) -> list[Detection]:
    """Find the targets in an image file, in the order of their numbers.

    Those that are too small, or seen too flatly, are left out: their corners are not exact.

    Args:
        path: The image; its EXIF orientation is not applied, as everywhere.
        kind: One of ``TARGET_KINDS``.

    Raises:
        UserError: Two places of the image show one number.
    """
    opencv = load_opencv("--targets")
    with open_image(path) as image:
        gray = np.asarray(colors_of(image).convert("L"))
    dictionary = dictionary_of(opencv, kind)
    detector = opencv.aruco.ArucoDetector(dictionary, opencv.aruco.DetectorParameters())
    corners, numbers, _ = detector.detectMarkers(gray)
    if numbers is None:
        return []
    n_cells = dictionary.markerSize + 2
    by_number: dict[int, Detection] = {}
    for points, number in zip(corners, np.ravel(numbers), strict=True):
        rough = np.asarray(points, np.float64).reshape(4, 2) + _MIDDLE
        detection = Detection(int(number), rough)
        other = by_number.setdefault(detection.number, detection)
        distance = float(np.linalg.norm(other.middle - detection.middle))
        if distance > _TOGETHER * max(other.side, detection.side):
            pixels = " and ".join(f"{x:.0f}, {y:.0f}" for x, y in (other.middle, detection.middle))
            raise UserError(
                f"{path}: shows two targets with the number {detection.number}, at pixels {pixels}"
                "; print each number once, or cover one of them"
            )
    detections = []
    for number in sorted(by_number):
        refined = None
        if by_number[number].width >= _LEAST_CELL * n_cells:
            refined = _refined(gray, by_number[number].corners, n_cells)
        if refined is not None:
            detections.append(Detection(number, refined))
    return detections


def _refined(gray: np.ndarray, corners: np.ndarray, n_cells: int) -> np.ndarray | None:
    """Return the corners of a target where lines through its measured edges meet.

    Args:
        gray: The image. (H, W) uint8
        corners: Within a pixel or two, clockwise, pixels from the corner of the image. (4, 2)
        n_cells: Cells of the target a side, the border included.

    Returns:
        The corners, (4, 2); None where an edge is not clear, as of targets that are half hidden.
    """
    refined = corners
    for _ in range(_ROUNDS):
        cell = float(np.linalg.norm(np.roll(refined, -1, axis=0) - refined, axis=1).min()) / n_cells
        reach = min(max(_REACH * cell, _LEAST_REACH), _MOST_REACH)
        middle = refined.mean(axis=0)
        lines = []
        for index in range(4):
            line = _edge_line(gray, refined[index], refined[(index + 1) % 4], middle, reach)
            if line is None:
                return None
            lines.append(line)
        # A corner is where the edge that ends there meets the one that begins there.
        moved = np.stack([np.cross(lines[index - 1], lines[index]) for index in range(4)])
        refined = moved[:, :2] / moved[:, 2:]
    distances = np.linalg.norm(refined - corners, axis=1)
    return refined if distances.max() <= max(2 * reach, 2.0) else None


def _edge_line(
    gray: np.ndarray, start: np.ndarray, end: np.ndarray, middle: np.ndarray, reach: float
) -> np.ndarray | None:
    """Return the line a x + b y + c = 0 of an edge, (3,); None where it has no contrast.

    Args:
        start: A corner, (2,); the edge goes to ``end``.
        middle: Of the target, which is the black side of the edge. (2,)
        reach: Pixels to either side of the edge that are read.
    """
    along = (end - start) / np.linalg.norm(end - start)
    outwards = np.array([along[1], -along[0]])
    if (start - middle) @ outwards < 0:
        outwards = -outwards
    shares = np.linspace(*_EDGE_PART, _PROFILES)
    feet = start + shares[:, None] * (end - start)
    n_steps = 2 * round(reach / _STEP)
    offsets = (np.arange(n_steps) + 0.5) * _STEP - n_steps * _STEP / 2
    places = feet[:, None] + offsets[:, None] * outwards - _MIDDLE
    values = map_coordinates(
        gray, [places[..., 1], places[..., 0]], output=np.float64, order=1, mode="nearest"
    )
    n_ends = max(1, n_steps // 6)
    black = float(np.median(values[:, :n_ends]))
    white = float(np.median(values[:, -n_ends:]))
    if white - black < _LEAST_CONTRAST:
        return None
    # What is black of a profile reaches as far as the edge would without blur.
    shifts = ((white - values) / (white - black)).sum(axis=1) * _STEP + offsets[0] - _STEP / 2
    return _line_through(feet + shifts[:, None] * outwards)


def _line_through(points: np.ndarray) -> np.ndarray:
    """Return the line that most points, (N, 2), lie on, as a x + b y + c = 0. (3,)"""
    is_used = np.ones(len(points), bool)
    for _ in range(2):
        mean = points[is_used].mean(axis=0)
        normal = np.linalg.svd(points[is_used] - mean)[2][1]
        distances = np.abs((points - mean) @ normal)
        is_used = distances <= max(3 * float(np.median(distances)), 1e-6)
    mean = points[is_used].mean(axis=0)
    normal = np.linalg.svd(points[is_used] - mean)[2][1]
    return np.array([*normal, -normal @ mean])
