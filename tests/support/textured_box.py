# SPDX-License-Identifier: Apache-2.0
"""A textured box, and photographs of it that are computed ray by ray, without its mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from gaussian_splatting.data.cameras import Camera
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from tests.support.tiny_scene import tiny_cameras, write_model

HALF_SIDES = np.array([0.7, 0.9, 0.8])
CENTER = np.array([0.1, -0.05, 0.15])
N_TRIANGLES = 12
_CELL = 64  # texels per side of the picture of one side of the box
_MARGIN = 4  # texels around it, which continue its colours
_SAMPLES = 4
_SIDES = [(axis, sign) for axis in range(3) for sign in (-1, 1)]


def color_at(points: np.ndarray) -> np.ndarray:
    """Colours of points of the box, (..., 3) in [0, 1]; smooth, and different on each side."""
    waves = points @ np.array([[3.0, -1.0, 2.0], [1.0, 2.5, -2.0], [-2.0, 1.5, 3.0]])
    return 0.5 + 0.35 * np.sin(waves + np.array([0.0, 2.0, 4.0]))


def box_mesh(n_sides: int = 6) -> TexturedMesh:
    """The box, with its colours in one picture; with fewer than six sides it is open."""
    grid = np.stack(np.meshgrid([-1, 1], [-1, 1], [-1, 1], indexing="ij"), axis=-1)
    corners = grid.reshape(-1, 3)
    picture = np.zeros((2 * _CELL, 3 * _CELL, 3))
    faces = []
    uvs = []
    texels = (np.arange(_CELL) + 0.5 - _MARGIN) / (_CELL - 2 * _MARGIN) * 2 - 1
    for number, (axis, sign) in enumerate(_SIDES[:n_sides]):
        across, up = (k for k in range(3) if k != axis)
        places = np.zeros((_CELL, _CELL, 3))
        places[..., axis] = sign
        places[..., across] = texels[None, :]
        places[..., up] = texels[:, None]
        row, column = divmod(number, 3)
        rows = slice(row * _CELL, (row + 1) * _CELL)
        columns = slice(column * _CELL, (column + 1) * _CELL)
        picture[rows, columns] = color_at(places * HALF_SIDES + CENTER)
        quad = [corner for corner in range(8) if corners[corner, axis] == sign]
        a, b, c, d = quad
        for triangle in ([a, b, d], [a, d, c]):
            shares = (corners[triangle][:, [across, up]] + 1) / 2
            place = shares * (_CELL - 2 * _MARGIN) + _MARGIN + np.array([column, row]) * _CELL
            v = 1 - place[:, 1] / (2 * _CELL)
            uvs.append(np.stack([place[:, 0] / (3 * _CELL), v], axis=1))
            faces.append(triangle)
    return TexturedMesh(
        vertices=torch.tensor(corners * HALF_SIDES + CENTER, dtype=torch.float32),
        faces=torch.tensor(faces),
        uvs=torch.tensor(np.array(uvs), dtype=torch.float32),
        texture=torch.tensor((picture * 255).round().astype(np.uint8)),
    )


def box_photograph(camera: Camera) -> np.ndarray:
    """The picture of the box on black: each ray meets the box where the slabs of its sides do.

    (H, W, 3) uint8
    """
    steps = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    x = (np.arange(camera.width)[:, None] + steps).reshape(-1)
    y = (np.arange(camera.height)[:, None] + steps).reshape(-1)
    rays = np.ones((len(y), len(x), 3))
    rays[..., 0] = (x - camera.cx) / camera.fx
    rays[..., 1] = (y[:, None] - camera.cy) / camera.fy
    rays = rays @ camera.rotation
    near_sides = (CENTER - np.sign(rays) * HALF_SIDES - camera.center) / rays
    far_sides = (CENTER + np.sign(rays) * HALF_SIDES - camera.center) / rays
    depth = near_sides.max(axis=-1)
    is_hit = (depth < far_sides.min(axis=-1)) & (depth > 0)
    colors = color_at(camera.center + depth[..., None] * rays)
    colors = np.where(is_hit[..., None], colors, 0.0)
    shape = (camera.height, _SAMPLES, camera.width, _SAMPLES, 3)
    return (colors.reshape(shape).mean(axis=(1, 3)) * 255).round().astype(np.uint8)


def write_box_scene(root: Path, shift: np.ndarray | None = None) -> Path:
    """Write photographs of the box from ten views, and a COLMAP model.

    Args:
        root: The scene folder to be.
        shift: Added to the coordinates of the model.
    """
    shift = np.zeros(3) if shift is None else shift
    cameras = tiny_cameras(zoom=2)
    (root / "images").mkdir(parents=True)
    for camera in cameras:
        Image.fromarray(box_photograph(camera)).save(root / "images" / camera.name)
    points = np.random.default_rng(0).uniform(-1, 1, (200, 3))
    axis = np.abs(points).argmax(axis=1)
    rows = np.arange(len(points))
    points[rows, axis] = np.sign(points[rows, axis])
    points = points * HALF_SIDES + CENTER
    colors = (color_at(points) * 255).astype(np.uint8)
    moved = [_moved(camera, shift) for camera in cameras]
    write_model(root / "sparse" / "0", moved, points + shift, colors)
    return root


def _moved(camera: Camera, shift: np.ndarray) -> Camera:
    return replace(camera, translation=camera.translation - camera.rotation @ shift)
