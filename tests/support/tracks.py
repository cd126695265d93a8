# SPDX-License-Identifier: Apache-2.0
"""Tracks for the points of the tiny scene, whose model is written without any."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pycolmap
import torch
from PIL import Image

from gaussian_splatting.core.spherical_harmonics import SH_C0
from gaussian_splatting.rasterization import rasterize
from tests.support.random_scenes import look_at
from tests.support.tiny_scene import TinyScene, save_png, tiny_cloud, write_scene

FACING = 0.3
"""Least cosine between normal and view direction at which a point of the sphere is observed."""


def make_observed_scene(root: Path, n_views: int = 24) -> TinyScene:
    """An object beside the centre of its views, with masks and points observed where seen."""
    cloud = tiny_cloud(400)
    middle = torch.tensor([0.3, -0.2, 0.1])
    # Dark enough not to clip when it is overexposed.
    darker = (0.5 * (cloud.sh_dc * SH_C0 + 0.5) - 0.5) / SH_C0
    means = cloud.means * torch.tensor([1.1, 0.9, 0.8]) + middle
    cloud = replace(cloud, means=means, sh_dc=darker)
    cameras = []
    for k in range(n_views):
        height = 0.05 + 0.8 * (k + 0.5) / n_views
        radius, angle = 3.4 * math.sqrt(1 - height**2), 2.4 * k
        center = (radius * math.cos(angle), radius * math.sin(angle), 3.4 * height)
        cameras.append(
            look_at(
                center,
                width=256,
                height=192,
                focal=240.0,
                principal=(12.0, -8.0),
                name=f"view_{k:02d}.png",
            )
        )
    scene = write_scene(root, cloud, cameras, 600)
    rng = np.random.default_rng(3)
    pictures = {}
    for view in scene.cameras:
        # Sensor noise, without which smooth renders have no detail to lose.
        clean = np.asarray(Image.open(view.image_path)).astype(float)
        noisy = np.clip(clean + rng.normal(size=clean.shape) * 6 + 3, 0, 255).astype(np.uint8)
        save_png(view.image_path, noisy)
        pictures[view.name] = noisy
    colors: dict[int, list[np.ndarray]] = {}
    folder = root / "sparse" / "0"
    model = pycolmap.Reconstruction(folder)
    numbers = sorted(model.points3D)
    points = np.array([model.points3D[point].xyz for point in numbers])
    normals = points - middle.numpy()
    for number, image in sorted(model.images.items()):
        camera, pose = model.cameras[image.camera_id], image.cam_from_world()
        away = image.projection_center() - points
        lengths = np.linalg.norm(normals, axis=1) * np.linalg.norm(away, axis=1)
        seen = ((normals * away).sum(axis=1) >= FACING * lengths).nonzero()[0]
        pixels = camera.img_from_cam(pose * points[seen]) + rng.normal(size=(len(seen), 2)) * 0.3
        corners = np.clip(pixels.astype(int), 0, (camera.width - 1, camera.height - 1))
        for k, pixel, (column, row) in zip(seen, pixels, corners, strict=True):
            image.points2D.append(pycolmap.Point2D(pixel))
            element = pycolmap.TrackElement(number, len(image.points2D) - 1)
            model.add_observation(numbers[k], element)
            colors.setdefault(numbers[k], []).append(pictures[image.name][row, column])
    for point, seen in colors.items():
        model.points3D[point].color = np.mean(seen, axis=0).astype(np.uint8)
    model.write_binary(str(folder))
    (root / "masks").mkdir()
    for view in scene.cameras:
        with torch.no_grad():
            alpha = rasterize(cloud.activate(), view).alpha
        mask = (alpha.numpy() >= 0.5).astype(np.uint8) * 255
        save_png(root / "masks" / view.name, mask)
    return scene


def add_tracks(model_folder: Path, n_points: int, names: tuple[str, ...]) -> None:
    """Have the first points of a model observed by some of its images."""
    model = pycolmap.Reconstruction(model_folder)
    numbers = {image.name: number for number, image in model.images.items()}
    for point in sorted(model.points3D)[:n_points]:
        for name in names:
            image = model.images[numbers[name]]
            image.points2D.append(pycolmap.Point2D(np.array([1.0, 2.0])))
            element = pycolmap.TrackElement(numbers[name], len(image.points2D) - 1)
            model.add_observation(point, element)
    model.write_binary(str(model_folder))
