# SPDX-License-Identifier: Apache-2.0
"""Photographs of the demo's knot that turns before a camera and lamp that stand still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from gaussian_splatting.data.cameras import Camera
from sugar_capture.features.photographs import FILM_DIAGONAL
from sugar_pipeline.demo.demo_surface import make_disc, make_knot
from sugar_pipeline.demo.demo_texture import knot_chart, textured_surface
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, render_textured
from tests.support.photographed_room import poster
from tests.support.random_scenes import look_at
from tests.support.shaded_normals import render_normals

WIDTH, HEIGHT, FOCAL = 640, 480, 800.0
LAMP = np.array([-0.5, -0.6, -0.62])  # towards the lamp, in the camera's axes
AMBIENT = 0.55


@cache
def painted_knot(with_disc: bool = True) -> TexturedMesh:
    knot, disc = make_knot(), make_disc()
    mesh = textured_surface(knot, knot_chart(knot, 1.0), disc, 0, 1.0)
    n = len(mesh.faces) if with_disc else len(knot.faces)
    return replace(mesh, faces=mesh.faces[:n], uvs=mesh.uvs[:n])


def camera_at(angle: float, elevation: float = 30.0, distance: float = 3.6) -> Camera:
    """Where the camera stands as the object sees it. Angles in degrees"""
    a, e = np.radians([angle, elevation])
    eye = distance * np.array([np.cos(a) * np.cos(e), np.sin(a) * np.cos(e), np.sin(e)])
    target = np.array([0.0, 0.0, 0.3])
    view = look_at(eye + target, target, width=WIDTH, height=HEIGHT, focal=FOCAL)
    return replace(view, fy=FOCAL)


def studio(seed: int) -> np.ndarray:
    """Render the background. (H, W, 3) float in [0, 1]"""
    image = Image.fromarray(poster(seed).astype(np.uint8)).resize((WIDTH, HEIGHT))
    return 0.2 + 0.6 * np.asarray(image, dtype=np.float64) / 255


def photograph(
    mesh: TexturedMesh, camera: Camera, behind: np.ndarray, noise: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A photograph, (H, W, 3) uint8, and its pixels with the object, (H, W) bool."""
    color = render_textured(mesh, camera, supersampling=2).numpy().astype(np.float64)
    normals, covered = render_normals(mesh, camera)
    shade = normals.numpy().astype(np.float64) @ camera.rotation.T @ LAMP
    light = AMBIENT + (1 - AMBIENT) * shade.clip(0, 1)[..., None]
    image = np.where(covered.numpy()[..., None], color * light, behind)
    image = image + noise.normal(scale=1.5 / 255, size=image.shape)
    return (255 * image.clip(0, 1)).round().astype(np.uint8), covered.numpy()


def write_turntable(
    folder: Path, n: int, elevations: Sequence[float], with_disc: bool = True
) -> dict[str, Camera]:
    """Write photographs of whole turns; the cameras as the object sees them, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    noise, cameras, exif = np.random.default_rng(0), {}, Image.Exif()
    diagonal = np.hypot(WIDTH, HEIGHT)
    exif.get_ifd(0x8769)[0xA405] = round(FOCAL / diagonal * FILM_DIAGONAL)
    for number, elevation in enumerate(elevations):
        for k in range(n):
            camera = camera_at(360 * k / n, elevation)
            camera = replace(camera, name=f"{number}_{k:03}.jpg")
            image, _ = photograph(painted_knot(with_disc), camera, studio(number), noise)
            Image.fromarray(image).save(folder / camera.name, quality=95, exif=exif)
            cameras[camera.name] = camera
    return cameras
