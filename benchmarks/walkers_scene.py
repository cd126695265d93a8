# SPDX-License-Identifier: Apache-2.0
"""A yard where people walk: ``python benchmarks/walkers_scene.py FOLDER``.

Houses stand around and in a yard, photographed on a ring. In a third of the photographs that are
trained on, two or three figures of a person's size are somewhere in it. ``truth/`` has masks that
are black where they are. Held-out photographs show the empty yard.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch

from benchmarks.relief_scene import make_folders, parser
from benchmarks.town_scene import (
    ObservedSamples,
    Quads,
    SurfacePoints,
    camera_at,
    cells,
    house,
    observed_pixels,
    painted,
    turn_about_z,
)
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap_writing import write_capture
from gaussian_splatting.scenes.scene import TEST_INTERVAL
from sugar_pipeline.demo.demo_texture import picture
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_scene.surface_queries import Surface, sample_surface
from sugar_utils.entrypoint import run_main

SEED = 23
HALF = 1.6  # of the yard, world units
RING = 1.1  # radius of the ring of cameras
EYES = (0.25, 0.5)  # range of the heights of the cameras
FIGURE = 0.32  # height of a person
REACH = 0.75  # from the middle, within which persons walk
N_SAMPLES = 30_000
FOCAL = 0.8  # in image widths
CHANGED = 12  # difference of bytes from which a pixel shows a person


def yard() -> np.ndarray:
    """Ground in cells, and houses: some in the middle, the others around. (Q, 4, 3)"""
    rng = np.random.default_rng(SEED)
    parts = [cells(HALF, 16)]
    for angle in np.linspace(0, 2 * np.pi, 14, endpoint=False):
        parts.append(_on_ground(1.35 * np.array([np.cos(angle), np.sin(angle)]), rng))
    for middle in ((-0.25, 0.1), (0.3, -0.2)):
        parts.append(_on_ground(np.array(middle), rng))
    return np.concatenate(parts)


def _on_ground(middle: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A house on flat ground. (Q, 4, 3)"""
    quads = house(middle, rng)
    # It was put on hills, a tenth into them.
    quads[..., 2] -= quads[..., 2].min() + 0.02
    return quads


def person(rng: np.random.Generator) -> np.ndarray:
    """Legs, body and head of a person who walks, as boxes. (Q, 4, 3)"""
    angle = rng.uniform(0, 2 * np.pi)
    distance = rng.uniform(0.45, REACH)
    place = distance * np.array([np.cos(angle), np.sin(angle), 0])
    turn = turn_about_z(rng.uniform(0, 2 * np.pi))
    step = 0.05 * rng.uniform(-1, 1)
    boxes = [
        ((step, 0.03), 0.0, 0.5, 0.03),
        ((-step, -0.03), 0.0, 0.5, 0.03),
        ((0.0, 0.0), 0.48, 0.85, 0.07),
        ((0.0, 0.0), 0.85, 1.0, 0.04),
    ]
    parts = []
    for (across, along), low, high, half in boxes:
        middle = np.array([across, along, 0])
        plan = half * np.array([[-1, -1, 0], [1, -1, 0], [1, 1, 0], [-1, 1, 0]]) + middle
        bottom = plan + [0, 0, FIGURE * low]
        top = plan + [0, 0, FIGURE * high]
        sides = [[bottom[i], bottom[(i + 1) % 4], top[(i + 1) % 4], top[i]] for i in range(4)]
        parts.append(np.array([*sides, [top[0], top[1], top[2], top[3]]]))
    return np.concatenate(parts) @ turn.T + place


def cameras(n_views: int, width: int) -> list[Camera]:
    """Views from a ring across the yard."""
    rng = np.random.default_rng(SEED + 1)
    views = []
    for number in range(n_views):
        angle = 2 * np.pi * number / n_views + rng.uniform(-0.03, 0.03)
        height = rng.uniform(*EYES)
        center = np.array([RING * np.cos(angle), RING * np.sin(angle), height])
        target = np.array([0.0, 0.0, 0.12]) + rng.uniform(-0.1, 0.1, 3)
        views.append(camera_at(f"view_{number:03d}.png", center, target, width, FOCAL))
    return views


def _with(scene: TexturedMesh, people: TexturedMesh) -> TexturedMesh:
    """The scene with people in it; both have the same picture as texture."""
    return TexturedMesh(
        vertices=torch.cat([scene.vertices, people.vertices]),
        faces=torch.cat([scene.faces, people.faces + len(scene.vertices)]),
        uvs=torch.cat([scene.uvs, people.uvs]),
        texture=scene.texture,
    )


def run(args: argparse.Namespace) -> None:
    make_folders(args.folder)
    (args.folder / "truth").mkdir(exist_ok=True)
    quads = yard()
    empty = painted(quads)
    mesh = Quads(quads).mesh()
    samples = sample_surface(mesh.vertices, mesh.faces, N_SAMPLES, SEED)
    surface = Surface(mesh.vertices, mesh.faces)
    surface_points = SurfacePoints.of(samples)
    views = cameras(args.n_views, args.width)
    trained = [number for number in range(len(views)) if number % TEST_INTERVAL]
    choice = np.random.default_rng(SEED + 2).permutation(trained)
    with_people = set(choice[: len(trained) // 3]) if args.people else set()
    observed = ObservedSamples(np.ones(N_SAMPLES, bool))
    for number, camera in enumerate(views):
        pixels = picture(empty, camera)
        observed.add(pixels, *observed_pixels(surface, camera, surface_points))
        is_person = np.zeros(pixels.shape[:2], bool)
        if number in with_people:
            rng = np.random.default_rng((SEED, number))
            people = [person(rng) for _ in range(rng.integers(2, 4))]
            crowded = picture(_with(empty, painted(np.concatenate(people))), camera)
            is_person = np.abs(crowded.astype(int) - pixels).max(axis=-1) > CHANGED
            pixels = np.where(is_person[..., None], crowded, pixels)
        Image.fromarray(pixels).save(args.folder / "images" / camera.name)
        truth = Image.fromarray(np.where(is_person, 0, 255).astype(np.uint8))
        truth.save(args.folder / "truth" / f"{camera.name}.png")
    write_capture(args.folder / "sparse" / "0", views, observed.points(samples.points))


if __name__ == "__main__":
    flags = parser("Make a yard in which people walk.")
    flags.add_argument("--n_views", type=int, default=56)
    flags.add_argument("--width", type=int, default=240, help="of the photographs, pixels")
    flags.add_argument("--people", type=int, choices=(0, 1), default=1)
    sys.exit(run_main(lambda: run(flags.parse_args())))
