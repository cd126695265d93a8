# SPDX-License-Identifier: Apache-2.0
"""Gaussians on surfaces of known shape, with cameras around them, as a scene on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.core.cloud import GaussianCloud, quaternions_of
from gaussian_splatting.core.spherical_harmonics import SH_C0
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.checkpoint import save_payload
from gaussian_splatting.engine.model import STATE_NAMES
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.reference_layout import (
    point_cloud_path,
    write_cameras_json,
    write_cfg_args,
)
from sugar_scene.triangle_mesh import TriangleMesh
from tests.support.random_scenes import look_at

ITERATION = 30


@dataclass(frozen=True)
class MeshScene:
    """Paths that an extraction needs."""

    root: Path
    checkpoint: Path
    coarse: Path


def flat_gaussians(
    points: np.ndarray, normals: np.ndarray, colors: np.ndarray, radius: float, opacity: float
) -> GaussianCloud:
    """Discs on a surface, their thin axis along its normal."""
    n = len(points)
    helper = np.where(np.abs(normals[:, :1]) > 0.7, (0.0, 1.0, 0.0), (1.0, 0.0, 0.0))
    second = np.cross(normals, helper)
    second /= np.linalg.norm(second, axis=1, keepdims=True)
    axes = np.stack([normals, second, np.cross(normals, second)], axis=2)
    scales = np.tile([radius / 10, radius, radius], (n, 1))
    return GaussianCloud(
        means=torch.tensor(points, dtype=torch.float32),
        sh_dc=torch.tensor((colors - 0.5) / SH_C0, dtype=torch.float32)[:, None],
        sh_rest=torch.zeros(n, 15, 3),
        opacity_logits=torch.full((n, 1), float(np.log(opacity / (1 - opacity)))),
        log_scales=torch.tensor(np.log(scales), dtype=torch.float32),
        quats=quaternions_of(torch.tensor(axes, dtype=torch.float32)),
    )


def sphere_points(n: int) -> np.ndarray:
    """Evenly spread points of the unit sphere. (n, 3)"""
    k = np.arange(n) + 0.5
    height, angle = 1 - 2 * k / n, np.pi * (1 + 5**0.5) * k
    ring = np.sqrt(1 - height**2)
    return np.stack([ring * np.cos(angle), ring * np.sin(angle), height], axis=1)


def sphere_cloud(n: int = 1500, opacity: float = 0.95) -> GaussianCloud:
    """A unit sphere whose colour is its normal."""
    points = sphere_points(n)
    return flat_gaussians(points, points, 0.5 + 0.4 * points, 3.0 / n**0.5, opacity)


def far_wall(n: int = 900, distance: float = 9.0) -> GaussianCloud:
    """A wall behind the sphere, outside the cameras' cube."""
    side = int(n**0.5)
    u, v = np.meshgrid(np.linspace(-8, 8, side), np.linspace(-8, 8, side))
    points = np.stack([u.ravel(), v.ravel(), np.full(u.size, distance)], axis=1)
    normals = np.tile([0.0, 0.0, -1.0], (len(points), 1))
    return flat_gaussians(points, normals, np.full((len(points), 3), 0.3), 16 / side * 0.7, 0.95)


def joined(*clouds: GaussianCloud) -> GaussianCloud:
    """Clouds as one."""
    names = clouds[0].tensors()
    return GaussianCloud(**{k: torch.cat([cloud.tensors()[k] for cloud in clouds]) for k in names})


def cameras_around(n: int = 14, distance: float = 3.5, width: int = 96) -> list[Camera]:
    """Cameras on a sphere, looking at the origin; sizes and principal points differ."""
    return [
        look_at(
            center,
            width=width,
            height=width - 16,
            focal=1.3 * width,
            principal=(index % 3, -2.0),
            name=f"view_{index:03d}.png",
        )
        for index, center in enumerate(distance * sphere_points(n))
    ]


def write_mesh_scene(root: Path, cloud: GaussianCloud, cameras: list[Camera]) -> MeshScene:
    """Write a vanilla checkpoint and a coarse model of the same Gaussians."""
    checkpoint, scene = root / "vanilla", root / "scene (1)"
    coarse = root / "sugarcoarse_3Dgs30_densityestim02_sdfnorm02" / "15000.pt"
    scene.mkdir(parents=True)
    write_cfg_args(checkpoint, source_path=scene)
    write_cameras_json(checkpoint, cameras, [])
    write_gaussian_ply(point_cloud_path(checkpoint, ITERATION), cloud)
    state = {file: cloud.tensors()[own] for own, file in STATE_NAMES.items()}
    save_payload(
        coarse,
        {
            "state_dict": state,
            "optimizer_state_dict": {},
            "epoch": 1,
            "iteration": 15_000,
            "train_losses": [],
        },
    )
    return MeshScene(scene, checkpoint, coarse)


def icosahedron() -> TriangleMesh:
    """A ball as large as the tiny scene's, in twenty triangles."""
    golden = (1 + 5**0.5) / 2
    corners = [(0, a, b * golden) for a in (-1, 1) for b in (-1, 1)]
    vertices = np.array([np.roll(c, k) for k in range(3) for c in corners], dtype=float)
    faces = [
        (i, j, k)
        for i in range(12)
        for j in range(i + 1, 12)
        for k in range(j + 1, 12)
        if all(
            np.linalg.norm(vertices[a] - vertices[b]) < 2.01 for a, b in ((i, j), (j, k), (i, k))
        )
    ]
    vertices /= np.linalg.norm(vertices[0])
    return TriangleMesh(vertices, np.array(faces), np.full((12, 3), 128, np.uint8))


def mesh_of(vertices, faces) -> TriangleMesh:
    """A grey mesh."""
    vertices = np.asarray(vertices, dtype=np.float64)
    colors = np.full((len(vertices), 3), 128, dtype=np.uint8)
    return TriangleMesh(vertices, np.asarray(faces, dtype=np.int64).reshape(-1, 3), colors)


def sphere(radius=0.5, center=(0.0, 0.0, 0.0), rings=40) -> TriangleMesh:
    """A globe of 2 * rings meridians, outward."""
    lat = np.linspace(0, np.pi, rings + 1)[1:-1]
    lon = np.arange(2 * rings) * np.pi / rings
    ring = np.stack(
        [
            np.sin(lat)[:, None] * np.cos(lon),
            np.sin(lat)[:, None] * np.sin(lon),
            np.repeat(np.cos(lat)[:, None], len(lon), axis=1),
        ],
        axis=-1,
    )
    vertices = np.concatenate([ring.reshape(-1, 3), [[0, 0, 1], [0, 0, -1]]])
    n, rows = len(lon), np.arange((rings - 1) * 2 * rings).reshape(rings - 1, -1)
    right = np.roll(rows, -1, axis=1)
    a, b, c, d = rows[:-1], rows[1:], right[1:], right[:-1]
    top, bottom = np.full(n, len(vertices) - 2), np.full(n, len(vertices) - 1)
    faces = [
        np.stack([a, b, c], -1).reshape(-1, 3),
        np.stack([a, c, d], -1).reshape(-1, 3),
        np.stack([top, rows[0], right[0]], -1),
        np.stack([bottom, right[-1], rows[-1]], -1),
    ]
    return mesh_of(radius * vertices + center, np.concatenate(faces))
