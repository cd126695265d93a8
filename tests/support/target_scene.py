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
    height, width = camera.height, camera.width
    columns = (np.arange(width * _SAMPLES, dtype=np.float32) + 0.5) / _SAMPLES
    rows = (np.arange(height * _SAMPLES, dtype=np.float32)[:, None] + 0.5) / _SAMPLES
    x = (columns - camera.cx) / camera.fx
    y = (rows - camera.cy) / camera.fy

    def rays_along(axis: np.ndarray) -> np.ndarray:
        """Dot products of the rays through all samples with a direction of the world."""
        in_view = (camera.rotation @ axis).astype(np.float32)
        return in_view[0] * x + in_view[1] * y + in_view[2]

    depth = np.full((len(rows), len(columns)), np.inf, np.float32)
    gray = np.full(depth.shape, 0.4, np.float32)
    for board in planes:
        normal = np.cross(board.across, board.down)
        corner = board.corner - camera.center
        with np.errstate(divide="ignore", invalid="ignore"):
            distance = np.float32(corner @ normal) / rays_along(normal)
            is_hit = (distance > 0) & (distance < depth)
            place = []
            sides = zip((board.across, board.down), board.texture.shape[::-1], strict=True)
            for axis, n_texels in sides:
                along = distance * rays_along(axis) - np.float32(corner @ axis)
                place.append(along * np.float32(2 * _TEXELS / n_texels) - 1)
                is_hit &= np.abs(place[-1]) < 1
        grid = torch.from_numpy(np.stack([each[is_hit] for each in place], axis=-1))
        texture = torch.from_numpy(board.texture)[None, None].float()
        colors = grid_sample(texture, grid[None, None], align_corners=False)
        gray[is_hit] = colors[0, 0, 0].numpy()
        depth[is_hit] = distance[is_hit]
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
