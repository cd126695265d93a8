# SPDX-License-Identifier: Apache-2.0
"""Photographs of a floor and two walls with printed targets, whose places are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.spatial.transform import Rotation
from torch.nn.functional import grid_sample

from gaussian_splatting.data.cameras import Camera
from sugar_maps.printed_targets import TARGET_KINDS
from sugar_maps.similarity import Similarity
from tests.support.random_scenes import look_at
from tests.support.survey import Capture

SIDE = 0.14
"""Side of the targets, world units."""

METRES = 2.5
"""A world unit, metres."""

TO_MAP = Similarity(
    METRES,
    Rotation.from_euler("zyx", [40, 5, -4], degrees=True).as_matrix(),
    np.array([500_210.3, 5_400_123.8, 210.2]),
)

_TEXELS = 500  # a world unit
_SAMPLES = 3  # a side of a pixel


@dataclass(frozen=True)
class Board:
    """A square of a plane with a texture; ``across`` and ``down`` are unit vectors."""

    corner: np.ndarray  # upper left, world units, (3,)
    across: np.ndarray
    down: np.ndarray
    texture: np.ndarray  # grey, 0 to 1, (H, W)

    def place(self, x: float, y: float) -> np.ndarray:
        """The point so many world units to the right and down. (3,)"""
        return self.corner + x * self.across + y * self.down


@dataclass(frozen=True)
class TargetScene:
    """A capture of targets, and the places of their middles by number, world units."""

    capture: Capture
    middles: dict[int, np.ndarray]


def marker(number: int, kind: str = "apriltag36h11") -> np.ndarray:
    """The cells of a target, black is 0 and white 1; OpenCV makes them."""
    import cv2

    dictionary = cv2.aruco.getPredefinedDictionary(getattr(cv2.aruco, TARGET_KINDS[kind]))
    n_cells = dictionary.markerSize + 2
    return cv2.aruco.generateImageMarker(dictionary, number, n_cells) / 255.0


def _painted(size: float, seed: int, targets: Sequence[tuple[int, float, float, float]]):
    """A rough texture with targets: number, middle, and angle of each."""
    n = round(size * _TEXELS)
    rng = np.random.default_rng(seed)
    coarse = torch.from_numpy(rng.uniform(0.3, 0.8, (1, 1, 40, 40)))
    texture = torch.nn.functional.interpolate(coarse, (n, n), mode="bilinear")[0, 0].numpy()
    rows, columns = (np.mgrid[0:n, 0:n] + 0.5) / _TEXELS
    for number, x, y, angle in targets:
        cells = marker(number)
        cosine, sine = np.cos(angle), np.sin(angle)
        u = (cosine * (columns - x) + sine * (rows - y)) / SIDE + 0.5
        v = (-sine * (columns - x) + cosine * (rows - y)) / SIDE + 0.5
        border = 1.5 / len(cells)
        is_paper = (np.abs(u - 0.5) < 0.5 + border) & (np.abs(v - 0.5) < 0.5 + border)
        texture[is_paper] = 0.95
        is_inside = (u >= 0) & (u < 1) & (v >= 0) & (v < 1)
        i = (v[is_inside] * len(cells)).astype(int)
        j = (u[is_inside] * len(cells)).astype(int)
        texture[is_inside] = 0.05 + 0.9 * cells[i, j]
    return texture


def boards(numbers: Sequence[int] = range(8)) -> tuple[list[Board], dict[int, np.ndarray]]:
    """A floor with four targets, two walls with two each, and the middles of the targets."""
    x = np.array([1.0, 0, 0])
    y = np.array([0, 1.0, 0])
    z = np.array([0, 0, 1.0])
    layout = [
        (np.array([-1.0, 1, 0]), x, -y, 2.0, [(0.5, 0.5), (1.5, 0.6), (0.6, 1.5), (1.4, 1.4)]),
        (np.array([-1.0, 1, 1]), x, -z, 2.0, [(0.5, 0.3), (1.4, 0.6)]),
        (np.array([-1.0, -1, 1]), y, -z, 2.0, [(0.6, 0.5), (1.5, 0.4)]),
    ]
    remaining = list(numbers)
    made = []
    middles = {}
    for seed, (corner, across, down, size, places) in enumerate(layout):
        targets = []
        board = Board(corner, across, down, np.zeros((1, 1)))
        for index, (right, below) in enumerate(places):
            number = remaining.pop(0)
            targets.append((number, right, below, 0.4 * index + 0.2))
            middles[number] = board.place(right, below)
        made.append(replace(board, texture=_painted(size, seed, targets)))
    return made, middles


def photograph(camera: Camera, planes: Sequence[Board]) -> np.ndarray:
    """The picture that a camera takes of boards; nearer ones hide others. (H, W) uint8"""
    steps = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    u = (np.arange(camera.width)[:, None] + steps).reshape(-1)
    v = (np.arange(camera.height)[:, None] + steps).reshape(-1)
    directions = np.stack(
        np.broadcast_arrays((u - camera.cx) / camera.fx, ((v - camera.cy) / camera.fy)[:, None], 1),
        axis=-1,
    )
    directions = directions @ camera.rotation
    depth = np.full(directions.shape[:2], np.inf)
    gray = np.full(directions.shape[:2], 0.4)
    for board in planes:
        normal = np.cross(board.across, board.down)
        with np.errstate(divide="ignore", invalid="ignore"):
            distance = (board.corner - camera.center) @ normal / (directions @ normal)
        points = camera.center + distance[..., None] * directions - board.corner
        size = np.array(board.texture.shape[::-1]) / _TEXELS
        place = np.stack([points @ board.across, points @ board.down], axis=-1) / size * 2 - 1
        is_hit = (distance > 0) & (distance < depth) & (np.abs(place) < 1).all(axis=-1)
        texture = torch.from_numpy(board.texture)[None, None].float()
        grid = torch.from_numpy(np.nan_to_num(place)).float()[None]
        colors = grid_sample(texture, grid, align_corners=False)[0, 0].numpy()
        gray = np.where(is_hit, colors, gray)
        depth = np.where(is_hit, distance, depth)
    height, width = camera.height, camera.width
    means = gray.reshape(height, _SAMPLES, width, _SAMPLES).mean(axis=(1, 3))
    return np.rint(means * 255).astype(np.uint8)


def target_cameras(n: int) -> list[Camera]:
    """Views from the open side of the room, at three heights."""
    cameras = []
    for index in range(n):
        angle = np.radians(-80 + 110 * index / max(n - 1, 1))
        radius = 2.6 + 0.3 * (index % 2)
        center = (radius * np.cos(angle), radius * np.sin(angle), 1.0 + 0.7 * (index % 3))
        camera = look_at(
            center,
            target=(-0.2, 0.2, 0.2),
            width=800,
            height=600,
            focal=820.0,
            name=f"view_{index:02d}.png",
        )
        cameras.append(camera)
    return cameras


def make_target_scene(root: Path, n: int, noise: float = 2.0) -> TargetScene:
    """Write photographs with noise, in grey levels, and return the capture."""
    planes, middles = boards()
    rng = np.random.default_rng(6)
    cameras = []
    for camera in target_cameras(n):
        pixels = photograph(camera, planes) + noise * rng.normal(size=(600, 800))
        path = root / camera.name
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
        cameras.append(replace(camera, image_path=path))
    return TargetScene(Capture(root, cameras), middles)
